import pytest
import torch

from irminsul.errors import InputError
from irminsul.kernels import row_movers, rows, rows_triton
from irminsul.kernels.row_movers import RowKernel, row_mover
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, Pairing, RopeSpec

LAYOUT = RowLayout(6, 4, "bfloat16")
ROPE = RopeSpec((1.0, 0.013), Pairing.HALF_SPLIT)
MOVES = tuple(torch.tensor(column) for column in ([0, 1, 1], [5, 6, 7], [3, 4, 4], [90_000, 4, 17]))


def make_pool(device):
    return torch.randn(3, 12, 10, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)


@pytest.mark.parametrize("angle_source", AngleSource)
@pytest.mark.parametrize("kernel", RowKernel)
def test_every_implementation_moves_the_same_rows(device, kernel, angle_source):
    expected, pool = make_pool(device), make_pool(device)
    rows.move_rows(expected, LAYOUT, ROPE, *MOVES, angle_source)
    layers = [layer.clone()[:, None] for layer in pool]
    row_mover(kernel.value, layers, LAYOUT)(ROPE, *MOVES, angle_source)
    assert torch.equal(torch.stack(layers)[:, :, 0], expected)
    assert not torch.equal(expected, pool)


@pytest.mark.parametrize("kernel", RowKernel)
def test_the_implementation_named_is_the_one_that_runs(device, kernel, monkeypatch):
    ran = []
    monkeypatch.setattr(row_movers, "move_rows", lambda *_: ran.append(RowKernel.REFERENCE))
    monkeypatch.setattr(rows_triton, "_launch", lambda *_: ran.append(RowKernel.TRITON))
    row_mover(kernel, make_pool(device).unbind(0), LAYOUT)(ROPE, *MOVES)
    assert set(ran) == {kernel}


@pytest.mark.parametrize(("check_slots", "checks"), [(True, 1), (False, 0)])
def test_slots_are_checked_unless_the_caller_vouches_for_them(device, check_slots, checks, monkeypatch):
    checked = []
    monkeypatch.setattr(rows_triton, "check_moves", lambda *_, **__: checked.append(1))
    row_mover("triton", make_pool(device).unbind(0), LAYOUT, check_slots=check_slots)(ROPE, *MOVES)
    assert len(checked) == checks


def test_what_cannot_be_obeyed_is_refused(monkeypatch):
    layers = make_pool("cpu").unbind(0)
    with pytest.raises(InputError, match="unknown row kernel 'cuda'; valid row kernels: reference, triton"):
        row_mover("cuda", layers, LAYOUT)
    monkeypatch.setattr(rows_triton.triton, "JITFunction", type(rows_triton._move))
    with pytest.raises(InputError, match="row kernel 'triton' needs rows on a GPU, but they are on cpu"):
        row_mover("triton", layers, LAYOUT)
    monkeypatch.setattr(row_movers, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="row kernel 'triton' needs the triton package, which is not installed"):
        row_mover("triton", layers, LAYOUT)
