"""Named cases: archives that unpack to far more than they are, endless lines, depth, and very many of one thing.

Readers run in a process of their own under a limit of memory. Sizes: see ``fuzzing.FULL``.
"""

import gzip
import json
import os
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import zstandard
from fuzzing import FULL, SOAK, figures, irminsul, write
from sample_logs import CALL, TOOL, USER

MIB, GIB = 2**20, 2**30
BOMB_BYTES = 10 * GIB if FULL else GIB if SOAK else 128 * MIB
LINE_BYTES = 2 * GIB if SOAK else 128 * MIB
MANY = 100_000 if FULL else 10_000 if SOAK else 2_000
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}
GOOD = b'{"prompt": "Which berth is free?"}\n'

LIMIT_MIB = 512
"""What a reader may have; a line of the greatest length that is read, and its text, take 130 MiB of it."""
READ = f"""
import resource, sys
from irminsul.trace.lines import BadLines, read_lines
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_MIB * MIB},) * 2)
bad = BadLines()
read = sum(1 for _ in read_lines(sys.argv[1], bad))
peak = next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(read, bad.count, peak, bad.first[0].line, bad.first[0].reason)
"""


def members(pack, first=b""):
    """A file of members, each of 64 MiB of zeros, that unpacks to BOMB_BYTES and then to a good line."""
    member = pack(b"0" * 64 * MIB)
    return pack(first) + member * (BOMB_BYTES // (64 * MIB)) + pack(b"\n" + GOOD)


def one_frame(_):
    """The same as one frame of zstd, as a stream is written."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    block = b"0" * 64 * MIB
    packed = b"".join(frame.compress(block) for _ in range(BOMB_BYTES // len(block)))
    return packed + frame.compress(b"\n" + GOOD) + frame.flush()


@pytest.mark.parametrize(
    ("name", "pack", "least"),
    [("gzip", gzip.compress, 900), ("zstd", zstandard.compress, 9000), ("one zstd frame", one_frame, 9000)],
)
def test_a_bomb_is_one_bad_line_and_takes_no_memory(tmp_path, name, pack, least):
    path = write(tmp_path / "bomb", one_frame(None) if pack is one_frame else members(pack))
    assert least * path.stat().st_size < BOMB_BYTES
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", READ, path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    read, bad, peak, line, reason = done.stdout.split(maxsplit=4)
    assert (read, bad, line, reason) == ("1", "1", "1", "longer than 64 MiB\n")
    assert int(peak) < LIMIT_MIB
    figures.named.append(
        f"{path.stat().st_size / 1e6:.1f} MB of {name} that unpack to {BOMB_BYTES / GIB:g} GiB: "
        f"{time.monotonic() - started:.0f} s, {peak} MiB"
    )


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_bomb_ends_the_command_before_it_is_unpacked(tmp_path, compiled, pack):
    path = write(tmp_path / "bomb", members(pack))
    out = irminsul("analyze", path, "--format", "plain", "--tokenizer", compiled)
    assert out.sentence == f"{path}, line 1: longer than 64 MiB"


def test_a_line_of_gigabytes(tmp_path, compiled):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(GOOD)
        file.seek(LINE_BYTES)  # sparse: takes no disk
        file.write(b"\n" + GOOD)
    out = irminsul("analyze", path, "--format", "plain", "--tokenizer", compiled)
    assert out.sentence == f"{path}, line 2: longer than 64 MiB"
    out = irminsul("analyze", path, "--format", "plain", "--tokenizer", compiled, "--skip-bad", seconds=30)
    assert out.status == 0
    assert "1 bad line skipped" in out.stdout


def test_a_zip_archive_is_named(tmp_path, compiled):
    with zipfile.ZipFile(tmp_path / "log", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("log.jsonl", GOOD)
    out = irminsul("analyze", tmp_path / "log", "--tokenizer", compiled)
    assert out.sentence == f"{tmp_path / 'log'} is a zip archive; unpack it first"


@pytest.mark.parametrize("declared", ["there", "claimed"])
def test_cached_tokens_that_are_a_bomb_are_made_again(tmp_path, compiled, declared):
    log = write(tmp_path / "log", GOOD)
    arguments = ("analyze", log, "--tokenizer", compiled, "--token-cache", tmp_path / "cache")
    assert irminsul(*arguments).status == 0
    (entry,) = (tmp_path / "cache").iterdir()
    if declared == "there":
        np.savez_compressed(entry, digest=np.zeros(256 * MIB, dtype=np.uint8))
    else:
        header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % 10**15
        with zipfile.ZipFile(entry, "w") as archive:
            archive.writestr("digest.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    out = irminsul(*arguments)
    assert out.status == 0
    assert "were damaged and have been made again" in " ".join(out.stdout.split())


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_an_archive_that_breaks_off_is_told(tmp_path, compiled, pack):
    whole = pack(GOOD * 20)
    for end in (len(whole) // 2, len(whole) - 1):
        out = irminsul("analyze", write(tmp_path / "log", whole[:end]), "--format", "plain", "--tokenizer", compiled)
        assert "the compressed data is damaged or breaks off here" in out.sentence
    write(tmp_path / "log", whole * 2)
    twice = irminsul("analyze", tmp_path / "log", "--tokenizer", compiled, "--json", tmp_path / "out")
    assert twice.status == 0
    assert json.loads((tmp_path / "out").read_text())["totals"]["calls"] == 40


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": %s}' % (b"[" * 100_000), "JSON nested too deeply"),
        (b'{"prompt": "a\0b"}', "holds a NUL byte (is this UTF-16, or a damaged file?)"),
        (b'{"prompt": "\xff"}', "not UTF-8 (invalid start byte at byte 12)"),
        (b'{"prompt": [-1]}', "'prompt' holds -1, which is no token id"),
        (b'{"prompt": "x", "ts": NaN}', "not JSON: NaN is no number"),
        (b'{"prompt": "x", "ts": -5}', "'ts': a time is out of range"),
        (b'{"prompt": "x", "ts": "9999-12-31T23:59:59-23:59"}', "'ts': a time is out of range"),
        (b'{"messages": [], "functions": 5}', "'functions' must be of type list, got int"),
        (
            b'"event": "request.x" "timestamp"',
            "not JSON: Expecting property name enclosed in double quotes at column 2",
        ),
        (
            json.dumps({"system": "", "messages": [THOUGHT | {"reasoning_content": 5}]}).encode(),
            "'reasoning_content' must be a string or null, got int",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path, compiled, line, reason):
    form = {b'"ev': "sglang", b'{"m': "openai-chat", b'{"s': "anthropic"}.get(line[:3], "plain")
    path = write(tmp_path / "log", b"\n" + line + b"\n")
    out = irminsul("analyze", path, "--format", form, "--tokenizer", compiled)
    assert out.sentence == f"{path}, line 2: {reason}"


@pytest.mark.parametrize(
    ("ms", "reason"),
    [
        ("NaN", "NaN is no number"),
        ("-1", "a point needs a time ms > 0"),
        ("0", "a point needs a time ms > 0"),
        ("1e999", "a point needs a time ms > 0"),
        ("9" * 400, "a point needs a time ms > 0"),
    ],
)
def test_prices_that_are_none_are_refused(tmp_path, compiled, ms, reason):
    log = write(tmp_path / "log", GOOD)
    path = write(tmp_path / "prices", b'{"points": [{"total": 5, "computed": 5, "ms": %s}]}' % ms.encode())
    out = irminsul("analyze", log, "--tokenizer", compiled, "--cost-model", path)
    assert str(path) in out.sentence
    assert reason in out.sentence


def test_a_shape_of_impossibly_many_layers_is_counted_at_once(tmp_path, compiled):
    log = write(tmp_path / "log", GOOD)
    shape = dict.fromkeys(
        ("num_attention_heads", "hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8
    ) | dict.fromkeys(("intermediate_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"), 8)
    for layers, status in ((10**9, 0), (10**30, 1)):
        path = write(tmp_path / "shape", json.dumps(shape | {"num_hidden_layers": layers}).encode())
        assert irminsul("analyze", log, "--tokenizer", compiled, "--model-config", path).status == status


RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("tools", {"messages": [USER], "tools": [TOOL] * MANY}),
        ("messages", {"messages": [USER] * MANY}),
        ("calls", {"messages": [USER, CALL | {"tool_calls": CALL["tool_calls"] * MANY}]}),
        ("blocks", {"system": "", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}]}),
        ("results", {"messages": [{"role": "user", "content": [RESULT] * MANY}]}),
        ("items", {"instructions": "x", "input": [{"role": "user", "content": "x"}] * MANY}),
    ],
)
def test_very_many_of_one_thing_take_linear_time(tmp_path, compiled, name, body):
    log = write(tmp_path / "log", json.dumps(body).encode())
    started = time.process_time()
    out = irminsul("analyze", log, "--tokenizer", compiled, "--matchers", "winnow64", seconds=2 + MANY / 2_000)
    assert out.status == 0, out.stderr
    figures.named.append(f"{MANY:,} {name}: {time.process_time() - started:.1f} s")
