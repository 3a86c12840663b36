"""Rows of one prompt, computed, extended and replaced by moved ones; the slot of a row is its position.

Shape letters: T tokens, L layers, S rows of the prompt (positions 0..S-1), N moved rows, W row width, V vocabulary.
"""

import torch
from torch import Tensor

from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.model import MlaModel
from irminsul.errors import InputError
from irminsul.kernels.rows import move_rows
from irminsul.layout import RowLayout
from irminsul.rope import RopeSpec


def prefill(model: MlaModel, token_ids_S: Tensor) -> Tensor:
    """Compute a whole prompt, int64 [S], from nothing: its rows [L, S, W]; InputError if they are not finite."""
    pool_LSW = model.new_pool(len(token_ids_S))
    model.forward(_batch(token_ids_S, len(token_ids_S), torch.arange(0)), pool_LSW)
    return _finite(pool_LSW)


def extend(model: MlaModel, pool_LSW: Tensor, token_ids_T: Tensor) -> Tensor:
    """Compute the last T tokens of a prompt, whose earlier rows are in the pool.

    Args:
        model: it computes, and the rows of these tokens are written to the end of the pool.
        pool_LSW: rows of the prompt.
        token_ids_T: int64.

    Returns:
        Logits float32 [T, V], on the model's device.

    Raises:
        InputError: the logits are not finite.
    """
    return _finite(model.forward(_batch(token_ids_T, pool_LSW.shape[1], torch.arange(len(token_ids_T))), pool_LSW))


def with_moved_rows(
    pool_LSW: Tensor, donor_LNW: Tensor, layout: RowLayout, rope: RopeSpec, *, source_start: int, target_start: int
) -> Tensor:
    """Copy a prompt's rows and replace N of them by a donor's, as a server does for a shifted hit.

    Args:
        pool_LSW: rows of the prompt, not written to.
        donor_LNW: rows computed elsewhere at positions ``source_start`` and behind.
        layout: of both.
        rope: what the rows are turned by.
        source_start: where the mover takes the donor to have stood; ``target_start`` gives rows copied unturned.
        target_start: first position that is replaced.
    """
    n_slots, length = pool_LSW.shape[1], donor_LNW.shape[1]
    assert 0 <= target_start <= n_slots - length, (target_start, length, n_slots)
    both_LSW = torch.cat([pool_LSW, donor_LNW], dim=1)
    steps_N = torch.arange(length)
    move_rows(
        both_LSW,
        layout,
        rope,
        n_slots + steps_N,
        target_start + steps_N,
        source_start + steps_N,
        target_start + steps_N,
    )
    return both_LSW[:, :n_slots].contiguous()


def _finite(computed: Tensor) -> Tensor:
    if not bool(computed.isfinite().all()):
        raise InputError("what the model computes is not finite: its checkpoint is damaged, or its dtype is too narrow")
    return computed


def _batch(token_ids_T: Tensor, n_rows: int, logit_rows_N: Tensor) -> ForwardBatch:
    """The last tokens of a prompt of ``n_rows`` tokens."""
    slots_S = torch.arange(n_rows)
    positions_T = slots_S[n_rows - len(token_ids_T) :]
    span = Span(0, len(token_ids_T), slots_S)
    return ForwardBatch(token_ids_T, positions_T, positions_T, (span,), logit_rows_N)
