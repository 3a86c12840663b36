import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from irminsul.checkpoints import smollm2
from irminsul.cli import app
from irminsul.errors import InputError
from irminsul.fidelity import command
from irminsul.fidelity.command import choose, fidelity_command
from irminsul.fidelity.measure import Harness
from irminsul.fidelity.paths import PATHS, shipped_path
from irminsul.fidelity.report import ALL_TASKS, findings, markdown, read_json
from irminsul.fidelity.tasks import TASKS
from irminsul.registry import MATCHERS

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
    assert written == json.loads(json.dumps(report))
    assert list(written["tasks"]) == ["qa", "continuation"]
    for paths in written["tasks"].values():
        assert list(paths) == ["full", "prefix", "naive", "shifted", "shifted-carve64", "control"]
        for row in paths.values():
            assert row.keys() >= NAMED_KEYS
            assert row["n"] == 2
            assert row["kl_ci95"] is None
            assert 0 <= row["argmax_match"] <= 1
            assert 0 <= row["first_divergence"] <= row["tokens"]
    assert written["tasks"]["continuation"]["shifted"]["score"] is None
    assert 0 <= written["tasks"]["qa"]["shifted"]["score"] <= 1
    assert written["run"]["seed"] == 0
    assert written["all_tasks"]["naive"]["n"] == 4
    assert (written["schema"], written["run"]["complete"]) == (2, True)
    assert written["worst"]["path"] == written["run"]["default_path"] == shipped_path()
    assert len(written["worst"]["cases"]) == 4


def test_every_case_is_written_so_that_the_means_can_be_computed_again(measured):
    _, _, _, path = measured
    written = json.loads(path.read_text())
    for task, paths in written["tasks"].items():
        cases = [case for case in written["cases"] if case["task"] == task]
        assert [case["number"] for case in cases] == [0, 1]
        for name, row in paths.items():
            own = [case["paths"][name] for case in cases]
            for key, mean in (("kl", "kl_mean"), ("argmax_match", "argmax_match"), ("computed", "computed")):
                assert sum(case[key] for case in own) / 2 == pytest.approx(row[mean])
            assert all(case.keys() >= {"kl", "first_divergence", "score", "shifted", "computed"} for case in own)
    assert json.loads(json.dumps(read_json(path))) == written


def test_tables_and_progress_name_what_was_measured(measured):
    _, out, progress, _ = measured
    assert "continuation (n = 2" in out
    assert "…" not in out
    assert "all tasks (n = 4" in out
    assert "bootstrap-t over cases" in unfolded(out)
    assert "(2 cases)" in out
    assert "Path `shifted-carve64`: as shifted, but positions below 64 computed." in unfolded(out)
    assert "Task `qa`: documents in another order" in unfolded(out)
    assert "`shifted-carve64` (what the engine did by default) has a lower KL than" in unfolded(out)
    assert "Too few cases to say for `shifted-carve64`: qa, continuation, all tasks." in unfolded(out)
    assert "At the time of measurement the engine's default planned like shifted-carve64." in unfolded(out)
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
        ({"json_path": Path("/dev/full")}, "cannot write /dev/full: it is not a regular file"),
        ({"json_path": Path()}, r"cannot write \.: it is a directory"),
    ],
)
def test_what_is_unknown_or_does_not_fit_is_refused(checkpoint, options, message):
    with pytest.raises(InputError, match=message):
        run(checkpoint, **options)


def test_a_json_path_without_a_directory_is_refused_before_anything_runs(checkpoint, tmp_path):
    with pytest.raises(InputError, match="there is no directory"):
        run(checkpoint, json_path=tmp_path / "absent" / "out.json")


@pytest.mark.parametrize("content", [b"[]", b"no json", b'{"tasks": {}}', b"\xff", b"[" * 100_000, b'{"run": NaN}'])
def test_a_file_that_is_no_report_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
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
    chosen = choose("path", PATHS, "control", (), always=("shifted",))
    assert [path.name for path in chosen] == ["shifted", "control"]


def without(keys):
    def damage(report):
        for key in keys[:-1]:
            report = report[key]
        del report[keys[-1]]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda report: report.update(schema=1), "has schema 1, but this version reads 2"),
        (without(["schema"]), "has schema 1"),
        (without(["cases"]), "cases"),
        (without(["run", "left_out"]), "run.left_out"),
        (without(["cases", 0, "paths", "naive", "kl"]), "kl: Field required"),
        (without(["cases", 0, "paths", "naive"]), "all on the same paths"),
        (lambda report: report["cases"].clear(), "at least one case"),
        (lambda report: report["cases"][0]["paths"]["naive"].update(kl="low"), "should be a valid number"),
    ],
)
def test_a_report_in_another_form_is_refused(measured, tmp_path, damage, message):
    report = json.loads(measured[3].read_text())
    damage(report)
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(report))
    with pytest.raises(InputError, match=message):
        read_json(path)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["smollm2-mla"], "checkpoint"),
        (["--tasks", "foo"], "--tasks"),
        (["--json", "other.json", "--quick", "--seed", "0"], "--quick, --seed, --json"),
    ],
)
def test_nothing_is_measured_beside_render(measured, words, refused):
    result = CliRunner().invoke(app, ["fidelity", "--render", str(measured[3]), *words])
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == f"--render only prints a file; leave out {refused}"


def test_the_help_names_what_can_be_chosen():
    text = unfolded(CliRunner().invoke(app, ["fidelity", "--help"], env={"COLUMNS": "4000"}).output)
    for names in (TASKS, PATHS, MATCHERS):
        assert ", ".join(names) in text


@pytest.mark.parametrize("seed", ["9" * 30, "-1"])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    result = CliRunner().invoke(app, ["fidelity", "--seed", seed])
    assert result.exit_code == 2
    assert "--seed" in result.output


def test_finished_cases_survive_an_interruption(checkpoint, tmp_path, monkeypatch):
    real = Harness.measure

    def interrupted(self, task, number, *args):
        if number == 1:
            raise KeyboardInterrupt
        return real(self, task, number, *args)

    monkeypatch.setattr(Harness, "measure", interrupted)
    path = tmp_path / "report.json"
    path.write_text("an earlier report")
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, tasks="continuation", paths="naive", n=2, json_path=path)
    assert path.read_text() == "an earlier report"
    written = read_json(tmp_path / "report.incomplete.json")
    assert len(written["cases"]) == 1
    assert "INCOMPLETE" in markdown(written)


def test_each_path_shows_the_matcher_it_names(measured):
    report = json.loads(measured[3].read_text())
    report["run"]["path_matchers"] = {"naive": "winnow32"}
    assert "| naive (winnow32) | " in markdown(report)


def verdict(difference: float, *, better: bool | None, decided: bool = True):
    interval = [difference - 0.1, difference + 0.1] if decided else None
    return {"difference": difference, "ci95": interval, "better": better}


def report_with(naive, *, control=None, noise=1e-6, reused=100.0):
    """What findings reads, of the path ``shifted`` on the tasks named."""
    row = {"shifted": reused, "kl_max": 1.0}
    return {
        "run": {"default_path": "shifted", "noise_limit": 1e-3},
        "tasks": {task: {"shifted": row} for task in naive},
        "all_tasks": {"shifted": row, "control": row, "prefix": {"shifted": 0.0, "kl_max": noise}},
        "against_naive": {task: {"shifted": found} for task, found in naive.items()},
        "against_shifted": {ALL_TASKS: {"control": control or verdict(0.5, better=False)}},
        "against_prefix": {ALL_TASKS: {"shifted": verdict(0.5, better=False)}},
    }


def test_exceptions_to_the_rule_are_named():
    naive = {
        "qa": verdict(-0.5, better=True),
        "agent": verdict(0.02, better=None),
        "copy": verdict(0.1, better=None, decided=False),
    }
    beaten, exceptions, few, noise, control = findings(report_with(naive))
    assert beaten.endswith("on: qa.")
    assert exceptions.endswith("its interval): agent (+0.0200, -0.0800 to +0.1200).")
    assert few == "Too few cases to say for `shifted`: copy."
    assert "at most 1e-06" in noise
    assert "the harness sees a wrong rotation" in control


def test_a_control_that_is_hardly_worse_is_not_trusted():
    found = findings(report_with({}, control=verdict(0.05, better=None)))[-1]
    assert "NOT clearly worse" in found
    assert "Too few cases" in findings(report_with({}, control=verdict(9.0, better=None, decided=False)))[-1]


def test_a_noise_floor_that_is_not_near_zero_is_not_trusted():
    assert "do not trust this run" in findings(report_with({}, noise=0.01))[0]


def test_where_nothing_was_reused_nothing_is_claimed():
    lines = findings(report_with({"qa": verdict(-0.5, better=True)}, reused=0.0))
    assert "on: none." in lines[0]
    assert "Nothing was reused by `shifted` on: qa." in lines
    assert lines[-1].startswith("Nothing was reused by the control")


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
