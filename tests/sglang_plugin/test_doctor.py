"""What the doctor says, with SGLang replaced by answers; tests/sglang has the real one."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError

import pytest
from typer.testing import CliRunner

from irminsul import cli
from irminsul.checkpoints.smollm2 import BuiltIn
from irminsul.sglang import doctor
from irminsul.sglang.doctor import Check, Verdict
from irminsul.sglang.support import TESTED_VERSION

GOOD = {"architectures": ["DeepseekV2ForCausalLM"], "qk_rope_head_dim": 64, "rope_scaling": None}


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with the config of a supported model."""
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    return tmp_path


@pytest.fixture
def without_sglang(monkeypatch):
    """Let SGLang be missing."""

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", version)


@pytest.fixture
def with_sglang(monkeypatch):
    """Let SGLang be installed, and its process answer what the test says; returns what it was asked."""

    def set_answer(stdout, stderr="", status=0, version=TESTED_VERSION):
        asked = []

        def run(command, **options):
            asked.append((command, options))
            return subprocess.CompletedProcess(command, status, stdout, stderr)

        monkeypatch.setattr(doctor, "version", lambda package: version)
        monkeypatch.setattr(doctor.subprocess, "run", run)
        return asked

    return set_answer


@pytest.fixture
def plugin(monkeypatch):
    """Let the entry point be there."""
    found = EntryPoint("irminsul", "irminsul.sglang.plugin:activate", doctor.ENTRY_POINTS)
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [found])


def answer(*checks):
    """What the process prints."""
    return "".join(
        json.dumps({"name": name, "verdict": verdict, "sentence": sentence}) + "\n"
        for name, verdict, sentence in checks
    )


def named(checks, name):
    return [check for check in checks if check.name == name]


def only(checks, name):
    (check,) = named(checks, name)
    return check


def test_without_sglang_the_config_is_read_and_nothing_is_claimed(checkpoint, without_sglang):
    checks = doctor.examine(str(checkpoint), ["--enable-hierarchical-cache"], {})
    assert only(checks, "sglang") == Check(
        "sglang", Verdict.REFUSED, "SGLang is not installed: pip install 'irminsul-kv[sglang]'"
    )
    assert only(checks, "surface").verdict is Verdict.NOT_CHECKED
    assert only(checks, "flags").verdict is Verdict.NOT_CHECKED
    assert only(checks, "model").verdict is Verdict.OK
    assert "smollm2-mla" in only(checks, "model").sentence
    assert not doctor.works(checks)


def test_all_problems_of_a_model_are_told(checkpoint, without_sglang):
    config = {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3"}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    problems = named(doctor.examine(str(checkpoint), [], {}), "model")
    assert [check.verdict for check in problems] == [Verdict.REFUSED] * 2
    assert problems[0].sentence.startswith("model class LlamaForCausalLM has not been shown to work")
    assert problems[1].sentence.startswith("rope type 'llama3' is not supported")


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_config_that_cannot_be_read_is_refused(text, tmp_path, without_sglang):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    check = only(doctor.examine(str(tmp_path), [], {}), "model")
    assert check.verdict is Verdict.REFUSED
    assert str(tmp_path / "config.json") in check.sentence


def test_a_name_cannot_be_looked_up_without_sglang(without_sglang):
    check = only(doctor.examine("deepseek-ai/DeepSeek-V2-Lite", [], {}), "model")
    assert check.verdict is Verdict.NOT_CHECKED


def test_settings_that_cannot_be_read_are_one_finding_of_several(checkpoint, without_sglang):
    checks = doctor.examine(str(checkpoint), [], {"IRMINSUL_SGLANG_MODUS": "live"})
    assert only(checks, "settings").sentence.startswith("IRMINSUL_SGLANG_MODUS: unknown setting 'modus'")
    assert only(checks, "model").verdict is Verdict.OK


def test_what_sglang_answers_is_passed_on(checkpoint, with_sglang, plugin):
    answers = (("surface", "ok", "hooked"), ("flags", "refused", "a"), ("flags", "refused", "b"), ("model", "ok", "c"))
    asked = with_sglang(answer(*answers))
    checks = doctor.examine("some/model", ["--tp-size", "2"], {"PATH": "/bin"})
    assert [(one.name, one.verdict, one.sentence) for one in checks if one.name in ("surface", "flags", "model")] == [
        *answers
    ]
    assert only(checks, "sglang").verdict is Verdict.OK
    assert only(checks, "entry point") == Check(
        "entry point", Verdict.OK, "sglang.srt.plugins: irminsul.sglang.plugin:activate"
    )
    ((command, options),) = asked
    assert command[-3:] == ["some/model", "--tp-size", "2"]
    assert options["env"] == {"PATH": "/bin"}


@pytest.mark.parametrize("said", ["", answer(("surface", "ok", "hooked"))])
def test_a_process_that_dies_is_a_refusal_with_its_last_words(said, with_sglang):
    with_sglang(said, stderr="Traceback\n  File\nImportError: no libcuda\n\n", status=1)
    checks = doctor.examine("some/model", [], {})
    refused, *rest = [one for one in checks if one.name in ("surface", "flags", "model")][said.count("\n") :]
    assert refused.verdict is Verdict.REFUSED
    assert refused.sentence.endswith("(status 1): ImportError: no libcuda")
    assert rest
    assert {one.verdict for one in rest} == {Verdict.NOT_CHECKED}


@pytest.mark.parametrize(("forced", "verdict"), [("false", Verdict.REFUSED), ("true", Verdict.OK)])
def test_another_release_is_refused_unless_forced(forced, verdict, with_sglang):
    with_sglang("", version="0.6.0")
    checks = doctor.examine("some/model", [], {"IRMINSUL_SGLANG_FORCE_VERSION": forced})
    assert only(checks, "sglang").verdict is verdict


def test_a_missing_entry_point_is_refused(monkeypatch, checkpoint, without_sglang):
    monkeypatch.setattr(doctor, "entry_points", lambda **_: [])
    assert "not installed in this environment" in only(doctor.examine(str(checkpoint), [], {}), "entry point").sentence


@pytest.mark.parametrize(
    ("listed", "verdict"),
    [("", Verdict.OK), ("irminsul", Verdict.OK), ("a, irminsul", Verdict.OK), ("a,irminsul2", Verdict.REFUSED)],
)
def test_a_list_of_plugins_must_name_ours(listed, verdict, checkpoint, without_sglang, plugin):
    assert only(doctor.examine(str(checkpoint), [], {"SGLANG_PLUGINS": listed}), "entry point").verdict is verdict


def test_the_reference_kernel_needs_no_triton(checkpoint, without_sglang):
    checks = doctor.examine(str(checkpoint), [], {"IRMINSUL_SGLANG_ROW_KERNEL": "reference"})
    assert only(checks, "triton").verdict is Verdict.NOT_CHECKED


@pytest.mark.parametrize(("package", "name"), [("torch", "gpu"), ("triton", "triton")])
def test_what_cannot_be_imported_is_refused(package, name, monkeypatch, checkpoint, without_sglang):
    monkeypatch.setitem(sys.modules, package, None)
    check = only(doctor.examine(str(checkpoint), [], {}), name)
    assert check.verdict is Verdict.REFUSED
    assert "cannot be imported" in check.sentence


@pytest.mark.parametrize(
    ("cuda", "available", "verdict", "told"),
    [
        (None, False, Verdict.REFUSED, "a build without CUDA"),
        ("13.0", False, Verdict.REFUSED, "sees no GPU"),
        ("13.0", True, Verdict.OK, "NVIDIA A, NVIDIA A"),
    ],
)
def test_gpus(cuda, available, verdict, told, monkeypatch, checkpoint, without_sglang):
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA A")
    check = only(doctor.examine(str(checkpoint), [], {}), "gpu")
    assert check.verdict is verdict
    assert told in check.sentence


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("not checked", 0), ("refused", 1)])
def test_the_command_ends_with_1_only_if_something_is_refused(verdict, status, monkeypatch):
    checks = [Check("model", Verdict(verdict), "why")]
    monkeypatch.setattr(doctor, "examine", lambda model, flags: checks)
    done = CliRunner().invoke(cli.app, ["doctor", "some/model"])
    assert done.exit_code == status
    assert done.stdout.split() == [*verdict.split(), "model", "why"]


def test_the_command_passes_flags_on_and_prints_json(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "examine", lambda *given: asked.append(given) or [Check("gpu", Verdict.OK, "one")])
    flags = ["--tp-size", "2", "--json-model-override-args", "{}"]
    done = CliRunner().invoke(cli.app, ["doctor", "some/model", "--json", "--", *flags])
    assert asked == [("some/model", flags)]
    assert json.loads(done.stdout) == {
        "model": "some/model",
        "flags": flags,
        "works": True,
        "checks": [{"name": "gpu", "verdict": "ok", "sentence": "one"}],
    }


def test_the_command_knows_the_built_in_models():
    assert set(cli._BUILT_IN) == set(BuiltIn)
