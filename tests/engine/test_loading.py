"""From a directory to a tokenizer: what is wrong is told in one line, and config.json is looked at first."""

import json

import pytest
from tiny_llama import tiny_tokenizer

from irminsul.engine.loading import load_tokenizer, read_tokenizer
from irminsul.errors import CheckpointError, UnsupportedModelError
from irminsul.testing.tiny import write_tiny_checkpoint


@pytest.fixture
def folder(tmp_path):
    path = write_tiny_checkpoint(tmp_path / "m")
    tiny_tokenizer().save_pretrained(path)
    return path


def test_the_tokenizer_of_a_checkpoint_is_loaded(folder):
    assert load_tokenizer(folder)("the<|im_end|>").input_ids[-1] == 2


@pytest.mark.parametrize("content", ["[]", "[" * 200_000, "{}", '{"model_type": "llama"}'])
def test_a_faulty_configuration_is_named_before_the_tokenizer(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"config\.json|model type") as raised:
        load_tokenizer(folder)
    assert "tokenizer" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[1, 2]", "[" * 200_000, "", "?"])
def test_whatever_transformers_raises_is_told_in_one_line(folder, file, content):
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=r"holds no usable tokenizer: [A-Z][A-Za-z]+: ") as raised:
        load_tokenizer(folder)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_may_be_read_without_a_checkpoint(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_tokenizer(folder)
    assert read_tokenizer(folder)("the").input_ids
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_tokenizer(folder)("the").input_ids
