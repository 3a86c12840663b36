"""A tiny random model with a tokenizer of one token a byte, and random text for it to read."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from irminsul.engine.model import MlaModel
from irminsul.reproduce.material import Material
from irminsul.reproduce.subject import Subject
from irminsul.testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, tokenizer) -> Path:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "v2", moe=False)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(checkpoint) -> MlaModel:
    return MlaModel.load(checkpoint)


@pytest.fixture(scope="session")
def material() -> Material:
    generator = torch.Generator().manual_seed(0)
    return Material(
        torch.randint(3, 512, (6000,), generator=generator), torch.randint(3, 512, (9000,), generator=generator)
    )


@pytest.fixture(scope="session")
def subject(checkpoint, model, material) -> Subject:
    return Subject(model, checkpoint, material, quick=True, seed=0, tell=lambda _: None)
