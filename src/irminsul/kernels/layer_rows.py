"""The rows of an engine that keeps each layer in a tensor of its own.

Shape letters: ``L`` layers, ``S`` slots of the pool, ``W`` row width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from irminsul.errors import InputError
from irminsul.layout import ITEM_SIZES, RowLayout

VECTOR_BYTES = 16
"""The widest load of a GPU's thread."""


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Layers that have been shown to hold rows, and where they lie; made once for a pool, valid while the pool is."""

    layers_SW: tuple[Tensor, ...]
    """Views of the layers, contiguous, all on one device."""
    layout: RowLayout
    addresses_L: Tensor
    """int64, on the device of the layers: where the rows of each begin."""
    alignment: int
    """Bytes, at most `VECTOR_BYTES`, that divide every address, a row, and its latent part: a power of two."""

    @classmethod
    def of(cls, layers: Sequence[Tensor], layout: RowLayout) -> "LayerRows":
        """Check the layers and note their addresses.

        Args:
            layers: one tensor a layer, [S, W], or [S, 1, W] as SGLang has them; contiguous, equal in shape and
                device.
            layout: what a row is.

        Raises:
            InputError: no layers, or one that is not as said above.
        """
        if not layers:
            raise InputError("a pool must have at least one layer, got none")
        layers_SW = tuple(_as_rows(layer, layout) for layer in layers)
        first_SW = layers_SW[0]
        for layer_SW in layers_SW:
            if (layer_SW.shape, layer_SW.device) != (first_SW.shape, first_SW.device):
                raise InputError(
                    f"all layers must be alike, got {tuple(first_SW.shape)} on {first_SW.device} "
                    f"and {tuple(layer_SW.shape)} on {layer_SW.device}"
                )
        addresses = [layer_SW.data_ptr() for layer_SW in layers_SW]
        item_bytes = ITEM_SIZES[layout.dtype]
        return cls(
            layers_SW,
            layout,
            torch.tensor(addresses, dtype=torch.int64, device=first_SW.device),
            math.gcd(VECTOR_BYTES, layout.width * item_bytes, layout.latent_dim * item_bytes, *addresses),
        )

    @property
    def slots(self) -> int:
        """Rows that a layer has room for."""
        return len(self.layers_SW[0])

    @property
    def device(self) -> torch.device:
        """Where all layers are."""
        return self.layers_SW[0].device


def _as_rows(layer: Tensor, layout: RowLayout) -> Tensor:
    """View a layer as [S, W]."""
    if layer.dim() not in (2, 3) or layer.shape[1:].numel() != layout.width or layer.shape[-1] != layout.width:
        raise InputError(
            f"a layer must be [slots, {layout.width}] or [slots, 1, {layout.width}], got shape {tuple(layer.shape)}"
        )
    if layer.dtype != getattr(torch, layout.dtype):
        raise InputError(f"a layer holds {layer.dtype}, but its layout says {layout.dtype}")
    if not layer.is_contiguous():
        raise InputError(f"a layer must be contiguous, got strides {layer.stride()} for shape {tuple(layer.shape)}")
    return layer.view(-1, layout.width)
