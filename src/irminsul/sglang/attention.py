"""Which form of MLA attention is cheaper for batch rows that share a prefix.

Up-projected attention (MHA) reads keys and values of full heads, which it makes from the latents of the row's whole
prefix, for each batch row anew; absorbed attention (MLA) reads the latents themselves, at 2·C + R products a query,
head and key instead of K + R + V. One long row pays for the up-projection; seventeen short rows over the same prefix
pay for it seventeen times.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an MLA model's attention, on one rank."""

    heads: int
    latent: int
    """C: ``kv_lora_rank``."""
    rope: int
    """R: ``qk_rope_head_dim``."""
    nope: int
    """K: ``qk_nope_head_dim``."""
    value: int
    """V: ``v_head_dim``."""


def attention_products(
    shape: AttentionShape, starts_B: NDArray[np.int64], ends_B: NDArray[np.int64]
) -> tuple[float, float]:
    """Return multiply-adds of one layer for batch rows [start, end): (up-projected, absorbed)."""
    lengths_B = (ends_B - starts_B).astype(np.float64)
    # Each of a row's queries reads all keys before it and its own.
    pairs = float((lengths_B * (starts_B + ends_B + 1) / 2).sum())
    up_projected = float(ends_B.sum()) * shape.latent * (shape.nope + shape.value)
    absorbed_ends = float(lengths_B.sum()) * shape.latent * (shape.nope + shape.value)
    mha = shape.heads * (pairs * (shape.nope + shape.rope + shape.value) + up_projected)
    mla = shape.heads * (pairs * (2 * shape.latent + shape.rope) + absorbed_ends)
    return mha, mla


def absorbed_is_cheaper(shape: AttentionShape, starts_B: NDArray[np.int64], ends_B: NDArray[np.int64]) -> bool:
    """Say whether absorbed attention needs fewer multiply-adds."""
    mha, mla = attention_products(shape, starts_B, ends_B)
    return mla < mha
