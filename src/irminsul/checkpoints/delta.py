"""What training changed, in little space: matrices of low rank in 8-bit integers, and how each layer was rewritten.

A trained matrix is the rewritten original plus ``up @ down``, where ``up`` is [out, rank] with one scale a row and
``down`` [rank, in] with one scale a column. The product of the integers is exact in float64 in whatever order it is
summed, so that a matrix has the same bits on every machine.

The file is safetensors. Per layer: ``frequency`` uint8 [Z], ``basis`` float32 [Z, G, 2], ``turn`` float32 [H, Z, 2],
``reflections`` int8 [X, E] (see `deepseek_form`), the norms float32, and for each matrix ``NAME.up``, ``NAME.down``
(int8), ``NAME.up_scale``, ``NAME.down_scale`` (float32). Beside them: ``norm``, and the metadata ``rope_theta``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from irminsul.checkpoints.deepseek_form import Array, LayerRecipe
from irminsul.errors import CheckpointError

ATTENTION_MATRICES = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm", "kv_a_layernorm")


@dataclass(frozen=True, eq=False)
class LowRankDelta:
    """A change of a matrix [out, in]."""

    up: NDArray[np.int8]
    up_scale: NDArray[np.float32]
    down: NDArray[np.int8]
    down_scale: NDArray[np.float32]

    @classmethod
    def quantise(cls, up: Array, down: Array, rng: np.random.Generator) -> "LowRankDelta":
        """Round a product to 8-bit factors.

        Args:
            up: [out, rank].
            down: [rank, in].
            rng: chooses a rotation of the rank.

        The factors are balanced by a singular value decomposition, then rotated together, so that no column of ``up``
        is too small for the scale that it shares with the others.
        """
        columns, upper = np.linalg.qr(up)
        rows, lower = np.linalg.qr(down.T)
        left, strengths, right = np.linalg.svd(upper @ lower.T)
        rotation, _ = np.linalg.qr(rng.standard_normal(left.shape))
        roots = np.sqrt(strengths)
        rounded_up, up_scale = _rounded(columns @ (left * roots) @ rotation)
        rounded_down, down_scale = _rounded(rows @ (right.T * roots) @ rotation)
        return cls(rounded_up, up_scale, np.ascontiguousarray(rounded_down.T), down_scale)

    def matrix(self) -> Array:
        """Return the change, float64 [out, in]."""
        scale = self.up_scale.astype(np.float64)[:, None] * self.down_scale.astype(np.float64)
        product: Array = self.up.astype(np.float64) @ self.down.astype(np.float64)
        return product * scale


@dataclass(frozen=True, eq=False)
class LayerDelta:
    """One layer."""

    recipe: LayerRecipe
    norms: Mapping[str, NDArray[np.float32]]
    matrices: Mapping[str, LowRankDelta]


@dataclass(frozen=True, eq=False)
class Delta:
    """All that a checkpoint adds to the original."""

    layers: tuple[LayerDelta, ...]
    norm: NDArray[np.float32]
    """Of the hidden state behind the last layer."""
    rope_theta: float

    @classmethod
    def read(cls, path: Path) -> "Delta":
        """Read a file; CheckpointError if it is missing or damaged."""
        try:
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                metadata = file.metadata()
            n_layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
            return cls(
                layers=tuple(_read_layer(tensors, f"layers.{layer}.") for layer in range(n_layers)),
                norm=tensors["norm"],
                rope_theta=float(metadata["rope_theta"]),
            )
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not a delta file: {error}") from error

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """Return what the file holds, by name; contiguous, for safetensors writes the memory of an array as it lies."""
        tensors: dict[str, NDArray[np.generic]] = {"norm": self.norm}
        for at, layer in enumerate(self.layers):
            tensors |= {f"layers.{at}.{name}": value for name, value in _layer_tensors(layer).items()}
        return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def _rounded(rows: Array) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round each row to integers of at most 127 times its scale."""
    scale = (np.abs(rows).max(axis=1) / 127).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    return (rows / scale[:, None]).round().clip(-127, 127).astype(np.int8), scale


def _read_layer(tensors: Mapping[str, NDArray[np.generic]], prefix: str) -> LayerDelta:
    def floats(name: str) -> NDArray[np.float32]:
        return tensors[prefix + name].astype(np.float32, casting="safe")

    def integers(name: str) -> NDArray[np.int8]:
        return tensors[prefix + name].astype(np.int8, casting="safe")

    recipe = LayerRecipe(
        frequency_Z=tensors[prefix + "frequency"].astype(np.int64, casting="safe"),
        basis_ZG=_complex(floats("basis")),
        turn_HZ=_complex(floats("turn")),
        reflections_XE=integers("reflections").astype(np.float64),
    )
    matrices = {
        name: LowRankDelta(
            integers(name + ".up"), floats(name + ".up_scale"), integers(name + ".down"), floats(name + ".down_scale")
        )
        for name in (*ATTENTION_MATRICES, *MLP_MATRICES)
    }
    return LayerDelta(recipe, {name: floats(name) for name in NORMS}, matrices)


def _layer_tensors(layer: LayerDelta) -> dict[str, NDArray[np.generic]]:
    recipe = layer.recipe
    tensors: dict[str, NDArray[np.generic]] = {
        "frequency": recipe.frequency_Z.astype(np.uint8),
        "basis": _pairs(recipe.basis_ZG),
        "turn": _pairs(recipe.turn_HZ),
        "reflections": recipe.reflections_XE.astype(np.int8),
        **layer.norms,
    }
    for name, matrix in layer.matrices.items():
        tensors |= {f"{name}.{field}": value for field, value in vars(matrix).items()}
    return tensors


def _complex(pairs: NDArray[np.float32]) -> NDArray[np.complex128]:
    return pairs[..., 0].astype(np.float64) + 1j * pairs[..., 1].astype(np.float64)


def _pairs(z: NDArray[np.complex128]) -> NDArray[np.float32]:
    return np.stack([z.real, z.imag], axis=-1).astype(np.float32)
