import pytest
import torch

from irminsul.errors import InputError
from irminsul.kernels.layer_rows import LayerRows
from irminsul.layout import RowLayout

LAYOUT = RowLayout(12, 4, "bfloat16")


def layer(*shape, dtype=torch.bfloat16):
    return torch.zeros(*(shape or (9, 1, 16)), dtype=dtype)


def test_layers_are_viewed_and_their_addresses_noted():
    layers = [layer(), layer(9, 16)]
    rows = LayerRows.of(layers, LAYOUT)
    assert (rows.slots, rows.device.type, len(rows.layers_SW)) == (9, "cpu", 2)
    assert rows.addresses_L.tolist() == [given.data_ptr() for given in layers]
    rows.layers_SW[0][4] = 1
    assert layers[0][4].eq(1).all()


@pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "dtype", "alignment"),
    [
        (512, 64, "bfloat16", 16),
        (5, 8, "float32", 4),
        (5, 8, "bfloat16", 2),
        (12, 4, "float16", 8),
        (8, 2, "float32", 8),
    ],
)
def test_alignment_divides_addresses_rows_and_latents(latent_dim, rope_dim, dtype, alignment):
    layout = RowLayout(latent_dim, rope_dim, dtype)
    rows = LayerRows.of([layer(3, layout.width, dtype=getattr(torch, dtype))], layout)
    assert rows.alignment == alignment


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "a pool must have at least one layer"),
        ([layer(9, 2, 8)], r"a layer must be \[slots, 16\] or \[slots, 1, 16\], got shape \(9, 2, 8\)"),
        ([layer(9, 2, 16)], "a layer must be"),
        ([layer(16)], "a layer must be"),
        ([layer(9, 1, 1, 16)], "a layer must be"),
        ([layer(dtype=torch.float32)], "a layer holds torch.float32, but its layout says bfloat16"),
        ([layer(18, 16)[::2]], r"a layer must be contiguous, got strides \(32, 1\) for shape \(9, 16\)"),
        ([layer(16, 9).T], "a layer must be contiguous"),
        ([layer(), layer(8, 1, 16)], r"all layers must be alike, got \(9, 16\) on cpu and \(8, 16\) on cpu"),
    ],
)
def test_layers_that_hold_no_rows_are_refused(layers, message):
    with pytest.raises(InputError, match=message):
        LayerRows.of(layers, LAYOUT)
