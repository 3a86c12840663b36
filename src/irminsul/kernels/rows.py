"""Moving cached rows: gather, turn, scatter, for all layers at once.

This is the plain reference, on any device; its result defines what a faster version must give.

Shape letters: ``L`` layers, ``S`` slots of the pool, ``W`` row width, ``N`` rows to move, ``P`` pairs.
"""

import torch
from torch import Tensor

from irminsul.errors import InputError
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, RopeSpec, Turn

TEMPORARY_BYTES = 64 * 2**20
"""What one block of a move may hold beside the pool."""


def move_rows(
    pool_LSW: Tensor,
    layout: RowLayout,
    rope: RopeSpec,
    source_slots_N: Tensor,
    target_slots_N: Tensor,
    source_positions_N: Tensor,
    target_positions_N: Tensor,
    angle_source: AngleSource = AngleSource.EXACT,
) -> None:
    """Write to each target slot, in every layer, the row of its source slot as it would stand at the target position.

    The latent is copied, the rotary part is turned by the angle of the move and rounded once; nothing is scaled.
    A row that stands where it stood is copied bit for bit. All sources are read before any target is written, so
    the two sets of slots may overlap.

    Rows are moved in blocks of at most `TEMPORARY_BYTES`. If a slot is both read and written, a block holds all rows
    of one or more layers, because no block may write what a later one reads. On a CPU a block is part of one layer,
    which stays in its caches; on a GPU it spans all layers, for few launches.

    Args:
        pool_LSW: the rows of all layers, of the layout's dtype and width; written in place.
        layout: what a row is.
        rope: how the model turns its keys.
        source_slots_N: where each row is; integers. A slot may be named more than once.
        target_slots_N: where it goes; integers, each named once.
        source_positions_N: the position it was computed at; integers.
        target_positions_N: the position it takes; integers.
        angle_source: EXACT, or TABLE to reproduce an engine whose tables are float32.

    Raises:
        InputError: pool, layout and rope do not fit one another.
    """
    check_pool(pool_LSW, layout, rope)
    indices = (source_slots_N, target_slots_N, source_positions_N, target_positions_N)
    sources_N, targets_N, old_N, new_N = (as_index(index_N, pool_LSW.device) for index_N in indices)
    check_moves(sources_N, targets_N, old_N, new_N, slots=pool_LSW.shape[1])
    overlap = bool(torch.isin(targets_N, sources_N).any())
    n_layers, n_rows = pool_LSW.shape[0], len(sources_N)
    layer_step, row_step = _steps(n_layers, n_rows, _temporary_bytes(layout), pool_LSW.device, overlap=overlap)
    for first in range(0, n_rows, row_step):
        rows = slice(first, first + row_step)
        turn = Turn.by(rope.move_angles(old_N[rows], new_N[rows], angle_source), rope.pairing)
        for layer in range(0, n_layers, layer_step):
            _move_block(pool_LSW[layer : layer + layer_step], layout, turn, sources_N[rows], targets_N[rows])


def _move_block(pool_LSW: Tensor, layout: RowLayout, turn: Turn, sources_N: Tensor, targets_N: Tensor) -> None:
    moved_LNW = pool_LSW.index_select(1, sources_N)
    _, rope_LNR = layout.split(moved_LNW)
    rope_LNR.copy_(turn(rope_LNR))
    pool_LSW.index_copy_(1, targets_N, moved_LNW)


def _steps(layers: int, rows: int, row_bytes: int, device: torch.device, *, overlap: bool) -> tuple[int, int]:
    """Return the size (layers, rows) of a block of bounded memory, such that none writes what a later one reads."""
    if overlap:
        return (1 if device.type == "cpu" else max(1, TEMPORARY_BYTES // max(1, rows * row_bytes))), max(1, rows)
    layer_step = 1 if device.type == "cpu" else layers
    return layer_step, max(1, TEMPORARY_BYTES // (layer_step * row_bytes))


def _temporary_bytes(layout: RowLayout) -> int:
    """Bytes that moving one row of one layer holds at its peak.

    The gathered row; four float32 copies of its rotary part while it is turned; and its angles, cosines and sines in
    float64 and float32 (20 bytes a value), counted here as if each layer had its own.
    """
    return layout.bytes_per_token(1) + (4 * 4 + 20) * layout.rope_dim


def check_pool(pool_LSW: Tensor, layout: RowLayout, rope: RopeSpec) -> None:
    """Refuse, with an InputError, a pool, layout and rope that do not fit one another."""
    if pool_LSW.dim() != 3 or pool_LSW.shape[-1] != layout.width:
        raise InputError(f"a pool must be [layers, slots, {layout.width}], got shape {tuple(pool_LSW.shape)}")
    if pool_LSW.dtype != getattr(torch, layout.dtype):
        raise InputError(f"the pool holds {pool_LSW.dtype}, but its layout says {layout.dtype}")
    if rope.rotary_dim != layout.rope_dim:
        raise InputError(f"the model turns {rope.rotary_dim} values, but a row has {layout.rope_dim} rotary values")


def as_index(index_N: Tensor, device: torch.device) -> Tensor:
    """Return slots or positions as int64 on a device."""
    assert index_N.dim() == 1, index_N.shape
    assert not index_N.is_floating_point(), index_N.dtype
    return index_N.to(device=device, dtype=torch.int64)


def check_moves(sources_N: Tensor, targets_N: Tensor, old_N: Tensor, new_N: Tensor, *, slots: int) -> None:
    """Assert that slots lie in the pool, that no target is named twice, and that all four have one entry a row."""
    assert len(sources_N) == len(targets_N) == len(old_N) == len(new_N), "one slot and one position for each row"
    for slots_N in (sources_N, targets_N):
        assert bool(((slots_N >= 0) & (slots_N < slots)).all()), "a slot lies outside the pool"
    ordered_N = targets_N.sort().values
    assert bool((ordered_N[1:] > ordered_N[:-1]).all()), "two rows go to the same slot"
