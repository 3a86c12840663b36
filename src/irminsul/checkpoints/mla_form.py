"""Grouped-query attention with RoPE, rewritten as multi-head latent attention.

All keys of a token, K = G * D values of the G key heads, are written in an orthogonal basis B. With k' = B k, and the
query of head h put in the place of its own key head, q' = B[:, own] q, no score changes: q' . k' = q . k. The first R
coordinates of k' are turned with the position and become the rotary part of the row; the others stand still and join
the values in its latent part.

RoPE is a product of complex numbers: key head g at frequency f is z = k[g, f] + i k[g, f + F], and position p turns it
by exp(i p theta_f). A unitary basis of the key heads *at one frequency* commutes with that, so it changes no score at
any distance as long as all of its coordinates are turned. `lossless_basis` turns all of them. `rotary_basis` turns the
coordinates that carry most of the energy of real keys. That is approximate, in two ways: a group of neighbouring
frequencies shares their mean, and what stands still meets every query at the same angle. Each head's query is turned
once and for all by the angle that is typical of the distances it attends over, so that this angle is a good one.

Shape letters: E hidden size, H query heads, G key heads, D head, F = D/2 frequencies, Z = G * F complex key
coordinates (head first), K = G * D real ones, R rotary, N = K - R still, C latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a grouped-query attention; head h reads key head h // (n_heads // n_kv_heads)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def key_dim(self) -> int:
        """Values of all keys of a token."""
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class FrequencyGroup:
    """Neighbouring frequencies that share rotary pairs."""

    width: int
    """Frequencies in the group."""
    pairs: int
    """Rotary pairs it gets, at the mean of its frequencies; at most key heads * width."""


@dataclass(frozen=True, eq=False)
class KeyBasis:
    """An orthogonal basis of all keys of a layer."""

    rows_KK: Tensor
    """float64; row i gives coordinate i. Rotary pairs first, each as (real, imaginary)."""
    rotary_dim: int
    """Coordinates that are turned with the position; the others stand still."""


def lossless_basis(shape: AttentionShape) -> KeyBasis:
    """Turn everything: only reorders, from half-split halves of each key head to pairs."""
    n_complex = shape.key_dim // 2
    return KeyBasis(_as_real_pairs(torch.eye(n_complex, dtype=torch.complex128), shape), shape.key_dim)


def lossless_frequencies(inv_freq_F: Sequence[float], shape: AttentionShape) -> list[float]:
    """Frequency of each rotary pair of `lossless_basis`, radians a position."""
    return list(inv_freq_F) * shape.n_kv_heads


def rotary_basis(covariance_ZZ: Tensor, groups: Sequence[FrequencyGroup], shape: AttentionShape) -> KeyBasis:
    """Turn the leading principal components of each group of frequencies.

    Args:
        covariance_ZZ: complex128, mean of z z^H over keys before RoPE; see `calibration.key_covariances`.
        groups: in the order of the frequencies, which they tile.
        shape: of the attention.

    Returns:
        A basis with two rotary coordinates for each pair of the groups. Each component's phase is fixed (its largest
        entry is real and positive), so that equal covariances give equal bases.
    """
    n_frequencies = shape.head_dim // 2
    assert sum(group.width for group in groups) == n_frequencies, groups
    turned, still = [], []
    for group, start in zip(groups, _starts(groups), strict=True):
        members_M = torch.cat(
            [head * n_frequencies + torch.arange(start, start + group.width) for head in range(shape.n_kv_heads)]
        )
        assert 0 <= group.pairs <= len(members_M), group
        rows_MZ = torch.zeros(len(members_M), len(covariance_ZZ), dtype=torch.complex128)
        rows_MZ[:, members_M] = _principal_rows(covariance_ZZ[members_M[:, None], members_M])
        turned.append(rows_MZ[: group.pairs])
        still.append(rows_MZ[group.pairs :])
    rows_KK = _as_real_pairs(torch.cat(turned + still), shape)
    return KeyBasis(rows_KK, 2 * sum(group.pairs for group in groups))


def group_frequencies(inv_freq_F: Sequence[float], groups: Sequence[FrequencyGroup]) -> list[float]:
    """Frequency of each rotary pair of `rotary_basis`, radians a position: the mean of its group."""
    frequencies: list[float] = []
    for group, start in zip(groups, _starts(groups), strict=True):
        mean = sum(inv_freq_F[start : start + group.width]) / group.width
        frequencies += [mean] * group.pairs
    return frequencies


def rewrite_attention(
    query_proj: Tensor,
    key_proj: Tensor,
    value_proj: Tensor,
    basis: KeyBasis,
    typical_turn_HF: Tensor,
    shape: AttentionShape,
) -> dict[str, Tensor]:
    """Write the projections of one layer as DeepSeek's.

    Args:
        query_proj: [H * D, E].
        key_proj: [G * D, E].
        value_proj: [G * D, E].
        basis: of the keys.
        typical_turn_HF: complex128; each head's queries are multiplied by it where they meet what stands still.
        shape: of the attention.

    Returns:
        By DeepSeek's names, in the dtype of ``query_proj``: ``q_proj`` [H * (N + R), E], a head's rows being
        [still | rotary]; ``kv_a_proj_with_mqa`` [G * D + N + R, E], rows [values | still | rotary];
        ``kv_b_proj`` [H * (N + D), G * D + N], a head's rows being [still | value], each a copy of one latent.
    """
    rotary_RK, still_NK = basis.rows_KK.tensor_split([basis.rotary_dim])
    keys_KE = key_proj.double()
    queries_HDE = query_proj.double().view(shape.n_heads, shape.head_dim, -1)
    still_HNE = _of_own_key_head(still_NK, shape) @ _turned(queries_HDE, typical_turn_HF)
    rotary_HRE = _of_own_key_head(rotary_RK, shape) @ queries_HDE
    row = torch.cat([value_proj.double(), still_NK @ keys_KE, rotary_RK @ keys_KE])
    return {
        "q_proj": torch.cat([still_HNE, rotary_HRE], dim=1).flatten(0, 1).to(query_proj.dtype),
        "kv_a_proj_with_mqa": row.to(query_proj.dtype),
        "kv_b_proj": _latent_copies(len(still_NK), shape).to(query_proj.dtype),
    }


def _of_own_key_head(rows_XK: Tensor, shape: AttentionShape) -> Tensor:
    """For each query head, the columns of its own key head: [H, X, D]."""
    rows_GXD = rows_XK.view(len(rows_XK), shape.n_kv_heads, shape.head_dim).transpose(0, 1)
    return rows_GXD.repeat_interleave(shape.n_heads // shape.n_kv_heads, dim=0)


def _turned(queries_HDE: Tensor, turn_HF: Tensor) -> Tensor:
    """Multiply half-split queries by a complex number for each head and frequency."""
    low_HFE, high_HFE = queries_HDE.chunk(2, dim=1)
    z_HFE = torch.complex(low_HFE, high_HFE) * turn_HF[:, :, None]
    return torch.cat([z_HFE.real, z_HFE.imag], dim=1)


def _latent_copies(n_still: int, shape: AttentionShape) -> Tensor:
    """[H * (N + D), G * D + N] of zeros and ones: each head takes all of N and the values of its own key head."""
    one_CC = torch.eye(shape.key_dim + n_still)
    values_GDC, still_NC = one_CC[: shape.key_dim].view(shape.n_kv_heads, shape.head_dim, -1), one_CC[shape.key_dim :]
    per_kv_head = torch.cat([still_NC.expand(shape.n_kv_heads, -1, -1), values_GDC], dim=1)
    return per_kv_head.repeat_interleave(shape.n_heads // shape.n_kv_heads, dim=0).flatten(0, 1)


def _starts(groups: Sequence[FrequencyGroup]) -> list[int]:
    return list(accumulate((group.width for group in groups), initial=0))[:-1]


def _principal_rows(covariance_MM: Tensor) -> Tensor:
    """Return the unitary matrix whose row i reads principal component i off z, strongest first."""
    _, vectors_MM = torch.linalg.eigh(covariance_MM)
    rows_MM = vectors_MM.flip(-1).mH
    largest_M1 = rows_MM.gather(1, rows_MM.abs().argmax(dim=1, keepdim=True))
    phased_MM: Tensor = rows_MM * (largest_M1.conj() / largest_M1.abs())
    return phased_MM


def _as_real_pairs(rows_ZZ: Tensor, shape: AttentionShape) -> Tensor:
    """Write a complex basis as a real one: float64 [K, K].

    Row z becomes the two rows of its real and imaginary part; column (head, frequency) becomes the half-split columns
    (head, frequency) and (head, frequency + F).
    """
    rows = rows_ZZ.view(len(rows_ZZ), shape.n_kv_heads, shape.head_dim // 2)
    real = torch.cat([rows.real, -rows.imag], dim=-1)
    imaginary = torch.cat([rows.imag, rows.real], dim=-1)
    return torch.stack([real, imaginary], dim=1).reshape(shape.key_dim, shape.key_dim)
