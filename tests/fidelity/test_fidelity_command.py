import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from irminsul.checkpoints import smollm2
from irminsul.cli import app
from irminsul.errors import InputError
from irminsul.fidelity import command
from irminsul.fidelity.command import choose, fidelity_command
from irminsul.fidelity.paths import PATHS
from irminsul.fidelity.report import findings, markdown, read_json
from irminsul.fidelity.tasks import TASKS

NAMED_KEYS = {"n", "score", "kl_mean", "kl_ci95", "argmax_match", "first_divergence"}


def console():
    return Console(file=io.StringIO(), width=60)


def unfolded(text: str) -> str:
    return " ".join(text.split())


def run(checkpoint, **options):
    out, progress = console(), console()
    report = fidelity_command(checkpoint=checkpoint, console=out, progress=progress, **options)
    return report, out.file.getvalue(), progress.file.getvalue()


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "fidelity.json"
    options = {"tasks": "continuation,qa", "paths": "naive,shifted,control,prefix", "n": 2}
    return *run(checkpoint, json_path=path, **options), path


def test_the_json_has_the_keys_it_promises(measured):
    report, _, _, path = measured
    written = json.loads(path.read_text())
    assert written == report
    assert list(written["tasks"]) == ["qa", "continuation"]
    for paths in written["tasks"].values():
        assert list(paths) == ["full", "prefix", "naive", "shifted", "control"]
        for row in paths.values():
            assert row.keys() >= NAMED_KEYS
            assert row["n"] == 2
            low, high = row["kl_ci95"]
            assert 0 <= low <= row["kl_mean"] <= high
            assert 0 <= row["argmax_match"] <= 1
            assert 0 <= row["first_divergence"] <= row["tokens"]
    assert written["tasks"]["continuation"]["shifted"]["score"] is None
    assert 0 <= written["tasks"]["qa"]["shifted"]["score"] <= 1
    assert written["run"]["seed"] == 0
    assert written["all_tasks"]["naive"]["n"] == 4
    assert len(written["worst"]["cases"]) == 4


def test_tables_and_progress_name_what_was_measured(measured):
    _, out, progress, _ = measured
    assert "continuation (n = 2" in out
    assert "…" not in out
    assert "all tasks (n = 4" in out
    assert "bootstrap over cases" in unfolded(out)
    assert "matcher winnow64, seed 0" in unfolded(out)
    assert progress.count("KL naive") == 4


def test_markdown_comes_from_the_file_alone(measured):
    _, _, _, path = measured
    result = CliRunner().invoke(app, ["fidelity", "--render", str(path)])
    assert result.exit_code == 0, result.output
    assert result.output == markdown(read_json(path))
    assert "| shifted | " in result.output
    rows = [line for line in result.output.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {10}


def test_the_same_seed_gives_the_same_report(checkpoint, measured):
    again, _, _ = run(checkpoint, tasks="qa", paths="shifted", n=2)
    first = measured[0]["tasks"]["qa"]["shifted"]
    assert again["tasks"]["qa"]["shifted"]["kl_mean"] == pytest.approx(first["kl_mean"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "qa,needles"}, "unknown task 'needles'; valid tasks: needle-1k, needle-2k"),
        ({"paths": "shifted,exact"}, "unknown path 'exact'; valid paths: prefix, naive, shifted"),
        ({"matcher": "magic"}, "unknown matcher 'magic'; valid matchers: fixed128"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"tasks": "needle-8k"}, "context is 4096 tokens, too short for needle-8k"),
    ],
)
def test_what_is_unknown_or_does_not_fit_is_refused(checkpoint, options, message):
    with pytest.raises(InputError, match=message):
        run(checkpoint, **options)


def test_a_json_path_without_a_directory_is_refused_before_anything_runs(checkpoint, tmp_path):
    with pytest.raises(InputError, match="there is no directory"):
        run(checkpoint, json_path=tmp_path / "absent" / "out.json")


@pytest.mark.parametrize("content", ["[]", "no json", '{"tasks": {}}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(InputError, match="is not a report of irminsul fidelity"):
        read_json(path)
    with pytest.raises(InputError, match="cannot read"):
        read_json(tmp_path / "absent.json")


def test_tasks_that_do_not_fit_are_left_out_by_name_if_none_was_asked_for(checkpoint, monkeypatch):
    monkeypatch.setattr(command, "TASKS", {name: TASKS[name] for name in ("needle-8k", "continuation")})
    report, out, _ = run(checkpoint, n=1, paths="shifted-run512")
    assert report["run"]["left_out"] == ["needle-8k"]
    assert list(report["tasks"]) == ["continuation"]
    assert "Left out because they need a longer context: needle-8k." in unfolded(out)


def test_names_come_in_their_own_order_and_once():
    assert [path.name for path in choose("path", PATHS, "shifted, naive,shifted", ())] == ["naive", "shifted"]


def verdict(difference: float, *, better: bool | None):
    return {"shifted": {"difference": difference, "ci95": [difference - 0.1, difference + 0.1], "better": better}}


def test_exceptions_to_the_rule_are_named():
    report = {
        "against_naive": {"qa": verdict(-0.5, better=True), "agent": verdict(0.02, better=None)},
        "all_tasks": {"shifted": {"kl_mean": 0.5}, "control": {"kl_mean": 0.4}},
    }
    beaten, exceptions, control = findings(report)
    assert beaten.endswith("on: qa.")
    assert "agent (+0.0200, -0.0800 to +0.1200)" in exceptions
    assert "NOT worse" in control


@pytest.fixture(scope="module")
def pretrained():
    try:
        gguf = smollm2.find_gguf()
    except InputError as error:
        pytest.skip(str(error))
    return smollm2.build(smollm2.BuiltIn.MLA, gguf=gguf)


@pytest.mark.slow
@pytest.mark.checkpoint
def test_on_a_pretrained_model_shifted_beats_naive_and_the_control_is_worst(pretrained):
    """The quick form, without the dearer paths."""
    report, _, _ = run(pretrained, quick=True, paths="prefix,naive,shifted,control")
    for name, paths in report["tasks"].items():
        assert paths["prefix"]["kl_mean"] < 1e-3, name
        assert paths["shifted"]["kl_mean"] < paths["naive"]["kl_mean"], name
        assert paths["prefix"]["argmax_match"] > 0.9, name
    overall = report["all_tasks"]
    assert overall["control"]["kl_mean"] > overall["naive"]["kl_mean"] > overall["shifted"]["kl_mean"]
    scores = [paths["prefix"]["score"] == paths["full"]["score"] for paths in report["tasks"].values()]
    assert all(scores)
