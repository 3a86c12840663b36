"""From a checkpoint directory to an engine and a tokenizer."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from irminsul.engine.config import ModelConfig, refusing_faults
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.errors import CheckpointError, InputError
from irminsul.layout import ITEM_SIZES


def load_engine(path: Path, config: EngineConfig, *, device: str = "cpu", dtype: str = "float32") -> Engine:
    """Load a checkpoint and build an engine on it.

    Raises:
        InputError: a device or dtype that does not exist here.
        CheckpointError, UnsupportedModelError: see MlaModel.load.
    """
    return Engine(load_model(path, device=device, dtype=dtype), config, identity=str(path.resolve()))


def load_model(path: Path, *, device: str = "cpu", dtype: str = "float32") -> MlaModel:
    """Load a checkpoint's weights; errors as in load_engine."""
    if dtype not in ITEM_SIZES:
        raise InputError(f"unknown dtype {dtype!r}; valid dtypes: {', '.join(ITEM_SIZES)}")
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device!r}; valid devices: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' was asked for, but torch finds no CUDA device here")
    return MlaModel.load(path, device=device, dtype=getattr(torch, dtype))


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load a checkpoint's tokenizer from its directory, never from a hub.

    Raises:
        CheckpointError, UnsupportedModelError: config.json, which transformers looks into as well, is that of no
            supported model, or there is no usable tokenizer, or only that of another model.
    """
    vocabulary = ModelConfig.from_checkpoint(path).vocab_size
    tokenizer = read_tokenizer(path)
    last = max(tokenizer.get_vocab().values(), default=0)
    if last >= vocabulary:
        raise CheckpointError(
            f"{path} holds the tokenizer of another model: it has a token {last}, and the model {vocabulary} tokens"
        )
    return tokenizer


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a directory, of whatever model; CheckpointError if there is no usable one."""
    with refusing_faults(f"{path} holds no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
