"""The rewriting in DeepSeek's format, against the original attention, where it must be exact."""

import hashlib

import numpy as np
import pytest

from irminsul.checkpoints.deepseek_form import DeepseekShape, LayerRecipe, rewrite_attention, widen_values
from irminsul.checkpoints.grouped_query import AttentionShape

OLD = AttentionShape(n_heads=4, n_kv_heads=2, head_dim=8)
HIDDEN, N_FREQUENCIES, N_COMPLEX = 24, 4, 8
INV_FREQ_F = 0.7 ** np.arange(N_FREQUENCIES)


def projections(rng):
    shapes = {
        "query_proj": (OLD.n_heads * OLD.head_dim, HIDDEN),
        "key_proj": (OLD.key_dim, HIDDEN),
        "value_proj": (OLD.key_dim, HIDDEN),
        "out_proj": (HIDDEN, OLD.n_heads * OLD.head_dim),
    }
    return {name: rng.integers(-8, 9, shape) / 8 for name, shape in shapes.items()}


def recipe(rng, *, n_left_out):
    """Frequencies in a shuffled order, a unitary basis for each, and reflections of small integers."""
    order_Z = rng.permutation(N_COMPLEX)
    bases = [np.linalg.qr(rng.normal(size=(2, 2)) + 1j * rng.normal(size=(2, 2)))[0] for _ in range(N_FREQUENCIES)]
    return LayerRecipe(
        frequency_Z=np.repeat(np.arange(N_FREQUENCIES), OLD.n_kv_heads)[order_Z],
        basis_ZG=np.concatenate(bases)[order_Z],
        turn_HZ=np.ones((OLD.n_heads, N_COMPLEX), dtype=complex),
        reflections_XE=rng.integers(-9, 10, (n_left_out, HIDDEN)).astype(float),
    )


def rotated(pairs_X, angles):
    return (pairs_X[0::2] + 1j * pairs_X[1::2]) * np.exp(1j * angles)


def original_score(weights, x, y, head, distance):
    query = (weights["query_proj"] @ x).reshape(OLD.n_heads, 2, -1)[head]
    key = (weights["key_proj"] @ y).reshape(OLD.n_kv_heads, 2, -1)[head // 2]
    product = np.conj(query[0] + 1j * query[1]) * (key[0] + 1j * key[1])
    return (product * np.exp(-1j * INV_FREQ_F * distance)).sum().real / np.sqrt(OLD.head_dim)


@pytest.mark.parametrize("distance", [0, 1, 50])
def test_where_all_coordinates_are_turned_no_score_changes(distance):
    rng = np.random.default_rng(1)
    weights, fitted, norm_E = projections(rng), recipe(rng, n_left_out=8), rng.uniform(0.5, 2, HIDDEN)
    new = DeepseekShape(latent=16, nope_dim=0, rope_dim=2 * N_COMPLEX)
    written = rewrite_attention(**weights, norm_E=norm_E, recipe=fitted, old=OLD, new=new)
    x, y = rng.normal(size=(2, HIDDEN))
    queries_HR = (written.q_proj @ x).reshape(OLD.n_heads, -1)
    key_R = written.kv_a_proj_with_mqa[new.latent :] @ y
    angles = INV_FREQ_F[fitted.frequency_Z]
    for head in range(OLD.n_heads):
        score = (np.conj(rotated(queries_HR[head], 0 * angles)) * rotated(key_R, -angles * distance)).sum().real
        expected = original_score(weights, x, y, head, distance)
        assert score / np.sqrt(new.rope_dim) == pytest.approx(expected, abs=1e-9)


def test_standing_coordinates_give_the_score_of_distance_zero_and_values_are_the_originals():
    rng = np.random.default_rng(2)
    weights, fitted, norm_E = projections(rng), recipe(rng, n_left_out=0), rng.uniform(0.5, 2, HIDDEN)
    new = DeepseekShape(latent=HIDDEN, nope_dim=10, rope_dim=6)  # five of eight coordinates stand
    written = rewrite_attention(**weights, norm_E=norm_E, recipe=fitted, old=OLD, new=new)
    x, y = rng.normal(size=(2, HIDDEN))
    row = written.kv_a_proj_with_mqa @ y
    up_HX = (written.kv_b_proj @ row[: new.latent]).reshape(OLD.n_heads, -1)
    queries_HD = (written.q_proj @ x).reshape(OLD.n_heads, -1)
    values_GV = (weights["value_proj"] @ y).reshape(OLD.n_kv_heads, -1)
    for head in range(OLD.n_heads):
        key_D = np.concatenate([up_HX[head, : new.nope_dim], row[new.latent :]])
        score = queries_HD[head] @ key_D / np.sqrt(new.nope_dim + new.rope_dim)
        assert score == pytest.approx(original_score(weights, x, y, head, 0), abs=1e-9)
        np.testing.assert_allclose(up_HX[head, new.nope_dim :], values_GV[head // 2], atol=1e-9)


def test_the_latent_is_an_orthogonal_transform_of_the_normalised_state():
    rng = np.random.default_rng(3)
    weights, fitted, norm_E = projections(rng), recipe(rng, n_left_out=5), rng.uniform(0.5, 2, HIDDEN)
    new = DeepseekShape(latent=HIDDEN - 5, nope_dim=10, rope_dim=6)
    written = rewrite_attention(**weights, norm_E=norm_E, recipe=fitted, old=OLD, new=new)
    transform_CE = written.kv_a_proj_with_mqa[: new.latent] * norm_E
    np.testing.assert_allclose(transform_CE @ transform_CE.T, np.eye(new.latent), atol=1e-12)


def test_wider_values_change_no_result():
    rng = np.random.default_rng(4)
    kv_b, out = rng.normal(size=(4 * (6 + 8), 16)), rng.normal(size=(HIDDEN, 4 * 8))
    wide_kv_b, wide_out = widen_values(kv_b, out, nope_dim=6, n_heads=4, value_dim=20)
    latent = rng.normal(size=16)
    values = (kv_b @ latent).reshape(4, -1)[:, 6:]
    wide_values = (wide_kv_b @ latent).reshape(4, -1)[:, 6:]
    assert wide_values.shape == (4, 20)
    np.testing.assert_allclose(wide_out @ wide_values.ravel(), out @ values.ravel(), atol=1e-12)
    np.testing.assert_array_equal((wide_kv_b @ latent).reshape(4, -1)[:, :6], (kv_b @ latent).reshape(4, -1)[:, :6])


def test_the_result_has_the_same_bits_on_every_machine():
    """A golden digest: products and sums in a fixed order, from numbers that no library computed."""
    rng = np.random.default_rng(5)
    weights, norm_E = projections(rng), rng.integers(3, 12, HIDDEN) / 8
    fitted = LayerRecipe(
        frequency_Z=np.repeat(np.arange(N_FREQUENCIES), 2),
        basis_ZG=(rng.integers(-9, 10, (N_COMPLEX, 2)) + 1j * rng.integers(-9, 10, (N_COMPLEX, 2))) / 7,
        turn_HZ=(rng.integers(-9, 10, (4, N_COMPLEX)) + 1j * rng.integers(-9, 10, (4, N_COMPLEX))) / 7,
        reflections_XE=rng.integers(-127, 128, (6, HIDDEN)).astype(float),
    )
    new = DeepseekShape(latent=18, nope_dim=10, rope_dim=6)
    written = rewrite_attention(**weights, norm_E=norm_E, recipe=fitted, old=OLD, new=new)
    sha = hashlib.sha256()
    for name, value in sorted(vars(written).items()):
        sha.update(name.encode() + np.ascontiguousarray(value, dtype="<f8").tobytes())
    assert sha.hexdigest() == "697bfefda2b570d15fe03f4aa96af682d0eca5603287b74430e5af7cf7ca6e9c"
