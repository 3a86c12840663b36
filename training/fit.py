"""Find the `LayerRecipe` of each layer from statistics: which key coordinates get the rotary pairs, and the latent.

A coordinate of frequency f that turns at another frequency g errs by a phase (f - g) d at distance d. The best constant
factor on the query leaves the share 1 - |E exp(i (f - g) d)|^2 of the energy of its score wrong, the mean being over
the distances that the heads attend over; standing still is g = 0. Rotary pairs are assigned so that the sum of what is
wrong is smallest: a linear assignment problem, solved exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from irminsul.checkpoints.deepseek_form import DeepseekShape, LayerRecipe
from irminsul.checkpoints.grouped_query import AttentionShape
from training.watch import Statistics


class FittedLayer(NamedTuple):
    """How a layer is rewritten, and where its latent norm starts."""

    recipe: LayerRecipe
    latent_scale: float
    """Root mean square of the latent before its norm."""


def rope_frequencies(theta: float, rope_dim: int) -> Tensor:
    """Radians a position of each pair, float64 [P], as every engine computes them from ``rope_theta``."""
    return 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)


def fit(
    statistics: Statistics,
    key_value_LXE: Sequence[tuple[Tensor, Tensor, Tensor]],
    inv_freq_F: Tensor,
    theta: float,
    old: AttentionShape,
    new: DeepseekShape,
    *,
    even_share: float,
) -> list[FittedLayer]:
    """Fit all layers.

    Args:
        statistics: of the original model.
        key_value_LXE: key projection, value projection and norm weight of each layer.
        inv_freq_F: frequencies of the original.
        theta: base of the new frequencies.
        old: heads of the original.
        new: widths of the result.
        even_share: weight of a flat distribution of distances beside that of the attention: scores at distances that
            are not attended to matter too, or they would be.
    """
    return [
        _fit_layer(statistics, layer, weights, inv_freq_F, theta, old, new, even_share)
        for layer, weights in enumerate(key_value_LXE)
    ]


def _fit_layer(
    statistics: Statistics,
    layer: int,
    weights: tuple[Tensor, Tensor, Tensor],
    inv_freq_F: Tensor,
    theta: float,
    old: AttentionShape,
    new: DeepseekShape,
    even_share: float,
) -> FittedLayer:
    energy_Z, basis_ZG = _principal_keys(statistics.key_covariance_LFGG[layer])
    frequency_Z = torch.arange(len(inv_freq_F)).repeat_interleave(old.n_kv_heads)
    own_G = torch.arange(old.n_heads) // old.group_size
    query_HZ = statistics.query_energy_LHF[layer][:, frequency_Z] * basis_ZG[:, own_G].T.abs().square()
    new_P0 = torch.cat([rope_frequencies(theta, new.rope_dim), torch.zeros(1, dtype=torch.float64)])
    mean_HZP = _mean_turns(statistics.distance_LHD[layer], inv_freq_F[frequency_Z], new_P0, even_share)
    wrong_ZP = ((query_HZ * energy_Z)[:, :, None] * (1 - mean_HZP.abs().square())).sum(0)
    order_Z, place_Z = _assign_pairs(wrong_ZP)
    # Of modulus 1: the shrinking that would make the error of the score least made the model far worse.
    turn_HZ = mean_HZP[:, order_Z, place_Z]
    turn_HZ = turn_HZ / turn_HZ.abs()
    basis_ZG, frequency_Z = basis_ZG[order_Z], frequency_Z[order_Z]
    still = slice(new.rope_dim // 2, None)
    reflections_XE, scale = _fit_latent(
        statistics.hidden_covariance_LEE[layer], weights, basis_ZG[still], frequency_Z[still], old, new
    )
    recipe = LayerRecipe(frequency_Z.numpy(), _as_stored(basis_ZG), _as_stored(turn_HZ), reflections_XE.numpy())
    return FittedLayer(recipe, scale)


def _principal_keys(covariance_FGG: Tensor) -> tuple[Tensor, Tensor]:
    """Return the energy [Z] and the rows [Z, G] of a basis of each frequency's key heads, strongest first."""
    energy_FG, vectors_FGG = torch.linalg.eigh(covariance_FGG)
    rows_FGG = _phased(vectors_FGG.flip(-1).mH)  # row c reads component c off the key heads
    return energy_FG.flip(-1).flatten(), rows_FGG.flatten(0, 1)


def _assign_pairs(wrong_ZP: Tensor) -> tuple[Tensor, Tensor]:
    """Give each rotary pair a coordinate.

    Args:
        wrong_ZP: what is wrong if coordinate z turns with pair p; the last column is standing still.

    Returns:
        All coordinates, the turned ones first in the order of their pairs; and the column of each.
    """
    gain_ZP = wrong_ZP[:, -1:] - wrong_ZP[:, :-1]
    pairs, turned = linear_sum_assignment(gain_ZP.T.numpy(), maximize=True)
    n_pairs = gain_ZP.shape[1]
    assert (pairs == np.arange(n_pairs)).all(), "more pairs than coordinates"
    still = np.setdiff1d(np.arange(len(gain_ZP)), turned)
    return torch.from_numpy(np.concatenate([turned, still])), torch.tensor([*pairs, *[n_pairs] * len(still)])


def _as_stored(z: Tensor) -> NDArray[np.complex128]:
    """Round to what the file of the checkpoint holds: complex numbers of two float32."""
    return z.to(torch.complex64).to(torch.complex128).numpy()


def _mean_turns(distance_HD: Tensor, inv_freq_Z: Tensor, new_P: Tensor, even_share: float) -> Tensor:
    """E exp(i (f_z - g_p) d) for each head: complex128 [H, Z, P]."""
    n = distance_HD.shape[-1]
    weights_HD = (1 - even_share) * distance_HD + even_share / n
    at_D = torch.arange(n, dtype=torch.float64)
    out = []
    for frequency in inv_freq_Z:
        phase_PD = (frequency - new_P)[:, None] * at_D
        out.append(torch.complex(weights_HD @ phase_PD.cos().T, weights_HD @ phase_PD.sin().T))
    return torch.stack(out, dim=1)


def _phased(rows: Tensor) -> Tensor:
    """Turn each row so that its largest entry is real and positive: an eigenvector's phase is free."""
    largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True))
    return rows * (largest.conj() / largest.abs())


def _fit_latent(
    hidden_EE: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    basis_SG: Tensor,
    frequency_S: Tensor,
    old: AttentionShape,
    new: DeepseekShape,
) -> tuple[Tensor, float]:
    """Choose what the latent leaves out: least energy among directions that standing keys and values do not need.

    Returns:
        The reflections, and the root mean square of the latent.
    """
    key_proj, value_proj, norm_E = (weight.double() for weight in weights)
    halves = key_proj.view(old.n_kv_heads, 2, -1, key_proj.shape[-1])
    keys_GFE = torch.complex(halves[:, 0], halves[:, 1])
    still_SE = torch.einsum("sg,gse->se", basis_SG, keys_GFE[:, frequency_S])
    needed = torch.cat([still_SE.real, still_SE.imag, value_proj]) * norm_E
    _, _, rows = torch.linalg.svd(needed, full_matrices=True)
    free_YE = rows[len(needed) :]
    energy_Y, vectors_YY = torch.linalg.eigh(free_YE @ hidden_EE @ free_YE.T)
    n_left_out = len(norm_E) - new.latent
    assert n_left_out <= len(free_YE), "the latent is too small for the standing keys and the values"
    left_out_XE = vectors_YY[:, :n_left_out].T @ free_YE
    kept = hidden_EE.diagonal().sum() - energy_Y[:n_left_out].sum()
    return _reflections(left_out_XE), float((kept / new.latent).sqrt())


def _reflections(rows_XE: Tensor) -> Tensor:
    """Householder vectors that send the span of orthonormal rows to the last coordinates, rounded to int8 values.

    Each reflection is made for what the rounded ones before it have left, so that rounding errors do not add up.
    """
    rows_XE = rows_XE.clone()
    n, width = rows_XE.shape
    vectors = []
    for k in range(n):
        # Reflection k must keep the last k coordinates, which are done.
        target = width - 1 - k
        row_E = rows_XE[k].clone()
        row_E[target + 1 :] = 0
        vector_E = row_E / row_E.norm()
        vector_E[target] += 1.0 if vector_E[target] >= 0 else -1.0
        rounded_E = (vector_E * (127 / vector_E.abs().max())).round()
        vectors.append(rounded_E)
        along = rows_XE @ rounded_E
        rows_XE -= along[:, None] * (2 * rounded_E / rounded_E.square().sum())
    return torch.stack(vectors)
