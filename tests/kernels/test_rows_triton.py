"""The Triton kernel does what the reference does, to the bit.

Where there is no GPU it runs in Triton's interpreter (see conftest.py), and is compiled for one without being run.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.kernels import rows, rows_triton
from irminsul.kernels.layer_rows import LayerRows
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, Pairing, RopeSpec

DTYPES = ["float32", "bfloat16", "float16"]
WIDTHS = [(512, 64), (256, 64), (128, 32), (192, 192), (320, 64), (96, 6), (5, 8), (3, 2)]
SLOTS = 80
SPECIAL = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -1.0, 1.0, 3e-39])


def make_rope(rope_dim, pairing=Pairing.INTERLEAVED):
    # An mscale that is not 1: a move that applied it would be seen by every test below.
    pairs = rope_dim // 2
    return RopeSpec(tuple(10_000 ** -(pair / pairs) for pair in range(pairs)), pairing, mscale=1.3)


def make_pool(layout, device, layers=3, slots=SLOTS):
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(layers, slots, layout.width, generator=generator)
    return pool.to(device=device, dtype=getattr(torch, layout.dtype))


def make_moves(count, slots=SLOTS, seed=2):
    """Distinct targets, sources that repeat, positions up to 200,000; every third row stays where it stood."""
    generator = torch.Generator().manual_seed(seed)
    targets, others = torch.randperm(slots, generator=generator).split([count, slots - count])
    sources = others[torch.randint(len(others), (count,), generator=generator)]
    old = torch.randint(200_000, (count,), generator=generator)
    new = torch.randint(200_000, (count,), generator=generator)
    new[::3] = old[::3]
    return sources, targets, old, new


def bits(pool):
    return pool.view(torch.int32 if pool.dtype is torch.float32 else torch.int16)


def assert_same_bits(pool, expected):
    """Equal to the bit, but any NaN equals any other."""
    both_nan = pool.isnan() & expected.isnan()
    assert torch.equal(bits(pool).masked_fill(both_nan, 0), bits(expected).masked_fill(both_nan, 0))


def assert_equals_reference(pool, layout, rope, moves, angle_source=AngleSource.EXACT):
    expected = pool.clone()
    rows.move_rows(expected, layout, rope, *moves, angle_source)
    rows_triton.move_rows(pool, layout, rope, *moves, angle_source)
    assert_same_bits(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_equals_the_reference_in_every_layout(device, dtype, pairing, width):
    layout = RowLayout(*width, dtype)
    assert_equals_reference(make_pool(layout, device), layout, make_rope(width[1], pairing), make_moves(21))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 33])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_equals_the_reference_whatever_the_block_holds(device, count, layers):
    layout = RowLayout(12, 8, "bfloat16")
    assert_equals_reference(make_pool(layout, device, layers), layout, make_rope(8), make_moves(count))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("angle_source", AngleSource)
def test_indices_may_be_strided_and_of_any_integer_type(device, angle_source, index_dtype):
    layout = RowLayout(12, 8, "float32")
    moves = torch.stack(make_moves(20), dim=1).to(index_dtype).unbind(dim=1)
    assert not moves[0].is_contiguous()
    assert_equals_reference(make_pool(layout, device), layout, make_rope(8), moves, angle_source)


@st.composite
def move_columns(draw):
    slots = draw(st.permutations(range(SLOTS)))
    count = draw(st.integers(0, SLOTS // 2))
    sources = draw(st.lists(st.sampled_from(slots[count:]), min_size=count, max_size=count))
    position = st.integers(0, 200_000)
    old, new = (draw(st.lists(position, min_size=count, max_size=count)) for _ in range(2))
    return [torch.tensor(column, dtype=torch.int64) for column in (sources, slots[:count], old, new)]


@settings(max_examples=25)
@given(
    move_columns(),
    st.sampled_from(Pairing),
    st.sampled_from(AngleSource),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 40), st.integers(1, 20).map(lambda pairs: 2 * pairs)),
)
def test_equals_the_reference_for_any_move(device, moves, pairing, angle_source, dtype, width):
    layout = RowLayout(*width, dtype)
    pool = make_pool(layout, device, layers=2)
    assert_equals_reference(pool, layout, make_rope(width[1], pairing), moves, angle_source)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", Pairing)
def test_zeros_infinities_and_nans_go_where_the_reference_puts_them(device, dtype, pairing):
    layout = RowLayout(8, 8, dtype)
    pool = make_pool(layout, device)
    for slot in range(SLOTS):
        pool[:, slot, 8:] = SPECIAL[torch.randperm(8, generator=torch.Generator().manual_seed(slot))]
    assert_equals_reference(pool, layout, make_rope(8, pairing), make_moves(30))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angle_source", AngleSource)
def test_rows_that_keep_their_position_are_copied_bit_for_bit(device, dtype, angle_source):
    """Any bits: a pool of random bit patterns holds signed zeros, infinities and NaNs of every kind."""
    layout = RowLayout(12, 8, dtype)
    pool = make_pool(layout, "cpu")
    bits(pool).random_(-(2**15), 2**15, generator=torch.Generator().manual_seed(3))
    pool[:, :8, -8:] = SPECIAL.to(pool.dtype)
    pool = pool.to(device)
    before = pool.clone()
    positions = torch.arange(SLOTS // 2) * 5000
    sources, targets = torch.arange(SLOTS).split(SLOTS // 2)
    rows_triton.move_rows(pool, layout, make_rope(8), sources, targets, positions, positions, angle_source)
    assert torch.equal(bits(pool[:, targets]), bits(before[:, sources]))
    assert torch.equal(bits(pool[:, sources]), bits(before[:, sources]))


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (1, 2), (2, 4), (4, 8), (8, 16)])
def test_layers_lie_anywhere_and_nothing_else_is_written(device, offset, alignment):
    """Separate buffers as SGLang keeps them, each inside a larger one, and aligned to as little as a value."""
    layout, moves = RowLayout(24, 8, "bfloat16"), make_moves(20)
    whole = make_pool(layout, device, layers=4, slots=SLOTS + 1).flatten(1)
    around = [values.clone() for values in whole]
    size = SLOTS * layout.width
    layers = [values[offset : offset + size].view(SLOTS, 1, layout.width) for values in around]
    bound = LayerRows.of(layers, layout)
    assert bound.alignment == alignment
    rows_triton.move_layer_rows(bound, make_rope(8), *moves)
    for before, after in zip(whole, around, strict=True):
        expected = before.clone()
        rows.move_rows(expected[offset : offset + size].view(1, SLOTS, layout.width), layout, make_rope(8), *moves)
        assert_same_bits(after, expected)


def test_slots_beyond_two_to_the_31_values(device):
    layout = RowLayout(512, 64, "bfloat16")
    slots = 2**31 // layout.width + 100
    pool = torch.empty(1, slots, layout.width, dtype=torch.bfloat16, device=device)  # only the rows named are touched
    few = make_pool(layout, device, layers=1)
    named = torch.cat([torch.arange(40), torch.arange(slots - 40, slots)])
    pool[:, named] = few
    sources, targets, old, new = make_moves(30)
    rows_triton.move_rows(pool, layout, make_rope(64), named[sources], named[targets], old, new)
    rows.move_rows(few, layout, make_rope(64), sources, targets, old, new)
    assert_same_bits(pool[:, named], few)


def test_all_layers_move_in_one_launch(device, monkeypatch):
    launches = []
    kernel = rows_triton._move

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(rows_triton, "_move", Counted())
    monkeypatch.setattr(rows_triton, "check_device", lambda device: None)
    layout = RowLayout(12, 8, "float32")
    assert_equals_reference(make_pool(layout, device, layers=5), layout, make_rope(8), make_moves(33))
    assert launches == [(5 * 9,)]


@pytest.mark.parametrize(
    "changes",
    [
        {"sources": [0, 1, 11]},
        {"sources": [0, 1, 10], "old": [0, 5, 10], "new": [0, 5, 10]},
        {"targets": [10, 11, 10]},
        {"targets": [10, 11, SLOTS]},
        {"sources": [0, 1, -1]},
        {"sources": [0, 1]},
    ],
    ids=["overlap", "own target", "slot twice", "slot too high", "slot below 0", "count"],
)
def test_broken_callers_are_caught_before_anything_is_written(device, changes):
    columns = {"sources": [0, 1, 2], "targets": [10, 11, 12], "old": [0, 1, 2], "new": [7, 8, 9]} | changes
    layout = RowLayout(12, 8, "float32")
    pool = make_pool(layout, device)
    with pytest.raises(AssertionError):
        rows_triton.move_rows(pool, layout, make_rope(8), *map(torch.tensor, columns.values()))
    assert torch.equal(pool, make_pool(layout, device))


def test_a_caller_that_vouches_for_its_slots_is_not_checked(device, monkeypatch):
    layout, moves = RowLayout(12, 8, "float32"), make_moves(20)
    pool, expected = make_pool(layout, device), make_pool(layout, device)
    monkeypatch.setattr(rows_triton, "check_moves", lambda *_, **__: pytest.fail("checked"))
    rows_triton.move_layer_rows(LayerRows.of(pool.unbind(0), layout), make_rope(8), *moves, check_slots=False)
    rows.move_rows(expected, layout, make_rope(8), *moves)
    assert_same_bits(pool, expected)


def test_a_rotation_of_another_size_is_refused(device):
    layout = RowLayout(12, 8, "float32")
    pool = make_pool(layout, device)
    with pytest.raises(InputError, match="the model turns 6 values, but a row has 8 rotary values"):
        rows_triton.move_rows(pool, layout, make_rope(6), *make_moves(3))
    with pytest.raises(InputError, match="a pool must be"):
        rows_triton.move_rows(pool[0], layout, make_rope(8), *make_moves(3))


def test_rows_where_the_kernel_does_not_run_are_refused(monkeypatch):
    layout = RowLayout(12, 8, "float32")
    monkeypatch.setattr(rows_triton, "_move", None)
    monkeypatch.setattr(rows_triton.triton, "JITFunction", type(None))
    pool = make_pool(layout, "cpu")
    with pytest.raises(InputError, match=r"row kernel 'triton' needs rows on a GPU, but they are on cpu"):
        rows_triton.move_rows(pool, layout, make_rope(8), *make_moves(3))
    monkeypatch.setattr(rows_triton.triton, "JITFunction", int)
    with pytest.raises(InputError, match="the rows are on meta, but TRITON_INTERPRET is set"):
        rows_triton.check_device(torch.device("meta"))


COMPILE = """
import json, re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from irminsul.errors import InputError
from irminsul.kernels import rows_triton
from irminsul.layout import RowLayout
from irminsul.rope import Pairing

try:
    rows_triton.check_device(torch.device("cpu"))
except InputError as refusal:
    print(refusal)
signature = dict.fromkeys(rows_triton._move.arg_names, "constexpr")
signature |= {"addresses_L": "*i64", "source_slots_N": "*i64", "target_slots_N": "*i64"}
signature |= {"cos_NP": "*fp32", "sin_NP": "*fp32", "n_rows": "i32", "n_layers": "i32"}
for dtype, pairing in (("bfloat16", Pairing.INTERLEAVED), ("float32", Pairing.HALF_SPLIT)):
    constants = rows_triton._constants(RowLayout(512, 64, dtype), pairing, 16) | {"BLOCK_ROWS": rows_triton._BLOCK_ROWS}
    source = ASTSource(fn=rows_triton._move, signature=signature, constexprs=constants)
    options = {"num_warps": rows_triton._NUM_WARPS, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(json.dumps(re.findall(r"(?:ld|st)[.]global[.]v2[.]b64|fma[.]rn[.]f32|cvt[.]rn[.]bf16[.]f32", ptx)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_compiles_for_a_gpu_with_wide_loads_and_without_fused_sums(tmp_path):
    """Compiled for an H100 or H200, not run. In a process of its own: here Triton may be interpreting."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=own | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    refusal, *compiled = ran.stdout.splitlines()
    assert refusal == "row kernel 'triton' needs rows on a GPU, but they are on cpu; 'reference' does not"
    # Of the latents of four rows each of 64 threads has 64 bytes (bfloat16) or 128 (float32), in vectors of 16.
    for line, vectors in zip(compiled, (4, 8), strict=True):
        found = json.loads(line)
        assert found.count("ld.global.v2.b64") == found.count("st.global.v2.b64") == vectors, found
        assert "fma.rn.f32" not in found
    assert compiled[0].count("cvt.rn.bf16.f32") == 4
