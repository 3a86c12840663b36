"""The rewriting as algebra, on random projections: no score changes unless a coordinate is left unturned."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irminsul.checkpoints.calibration import as_complex
from irminsul.checkpoints.mla_form import (
    AttentionShape,
    FrequencyGroup,
    group_frequencies,
    lossless_basis,
    lossless_frequencies,
    rewrite_attention,
    rotary_basis,
)

SHAPE = AttentionShape(n_heads=6, n_kv_heads=3, head_dim=16)
HIDDEN = 40
INV_FREQ = [10.0 ** (-at / 2) for at in range(8)]
GROUPS = (FrequencyGroup(1, 3), FrequencyGroup(1, 2), FrequencyGroup(2, 1), FrequencyGroup(3, 4), FrequencyGroup(1, 0))
ALL_TURNED = (FrequencyGroup(1, 3),) * 8
NO_TURN = torch.ones(6, 8, dtype=torch.complex128)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random_keys(seed, n_tokens=200):
    mix = torch.randn(SHAPE.key_dim, SHAPE.key_dim, generator=generator(seed), dtype=torch.float64)
    return torch.randn(n_tokens, SHAPE.key_dim, generator=generator(seed + 1), dtype=torch.float64) @ mix


def covariance(keys_TK):
    z_TZ = as_complex(keys_TK, SHAPE.n_kv_heads)
    return z_TZ.T @ z_TZ.conj() / len(z_TZ)


def projections(seed):
    widths = (SHAPE.n_heads * SHAPE.head_dim, SHAPE.key_dim, SHAPE.key_dim)
    return [
        torch.randn(width, HIDDEN, generator=generator(seed + at), dtype=torch.float64)
        for at, width in enumerate(widths)
    ]


def llama_turn(x_THD, positions_T):
    """RoPE as Llama has it: value d turns with value d + D/2."""
    angles_T1F = positions_T[:, None, None] * torch.tensor(INV_FREQ, dtype=torch.float64)
    low, high = x_THD.chunk(2, dim=-1)
    cos, sin = angles_T1F.cos(), angles_T1F.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def deepseek_turn(x_TxR, positions_T, frequencies):
    """RoPE as DeepSeek has it: value 2j turns with value 2j + 1."""
    angles_T1P = positions_T[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
    even, odd = x_TxR[..., ::2], x_TxR[..., 1::2]
    cos, sin = angles_T1P.cos(), angles_T1P.sin()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def llama_scores_and_values(weights, x_TE, positions_T):
    query, key, value = (x_TE @ weight.T for weight in weights)
    query_THD = llama_turn(query.view(len(x_TE), -1, SHAPE.head_dim), positions_T)
    key_TGD = llama_turn(key.view(len(x_TE), -1, SHAPE.head_dim), positions_T)
    share = SHAPE.n_heads // SHAPE.n_kv_heads
    scores_HTS = torch.einsum("thd,shd->hts", query_THD, key_TGD.repeat_interleave(share, dim=1))
    return scores_HTS, value.view(len(x_TE), -1, SHAPE.head_dim).repeat_interleave(share, dim=1)


def mla_scores_and_values(tensors, x_TE, positions_T, frequencies):
    rotary_dim = 2 * len(frequencies)
    query_THQ = (x_TE @ tensors["q_proj"].T).view(len(x_TE), SHAPE.n_heads, -1)
    row = x_TE @ tensors["kv_a_proj_with_mqa"].T
    latent_TC, rotary_TR = row[:, :-rotary_dim], row[:, -rotary_dim:]
    up_THX = (latent_TC @ tensors["kv_b_proj"].T).view(len(x_TE), SHAPE.n_heads, -1)
    still_query, rotary_query = query_THQ[..., :-rotary_dim], query_THQ[..., -rotary_dim:]
    still_key, value_THD = up_THX[..., : -SHAPE.head_dim], up_THX[..., -SHAPE.head_dim :]
    turned_key_TR = deepseek_turn(rotary_TR[:, None], positions_T, frequencies)[:, 0]
    turned_query = deepseek_turn(rotary_query, positions_T, frequencies)
    scores_HTS = torch.einsum("thn,shn->hts", still_query, still_key) + torch.einsum(
        "thr,sr->hts", turned_query, turned_key_TR
    )
    return scores_HTS, value_THD


@given(seed=st.integers(0, 1000), far=st.integers(0, 100_000))
def test_the_lossless_form_keeps_every_score_and_value(seed, far):
    weights = projections(seed)
    x_TE = torch.randn(7, HIDDEN, generator=generator(seed), dtype=torch.float64)
    positions_T = torch.tensor([0, 1, 2, 5, far + 6, far + 7, far + 500], dtype=torch.float64)
    tensors = rewrite_attention(*weights, lossless_basis(SHAPE), NO_TURN, SHAPE)
    frequencies = lossless_frequencies(INV_FREQ, SHAPE)
    for new, old in zip(
        mla_scores_and_values(tensors, x_TE, positions_T, frequencies),
        llama_scores_and_values(weights, x_TE, positions_T),
        strict=True,
    ):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)


def test_the_comparison_above_can_fail():
    weights = projections(0)
    x_TE = torch.randn(7, HIDDEN, generator=generator(0), dtype=torch.float64)
    positions_T = torch.arange(7, dtype=torch.float64)
    tensors = rewrite_attention(*weights, lossless_basis(SHAPE), NO_TURN, SHAPE)
    wrong = lossless_frequencies(INV_FREQ[::-1], SHAPE)
    new, _ = mla_scores_and_values(tensors, x_TE, positions_T, wrong)
    old, _ = llama_scores_and_values(weights, x_TE, positions_T)
    assert (new - old).abs().max() > 1


@given(seed=st.integers(0, 1000))
def test_any_unitary_basis_keeps_every_score_if_all_of_it_is_turned(seed):
    weights = projections(seed)
    x_TE = torch.randn(6, HIDDEN, generator=generator(seed), dtype=torch.float64)
    positions_T = torch.tensor([0, 1, 3, 40, 4000, 8191], dtype=torch.float64)
    basis = rotary_basis(covariance(random_keys(seed)), ALL_TURNED, SHAPE)
    tensors = rewrite_attention(*weights, basis, NO_TURN, SHAPE)
    new, _ = mla_scores_and_values(tensors, x_TE, positions_T, group_frequencies(INV_FREQ, ALL_TURNED))
    old, _ = llama_scores_and_values(weights, x_TE, positions_T)
    torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 1000), distance=st.integers(0, 50))
def test_what_stands_still_is_right_at_the_typical_distance(seed, distance):
    weights = projections(seed)
    x_TE = torch.randn(60, HIDDEN, generator=generator(seed), dtype=torch.float64)
    positions_T = torch.arange(60, dtype=torch.float64)
    groups = (FrequencyGroup(1, 1),) * 8
    basis = rotary_basis(covariance(random_keys(seed)), groups, SHAPE)
    angles_F = distance * torch.tensor(INV_FREQ, dtype=torch.float64)
    turn_HF = torch.polar(torch.ones_like(angles_F), angles_F).expand(SHAPE.n_heads, -1)
    tensors = rewrite_attention(*weights, basis, turn_HF, SHAPE)
    new, _ = mla_scores_and_values(tensors, x_TE, positions_T, group_frequencies(INV_FREQ, groups))
    old, _ = llama_scores_and_values(weights, x_TE, positions_T)
    at_distance = (slice(None), slice(distance, None), slice(0, 60 - distance))
    right = [scores[at_distance].diagonal(dim1=1, dim2=2) for scores in (new, old)]
    torch.testing.assert_close(*right, rtol=1e-9, atol=1e-9)
    elsewhere = [scores[:, 59, 0 if distance < 30 else 58] for scores in (new, old)]
    assert (elsewhere[0] - elsewhere[1]).abs().max() > 1e-3


@given(seed=st.integers(0, 1000), groups=st.sampled_from([GROUPS, ALL_TURNED, (FrequencyGroup(8, 5),)]))
def test_bases_are_orthogonal_and_ordered_by_energy(seed, groups):
    keys_TK = random_keys(seed)
    basis = rotary_basis(covariance(keys_TK), groups, SHAPE)
    one = torch.eye(SHAPE.key_dim, dtype=torch.float64)
    torch.testing.assert_close(basis.rows_KK @ basis.rows_KK.T, one, rtol=0, atol=1e-10)
    assert basis.rotary_dim == 2 * sum(group.pairs for group in groups)
    energy_K = (keys_TK @ basis.rows_KK.T).square().mean(dim=0)
    pair_energy = energy_K.view(-1, 2).sum(dim=1).tolist()
    turned, still = 0, basis.rotary_dim // 2
    for group in groups:
        n_still = group.width * SHAPE.n_kv_heads - group.pairs
        of_group = pair_energy[turned : turned + group.pairs] + pair_energy[still : still + n_still]
        assert of_group == sorted(of_group, reverse=True)
        turned, still = turned + group.pairs, still + n_still


def test_equal_covariances_give_equal_bases_whatever_phase_the_solver_returns():
    covariance_ZZ = covariance(random_keys(3))
    twist_Z = torch.exp(2j * torch.pi * torch.rand(len(covariance_ZZ), generator=generator(0), dtype=torch.float64))
    basis = rotary_basis(covariance_ZZ, GROUPS, SHAPE)
    again = rotary_basis(covariance_ZZ.clone(), GROUPS, SHAPE)
    assert torch.equal(basis.rows_KK, again.rows_KK)
    # A covariance of twisted coordinates has twisted vectors; the largest entry of each stays real and positive.
    twisted = rotary_basis(twist_Z[:, None] * covariance_ZZ * twist_Z.conj(), GROUPS, SHAPE)
    for rows_KK in (basis.rows_KK, twisted.rows_KK):
        real_row_ZK = rows_KK[::2].view(-1, SHAPE.n_kv_heads, 2, SHAPE.head_dim // 2)
        rows_ZZ = torch.complex(real_row_ZK[:, :, 0], -real_row_ZK[:, :, 1]).flatten(1)
        largest = rows_ZZ[torch.arange(len(rows_ZZ)), rows_ZZ.abs().argmax(dim=1)]
        assert (largest.real > 0).all()
        assert largest.imag.abs().max() < 1e-12


def test_a_group_turns_at_the_mean_of_its_frequencies():
    frequencies = group_frequencies(
        [4.0, 3.0, 2.0, 1.0], (FrequencyGroup(1, 2), FrequencyGroup(2, 1), FrequencyGroup(1, 0))
    )
    assert frequencies == [4.0, 4.0, 2.5]


@pytest.mark.parametrize("groups", [(FrequencyGroup(7, 1),), (FrequencyGroup(7, 1), FrequencyGroup(1, 4))])
def test_groups_must_fit(groups):
    with pytest.raises(AssertionError):
        rotary_basis(covariance(random_keys(0)), groups, SHAPE)
