"""The paper's Table 2 from a run of the fidelity harness."""

import pytest

from irminsul.fidelity.paths import shipped_path
from irminsul.reproduce import consistency
from irminsul.reproduce.consistency import Sizes


def row(kl, match=0.9, divergence=5.0, interval=(0.0, 1.0)):
    return {
        "n": 2,
        "kl_mean": kl,
        "kl_ci95": interval and list(interval),
        "argmax_match": match,
        "first_divergence": divergence,
        "tokens": 16.0,
    }


SHIPPED = shipped_path()
TASKS = {
    "needle-2k": {"full": row(0.0), SHIPPED: row(0.01), "shifted": row(0.02, 0.95, 9.25), "naive": row(0.5)},
    "self-copy": {"full": row(0.0), SHIPPED: row(0.4), "shifted": row(0.4, interval=None), "naive": row(0.3)},
}
BETTER = {"needle-2k": {SHIPPED: True, "shifted": True}, "self-copy": {SHIPPED: None, "shifted": False}}
REPORT = {
    "tasks": TASKS,
    "against_naive": {
        task: {path: {"better": better} for path, better in paths.items()} for task, paths in BETTER.items()
    },
    "cases": [{"task": "needle-2k"}],
}


@pytest.fixture
def asked(monkeypatch):
    asked = {}
    monkeypatch.setattr(consistency, "fidelity_command", lambda **options: asked.update(options) or REPORT)
    return asked


def test_the_harness_is_asked_for_the_same_model(subject, asked):
    consistency.run(subject)
    assert asked["checkpoint"] == subject.checkpoint
    assert (asked["device"], asked["dtype"], asked["seed"], asked["quick"]) == ("cpu", "float32", 0, True)
    assert asked["paths"] == f"{SHIPPED},shifted,naive"


def test_its_numbers_become_a_table_and_a_direction_each(subject, asked):
    report = consistency.run(subject)
    assert report.tables[0].header[2:5] == (f"KL {SHIPPED}", "KL shifted", "KL naive")
    assert report.tables[0].rows[0] == (
        "needle-2k",
        "2",
        "0.010 (0.000, 1.000)",
        "0.020 (0.000, 1.000)",
        "0.500 (0.000, 1.000)",
        "0.900",
        "0.950",
        "0.900",
        "5.0 of 16.0",
        "9.2 of 16.0",
        "5.0 of 16.0",
    )
    assert report.tables[0].rows[1][3] == "0.400"
    assert [compared.agrees for compared in report.comparisons] == [True, True, None, False]
    assert report.comparisons[0].paper.startswith("NIAH")
    assert report.comparisons[2].paper == "not measured"
    assert report.results["tasks"]["needle-2k"]["shifted"]["kl_mean"] == 0.02
    assert report.results["cases"] == REPORT["cases"]
    assert "shifted has a lower KL than naive on self-copy" in report.verdict


def test_tasks_and_paths_are_those_of_the_harness():
    from irminsul.fidelity.paths import PATHS
    from irminsul.fidelity.tasks import TASKS as KNOWN

    assert set(consistency.PATHS) <= set(PATHS)
    for sizes in (consistency.FULL, consistency.QUICK):
        assert isinstance(sizes, Sizes)
        assert set(sizes.tasks) <= set(KNOWN)
