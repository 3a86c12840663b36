"""What the fit promises of a recipe, whatever the statistics are."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import TINY

from irminsul.checkpoints.deepseek_form import _reflected
from training.fit import _assign_pairs, _mean_turns, _reflections, rope_frequencies
from training.start import find_recipes


@pytest.fixture
def fitted(original, text):
    return find_recipes(original, text.watched(TINY), TINY)


@given(n_left_out=st.integers(1, 6), width=st.integers(7, 20), seed=st.integers(0, 99))
def test_reflections_send_what_is_left_out_to_the_end(n_left_out, width, seed):
    generator = torch.Generator().manual_seed(seed)
    rows_XE = torch.linalg.qr(torch.randn(width, n_left_out, generator=generator, dtype=torch.float64))[0].T
    reflections_XE = _reflections(rows_XE)
    assert reflections_XE.abs().max() == 127
    assert (reflections_XE == reflections_XE.round()).all()
    moved_XE = _reflected(rows_XE.numpy(), reflections_XE.numpy())
    # Rounding to 8 bits leaves a per cent or so in the kept coordinates.
    kept = np.square(moved_XE[:, : width - n_left_out]).sum() / n_left_out
    assert kept < 0.002
    np.testing.assert_allclose(np.square(moved_XE).sum(-1), 1, atol=1e-9)


@given(n_coordinates=st.integers(3, 5), seed=st.integers(0, 99))
def test_pairs_go_where_least_is_wrong(n_coordinates, seed):
    wrong_ZP = torch.rand(n_coordinates, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    order_Z, place_Z = _assign_pairs(wrong_ZP)
    assert sorted(order_Z.tolist()) == list(range(n_coordinates))
    assert place_Z.tolist() == [0, 1] + [2] * (n_coordinates - 2)
    everywhere = [
        sum(wrong_ZP[z, p] for z, p in zip(places, (0, 1), strict=True))
        + sum(wrong_ZP[z, 2] for z in range(n_coordinates) if z not in places)
        for places in itertools.permutations(range(n_coordinates), 2)
    ]
    assert wrong_ZP[order_Z, place_Z].sum().item() == pytest.approx(min(everywhere).item())


def test_a_turn_at_the_same_frequency_needs_no_correction():
    distance_HD = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], dtype=torch.float64)
    turns_HZP = _mean_turns(distance_HD, torch.tensor([0.3, 1.0]), torch.tensor([0.3, 0.0]), even_share=0.0)
    torch.testing.assert_close(turns_HZP[:, 0, 0], torch.ones(2, dtype=torch.complex128))
    torch.testing.assert_close(turns_HZP[1, 1, 1], torch.exp(torch.tensor(2j, dtype=torch.complex128)))
    even_HZP = _mean_turns(distance_HD, torch.tensor([1.0]), torch.tensor([0.0]), even_share=1.0)
    torch.testing.assert_close(even_HZP[0], even_HZP[1])


def test_frequencies_are_those_of_every_engine():
    expected = [1.0, 8000 ** (-1 / 2)]
    np.testing.assert_allclose(rope_frequencies(8000.0, 4).numpy(), expected)


def test_every_coordinate_is_used_once_in_a_unitary_basis(fitted):
    assert len(fitted) == 2
    for recipe, _ in fitted:
        for frequency in range(8):
            basis = recipe.basis_ZG[recipe.frequency_Z == frequency]
            np.testing.assert_allclose(basis @ basis.conj().T, np.eye(2), atol=1e-6)
        np.testing.assert_allclose(np.abs(recipe.turn_HZ), 1, atol=1e-6)
        assert recipe.basis_ZG.astype(np.complex64).astype(complex).tolist() == recipe.basis_ZG.tolist()


def test_the_latent_keeps_what_standing_keys_and_values_read(fitted, original):
    """In a rewriting without turning or training, they come back from the latent as they were."""
    recipe, latent_scale = fitted[0]
    block = original.model.layers[0]
    values = (block.self_attn.v_proj.weight * block.input_layernorm.weight).detach().double().numpy()
    moved = _reflected(values, recipe.reflections_XE)
    assert np.linalg.norm(moved[:, 40:]) < 0.03 * np.linalg.norm(moved)
    # The states have mean square 1 in 48 coordinates, and little of it in those left out.
    assert 1.0 < latent_scale < (48 / 40) ** 0.5
