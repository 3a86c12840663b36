"""The file of what training changed."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from irminsul.checkpoints.deepseek_form import LayerRecipe
from irminsul.checkpoints.delta import ATTENTION_MATRICES, MLP_MATRICES, NORMS, Delta, LayerDelta, LowRankDelta
from irminsul.errors import CheckpointError


def low_rank(rng, n_out=40, n_in=30, rank=6):
    up, down = rng.normal(size=(n_out, rank)) * 10.0 ** rng.uniform(-2, 0, rank), rng.normal(size=(rank, n_in))
    return up, down


def small_delta():
    rng = np.random.default_rng(0)

    def layer():
        z = rng.normal(size=(4, 2)).astype(np.float32) + 1j * rng.normal(size=(4, 2)).astype(np.float32)
        return LayerDelta(
            LayerRecipe(np.array([0, 1, 1, 0]), z.astype(complex), z.T.astype(complex), np.array([[1.0, -127.0, 0.0]])),
            {name: rng.normal(size=5).astype(np.float32) for name in NORMS},
            {
                name: LowRankDelta.quantise(*low_rank(rng), np.random.default_rng(1))
                for name in (*ATTENTION_MATRICES, *MLP_MATRICES)
            },
        )

    return Delta((layer(), layer()), rng.normal(size=5).astype(np.float32), 800.0)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "delta.safetensors"
    save_file(small_delta().tensors(), path, metadata={"rope_theta": "800.0"})
    return path


def test_rounding_to_8_bits_keeps_the_product_to_about_a_per_cent():
    rng = np.random.default_rng(3)
    up, down = low_rank(rng)
    rounded = LowRankDelta.quantise(up, down, rng)
    assert rounded.up.dtype == rounded.down.dtype == np.int8
    error = np.linalg.norm(rounded.matrix() - up @ down) / np.linalg.norm(up @ down)
    assert 0 < error < 0.02


def test_what_was_not_trained_changes_nothing():
    _, down = low_rank(np.random.default_rng(3))
    rounded = LowRankDelta.quantise(np.zeros((40, 6)), down, np.random.default_rng(0))
    assert not rounded.matrix().any()


def test_the_integer_product_does_not_depend_on_the_order_of_its_sums():
    rng = np.random.default_rng(4)
    rounded = LowRankDelta.quantise(*low_rank(rng, rank=20), rng)
    order = rng.permutation(rounded.up.shape[1])
    shuffled = LowRankDelta(rounded.up[:, order], rounded.up_scale, rounded.down[order], rounded.down_scale)
    np.testing.assert_array_equal(rounded.matrix(), shuffled.matrix())


def test_a_file_gives_back_what_was_written(file):
    written, read = small_delta(), Delta.read(file)
    assert read.rope_theta == 800.0
    assert len(read.layers) == 2
    assert read.tensors().keys() == written.tensors().keys()
    for name, value in written.tensors().items():
        np.testing.assert_array_equal(read.tensors()[name], value)
        assert read.tensors()[name].dtype == value.dtype


@pytest.mark.parametrize("damage", ["cut", "missing", "tensor", "name", "metadata", "no_metadata"])
def test_a_damaged_file_is_refused_with_its_name(file, damage):
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "tensor":
        tensors = small_delta().tensors()
        del tensors["layers.1.q_proj.up"]
        save_file(tensors, file, metadata={"rope_theta": "800.0"})
    elif damage == "name":
        save_file({"layers.": np.zeros(1), "norm": np.zeros(1)}, file, metadata={"rope_theta": "800.0"})
    elif damage == "metadata":
        save_file(small_delta().tensors(), file, metadata={"rope_theta": "fast"})
    else:
        save_file(small_delta().tensors(), file)
    with pytest.raises(CheckpointError, match=r"delta\.safetensors is not a delta file: "):
        Delta.read(file)
