"""Where training starts: how each layer is rewritten, and the student made of it."""

from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from irminsul.checkpoints.deepseek_form import LayerRecipe, rewrite_attention
from irminsul.checkpoints.delta import MLP_MATRICES
from irminsul.checkpoints.grouped_query import shape_of
from irminsul.errors import InputError
from training.config import TrainingConfig
from training.fit import FittedLayer, fit, rope_frequencies
from training.student import Dims, Student
from training.watch import collect

RECIPES_FILE = "recipes.npz"


def find_recipes(original: LlamaForCausalLM, sequences: Sequence[Tensor], config: TrainingConfig) -> list[FittedLayer]:
    """Watch the original on sequences (int64 [T]) and fit each layer; its attention is set to "eager" for that."""
    original.set_attn_implementation("eager")
    return fit(
        collect(original, sequences, config.watched_length),
        [_key_value_norm(block) for block in original.model.layers],
        original.model.rotary_emb.inv_freq.double().cpu(),
        config.theta,
        shape_of(original),
        config.shape,
        even_share=config.even_share,
    )


def save_recipes(fitted: Sequence[FittedLayer], folder: Path) -> None:
    """Write `RECIPES_FILE`."""
    arrays = {
        f"{at}.{name}": value
        for at, (recipe, latent_scale) in enumerate(fitted)
        for name, value in (vars(recipe) | {"latent_scale": np.float64(latent_scale)}).items()
    }
    np.savez(folder / RECIPES_FILE, **arrays)


def load_recipes(folder: Path) -> list[FittedLayer]:
    """Read `RECIPES_FILE`; InputError if it is missing or damaged."""
    try:
        with np.load(folder / RECIPES_FILE) as file:
            arrays = dict(file)
        n_layers = len({name.split(".")[0] for name in arrays})
        return [_fitted(arrays, at) for at in range(n_layers)]
    except (OSError, EOFError, BadZipFile, ValueError, KeyError) as error:
        raise InputError(f"{folder / RECIPES_FILE} cannot be read: {error}") from error


def make_student(original: LlamaForCausalLM, fitted: Sequence[FittedLayer], config: TrainingConfig) -> Student:
    """Rewrite the original (float32) by recipes, nothing trained yet; the student is on the same device, float32."""
    shape, model = shape_of(original), original.model
    return Student(
        model.embed_tokens.weight.detach(),
        [_layer_weights(original, at, layer, config) for at, layer in enumerate(fitted)],
        model.norm.weight.detach(),
        config.ranks,
        Dims(shape.n_heads, config.shape.latent, config.shape.nope_dim, config.shape.rope_dim, shape.head_dim),
        rope_frequencies(config.theta, config.shape.rope_dim),
        config.seed,
    ).to(original.device)


def _fitted(arrays: dict[str, NDArray[np.generic]], at: int) -> FittedLayer:
    names = ("frequency_Z", "basis_ZG", "turn_HZ", "reflections_XE")
    recipe = LayerRecipe(**{name: arrays[f"{at}.{name}"] for name in names})
    return FittedLayer(recipe, float(arrays[f"{at}.latent_scale"]))


def _key_value_norm(block: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    modules = (block.self_attn.k_proj, block.self_attn.v_proj, block.input_layernorm)
    return tuple(module.weight.detach().cpu() for module in modules)


def _layer_weights(
    original: LlamaForCausalLM, at: int, fitted: FittedLayer, config: TrainingConfig
) -> dict[str, Tensor]:
    """Return the fixed matrices and the norms of one layer by name, float32."""
    block = original.model.layers[at]
    attention = block.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, block.input_layernorm)
    written = rewrite_attention(
        *(module.weight.detach().double().cpu().numpy() for module in projections),
        fitted.recipe,
        shape_of(original),
        config.shape,
    )
    norms = ("input_layernorm", "post_attention_layernorm")
    return (
        {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in vars(written).items()}
        | {name: getattr(block.mlp, name).weight.detach().float() for name in MLP_MATRICES}
        | {name: getattr(block, name).weight.detach() for name in norms}
        | {"kv_a_layernorm": torch.full((config.shape.latent,), fitted.latent_scale)}
    )
