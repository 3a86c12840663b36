"""The load generator on the embedded server with a tiny model: off against live, as an operator would run it."""

import random
import sys
from contextlib import contextmanager

import pytest
from server_fakes import byte_level_tokenizer, running

from irminsul.bench.results import read_blocks
from irminsul.cli import main
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.plan import Mode
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner
from irminsul.testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return MlaModel.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", family="v2", moe=False))


@contextmanager
def serving(model, mode, slots=4096):
    engine = Engine(model, EngineConfig(pool_slots=slots, page_size=4, prefill_chunk=128, mode=mode))
    with running(create_app(EngineRunner(engine), byte_level_tokenizer(), model_name="tiny")) as url:
        yield url
    engine.check_ownership()


def text(rng, n_chars):
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(n_chars))


def test_off_against_live(model, log, tmp_path, monkeypatch, capsys):
    rng = random.Random(0)
    body = text(rng, 400)
    # The same passage behind other beginnings of other lengths; and a session whose prompts only grow.
    calls = [(f"moved-{n}", "", text(rng, 40 + 7 * n) + body) for n in range(5)]
    history = text(rng, 300)
    calls += [("grows", "", history := history + text(rng, 60)) for _ in range(3)]
    with serving(model, Mode.OFF) as off, serving(model, Mode.LIVE) as live:
        arguments = ["--server", f"off={off}", "--server", f"live={live}", "--load", log(calls), "--out", tmp_path]
        arguments += ["--concurrency", "1,4", "--repeats", "2", "--max-tokens", "5", "--warm-up", "1"]
        monkeypatch.setattr(sys, "argv", ["irminsul", "bench", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    printed = capsys.readouterr()
    assert not end.value.code, printed.err
    blocks = read_blocks(tmp_path)
    assert len(blocks) == 8
    for block in blocks:
        tokens = block["tokens"]
        assert tokens["completion"] == 5 * len(calls), "ignore_eos makes equal work"
        assert sum(tokens[name] for name in ("prefix", "approximate_prefix", "shifted", "computed")) == tokens["prompt"]
        assert tokens["prefix"] >= 2 * 300, "the growing session, in a cache that was empty"
        assert (tokens["shifted"] > 3 * 350) == (block["server"]["name"] == "live")
        assert block["server"]["cache_at_start"] == "own salt"
        assert block["server"]["facts"] == {"mode": block["server"]["name"]}
        assert block["pool"]["slots"] == 4096
        assert 0 <= block["pool"]["occupied_before"] <= 1
        assert 0 < block["pool"]["occupied_after"] <= 1
        assert 0 < block["ttft_s"]["p50"] <= block["ttft_s"]["p99"] < block["end_to_end_s"]["p99"]
    # A block finds nothing of the one before it: equal work at one request at once.
    for name in ("off", "live"):
        one, other = [
            block["tokens"]
            for block in blocks
            if block["server"]["name"] == name and block["settings"]["pace"] == "1 at once"
        ]
        assert one == other
    assert "| log.jsonl | 4 at once | live / off |" in printed.out


def test_a_small_pool_shows_evictions(model, log, tmp_path, monkeypatch):
    rng = random.Random(1)
    calls = [(None, None, text(rng, 400)) for _ in range(8)]
    with serving(model, Mode.LIVE, slots=1200) as url:
        arguments = ["--server", f"live={url}", "--load", log(calls), "--out", tmp_path, "--repeats", "1"]
        monkeypatch.setattr(sys, "argv", ["irminsul", "bench", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    (block,) = read_blocks(tmp_path)
    assert block["pool"]["evicted_tokens"] > 1000
    assert block["pool"]["occupied_after"] > 0.5
