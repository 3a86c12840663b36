"""benchmarks/serve_results.py and serve_loads.py: studies in short, and the loads they send."""

import argparse
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from measured_blocks import block

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import serve_loads
import serve_on_gpu
import serve_results
from irminsul.errors import InputError


def request(of, session, started_s, ttft_s, computed, error=None):
    """A request as requests.jsonl.gz has it."""
    tokens = {"prompt_tokens": 5, "token_classes": {"prefix": 5 - computed, "computed": computed}}
    return {"block": of, "session": session, "started_s": started_s, "ttft_s": ttft_s, "error": error, **tokens}


@pytest.fixture
def study(tmp_path):
    """A folder with two blocks, and requests of one."""
    blocks = [block(server) for server in ("stock", "live")]
    for one in blocks:
        one |= {"id": one["server"]["name"], "load": one["load"] | {"name": "edited.jsonl.zst"}}
    (tmp_path / "blocks.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in blocks))
    requests = [
        request("stock", 0, 3.0, 0.4, 1),
        request("stock", 0, 1.0, 0.1, 5),
        request("stock", 1, 2.0, 0.3, 4),
        request("stock", 1, 4.0, 9.0, 5, error="timeout"),
        request("of a block that was not kept", 0, 1.0, 9.0, 5),
    ]
    with gzip.open(tmp_path / "requests.jsonl.gz", "wt") as file:
        file.write("".join(f"{json.dumps(one)}\n" for one in requests))
    return tmp_path


def test_rows_and_turns_of_a_study(study, tmp_path):
    serve_results.write(study, tmp_path / "study.json")
    found = json.loads((tmp_path / "study.json").read_text())
    assert [(row["load"], row["server"], row["ttft_ms"]["p50"]) for row in found["rows"]] == [
        ("edited", "stock", 100.0),
        ("edited", "live", 100.0),
    ]
    first, second = found["turns"]
    assert (first["turn"], first["calls"], first["ttft_ms"], first["computed"]) == (0, 2, 200.0, 9)
    assert (second["turn"], second["calls"], second["ttft_ms"], second["computed"]) == (1, 1, 400.0, 1)


def test_a_study_that_was_cut_short_keeps_what_is_whole(study, tmp_path):
    with (study / "requests.jsonl.gz").open("ab") as file:
        file.write(gzip.compress(b"of a block that was being written")[:-9])
    with (study / "blocks.jsonl").open("a") as file:
        file.write('{"format": 1, "id": "unfini')
    found = serve_results.collect(study)
    assert (len(found["rows"]), len(found["turns"])) == (2, 2)


def test_a_server_that_does_not_count_tokens_has_rows_and_no_turns(study):
    blocks = [json.loads(line) for line in (study / "blocks.jsonl").read_text().splitlines()]
    for one in blocks:
        del one["tokens"]
    (study / "blocks.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in blocks))
    untold = request("stock", 0, 1.0, 0.1, 5) | {"token_classes": None}
    (study / "requests.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(untold)}\n".encode()))
    found = serve_results.collect(study)
    assert ([row["tokens"] for row in found["rows"]], found["turns"]) == ([{}, {}], [])


def test_a_study_without_a_block_is_refused(tmp_path):
    (tmp_path / "blocks.jsonl").write_text("")
    with pytest.raises(InputError, match="no block that is complete"):
        serve_results.collect(tmp_path)


def test_a_working_set_counts_what_prompts_share_once():
    prompts = [np.array(tokens, dtype=np.int32) for tokens in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [9], [1, 2])]
    assert serve_loads.working_set(prompts) == 3 + 2 + 1
    assert serve_loads.working_set(prompts[:1]) == 3


def test_old_tool_results_become_placeholders():
    results = [{"role": "tool", "content": str(number)} for number in range(7)]
    history = [message for result in results for message in ({"role": "user", "content": "?"}, result)]
    kept = [message["content"] for message in serve_loads.without_old_results(history) if message["role"] == "tool"]
    assert kept == [serve_loads.CLEARED] * 2 + ["2", "3", "4", "5", "6"]
    assert results[0]["content"] == "0", "the history itself stays"


def test_flags_become_a_command_line():
    assert serve_on_gpu.command_line({"load_format": "dummy", "enable_metrics": True, "port": 1}) == [
        *("--load-format", "dummy"),
        "--enable-metrics",
        *("--port", "1"),
    ]


@pytest.mark.parametrize("flags", ["[]", "{x", "null", '{"port": 1}', '{"a": null}', '{"a": false}', "[" * 100_000])
def test_flags_are_an_object_of_what_a_command_line_can_say(flags):
    with pytest.raises(argparse.ArgumentTypeError, match=r"must be|is not to be chosen"):
        serve_on_gpu.flags_of_servers(flags)


def test_servers_that_start_again_have_the_same_model(tmp_path, monkeypatch):
    # A block's server is known by its model's name, too: one of another name would be measured again.
    started = []

    class Server:
        pid = 0

        def __init__(self, command, **_):
            started.append(command)

    monkeypatch.setattr(serve_on_gpu.subprocess, "Popen", Server)
    monkeypatch.setattr(serve_on_gpu, "wait", lambda *_: None)
    monkeypatch.setattr(serve_on_gpu, "end", lambda *_: None)
    for _ in range(2):
        with serve_on_gpu.servers({}, tmp_path, 31000, 0.0) as urls:
            assert list(urls) == ["stock", "live"]
    assert started[:2] == started[2:]
    model = Path(started[0][started[0].index("--model-path") + 1])
    assert json.loads((model / "config.json").read_text()) == serve_on_gpu.LITE


def test_every_load_of_a_study_is_one_that_can_be_made():
    made = {
        f"{p}-{length}{s}" for p in serve_loads.PATTERNS for length in serve_loads.LENGTHS for s in ("", "-markers")
    }
    studies = (serve_on_gpu.STUDIES["patterns"], serve_on_gpu.STUDIES["markers"])
    assert {load for study in studies for load in study.loads} == made


def test_studies_of_one_pool_share_their_servers_and_pressure_has_a_quarter():
    facts = {"logs-together": {"working_set": 800_000}}
    assert serve_on_gpu.by_pool(["patterns", "pressure", "logs"], facts) == {
        serve_on_gpu.ROOM: ["patterns", "logs"],
        200_000: ["pressure"],
    }


def test_sessions_of_logs_together_keep_their_order(tmp_path, monkeypatch):
    calls = [(f"session-{at % 4}", f"{at:02}") for at in range(16)]
    monkeypatch.setattr(serve_loads, "log_calls", lambda *_: iter(calls))
    together = serve_loads.calls_together([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], None, 1000)
    of_session = {}
    for session, prompt in together:
        of_session.setdefault(session, []).append(prompt)
    # The first half of each log's sessions, each as it was, but not one after the other.
    assert sorted(of_session) == [f"{log}.jsonl session-{at}" for log in "ab" for at in (0, 1)]
    assert all(prompts == sorted(prompts) and len(prompts) == 4 for prompts in of_session.values())
    assert len({session for session, _ in together[:4]}) > 1
