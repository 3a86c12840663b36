"""The command against scripted servers: blocks, their order, resume, failures, and what is kept."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from scripted_server import chat_events

from irminsul.bench.results import only_writer, read_blocks, read_requests
from irminsul.bench.server import PoolReading, read_pool
from irminsul.bench.summary import pool_change
from irminsul.cli import main
from irminsul.errors import InputError


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run ``irminsul bench serve``; return the exit status and what was printed."""

    def run(*arguments, command="serve"):
        monkeypatch.setattr(sys, "argv", ["irminsul", "bench", command, *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as error:
            status = error.code or 0
        return status, capsys.readouterr()

    return run


CALLS = [("a", "", "a1"), ("b", "", "b1"), ("a", "", "a2"), ("c", "", "c1")]


def kinds(server):
    """What a server was asked, in order: flushes and metrics by name, requests by their text."""
    texts = iter(server.texts)
    named = {"/v1/chat/completions": lambda: next(texts), "/flush_cache?timeout=30": lambda: "flush"}
    return [named[path]() for path in server.paths if path in named]


def test_blocks_alternate_and_begin_with_a_warm_up_and_an_empty_cache(bench, scripted, log, tmp_path):
    stock, live = scripted(), scripted()
    times = []
    for name, server in (("stock", stock), ("live", live)):
        answer = server.answer
        server.answer = lambda body, number, name=name, answer=answer: (times.append(name), answer(body, number))[1]
    status, printed = bench(
        *("--server", f"stock={stock.url}", "--server", f"live={live.url}/", "--load", log(CALLS)),
        *("--out", tmp_path / "out", "--repeats", 3, "--warm-up", 1, "--max-tokens", 3, "--concurrency", "1"),
    )
    assert status == 0, printed.err
    block = ["flush", "a1", "flush", "a1", "b1", "a2", "c1"]
    assert kinds(stock) == kinds(live) == block * 3
    assert times[::5] == ["stock", "live", "live", "stock", "stock", "live"]
    blocks = read_blocks(tmp_path / "out")
    assert [(block["server"]["name"], block["repeat"]) for block in blocks] == [
        *(("stock", 0), ("live", 0), ("live", 1), ("stock", 1), ("stock", 2), ("live", 2)),
    ]
    first = blocks[0]
    assert first["server"] == {
        "name": "stock",
        "url": stock.url,
        "kind": "sglang",
        "model": "m",
        "facts": {"version": "0.5.23", "page_size": 1, "cuda_graphs_prefill": "breakable, up to 2048"},
        "cache_at_start": "flushed",
        "ignore_eos": True,
    }
    assert first["settings"] == {
        "protocol": "openai",
        "max_tokens": 3,
        "think_time": "0",
        "warm_up": 1,
        "seed": 0,
        "pace": "1 at once",
        "load": first["load"]["fingerprint"],
    }
    assert first["tokens"] == {"prompt": 40, "completion": 12, "prefix": 16, "computed": 24}
    assert (first["requests"], first["succeeded"], first["errors"]) == (4, 4, {})
    assert first["command"].startswith("irminsul bench serve --server stock=")
    assert "| log.jsonl | 1 at once | live / stock |" in printed.out
    assert "pool" not in first, "a server without metrics has none, not zero"
    # As described, and nothing else.
    documented = (
        "format",
        "id",
        "comparison",
        "server",
        "load",
        "settings",
        "repeat",
        "started",
        "seconds",
        "requests",
    )
    summary = ("succeeded", "errors", "ttft_s", "itl_s", "tpot_s", "end_to_end_s", "requests_per_s", "in_flight")
    more = ("prompt_tokens", "output_tokens_per_s", "tokens", "client", "client_cpu_share", "command")
    assert tuple(first) == (*documented, *summary, *more)


def test_figures_of_a_block_are_those_of_its_requests(bench, scripted, log, tmp_path):
    role, *tokens, end, usage, done = chat_events(tokens=4)

    def answer(body, number):
        paused = [item for token in tokens for item in (0.002 * (number % 4), token)]
        return [role, *paused, end, usage, done]

    status, _ = bench(
        *("--server", f"s={scripted(answer=answer).url}", "--load", log([(None, None, str(n)) for n in range(12)])),
        *("--out", tmp_path / "out", "--repeats", 2, "--concurrency", 4, "--keep-requests", "--warm-up", 0),
    )
    assert status == 0
    with gzip.open(tmp_path / "out" / "requests.jsonl.gz", "rt") as file:
        requests = [json.loads(line) for line in file]
    for block in read_blocks(tmp_path / "out"):
        own = [request for request in requests if request["block"] == block["id"]]
        assert len(own) == 12
        for name, values in (
            ("ttft_s", [request["ttft_s"] for request in own]),
            ("itl_s", [gap for request in own for gap in request["itl_s"]]),
            ("tpot_s", [np.mean(request["itl_s"]) for request in own]),
            ("end_to_end_s", [request["end_to_end_s"] for request in own]),
        ):
            for percent in (50, 95, 99):
                assert block[name][f"p{percent}"] == pytest.approx(np.percentile(values, percent))
        assert block["requests_per_s"] == pytest.approx(12 / block["seconds"])
        assert block["in_flight"] == pytest.approx(sum(one["end_to_end_s"] for one in own) / block["seconds"])
        assert block["output_tokens_per_s"] == pytest.approx(48 / block["seconds"])


def test_a_second_run_measures_what_is_missing(bench, scripted, log, tmp_path):
    server = scripted()

    def run(repeats, load=CALLS, *more):
        status, printed = bench(
            *("--server", f"s={server.url}", "--load", log(load), "--out", tmp_path / "out"),
            *("--repeats", repeats, "--warm-up", 0, *more),
        )
        assert status == 0
        return printed

    run(1)
    assert len(server.bodies) == 4
    assert "1 of 2 blocks are in" in run(2).err
    assert len(server.bodies) == 8
    run(2)
    assert len(server.bodies) == 8
    run(2, CALLS, "--max-tokens", 3)
    assert len(server.bodies) == 16, "other settings are another measurement"
    run(2, CALLS[:2])
    assert len(server.bodies) == 20, "another load is, too"
    # A write that was interrupted is measured again; what was whole stays.
    path = tmp_path / "out" / "blocks.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(read_blocks(tmp_path / "out")) == 5
    run(2, CALLS[:2])
    assert len(server.bodies) == 22
    assert path.read_bytes().startswith(whole[: whole[:-1].rfind(b"\n") + 1])
    assert len(read_blocks(tmp_path / "out")) == 6


def test_what_is_no_result_is_not_written_over(bench, scripted, log, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "blocks.jsonl").write_text('{"format": 2}\n')
    status, printed = bench("--server", f"s={scripted().url}", "--load", log(CALLS), "--out", tmp_path / "out")
    assert status == 1
    assert printed.err.endswith("blocks.jsonl, line 1: no block of format 1\n")
    with pytest.raises(InputError, match="No such file"):
        read_blocks(tmp_path / "none")


def test_errors_are_counted_and_end_with_a_sentence(bench, scripted, log, tmp_path):
    def answer(body, number):
        if number == 1:
            return [("status", 429, [("retry-after", "1")], b'{"error": {"message": "too many"}}')]
        return chat_events()[: -1 if number == 2 else None]

    server = scripted(answer=answer)
    status, printed = bench(
        *("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--repeats", 1),
        *("--warm-up", 0, "--keep-requests"),
    )
    assert status == 1
    assert "2 of 4 requests failed and are counted in" in printed.err
    assert printed.err.endswith("the first, on server s: HTTP 429: too many\n")
    (block,) = read_blocks(tmp_path / "out")
    assert block["errors"] == {"HTTP 429": 1, "dropped stream": 1}
    assert (block["requests"], block["succeeded"], block["tokens"]["prompt"]) == (4, 2, 20)
    starts = [start for start, _ in server.spans]
    assert starts[2] - starts[1] > 1, "who is told to wait waits"
    assert "| 2 of 4 |" in printed.out


def test_a_server_that_answers_nothing_is_a_sentence_and_keeps_what_was_measured(bench, scripted, log, tmp_path):
    good = scripted()
    bad = scripted(answer=lambda *_: [("status", 400, [], b'{"error": {"message": "the prompt is too long"}}')])
    status, printed = bench(
        *("--server", f"good={good.url}", "--server", f"bad={bad.url}", "--load", log(CALLS)),
        *("--out", tmp_path / "out", "--repeats", 1),
    )
    assert status == 1
    assert printed.err.endswith("repeat 1); the first: HTTP 400: the prompt is too long\n")
    assert "server bad at http://127.0.0.1" in printed.err
    assert [block["server"]["name"] for block in read_blocks(tmp_path / "out")] == ["good"]


@pytest.mark.parametrize("number_of_the_last", [2, 3])
def test_a_server_that_goes_away_in_a_block(bench, scripted, log, tmp_path, number_of_the_last):
    server = scripted()

    def answer(body, number):
        events = chat_events()
        if number == number_of_the_last:
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            stopping.join()
            return [*events[:2], "drop"]
        return events

    server.answer = answer
    status, printed = bench(
        *("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--warm-up", 0),
    )
    assert status == 1
    assert "went away (log.jsonl, 1 at once, s, repeat 1); this block is not kept" in printed.err
    assert read_blocks(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--server", "x"], "a server is written NAME=URL, like stock=http://127.0.0.1:30000, got 'x'"),
        (["--server", "x=ftp://y"], "got 'x=ftp://y'"),
        (["--server", "x=http://u:p@y"], "a server is written NAME=URL"),
        (["--server", "s=http://127.0.0.1:9"], "servers must have different names, got s, s"),
        (["--server", "dead=http://127.0.0.1:9"], "server dead at http://127.0.0.1:9 does not answer"),
        (["--protocol", "grpc"], "unknown protocol 'grpc'; valid protocols: openai, sglang-ids"),
        (["--concurrency", "0"], "concurrencies are whole numbers"),
        (["--concurrency", "1", "--arrival-rate", "1"], "not both"),
        (["--server", "x=http://y:99999"], "a server is written NAME=URL"),
        (["--server", "x=http://y:-1"], "a server is written NAME=URL"),
        (["--server", "x=http://y:0"], "a server is written NAME=URL"),
        (["--server", "x=http://xn--a"], "a server is written NAME=URL"),
        (["--server", os.fsdecode(b"x=http://y/\xff")], "a server is written NAME=URL"),
        (["--concurrency", "9" * 5000], "concurrencies are whole numbers"),
        (["--arrival-rate", "0.0009"], "arrival rates are numbers of at least 0.001"),
        (["--load", "rerank:8K", "--load", "rerank:8K", "--calls", "2"], "got the same calls twice in "),
        (["--think-time", "long"], "a think time is written like"),
        (["--format", "csv"], "unknown log format 'csv'"),
        (["--load", "nothing"], "neither a file nor a pattern"),
        (["--tokenizer", "nobody", "--max-prompt-tokens", "8K"], "unknown tokenizer 'nobody'"),
        (["--max-prompt-tokens", "many"], "a number of tokens is written like"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(bench, scripted, log, tmp_path, options, sentence):
    server = scripted()
    status, printed = bench(
        "--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--repeats", 1, *options
    )
    assert (status, printed.out) == (1, "")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert server.bodies == []


def test_servers_that_cannot_do_what_is_asked(bench, scripted, log, tmp_path):
    def run(server, *more):
        status, printed = bench(
            *("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--repeats", 1, *more)
        )
        return status, printed.err

    other = scripted(owner="somebody")
    assert "offers no way to empty its cache that is known here; measure it as it is with --keep-cache" in run(other)[1]
    assert run(other, "--keep-cache")[0] == 0
    (block,) = read_blocks(tmp_path / "out")
    assert (block["server"]["cache_at_start"], block["server"]["ignore_eos"]) == ("kept", False)
    assert "ignore_eos" not in other.bodies[0]
    assert (
        "--protocol sglang-ids needs SGLang, and server s says it is somebody"
        in run(other, "--protocol", "sglang-ids")[1]
    )
    assert "does not flush its cache: Flush cache failed." in run(scripted(flush_status=400))[1]
    guarded = scripted(key="k")
    assert "wants an API key; put it into IRMINSUL_API_KEY" in run(guarded)[1]


def test_the_key_is_sent_and_not_kept(bench, scripted, log, tmp_path, monkeypatch):
    monkeypatch.setenv("IRMINSUL_API_KEY", "hidden-key")
    server = scripted(key="hidden-key")
    status, _ = bench("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--repeats", 1)
    assert status == 0
    assert "hidden-key" not in (tmp_path / "out" / "blocks.jsonl").read_text()


@pytest.mark.parametrize("key", ["k\u00e9y", "k\ney", " key"])
def test_a_key_that_cannot_be_sent_is_refused(bench, scripted, log, tmp_path, monkeypatch, key):
    monkeypatch.setenv("IRMINSUL_API_KEY", key)
    server = scripted()
    status, printed = bench("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out")
    assert (status, printed.err.count("\n"), server.paths) == (1, 1, [])
    assert "the API key must be printable ASCII" in printed.err


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/health"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[" * 100_000, "JSON nested too deeply"),
        (b"[]", "the line must be an object, got list"),
        (b'{"data": NaN}', "not JSON: NaN is no number"),
        (b'{"data": 1e999}', "a number is out of range"),
        (b'{"data": ' + b"9" * 5000 + b"}", "a number is out of range"),
        (b'{"data": "\\ud800"}', "holds half of a surrogate pair"),
        (b'{"data": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b"<html>", "not JSON"),
    ],
)
def test_a_server_that_says_no_json_of_itself(bench, scripted, log, tmp_path, path, body, reason):
    server = scripted(owner="irminsul" if path == "/health" else "sglang", pages={path: body})
    status, printed = bench("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out")
    assert (status, printed.err.count("\n"), server.bodies) == (1, 1, [])
    assert f"server s at {server.url} answers {path} with what is no JSON object: {reason}" in printed.err


def test_settings_that_are_no_plain_values_are_left_out(bench, scripted, log, tmp_path):
    told = {"version": "\x1b[2J", "page_size": {"a": [1]}, "tp_size": 2, "dtype": None, "disable_cuda_graph": False}
    server = scripted(pages={"/server_info": json.dumps(told).encode()})
    status, printed = bench("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path, "--repeats", 1)
    assert status == 0
    (block,) = read_blocks(tmp_path)
    assert block["server"]["facts"] == {"version": "\x1b[2J", "tp_size": 2, "disable_cuda_graph": False}
    assert r"version \x1b[2J, tp_size 2" in printed.out


def test_names_and_messages_that_are_no_text_are_kept_so_that_they_can_be_read(bench, scripted, log, tmp_path):
    def answer(body, number):
        return [("status", 500, [], b'{"error": "\\ud800[/red]"}')] if number == 0 else chat_events()

    path, out = log(CALLS, os.fsdecode(b"[red]log[bold]:cat:\x1b\xff.jsonl")), tmp_path / os.fsdecode(b"[/out]\xff")
    arguments = ["--server", f"s={scripted(answer=answer).url}", "--load", path, "--out", out, "--repeats", 1]
    status, printed = bench(*arguments, "--warm-up", 0, "--keep-requests")
    assert status == 1
    assert r"[red]log[bold]:cat:\x1b?.jsonl, 1 at once, s, repeat 1" in printed.err
    assert r"[red]log[bold]:cat:\x1b?.jsonl" in printed.out
    (block,) = read_blocks(out)
    assert block["first_error"] == "HTTP 500: ?[/red]"
    assert "[/out]?" in block["command"]
    assert [request["message"] for request in read_requests(out)] == ["?[/red]", "", "", ""]
    status, printed = bench(*arguments, "--warm-up", 0, "--keep-requests")
    assert status == 0
    assert r"1 of 1 blocks are in" in printed.err
    assert r"[/out]\udcff already" in printed.err
    assert bench(out, command="report")[0] == 0


def test_requests_are_kept_of_all_blocks_or_the_folder_is_another_one(bench, scripted, log, tmp_path):
    server = scripted()
    arguments = ["--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--warm-up", 0]
    assert bench(*arguments, "--repeats", 1)[0] == 0
    sent, before = len(server.bodies), (tmp_path / "out" / "blocks.jsonl").read_bytes()
    status, printed = bench(*arguments, "--repeats", 3, "--keep-requests")
    assert status == 1
    assert "--keep-requests: 1 of 3 blocks are in" in printed.err
    assert printed.err.endswith("already, without their requests; measure into another folder\n")
    assert len(server.bodies) == sent
    assert (tmp_path / "out" / "blocks.jsonl").read_bytes() == before
    # Other blocks of the folder do not matter, and without the requests it goes on.
    assert bench(*arguments, "--repeats", 1, "--keep-requests", "--max-tokens", 3)[0] == 0
    assert bench(*arguments, "--repeats", 2)[0] == 0


def test_arrivals_and_pauses_are_obeyed(bench, scripted, log, tmp_path):
    server = scripted(answer=lambda *_: [0.5, *chat_events()])
    status, _ = bench(
        *("--server", f"s={server.url}", "--load", log([("a", "", "1"), ("a", "", "2"), *[(None, None, "x")] * 20])),
        *("--out", tmp_path / "out", "--repeats", 1, "--warm-up", 0, "--arrival-rate", "100", "--think-time", "0.3"),
    )
    assert status == 0
    (block,) = read_blocks(tmp_path / "out")
    assert (block["settings"]["pace"], block["settings"]["think_time"]) == ("100 a second", "0.3")
    spans = dict(zip(server.texts, server.spans, strict=True))
    assert spans["2"][0] > spans["1"][1] + 0.29
    others = [span for text, span in zip(server.texts, server.spans, strict=True) if text == "x"]
    assert max(sum(start <= at[0] < end for start, end in others) for at in others) > 2, "nobody waits for an answer"


def test_pool_and_evictions_come_from_the_metrics(bench, scripted, log, tmp_path):
    readings = iter([(900, None), (100, 250.0), (700, 250.0), (200, 300.0)])

    def metrics():
        # Asked twice for each scrape: is there anything, and what.
        metrics.asked = getattr(metrics, "asked", 0) + 1
        if metrics.asked % 2:
            metrics.now = next(readings)
        free, evicted = metrics.now
        lines = ["# HELP x y", 'sglang:max_total_num_tokens{tp_rank="0"} 1000.0']
        lines.append(f'sglang:kv_available_tokens{{tp_rank="0",model="a b}}"}} {free}')
        if evicted is not None:
            lines.append(f'sglang:evicted_tokens_total{{tp_rank="0"}} {evicted}')
        return "\n".join(lines)

    server = scripted(metrics=metrics)
    status, _ = bench("--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--repeats", 2)
    assert status == 0
    first, second = (block["pool"] for block in read_blocks(tmp_path / "out"))
    # SGLang's gauges do not hear of a flush: what they tell in front of a block is of what was flushed.
    assert first == pytest.approx({"occupied_after": 0.9, "slots": 1000, "evicted_tokens": 250})
    assert second["evicted_tokens"] == 50


SLOTS = "sglang:max_total_num_tokens 1000\n"


@pytest.mark.parametrize(
    ("exposition", "reading"),
    [
        (SLOTS + "sglang:kv_available_tokens many\n", PoolReading(1000, None, None)),
        # Not a pool's: summaries of nothing are NaN.
        (SLOTS + "other NaN\nsglang:kv_available_tokens 3\n", PoolReading(1000, 3, None)),
        *(
            (SLOTS + f"sglang:kv_available_tokens {value}\n", None)
            for value in ("NaN", "+Inf", "-Inf", "1e15", "1e999")
        ),
        (SLOTS + "sglang:evicted_tokens_total NaN\n", None),
        ("sglang:max_total_num_tokens Inf\n", None),
        ('irminsul_pool_slots{state="free"} 5\nirminsul_pool_slots{state="held"} NaN\n', None),
        ('irminsul_pool_slots{state="free"} 5\nirminsul_pool_slots{state="held"} 4\n', PoolReading(9, 5, None)),
    ],
)
def test_a_pool_with_impossible_numbers_is_not_known(exposition, reading):
    assert read_pool(exposition) == reading


def test_a_pool_of_nearly_nothing_has_no_shares():
    tiny = PoolReading(5e-324, 1e14, None)
    assert pool_change(tiny, tiny, flushed=False) == {"slots": 5e-324}


def test_one_command_at_a_time_writes_to_a_folder(bench, scripted, log, tmp_path):
    server, out = scripted(), tmp_path / "out"
    arguments = ["--server", f"s={server.url}", "--load", log(CALLS), "--out", out]
    with only_writer(out):
        status, printed = bench(*arguments)
        assert status == 1
        assert printed.err == f"irminsul: another irminsul bench serve is writing to {out}\n"
        assert not server.paths
    status, _ = bench(*arguments, "--concurrency", 10**9)
    assert status == 0
    assert {block["settings"]["pace"] for block in read_blocks(out)} == {f"{10**9} at once"}


def test_an_interrupt_keeps_the_blocks_that_have_ended(scripted, log, tmp_path):
    server = scripted(answer=lambda _, number: [0.02 if number < 4 else 30, *chat_events()])
    arguments = ["--server", f"s={server.url}", "--load", log(CALLS), "--out", tmp_path / "out", "--warm-up", 0]
    process = subprocess.Popen(
        [sys.executable, "-m", "irminsul", "bench", "serve", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = time.monotonic() + 30
    while len(server.bodies) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "has 1 blocks, and the same command measures the rest" in told
    assert "Traceback" not in told
    assert len(read_blocks(tmp_path / "out")) == 1
