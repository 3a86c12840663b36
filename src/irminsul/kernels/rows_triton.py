"""Moving cached rows in one launch for all layers: the Triton form of ``irminsul.kernels.rows``.

Engines keep the rows of each layer in a tensor of its own, so the kernel takes a table of their addresses
(`LayerRows`). Each program moves `_BLOCK_ROWS` rows of one layer: the latent as raw words of up to eight bytes, which
touches no bit; the rotary part through float32, with one rounding. The kernel computes what the reference computes,
operation by operation: cos and sin come from the same `Turn`, products and sums are each rounded (no fused
multiply-add), a pair that does not turn is copied. So the result is the reference's to the bit, except that a NaN in
a pair that turns may become another NaN.

**Overlap.** No slot may be both read and written. The reference reads all sources before it writes a target; the
programs of a launch run in any order. A caller that breaks this is stopped by an assertion; a caller that proves it
otherwise (targets freshly allocated, sources locked) can leave the check away, and with it a wait for the device.

**Memory.** Beside the pool: 8 bytes a row and pair for cos and sin, and 29 while they are made.

**Where.** On a GPU. If ``TRITON_INTERPRET=1`` is set when this module is first imported, Triton interprets the kernel
on a CPU instead: slow, and meant for tests. It narrows to bfloat16 by cutting bits off, where a GPU rounds.

Shape letters: ``L`` layers, ``S`` slots of the pool, ``W`` row width, ``N`` rows to move, ``P`` pairs.
"""

from typing import Any, assert_never

import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul.errors import InputError
from irminsul.kernels.layer_rows import LayerRows
from irminsul.kernels.rows import as_index, check_moves, check_pool
from irminsul.layout import ITEM_SIZES, RowLayout
from irminsul.rope import AngleSource, Pairing, RopeSpec, Turn

_BLOCK_ROWS = 4
"""Rows of one program. Few: many small programs in flight hide the latency of rows that lie anywhere; on an H200 four
rows reach 83 % of a plain copy's bandwidth where sixteen, in four warps, reach 64 %."""
_NUM_WARPS = 2
_WORDS = {2: tl.int16, 4: tl.int32, 8: tl.int64}
"""What a latent is copied as, by bytes."""
_VALUES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


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
    """Do what ``irminsul.kernels.rows.move_rows`` does, where no slot is both read and written.

    Args:
        pool_LSW: the rows of all layers, of the layout's dtype and width, on a GPU, each layer contiguous; written
            in place.
        layout: what a row is.
        rope: how the model turns its keys.
        source_slots_N: where each row is; integers. A slot may be named more than once.
        target_slots_N: where it goes; integers, each named once, none of them a source.
        source_positions_N: the position it was computed at; integers.
        target_positions_N: the position it takes; integers.
        angle_source: EXACT, or TABLE to reproduce an engine whose tables are float32.

    Raises:
        InputError: pool, layout and rope do not fit one another, or the pool is not where the kernel runs.
    """
    check_pool(pool_LSW, layout, rope)
    moves = (source_slots_N, target_slots_N, source_positions_N, target_positions_N)
    move_layer_rows(LayerRows.of(pool_LSW.unbind(0), layout), rope, *moves, angle_source)


def move_layer_rows(
    rows: LayerRows,
    rope: RopeSpec,
    source_slots_N: Tensor,
    target_slots_N: Tensor,
    source_positions_N: Tensor,
    target_positions_N: Tensor,
    angle_source: AngleSource = AngleSource.EXACT,
    *,
    check_slots: bool = True,
) -> None:
    """Do the same in a pool whose layers are separate tensors.

    The kernel is launched on the current stream of the pool's device.

    Args:
        rows: the layers, from `LayerRows.of`; written in place.
        rope: how the model turns its keys.
        source_slots_N: as in `move_rows`, like the three after it.
        target_slots_N: where each row goes.
        source_positions_N: the position it was computed at.
        target_positions_N: the position it takes.
        angle_source: EXACT or TABLE.
        check_slots: assert that slots lie in the pool, that no target is named twice, and that none is a source.
            Without the check, a caller that breaks this corrupts memory.

    Raises:
        InputError: layout and rope do not fit one another, or the rows are not where the kernel runs.
    """
    check_pool(rows.layers_SW[0][None], rows.layout, rope)
    check_device(rows.device)
    indices = (source_slots_N, target_slots_N, source_positions_N, target_positions_N)
    sources_N, targets_N, old_N, new_N = (as_index(index_N, rows.device).contiguous() for index_N in indices)
    if check_slots:
        check_moves(sources_N, targets_N, old_N, new_N, slots=rows.slots)
        assert not torch.isin(targets_N, sources_N).any(), "a slot is both read and written"
    if len(targets_N):
        turn = Turn.by(rope.move_angles(old_N, new_N, angle_source), rope.pairing)
        _launch(rows, turn, sources_N, targets_N)


def check_device(device: torch.device) -> None:
    """Refuse a device that the kernel does not run on, with an InputError."""
    interpreted = not isinstance(_move, triton.JITFunction)
    if interpreted and device.type != "cpu":
        raise InputError(f"the rows are on {device}, but TRITON_INTERPRET is set: Triton runs on the CPU")
    if not interpreted and device.type != "cuda":
        raise InputError(f"row kernel 'triton' needs rows on a GPU, but they are on {device}; 'reference' does not")


def _launch(rows: LayerRows, turn: Turn, sources_N: Tensor, targets_N: Tensor) -> None:
    n_rows, n_layers = len(targets_N), len(rows.layers_SW)
    programs = n_layers * triton.cdiv(n_rows, _BLOCK_ROWS)
    # Triton launches on the current device, which need not be the pool's.
    with torch.cuda.device_of(rows.addresses_L):  # type: ignore[no-untyped-call]
        _move[(programs,)](
            rows.addresses_L,
            sources_N,
            targets_N,
            turn.cos_P,
            turn.sin_P,
            n_rows,
            n_layers,
            **_constants(rows.layout, turn.pairing, rows.alignment),
            BLOCK_ROWS=_BLOCK_ROWS,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # the reference rounds each product
        )


def _constants(layout: RowLayout, pairing: Pairing, alignment: int) -> dict[str, Any]:
    """Return what a kernel is compiled for: one for each pool."""
    word_bytes = min(alignment, max(_WORDS))
    item_bytes = ITEM_SIZES[layout.dtype]
    latent_words = layout.latent_dim * item_bytes // word_bytes
    pairs = layout.rope_dim // 2
    pair_step, pair_gap = _pair_strides(pairing, pairs)
    return {
        "WORD": _WORDS[word_bytes],
        "LATENT_WORDS": latent_words,
        "ROW_WORDS": layout.width * item_bytes // word_bytes,
        "ALIGNMENT": alignment,
        "VALUE": _VALUES[layout.dtype],
        "LATENT": layout.latent_dim,
        "WIDTH": layout.width,
        "PAIRS": pairs,
        "PAIR_STEP": pair_step,
        "PAIR_GAP": pair_gap,
        "BLOCK_WORDS": triton.next_power_of_2(latent_words),
        "BLOCK_PAIRS": triton.next_power_of_2(pairs),
    }


def _pair_strides(pairing: Pairing, pairs: int) -> tuple[int, int]:
    """Return the distance from one pair to the next, and from the first value of a pair to the second."""
    match pairing:
        case Pairing.INTERLEAVED:
            return 2, 1
        case Pairing.HALF_SPLIT:
            return 1, pairs
        case _:
            assert_never(pairing)


@triton.jit(do_not_specialize=["n_rows", "n_layers"])  # type: ignore[untyped-decorator]
def _move(
    addresses_L: tl.tensor,
    source_slots_N: tl.tensor,
    target_slots_N: tl.tensor,
    cos_NP: tl.tensor,
    sin_NP: tl.tensor,
    n_rows: tl.tensor,
    n_layers: tl.tensor,
    WORD: tl.constexpr,
    LATENT_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    PAIR_GAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    # Programs that follow one another share rows, not layers: all layers read the same slots, cosines and sines.
    program = tl.program_id(0)
    address = tl.load(addresses_L + program % n_layers)
    # Rows and slots are int64, and so is all arithmetic with them: a pool may hold more than 2^31 values.
    row = (program // n_layers).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    named = row < n_rows
    source = tl.load(source_slots_N + row, mask=named, other=0)
    target = tl.load(target_slots_N + row, mask=named, other=0)

    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    turned = named & (pair < PAIRS)
    cos = tl.load(cos_NP + row * PAIRS + pair, mask=turned, other=1.0)
    sin = tl.load(sin_NP + row * PAIRS + pair, mask=turned, other=0.0)
    # cos is 1 and sin is 0 only for an angle of 0: smaller ones have a sine. Such a pair is copied, not computed:
    # x·1 - y·0 loses the sign of a negative zero, and makes NaN of an infinite y.
    still = (cos == 1.0) & (sin == 0.0)

    # Nothing is known of an address that comes from memory, so its alignment is stated; otherwise loads are narrow.
    words = address.to(tl.pointer_type(WORD))
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    copied = named & (word < LATENT_WORDS)
    latent = tl.load(tl.multiple_of(words + source * ROW_WORDS + word, (1, ALIGNMENT)), mask=copied)

    # Both values of a pair are loaded side by side, so that interleaved ones travel as one word.
    values = address.to(tl.pointer_type(VALUE))
    side = tl.arange(0, 2)[None, None, :]
    value = LATENT + pair[:, :, None] * PAIR_STEP + side * PAIR_GAP
    turned_values = turned[:, :, None] & (side < 2)
    first, second = tl.split(tl.load(values + source[:, :, None] * WIDTH + value, mask=turned_values, other=0.0))
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    new_first = tl.where(still, first, (a * cos - b * sin).to(VALUE))
    new_second = tl.where(still, second, (b * cos + a * sin).to(VALUE))
    new_values = tl.join(new_first, new_second)

    tl.store(tl.multiple_of(words + target * ROW_WORDS + word, (1, ALIGNMENT)), latent, mask=copied)
    tl.store(values + target[:, :, None] * WIDTH + value, new_values, mask=turned_values)
