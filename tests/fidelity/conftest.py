"""A tiny checkpoint with a tokenizer of its own, trained on the text that the tasks are made of."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from irminsul.engine.model import MlaModel
from irminsul.testing.tiny import write_tiny_checkpoint
from irminsul.trace.pattern_text.library import reference

VOCABULARY = 1024
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([reference("compound", "types")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    path = write_tiny_checkpoint(
        tmp_path_factory.mktemp("fidelity") / "tiny",
        "v2",
        moe=False,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        eos_token_id=0,
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(checkpoint) -> MlaModel:
    return MlaModel.load(checkpoint)


def words(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens, none of which ends a text."""
    return tuple(np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist())


@pytest.fixture(scope="session")
def make_words():
    return words
