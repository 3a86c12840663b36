"""The load generator on a real SGLang server with the plugin, on a CPU: token ids, counters, flushes, metrics."""

import json
import sys

import pytest
from test_server import serving

from irminsul.bench.results import read_blocks
from irminsul.cli import main

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WITHOUT_TOKENIZER = ("--load-format", "dummy", "--skip-tokenizer-init", "--enable-metrics")


def test_blocks_on_sglang(tiny_checkpoint, tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    passage = [(7 * n) % 911 + 3 for n in range(300)]
    prompts = [[1000 - n] * (50 + 9 * n) + passage for n in range(1, 7)]
    log.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    with serving(tiny_checkpoint, tmp_path / "live", *WITHOUT_TOKENIZER) as live:
        arguments = ["--server", f"live={live.base_url}", "--load", log, "--repeats", "2", "--max-tokens", "3"]
        arguments += ["--protocol", "sglang-ids", "--format", "plain"]
        monkeypatch.setattr(
            sys, "argv", ["irminsul", "bench", "serve", *map(str, arguments), "--out", str(tmp_path / "out")]
        )
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    blocks = read_blocks(tmp_path / "out")
    assert len(blocks) == 2
    for block in blocks:
        tokens = block["tokens"]
        assert block["server"]["facts"]["version"] == "0.5.23"
        assert block["server"]["facts"]["radix_cache_backend"] == "irminsul"
        assert tokens["prompt"] == sum(map(len, prompts))
        assert tokens["completion"] == 3 * len(prompts)
        assert tokens["prefix"] == 0, "each block begins with an empty cache"
        assert tokens["shifted"] == 5 * 299
        assert sum(tokens[name] for name in ("prefix", "approximate_prefix", "shifted", "computed")) == tokens["prompt"]
        assert block["pool"]["slots"] == 4000
