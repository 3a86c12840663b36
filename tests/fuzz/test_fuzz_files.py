"""The other files that commands read: prices, shapes, tokenizers and templates, cached tokens, results, settings."""

import json
import shutil
from pathlib import Path

import pytest
from damage import damaged, damaged_bytes, json_bytes
from fuzzing import fuzz, irminsul, refused, write
from hypothesis import given
from hypothesis import strategies as st
from sample_logs import CALL, RESULT, SYSTEM, TOOL, USER

from irminsul.engine.config import ModelConfig
from irminsul.sglang.settings import read_settings

CHAT = json.dumps({"messages": [SYSTEM, USER, CALL, RESULT], "tools": [TOOL]}).encode() + b"\n"
PRICES = {
    "name": "a GPU",
    "source": "measured",
    "points": [
        {"total": total, "computed": computed, "ms": computed / 50}
        for total in (4096, 16384)
        for computed in (512, total)
    ],
}
SHAPE = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
OWN_SHAPE = {
    **{name: SHAPE[name] for name in SHAPE if "rope_s" not in name and "moe" not in name},
    "model_type": "irminsul_mla",
    "rope_inv_freq": [0.5**number for number in range(8)],
}
DISTRIBUTION = {"p50": 0.1, "p95": 0.2, "p99": 0.3, "mean": 0.1}
BLOCK = {
    "format": 1,
    "id": "a",
    "comparison": "c",
    "server": {
        "name": "stock",
        "url": "http://127.0.0.1:1",
        "kind": "sglang",
        "model": "m",
        "facts": {"version": "1"},
        "cache_at_start": "flushed",
        "ignore_eos": True,
    },
    "load": {"name": "log", "fingerprint": "f", "calls": 10, "sessions": 2, "left_out": 3, "notes": ["mind this"]},
    "settings": {
        "protocol": "openai",
        "max_tokens": 16,
        "think_time": "0",
        "warm_up": 2,
        "seed": 0,
        "pace": "1 at once",
    },
    "repeat": 0,
    "started": "2026-11-30T10:00:00+00:00",
    "seconds": 2.0,
    "requests": 10,
    "succeeded": 10,
    "errors": {},
    "ttft_s": DISTRIBUTION,
    "itl_s": None,
    "end_to_end_s": DISTRIBUTION,
    "requests_per_s": 5.0,
    "in_flight": 1.0,
    "output_tokens_per_s": 80.0,
    "prompt_tokens": DISTRIBUTION,
    "client_cpu_share": 0.1,
    "tokens": {"prompt": 1000, "computed": 750, "prefix": 250},
    "pool": {"occupied_before": 0.1},
    "client": {"irminsul": "0.1.0", "python": "3.11", "processor": "Abacus", "cores": 2, "gpus": ["H200"]},
}


@st.composite
def damaged_json(draw, *values):
    """Bytes of a JSON file with a fault or two."""
    value = draw(st.sampled_from(values))
    for _ in range(draw(st.integers(1, 2))):
        value = damaged(value, draw)
    return damaged_bytes(json_bytes(value, draw), draw)


@pytest.fixture
def analyze(compiled, tmp_path):
    """Analyse a small log with further options, in time."""
    log = write(tmp_path / "log", CHAT * 2)

    def run(*options, tokenizer=compiled):
        return irminsul("analyze", log, "--tokenizer", tokenizer, "--json", tmp_path / "out.json", *options)

    assert run().status == 0
    return run


@pytest.mark.parametrize(("option", "value"), [("--cost-model", PRICES), ("--model-config", SHAPE)])
def test_the_undamaged_files_are_read(analyze, tmp_path, option, value):
    assert analyze(option, write(tmp_path / "file", json.dumps(value).encode())).status == 0


@fuzz
@given(st.sampled_from(["--cost-model", "--model-config"]), st.data())
def test_damaged_prices_and_shapes(analyze, tmp_path, option, data):
    path = write(tmp_path / "file", data.draw(damaged_json(PRICES if option == "--cost-model" else SHAPE)))
    out = analyze(option, path)
    if out.status:
        assert str(path) in out.sentence
    else:
        json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)


TEMPLATE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@fuzz
@given(st.sampled_from(TEMPLATE_FILES), st.data())
def test_a_damaged_tokenizer_or_template(analyze, compiled, tmp_path, name, data):
    directory = tmp_path / "tokenizer"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(compiled, directory)
    content = (directory / name).read_bytes()
    if name.endswith(".json") and data.draw(st.booleans()):
        content = data.draw(damaged_json(json.loads(content)))
    else:
        content = damaged_bytes(content, data.draw)
    (directory / name).write_bytes(content)
    analyze(tokenizer=directory)


@fuzz
@given(st.data())
def test_damaged_cached_tokens_are_made_again(analyze, tmp_path, data):
    cache = tmp_path / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    whole = analyze("--token-cache", cache)
    (entry,) = cache.iterdir()
    entry.write_bytes(damaged_bytes(entry.read_bytes(), data.draw))
    again = analyze("--token-cache", cache)
    assert (whole.status, again.status) == (0, 0)


def test_the_undamaged_results_are_shown(tmp_path):
    write(tmp_path / "blocks.jsonl", json.dumps(BLOCK).encode() + b"\n")
    assert "stock" in irminsul("bench", "report", tmp_path, seconds=20).stdout


@fuzz
@given(st.lists(damaged_json(BLOCK) | st.just(json.dumps(BLOCK).encode()), min_size=1, max_size=3))
def test_damaged_results_are_shown_or_refused_by_line(tmp_path, lines):
    path = write(tmp_path / "blocks.jsonl", b"".join(line + b"\n" for line in lines))
    out = irminsul("bench", "report", tmp_path, "--html", tmp_path / "out.html")
    if out.status:
        assert str(path) in out.sentence


@fuzz
@given(damaged_json(SHAPE, OWN_SHAPE, SHAPE | {"model_type": "deepseek_v2"}))
def test_a_damaged_config_of_a_checkpoint(tmp_path, data):
    write(tmp_path / "config.json", data)
    refused(lambda: ModelConfig.from_checkpoint(tmp_path))


SETTINGS = b"""mode = "live"
matcher = "winnow64"
min_run = 64
gap_cost = 16.0
self_test = true
"""
VALUES = (
    "nan",
    "inf",
    "-1",
    "0",
    "1e400",
    "9" * 5000,
    "[" * 10_000,
    '"x"',
    "true",
    "2026-01-31",
    '"\\ud800"',
    "{}",
    "''",
)


@fuzz
@given(st.data())
def test_damaged_settings_of_the_plugin(tmp_path, data):
    lines = SETTINGS.splitlines(keepends=True)
    place = data.draw(st.integers(0, len(lines) - 1))
    if data.draw(st.booleans()):
        name = lines[place].split(b" = ")[0]
        lines[place] = name + b" = " + data.draw(st.sampled_from(VALUES)).encode() + b"\n"
    path = write(tmp_path / "irminsul.toml", damaged_bytes(b"".join(lines), data.draw))
    refused(lambda: read_settings({"IRMINSUL_SGLANG_CONFIG": str(path)}))
    text = data.draw(st.sampled_from(VALUES) | st.text(max_size=20))
    variable = data.draw(st.sampled_from(["MODE", "MIN_RUN", "GAP_COST", "SELF_TEST", "MAX_INDEX_MIB", "UNKNOWN"]))
    refused(lambda: read_settings({f"IRMINSUL_SGLANG_{variable}": text}))


def test_the_undamaged_shapes_and_settings_are_read(tmp_path):
    for shape in (SHAPE, OWN_SHAPE):
        write(tmp_path / "config.json", json.dumps(shape).encode())
        assert ModelConfig.from_checkpoint(tmp_path).n_layers == 3
    path = write(Path(tmp_path / "irminsul.toml"), SETTINGS)
    assert read_settings({"IRMINSUL_SGLANG_CONFIG": str(path)}).policy.min_run == 64
