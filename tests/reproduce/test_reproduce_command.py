"""The command: what it runs, writes and refuses."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from irminsul.cli import app
from irminsul.engine.loading import load_model
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
    better = {path: {"better": None} for path in consistency.REUSE}
    tasks = {"qa": dict.fromkeys(consistency.PATHS, path)}
    measured = {"tasks": tasks, "against_naive": {"qa": better}, "cases": []}
    monkeypatch.setattr(consistency, "tokens_needed", lambda **_: 0)
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


@pytest.fixture
def short(tmp_path, checkpoint):
    """A model that reads 256 tokens."""
    path = write_tiny_checkpoint(tmp_path / "short", "v2", moe=False, max_position_embeddings=256)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((checkpoint / file).read_bytes())
    return path


def test_a_model_that_reads_too_little_is_refused(tmp_path, short):
    with pytest.raises(InputError, match="needs prompts of 512 tokens, but the model reads 256"):
        reproduce_command("invariance", short, tmp_path, quick=True, tell=lambda _: None)


def test_what_does_not_fit_is_left_out_by_name_and_the_rest_is_done(tmp_path, short):
    out = tmp_path / "out"
    with pytest.raises(InputError) as refusal:
        reproduce_command("all", short, out, quick=True, tell=lambda _: None)
    for name in ("invariance", "sink", "rope-pitfall", "consistency"):
        assert f"{name} is left out: it needs prompts of " in str(refusal.value)
    assert {path.name for path in out.iterdir()} == {"rotation.json", "rotation.md", "rotation.png"}


def test_the_directory_is_looked_at_before_the_model_is_loaded(tmp_path):
    (tmp_path / "sink.md").mkdir()
    with pytest.raises(InputError, match=r"sink\.md: it is a directory"):
        reproduce_command("sink", tmp_path / "absent", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file"):
        reproduce_command("sink", tmp_path / "absent", tmp_path / "file")


def test_a_model_of_numbers_that_are_none_is_refused(tmp_path, checkpoint, monkeypatch):
    def damaged(*args, **options):
        model = load_model(*args, **options)
        return replace(model, embedding=torch.full_like(model.embedding, torch.nan))

    monkeypatch.setattr(command, "load_model", damaged)
    for name in ("invariance", "sink", "rotation", "rope-pitfall"):
        with pytest.raises(InputError, match="what the model computes is not finite"):
            reproduce_command(name, checkpoint, tmp_path / name, quick=True, tell=lambda _: None)
        assert list((tmp_path / name).iterdir()) == []


def test_a_seed_that_no_generator_takes_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["reproduce", "sink", "x", "--out", str(tmp_path), "--seed", "9" * 30])
    assert result.exit_code == 2
    assert "--seed" in result.output


def test_without_matplotlib_one_sentence_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_MATPLOTLIB], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "matplotlib: pip install 'irminsul-kv[reproduce]'" in done.stderr
    assert done.stderr.count("\n") == 1
