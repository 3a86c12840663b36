"""How well a model predicts text that was not used to build it."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module, resources
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.model import MlaModel

LogitsOf = Callable[[Tensor], Tensor]
"""Token ids int64 [T] to logits [T, vocabulary]."""

STANDARD_LIBRARY = ("calendar", "json.decoder", "sched", "shelve")
"""Modules whose source is held-out text; it differs a little between versions of Python."""
TOPICS = ("debugger", "execmodel", "string-methods")
"""Pages of the language reference that Python ships for ``help()``: held-out prose about code."""

_BLOCK = 256
"""Rows of logits that are turned into log probabilities at a time."""


def held_out_texts() -> dict[str, str]:
    """Return texts by name, none of which was trained on: two of ours, and what comes with every Python."""
    folder = resources.files("irminsul.checkpoints") / "data" / "held_out"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    ours = {f"ours-{at}": file.read_text(encoding="utf-8") for at, file in enumerate(files)}
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    pages = {f"help({name})": topics[name] for name in TOPICS}
    return ours | pages | {name: inspect.getsource(import_module(name)) for name in STANDARD_LIBRARY}


def token_sequences(tokenizer: Any, texts: Iterable[str], *, limit: int) -> list[Tensor]:  # noqa: ANN401
    """Encode texts without special tokens and keep the first ``limit`` tokens of each: int64 [T]."""
    return [
        torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:limit]) for text in texts
    ]


def perplexity(logits_of: LogitsOf | MlaModel, sequences: Sequence[Tensor]) -> float:
    """Exponential of the mean loss, in nats, over all tokens but the first of each sequence.

    Args:
        logits_of: a model, or a function.
        sequences: token ids, int64 [T] each, T >= 2.
    """
    if isinstance(logits_of, MlaModel):
        logits_of = whole_sequence_logits(logits_of)
    losses = [_losses(logits_of(token_ids_T), token_ids_T) for token_ids_T in sequences]
    return math.exp(float(torch.cat(losses).mean()))


def whole_sequence_logits(model: MlaModel) -> LogitsOf:
    """Compute each sequence from nothing, in one forward."""

    def logits_of(token_ids_T: Tensor) -> Tensor:
        slots_T = torch.arange(len(token_ids_T))
        batch = ForwardBatch(
            token_ids_T=token_ids_T,
            positions_T=slots_T,
            out_slots_T=slots_T,
            spans=(Span(0, len(token_ids_T), slots_T),),
            logit_rows_N=slots_T,
        )
        return model.forward(batch, model.new_pool(len(token_ids_T)))

    return logits_of


def _losses(logits_TV: Tensor, token_ids_T: Tensor) -> Tensor:
    """Loss of tokens 1..T-1, float64 [T - 1]."""
    logits_TV, targets_T = logits_TV[:-1], token_ids_T[1:].to(logits_TV.device)
    blocks = [
        F.cross_entropy(logits_TV[start : start + _BLOCK].float(), targets_T[start : start + _BLOCK], reduction="none")
        for start in range(0, len(targets_T), _BLOCK)
    ]
    return torch.cat(blocks).double()
