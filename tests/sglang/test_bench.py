"""The load generator on two real SGLang servers on a CPU, without and with the plugin: token ids, counters, flushes."""

import json
import sys

import pytest
from test_server import serving

from irminsul.bench.results import read_blocks
from irminsul.cli import main

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WITHOUT_TOKENIZER = ("--load-format", "dummy", "--skip-tokenizer-init", "--enable-metrics")


def test_stock_against_live(tiny_checkpoint, tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    passage = [(7 * n) % 911 + 3 for n in range(300)]
    prompts = [[1000 - n] * (50 + 9 * n) + passage for n in range(1, 7)]
    log.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    with (
        serving(tiny_checkpoint, tmp_path / "stock", *WITHOUT_TOKENIZER, IRMINSUL_SGLANG_MODE="off") as off,
        serving(tiny_checkpoint, tmp_path / "live", *WITHOUT_TOKENIZER) as live,
    ):
        arguments = ["--server", f"off={off.base_url}", "--server", f"live={live.base_url}", "--load", log]
        arguments += ["--protocol", "sglang-ids", "--format", "plain", "--repeats", "2", "--max-tokens", "3"]
        monkeypatch.setattr(
            sys, "argv", ["irminsul", "bench", "serve", *map(str, arguments), "--out", str(tmp_path / "out")]
        )
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    blocks = read_blocks(tmp_path / "out")
    assert [(block["server"]["name"], block["repeat"]) for block in blocks] == [
        *(("off", 0), ("live", 0), ("live", 1), ("off", 1)),
    ]
    for block in blocks:
        tokens = block["tokens"]
        assert block["server"]["facts"]["version"] == "0.5.23"
        assert tokens["prompt"] == sum(map(len, prompts))
        assert tokens["completion"] == 3 * len(prompts)
        assert block["pool"]["slots"] == 4000
        assert tokens["prefix"] == 0, "each block begins with an empty cache"
        if block["server"]["name"] == "live":
            assert tokens["shifted"] == 5 * 299
            assert (
                sum(tokens[name] for name in ("prefix", "approximate_prefix", "shifted", "computed"))
                == tokens["prompt"]
            )
        else:
            assert tokens["computed"] == tokens["prompt"]
            assert "shifted" not in tokens
