"""Which implementation moves the rows of an engine's layers: the one that is named, or none."""

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from typing import Protocol, assert_never

from torch import Tensor

from irminsul.choices import parse_choice
from irminsul.errors import InputError
from irminsul.kernels.layer_rows import LayerRows
from irminsul.kernels.rows import move_rows
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, RopeSpec


class RowKernel(StrEnum):
    """An implementation of moving rows."""

    REFERENCE = "reference"
    """Plain torch, on any device, layer by layer."""
    TRITON = "triton"
    """One launch for all layers, on a GPU."""


class RowMover(Protocol):
    """Moves rows of the layers it was made for; the contract is that of ``irminsul.kernels.rows.move_rows``.

    TRITON refuses overlapping slots; see ``irminsul.kernels.rows_triton``.
    """

    def __call__(
        self,
        rope: RopeSpec,
        source_slots_N: Tensor,
        target_slots_N: Tensor,
        source_positions_N: Tensor,
        target_positions_N: Tensor,
        angle_source: AngleSource = AngleSource.EXACT,
    ) -> None:
        """Write to each target slot, in every layer, the row of its source slot as it would stand there."""


def row_mover(kernel: str, layers: Sequence[Tensor], layout: RowLayout, *, check_slots: bool = True) -> RowMover:
    """Bind an implementation to the layers of a pool, once; nothing else is ever used in its place.

    Args:
        kernel: a `RowKernel`, or its name.
        layers: see `LayerRows.of`.
        layout: what a row is.
        check_slots: False lets TRITON trust its slots, for callers that prove them otherwise; the reference always
            checks.

    Raises:
        InputError: an unknown name, layers that do not hold such rows, Triton missing, or layers it cannot reach.
    """
    named = parse_choice(RowKernel, kernel, "row kernel")
    rows = LayerRows.of(layers, layout)
    match named:
        case RowKernel.REFERENCE:
            return partial(_move_layer_by_layer, rows)
        case RowKernel.TRITON:
            return _triton_mover(rows, check_slots=check_slots)
        case _:
            assert_never(named)


def _move_layer_by_layer(
    rows: LayerRows,
    rope: RopeSpec,
    source_slots_N: Tensor,
    target_slots_N: Tensor,
    source_positions_N: Tensor,
    target_positions_N: Tensor,
    angle_source: AngleSource = AngleSource.EXACT,
) -> None:
    moves = (source_slots_N, target_slots_N, source_positions_N, target_positions_N)
    for layer_SW in rows.layers_SW:
        move_rows(layer_SW[None], rows.layout, rope, *moves, angle_source)


def _triton_mover(rows: LayerRows, *, check_slots: bool) -> RowMover:
    if find_spec("triton") is None:
        raise InputError("row kernel 'triton' needs the triton package, which is not installed; 'reference' does not")
    from irminsul.kernels import rows_triton  # noqa: PLC0415  # builds of torch for CPUs come without Triton

    rows_triton.check_device(rows.device)
    return partial(rows_triton.move_layer_rows, rows, check_slots=check_slots)
