"""Benchmarks for a GPU host, on SGLang's own server on a CPU: they get what they ask for; no times are asserted."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from conftest import HOST, TINY

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(
        "IRMINSUL_TEST_BENCHMARKS" not in os.environ,
        reason="takes four minutes; set IRMINSUL_TEST_BENCHMARKS for the benchmarks of a GPU host on a CPU server",
    ),
]

ON_CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "context_length": 4096,
}
HOST_ONLY = {"SGLANG_PLUGINS": "sglang_host"}
"""Stock SGLang serves no MLA on a CPU."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HOST), *sys.path, str(ROOT / "src")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IRMINSUL_SGLANG_ROW_KERNEL", "reference")


def test_energy_reads_every_case(tmp_path, monkeypatch, capsys):
    import energy

    # Room for three prompts: requests evict what is not shared.
    small = {"max_total_tokens": 4000}
    models = {
        "mla": energy.Model("multi-head latent", {**TINY, "vocab_size": 40_000}, 384, shifts=True, flags=small),
    }
    monkeypatch.setattr(energy, "MODELS", models)
    monkeypatch.setattr(energy, "STOCK", HOST_ONLY)
    monkeypatch.setattr(energy, "SETTLE_S", 0.1)
    meter = energy.EnergyMeter(lambda: int(time.monotonic() / 0.05) * 50 * 80)
    arguments = argparse.Namespace(
        models=list(models), tokens=[1200], repeats=1, seconds=0.2, graphs=False, flags=ON_CPU, logs=tmp_path
    )
    arguments.out = tmp_path / "energy.json"
    energy.run_models(arguments, meter, {"models": {}})
    found = json.loads(arguments.out.read_text())
    rows = {row["case"]: row for row in found["models"]["mla"]["rows"]}
    assert len(rows) == 9
    reused = {"miss": 0, "25 %": 300, "50 %": 600, "75 %": 900}
    for case, row in rows.items():
        expected = reused.get(case.removesuffix(" shifted").removesuffix(" as prefix"))
        if expected is None:
            expected = 1200 - 512 - (200 if row["shifted"] else 0)
        assert abs(row["reused"] - expected) <= energy.CHANCE, case
        assert row["raw"][0]["requests"] >= energy.LEAST_REQUESTS
        assert abs(row["net_j"]) < 0.1 * row["gross_j"], "a counter that always draws the same saw no work"
    assert found["table"] in capsys.readouterr().out


def test_overhead_is_told_by_part(tmp_path, monkeypatch, capsys):
    import sglang_overhead
    from scheduler_profile import ADMISSION, INDEX, LOCK, MATCH, PARTS, PLAN, PUBLISH, SEARCH, SPLIT

    monkeypatch.setattr(sglang_overhead, "LITE", {**TINY, "vocab_size": 102_400})
    monkeypatch.setattr(sglang_overhead, "machine", dict)
    monkeypatch.setattr(sglang_overhead, "WITHOUT_PLUGIN", HOST_ONLY)
    out = tmp_path / "overhead.json"
    given = ["--out", out, "--loads", 2, "--tokens", 1424, "--new-tokens", 6, "--repeats", 1, "--no-graphs"]
    given += ["--flags", json.dumps(ON_CPU), "--logs", tmp_path]
    monkeypatch.setattr(sys, "argv", ["sglang_overhead.py", *map(str, given)])
    sglang_overhead.main()
    found = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    rows = {(row["requests"], row["in_common"], row["mode"]): row for row in found["rows"]}
    assert len(rows) == 2 * 4
    for (requests, kind, mode), row in rows.items():
        parts = row["parts_ms_per_request"]
        assert set(parts) <= set(PARTS), "on a CPU nothing waits for a GPU"
        assert bool(parts) == (mode != "stock")
        assert 0 < row["first_tokens_ms"] / 1000 < row["scheduler_s"]
        assert row["decode_steps"] >= 5
        shifts = mode in ("observe", "live") and kind == "passage"
        assert row["shifted_tokens_per_request"] == pytest.approx(712 if shifts else 0, abs=4)
        if mode == "stock":
            continue
        assert parts[PUBLISH] > 0
        assert parts[INDEX] > 0
        assert parts[MATCH] > 0
        assert parts[ADMISSION] > 0
        assert SEARCH in parts
        assert PLAN in parts
        assert (LOCK in parts) == (mode == "live" and kind == "passage")
        assert parts[SPLIT] > 0
        assert sum(parts.values()) == pytest.approx(row["plugin_ms_per_request"], rel=0.01)
        assert row["plugin_ms_per_request"] < 1000 * row["scheduler_s"] / requests
    assert {ratio["of"] for ratio in found["ratios"]} >= {"observe over off", "off over stock"}
