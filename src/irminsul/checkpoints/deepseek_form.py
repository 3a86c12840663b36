"""Grouped-query attention with RoPE, written in the strict format of DeepSeek-V2: the same numbers on every machine.

DeepSeek's format leaves little to choose: the frequencies of the rotary pairs are powers of one base,
the latent passes an RMSNorm, and heads have 128 standing, 64 rotary and 128 value coordinates. A `LayerRecipe` says
how one layer is fitted into that; it is found once from statistics (see ``training/``) and ships as numbers. Applying
it needs no statistics, no linear algebra library and no transcendental function: only products and sums whose order is
fixed, so that a checkpoint built anywhere has the same bytes.

**Rotation.** RoPE is a product of complex numbers: key head g at frequency f is z = k[g, f] + i k[g, f + F], turned by
exp(i p theta_f) at position p. A unitary basis over the key heads at one frequency commutes with that. Some of its
coordinates take the R/2 rotary pairs, turning at a frequency near their own; the others stand still. Each query
coordinate is turned once and for all by what is missing or too much on the mean of the distances it attends over.

**Latent norm.** The hidden state enters attention normalised: x = w * y with |y|^2 = E. If the latent were an
orthogonal transform of y, its norm would be a constant and the RMSNorm a constant factor. The latent has C = 512 of
E = 576 coordinates, so the 64 directions left out are chosen where y has least energy and which neither the standing
keys nor the values need. An orthogonal matrix that sends these directions to the last 64 coordinates is a product of
64 Householder reflections, which is exactly orthogonal however coarsely its vectors are stored.

Shape letters: E hidden size, H query heads, G key heads, D head, F = D/2 frequencies, Z = G * F complex key
coordinates, P rotary pairs, S = Z - P standing complex coordinates, N/R/V the standing, rotary and value width of a
head in the new format, C latent, X = E - C directions left out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from irminsul.checkpoints.grouped_query import AttentionShape

Array = NDArray[np.float64]


@dataclass(frozen=True)
class DeepseekShape:
    """The widths of the new format; heads of values keep theirs until they are widened."""

    latent: int = 512
    nope_dim: int = 128
    rope_dim: int = 64


@dataclass(frozen=True, eq=False)
class LayerRecipe:
    """How one layer is rewritten."""

    frequency_Z: NDArray[np.int64]
    """Original frequency of each new complex coordinate; the P rotary ones first, in the order of their pairs."""
    basis_ZG: NDArray[np.complex128]
    """k'_z = sum over g of basis[z, g] * k[g, frequency[z]]; unitary for each frequency."""
    turn_HZ: NDArray[np.complex128]
    """Factor on the query coordinate, beside the basis."""
    reflections_XE: Array
    """Householder vectors; applied in order to the rows of a matrix they send what is left out to the end."""


@dataclass(frozen=True, eq=False)
class DeepseekAttention:
    """The projections of one layer by DeepSeek's names, float64."""

    q_proj: Array
    """[H * (N + R), E], a head's rows being [standing | rotary]."""
    kv_a_proj_with_mqa: Array
    """[C + R, E]."""
    kv_b_proj: Array
    """[H * (N + V), C], a head's rows being [standing | value]."""
    o_proj: Array
    """[E, H * V]."""


def rewrite_attention(
    query_proj: Array,
    key_proj: Array,
    value_proj: Array,
    out_proj: Array,
    norm_E: Array,
    recipe: LayerRecipe,
    old: AttentionShape,
    new: DeepseekShape,
) -> DeepseekAttention:
    """Write one layer's attention in DeepSeek's format.

    Args:
        query_proj: [H * D, E], rows of a head half-split.
        key_proj: [G * D, E], half-split too.
        value_proj: [G * D, E].
        out_proj: [E, H * D].
        norm_E: weight of the norm in front of the attention (``input_layernorm``); not zero anywhere.
        recipe: of this layer.
        old: heads of the original.
        new: widths of the result; queries and keys that are wider than needed are filled with zeros.
    """
    n_rotary = new.rope_dim // 2
    keys_ZE = _key_coordinates(key_proj, recipe, old)
    queries_HZE = _query_coordinates(query_proj, recipe, old) * np.sqrt((new.nope_dim + new.rope_dim) / old.head_dim)
    needed = np.concatenate([_as_rows(keys_ZE[n_rotary:]), value_proj])
    mixed = _reflected(needed * norm_E, recipe.reflections_XE)[:, : new.latent]
    still_NC, value_VC = np.split(mixed, [2 * (len(keys_ZE) - n_rotary)])
    transform_CE = _reflected(np.eye(len(norm_E)), recipe.reflections_XE).T[: new.latent]
    still_HNE = _with_zero_rows(_as_rows(queries_HZE[:, n_rotary:]), new.nope_dim)
    rotary_HRE = _as_rows(queries_HZE[:, :n_rotary])
    return DeepseekAttention(
        q_proj=np.concatenate([still_HNE, rotary_HRE], axis=1).reshape(-1, len(norm_E)),
        kv_a_proj_with_mqa=np.concatenate([transform_CE / norm_E, _as_rows(keys_ZE[:n_rotary])]),
        kv_b_proj=_kv_b(still_NC, value_VC, old, new),
        o_proj=out_proj,
    )


def widen_values(kv_b_proj: Array, o_proj: Array, nope_dim: int, n_heads: int, value_dim: int) -> tuple[Array, Array]:
    """Widen the values of each head with zeros, which change no result: engines have kernels for few widths.

    Args:
        kv_b_proj: [H * (N + V), C].
        o_proj: [E, H * V].
        nope_dim: N.
        n_heads: H.
        value_dim: the new V.
    """
    kv_b_HXC = kv_b_proj.reshape(n_heads, -1, kv_b_proj.shape[-1])
    out_HVE = o_proj.T.reshape(n_heads, -1, len(o_proj))
    wide_HXC = _with_zero_rows(kv_b_HXC, nope_dim + value_dim)
    wide_HVE = _with_zero_rows(out_HVE, value_dim)
    return wide_HXC.reshape(-1, kv_b_proj.shape[-1]), wide_HVE.reshape(-1, len(o_proj)).T


def _key_coordinates(key_proj: Array, recipe: LayerRecipe, old: AttentionShape) -> NDArray[np.complex128]:
    keys_GFE = _as_complex(key_proj, old.n_kv_heads)
    total_ZE = np.zeros((len(recipe.frequency_Z), key_proj.shape[-1]), dtype=np.complex128)
    for keys_FE, basis_Z in zip(keys_GFE, recipe.basis_ZG.T, strict=True):
        total_ZE = total_ZE + _product(basis_Z[:, None], keys_FE[recipe.frequency_Z])
    return total_ZE


def _query_coordinates(query_proj: Array, recipe: LayerRecipe, old: AttentionShape) -> NDArray[np.complex128]:
    queries_HFE = _as_complex(query_proj, old.n_heads)
    own_head_H = np.arange(old.n_heads) // old.group_size
    factor_HZ = _product(recipe.turn_HZ, recipe.basis_ZG[:, own_head_H].T)
    return _product(factor_HZ[:, :, None], queries_HFE[:, recipe.frequency_Z])


def _as_complex(proj: Array, n_heads: int) -> NDArray[np.complex128]:
    """Rows of half-split heads as complex numbers: [heads, F, E]."""
    halves = proj.reshape(n_heads, 2, -1, proj.shape[-1])
    return halves[:, 0] + 1j * halves[:, 1]


def _as_rows(z: NDArray[np.complex128]) -> Array:
    """[..., Z, E] complex to [..., 2 Z, E] real, each coordinate as (real, imaginary)."""
    pairs = np.stack([z.real, z.imag], axis=-2)
    return pairs.reshape(*z.shape[:-2], -1, z.shape[-1])


def _reflected(rows: Array, reflections_XE: Array) -> Array:
    """Multiply rows by the orthogonal matrix that the reflections make; every sum is taken from left to right."""
    for vector_E in reflections_XE:
        along = np.add.accumulate(rows * vector_E, axis=-1)[:, -1:]
        length = np.add.accumulate(vector_E * vector_E)[-1]
        rows = rows - along * (2.0 * vector_E / length)
    return rows


def _kv_b(still_NC: Array, value_VC: Array, old: AttentionShape, new: DeepseekShape) -> Array:
    """Every head reads all standing keys, and the values of its own key head."""
    value_GVC = value_VC.reshape(old.n_kv_heads, old.head_dim, -1)
    value_HVC = value_GVC.repeat(old.group_size, axis=0)
    still_NC = _with_zero_rows(still_NC, new.nope_dim)
    still_HNC = np.broadcast_to(still_NC, (old.n_heads, *still_NC.shape))
    return np.concatenate([still_HNC, value_HVC], axis=1).reshape(-1, still_NC.shape[-1])


def _with_zero_rows(rows: Array, n_rows: int) -> Array:
    """Append rows of zeros to [..., rows, columns]."""
    zeros = np.zeros((*rows.shape[:-2], n_rows - rows.shape[-2], rows.shape[-1]))
    return np.concatenate([rows, zeros], axis=-2)


def _product(a: NDArray[np.complex128], b: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Multiply in rounded real steps: numpy's complex product fuses some of them on some processors."""
    real = a.real * b.real - a.imag * b.imag
    imaginary = a.real * b.imag + a.imag * b.real
    return real + 1j * imaginary
