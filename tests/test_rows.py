import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from irminsul.errors import InputError
from irminsul.kernels import rows
from irminsul.kernels.rows import move_rows
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, Pairing, RopeSpec, apply_rope, rotate

DTYPES = ["float32", "bfloat16", "float16"]
LAYERS, SLOTS = 3, 40
SPEC = RopeSpec((1.0, 0.31, 0.0101, 1e-4), Pairing.INTERLEAVED, mscale=1.3)
# An mscale that is not 1: a move that applied it would be seen by every test below.

cuda = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
devices = pytest.mark.parametrize("device", ["cpu", cuda])


def make_layout(dtype="float32"):
    return RowLayout(5, SPEC.rotary_dim, dtype)


def make_pool(layout, device="cpu", layers=LAYERS, slots=SLOTS):
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(layers, slots, layout.width, generator=generator)
    return pool.to(device=device, dtype=getattr(torch, layout.dtype))


def row_by_row(pool, layout, rope, moves, angle_source=AngleSource.EXACT):
    """The plainest way to say what a move is: one row of one layer at a time, from a copy of the pool."""
    before = pool.clone()
    for source, target, old, new in moves:
        angle = rope.move_angles(torch.tensor(old), torch.tensor(new), angle_source)
        for layer in range(len(pool)):
            latent, turned = layout.split(pool[layer, target])
            stored_latent, stored_rope = layout.split(before[layer, source])
            latent.copy_(stored_latent)
            turned.copy_(rotate(stored_rope, angle.to(pool.device), rope.pairing))


def columns(moves):
    return torch.tensor(moves, dtype=torch.int64).reshape(-1, 4).unbind(dim=1)


def bits(pool):
    return pool.view(torch.int32 if pool.dtype is torch.float32 else torch.int16)


def assert_same_bits(pool, expected):
    assert torch.equal(bits(pool), bits(expected))


@st.composite
def move_lists(draw, *, overlap=True):
    """Rows (source slot, target slot, old position, new position), each target once."""
    slots = draw(st.permutations(range(SLOTS)))
    count = draw(st.integers(0, SLOTS // 2))
    targets, others = slots[:count], slots[count:]
    sources = st.integers(0, SLOTS - 1) if overlap else st.sampled_from(others)
    position = st.integers(0, 200_000)
    return [(draw(sources), target, draw(position), draw(position)) for target in targets]


@devices
@pytest.mark.parametrize("angle_source", AngleSource)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_move_one_by_one_or_together(device, angle_source, dtype, pairing, index_dtype):
    rope = RopeSpec(SPEC.inv_freq, pairing, SPEC.mscale)
    layout = make_layout(dtype)
    moves = [(3, 30, 0, 100_000), (4, 31, 100_000, 0), (3, 5, 7, 7), (9, 2, 12, 13)]
    pool = make_pool(layout, device)
    expected = pool.clone()
    row_by_row(expected, layout, rope, moves, angle_source)
    move_rows(pool, layout, rope, *(column.to(index_dtype) for column in columns(moves)), angle_source)
    if device == "cpu":
        assert_same_bits(pool, expected)
    else:
        torch.testing.assert_close(pool, expected)
    untouched = [slot for slot in range(SLOTS) if slot not in (30, 31, 5, 2)]
    assert_same_bits(pool[:, untouched], make_pool(layout, device)[:, untouched])


@devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_moved_row_is_a_fresh_row_at_the_target(device, dtype):
    """The latent to the bit; the rotary part to three roundings of the row's dtype."""
    layout = make_layout(dtype)
    torch_dtype = getattr(torch, dtype)
    x_LTR = torch.randn(LAYERS, 6, SPEC.rotary_dim, generator=torch.Generator().manual_seed(2)).to(device)
    old = torch.tensor([0, 5, 99_999, 3, 40, 1], device=device)
    new = torch.tensor([100_000, 4, 1, 3, 41, 31_000], device=device)
    pool = make_pool(layout, device)
    layout.split(pool)[1][:, :6] = apply_rope(x_LTR, old, SPEC).to(torch_dtype)
    latent = layout.split(pool)[0][:, :6].clone()
    move_rows(pool, layout, SPEC, torch.arange(6), torch.arange(20, 26), old, new)
    moved_latent, moved_rope = layout.split(pool[:, 20:26])
    assert_same_bits(moved_latent.contiguous(), latent)
    fresh = apply_rope(x_LTR, new, SPEC)
    rounding = 4 * torch.finfo(torch_dtype).eps
    torch.testing.assert_close(moved_rope.float(), fresh, rtol=rounding, atol=rounding * fresh.abs().max().item())


@given(move_lists(), st.sampled_from(Pairing), st.sampled_from(AngleSource))
def test_any_move_of_any_slots(moves, pairing, angle_source):
    """Sources may repeat, and be targets of other rows or of their own."""
    rope = RopeSpec(SPEC.inv_freq, pairing, SPEC.mscale)
    layout = make_layout("bfloat16")
    pool = make_pool(layout)
    expected = pool.clone()
    row_by_row(expected, layout, rope, moves, angle_source)
    move_rows(pool, layout, rope, *columns(moves), angle_source)
    assert_same_bits(pool, expected)


@given(move_lists(), st.integers(1, 20_000))
def test_blocks_of_any_size_give_the_same_rows(moves, temporary_bytes):
    layout = make_layout("bfloat16")
    whole, blocks = make_pool(layout), make_pool(layout)
    move_rows(whole, layout, SPEC, *columns(moves))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "TEMPORARY_BYTES", temporary_bytes)
        move_rows(blocks, layout, SPEC, *columns(moves))
    assert_same_bits(blocks, whole)


@given(move_lists(overlap=False))
def test_moving_there_and_back_restores_the_rows(moves):
    layout = make_layout()
    pool = make_pool(layout)
    before = pool.clone()
    move_rows(pool, layout, SPEC, *columns(moves))
    last = {source: (target, new, old) for source, target, old, new in moves}
    back = [(target, source, new, old) for source, (target, new, old) in last.items()]
    move_rows(pool, layout, SPEC, *columns(back))
    sources = sorted(last)
    torch.testing.assert_close(pool[:, sources], before[:, sources], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angle_source", AngleSource)
def test_rows_that_keep_their_position_are_copied_bit_for_bit(dtype, angle_source):
    """Any bits: a pool of random bit patterns holds signed zeros, infinities and NaNs."""
    layout = make_layout(dtype)
    pool = make_pool(layout)
    generator = torch.Generator().manual_seed(3)
    bits(pool).random_(-(2**15), 2**15, generator=generator)
    pool[:, :8, -8:] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0, 1.0, 2.0])
    before = pool.clone()
    positions = torch.arange(SLOTS // 2) * 5000
    move_rows(pool, layout, SPEC, torch.arange(20), torch.arange(20, 40), positions, positions, angle_source)
    assert_same_bits(pool[:, 20:].contiguous(), before[:, :20].contiguous())
    assert_same_bits(pool[:, :20].contiguous(), before[:, :20].contiguous())


def test_slots_swap_in_one_move():
    layout = make_layout()
    pool = make_pool(layout)
    before = pool.clone()
    move_rows(pool, layout, SPEC, *columns([(1, 2, 9, 9), (2, 1, 9, 9)]))
    assert_same_bits(pool[:, [1, 2]], before[:, [2, 1]])


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate while it is active, and their peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.known.update(self.storages(args))
        result = function(*args, **(kwargs or {}))
        for storage in self.storages(result):
            if storage not in self.known:
                self.known.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, nbytes):
        self.live -= nbytes

    @staticmethod
    def storages(values):
        return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("dtype", "rope_dim"), [("bfloat16", 64), ("float32", 64), ("bfloat16", 8)])
def test_blocks_keep_within_the_memory_they_state(monkeypatch, dtype, rope_dim):
    limit = 2**21
    monkeypatch.setattr(rows, "TEMPORARY_BYTES", limit)
    layout = RowLayout(512, rope_dim, dtype)
    rope = RopeSpec(tuple(1 / (1 + pair) for pair in range(rope_dim // 2)), Pairing.HALF_SPLIT)
    pool = make_pool(layout, layers=4, slots=4096)
    moves = (torch.arange(2048), torch.arange(2048, 4096), torch.arange(2048), torch.arange(2048).flip(0))
    with LiveBytes() as memory:
        move_rows(pool, layout, rope, *moves)
    assert limit / 2 < memory.peak < limit


def arguments(**changes):
    count = torch.arange(3)
    given_arguments = {
        "pool_LSW": make_pool(make_layout()),
        "layout": make_layout(),
        "rope": SPEC,
        "source_slots_N": count,
        "target_slots_N": count + 10,
        "source_positions_N": count,
        "target_positions_N": count + 7,
    }
    return given_arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_LSW": torch.zeros(3, 40, 12)}, r"a pool must be \[layers, slots, 13\], got shape \(3, 40, 12\)"),
        ({"pool_LSW": torch.zeros(40, 13)}, "a pool must be"),
        ({"layout": make_layout("bfloat16")}, "the pool holds torch.float32, but its layout says bfloat16"),
        ({"rope": RopeSpec((1.0,), Pairing.INTERLEAVED)}, "the model turns 2 values, but a row has 8"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        move_rows(**arguments(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_slots_N": torch.tensor([10, 11, 10])},
        {"target_slots_N": torch.tensor([10, 11, 40])},
        {"source_slots_N": torch.tensor([0, 1, -1])},
        {"source_slots_N": torch.tensor([0, 1])},
        {"target_positions_N": torch.tensor([0, 1])},
        {"source_positions_N": torch.tensor([0.0, 1.0, 2.0])},
        {"source_slots_N": torch.tensor([[0, 1, 2]])},
    ],
    ids=["slot twice", "slot too high", "slot below 0", "sources", "positions", "float positions", "matrix"],
)
def test_broken_callers_are_caught_before_anything_is_written(changes):
    given_arguments = arguments(**changes)
    before = given_arguments["pool_LSW"].clone()
    with pytest.raises(AssertionError):
        move_rows(**given_arguments)
    assert torch.equal(given_arguments["pool_LSW"], before)


def test_nothing_to_move_is_no_error():
    nothing = torch.zeros(0, dtype=torch.int32)
    pool = make_pool(make_layout())
    move_rows(pool, make_layout(), SPEC, nothing, nothing, nothing, nothing)
    assert torch.equal(pool, make_pool(make_layout()))
