"""What is counted while the original runs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.watch import _diagonal_sums, collect

SEQUENCES = [torch.arange(3, 15), torch.arange(40, 49)]


@given(n_heads=st.integers(1, 3), n_tokens=st.integers(1, 9), seed=st.integers(0, 99))
def test_weights_are_added_up_along_diagonals(n_heads, n_tokens, seed):
    weights = torch.rand(n_heads, n_tokens, n_tokens, generator=torch.Generator().manual_seed(seed)).tril()
    expected = torch.stack([weights.diagonal(-distance, 1, 2).sum(-1) for distance in range(n_tokens)], dim=1)
    torch.testing.assert_close(_diagonal_sums(weights), expected)


def test_weights_above_the_diagonal_do_not_count():
    weights = torch.ones(1, 4, 4)
    torch.testing.assert_close(_diagonal_sums(weights), torch.tensor([[4.0, 3.0, 2.0, 1.0]]))


def test_keys_queries_and_states_are_those_of_the_model(original):
    statistics = collect(original, SEQUENCES, 16)
    states_TE = torch.cat([original.model.embed_tokens(ids) for ids in SEQUENCES]).double()
    norm = original.model.layers[0].input_layernorm
    plain_TE = states_TE * torch.rsqrt(states_TE.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    torch.testing.assert_close(statistics.hidden_covariance_LEE[0], plain_TE.T @ plain_TE / 21, rtol=1e-4, atol=1e-4)
    attention, normed_TE = original.model.layers[0].self_attn, (plain_TE * norm.weight.double())
    keys_TGD = (normed_TE @ attention.k_proj.weight.double().T).unflatten(-1, (2, 16)).detach().numpy()
    queries_THD = (normed_TE @ attention.q_proj.weight.double().T).unflatten(-1, (4, 16)).detach().numpy()
    z_TGF = keys_TGD[..., :8] + 1j * keys_TGD[..., 8:]
    covariance = np.einsum("tgf,thf->fgh", z_TGF, z_TGF.conj()) / 21
    np.testing.assert_allclose(statistics.key_covariance_LFGG[0], covariance, rtol=1e-3, atol=1e-3)
    energy = (queries_THD[..., :8] ** 2 + queries_THD[..., 8:] ** 2).mean(0)
    np.testing.assert_allclose(statistics.query_energy_LHF[0], energy, rtol=1e-3)


def test_distances_are_shares_and_the_first_token_is_left_out(original):
    statistics = collect(original, SEQUENCES, 16)
    assert statistics.distance_LHD.shape == (2, 4, 16)
    torch.testing.assert_close(statistics.distance_LHD.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    # Of 12 tokens the last is 11 behind the first, which does not count.
    assert not statistics.distance_LHD[:, :, 11:].any()
    assert statistics.distance_LHD[:, :, 10].all()


def test_a_model_that_does_not_show_its_attention_cannot_be_watched(original):
    original.set_attn_implementation("sdpa")
    with pytest.raises(AssertionError, match="attn_implementation='eager'"):
        collect(original, SEQUENCES, 16)
