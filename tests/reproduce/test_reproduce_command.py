"""The command: what it runs, writes and refuses."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from irminsul.cli import app
from irminsul.errors import InputError
from irminsul.reproduce import command, consistency, material
from irminsul.reproduce.command import EXPERIMENTS, reproduce_command
from irminsul.testing.tiny import write_tiny_checkpoint

WITHOUT_MATPLOTLIB = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
sys.argv = ["irminsul", "reproduce", "rotation", "x", "--out", "y"]
from irminsul.cli import main
main()
"""


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(material, "MODULES", ("argparse",))


def test_all_experiments_run_and_leave_their_files(checkpoint, tmp_path, monkeypatch):
    # The tasks of the fidelity harness do not fit a model of one token a byte; it has tests of its own.
    path = {"n": 1, "kl_mean": 0.1, "kl_ci95": None, "argmax_match": 1.0, "first_divergence": 2.0, "tokens": 2.0}
    measured = {"tasks": {"qa": {"shifted": path, "naive": path}}}
    monkeypatch.setattr(consistency, "fidelity_command", lambda **_: measured)
    said: list[str] = []
    paths = reproduce_command("all", checkpoint, tmp_path, quick=True, shown_as="tiny", seed=3, tell=said.append)
    assert [path.name for path in paths] == [f"{name}.{end}" for name in EXPERIMENTS for end in ("json", "md", "png")]
    for name in EXPERIMENTS:
        data = json.loads((tmp_path / f"{name}.json").read_text())
        assert data["experiment"] == name
        assert data["seed"] == 3
        assert data["command"].startswith(f"irminsul reproduce all tiny --out {tmp_path} --quick")
        assert data["comparisons"]
        assert any(f"{name}.json" in line for line in said)
        assert (tmp_path / f"{name}.png").stat().st_size < 100_000


def test_the_same_seed_gives_the_same_results(checkpoint, tmp_path):
    runs = [("a", 0), ("b", 0), ("c", 1)]
    results = []
    for folder, seed in runs:
        reproduce_command("sink", checkpoint, tmp_path / folder, quick=True, seed=seed, tell=lambda _: None)
        results.append(json.loads((tmp_path / folder / "sink.json").read_text())["results"])
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_the_command_line(checkpoint, tmp_path, monkeypatch):
    called = {}
    monkeypatch.setattr(command, "reproduce_command", lambda *args, **options: called.update(options, args=args))
    words = [
        "reproduce",
        "sink",
        str(checkpoint),
        "--out",
        str(tmp_path),
        "--quick",
        "--seed",
        "4",
        "--dtype",
        "bfloat16",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert called["args"] == ("sink", checkpoint, tmp_path)
    assert (called["quick"], called["seed"], called["dtype"], called["device"]) == (True, 4, "bfloat16", "cpu")


def test_an_unknown_experiment_is_refused_with_the_valid_ones(checkpoint, tmp_path):
    with pytest.raises(InputError, match=r"unknown experiment 'roc'; valid experiments: invariance, sink, .*, all"):
        reproduce_command("roc", checkpoint, tmp_path)


def test_a_model_that_reads_too_little_is_refused(tmp_path, checkpoint):
    path = write_tiny_checkpoint(tmp_path / "short", "v2", moe=False, max_position_embeddings=256)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((checkpoint / file).read_bytes())
    with pytest.raises(InputError, match="needs prompts of 512 tokens, but the model reads 256"):
        reproduce_command("invariance", path, tmp_path, quick=True, tell=lambda _: None)


def test_without_matplotlib_one_sentence_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_MATPLOTLIB], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "matplotlib: pip install 'irminsul-kv[reproduce]'" in done.stderr
    assert done.stderr.count("\n") == 1
