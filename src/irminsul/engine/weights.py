"""Tensors of a checkpoint, under the names of the released DeepSeek checkpoints, in safetensors files.

`expected_tensors` lists every tensor a configuration asks for; `Checkpoint.open` compares that list with the headers of
the files before anything is read. Only safetensors files are opened: a pickle can run code.

Shape letters: E hidden size, I intermediate size, H heads, N/R/V the non-rotary, rotary and value parts of a head,
C latent, X experts.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from irminsul.engine.config import ModelConfig, MoeConfig, Router
from irminsul.errors import CheckpointError

Shape = tuple[int, ...]

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_LAYER_PATTERN = re.compile(r"model\.layers\.(\d+)\.")


def expected_tensors(config: ModelConfig, *, packed_experts: bool = False) -> dict[str, Shape]:
    """Name and shape of every tensor of a checkpoint.

    Args:
        config: the model.
        packed_experts: all experts of a layer in two tensors, as transformers keeps them in memory and can save them,
            rather than one by one, as DeepSeek releases them and transformers saves them by default.
    """
    return dict(_tensors(config, packed_experts=packed_experts))


def _tensors(config: ModelConfig, *, packed_experts: bool) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (config.hidden_size,)
        yield prefix + "post_attention_layernorm.weight", (config.hidden_size,)
        yield from _attention_tensors(config, prefix + "self_attn.")
        if config.moe is not None and config.is_moe_layer(layer):
            yield from _moe_tensors(config, config.moe, prefix + "mlp.", packed=packed_experts)
        else:
            yield from _mlp_tensors(config, prefix + "mlp.", config.intermediate_size)


def _attention_tensors(config: ModelConfig, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, heads, query_width = config.hidden_size, config.n_heads, config.n_heads * config.qk_head_dim
    if config.q_lora_rank is None:
        yield prefix + "q_proj.weight", (query_width, hidden)
    else:
        yield from _linear(prefix + "q_a_proj", config.q_lora_rank, hidden, bias=config.attention_bias)
        yield prefix + "q_a_layernorm.weight", (config.q_lora_rank,)
        yield prefix + "q_b_proj.weight", (query_width, config.q_lora_rank)
    row_width = config.kv_lora_rank + config.qk_rope_head_dim
    yield from _linear(prefix + "kv_a_proj_with_mqa", row_width, hidden, bias=config.attention_bias)
    if config.latent_norm:
        yield prefix + "kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield prefix + "kv_b_proj.weight", (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank)
    yield from _linear(prefix + "o_proj", hidden, heads * config.v_head_dim, bias=config.attention_bias)


def _mlp_tensors(config: ModelConfig, prefix: str, intermediate_size: int) -> Iterator[tuple[str, Shape]]:
    yield from _linear(prefix + "gate_proj", intermediate_size, config.hidden_size, bias=config.mlp_bias)
    yield from _linear(prefix + "up_proj", intermediate_size, config.hidden_size, bias=config.mlp_bias)
    yield from _linear(prefix + "down_proj", config.hidden_size, intermediate_size, bias=config.mlp_bias)


def _moe_tensors(config: ModelConfig, moe: MoeConfig, prefix: str, *, packed: bool) -> Iterator[tuple[str, Shape]]:
    hidden, intermediate = config.hidden_size, moe.intermediate_size
    yield prefix + "gate.weight", (moe.n_routed, hidden)
    if moe.router is Router.NOAUX_TC:
        yield prefix + "gate.e_score_correction_bias", (moe.n_routed,)
    yield from _mlp_tensors(config, prefix + "shared_experts.", moe.n_shared * intermediate)
    if packed:
        yield prefix + "experts.gate_up_proj", (moe.n_routed, 2 * intermediate, hidden)
        yield prefix + "experts.down_proj", (moe.n_routed, hidden, intermediate)
        return
    for expert in range(moe.n_routed):
        yield f"{prefix}experts.{expert}.gate_proj.weight", (intermediate, hidden)
        yield f"{prefix}experts.{expert}.up_proj.weight", (intermediate, hidden)
        yield f"{prefix}experts.{expert}.down_proj.weight", (hidden, intermediate)


def _linear(name: str, n_out: int, n_in: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield name + ".weight", (n_out, n_in)
    if bias:
        yield name + ".bias", (n_out,)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint directory, checked by name, shape and dtype, not yet read."""

    file_of: Mapping[str, Any]
    """Open safetensors file of each tensor."""
    device: torch.device
    dtype: torch.dtype
    packed_experts: bool

    @classmethod
    def open(cls, path: str | Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> "Checkpoint":
        """Open ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.

        Args:
            path: checkpoint directory.
            config: what the checkpoint must hold. Multi-token prediction layers are ignored, and so are rotary
                tables and the output matrix of tied embeddings.
            device: where tensors are put.
            dtype: what tensors are converted to.

        Raises:
            CheckpointError: a file is missing or damaged; a tensor is missing, unknown, of the wrong shape, or not of
                a floating point type.
        """
        file_of = _open_files(Path(path))
        packed = any(name.endswith("mlp.experts.gate_up_proj") for name in file_of)
        expected = set()
        # One by one: a config.json may ask for more tensors than could be listed, but not for more than are there.
        for name, shape in _tensors(config, packed_experts=packed):
            _check_tensor(name, shape, file_of)
            expected.add(name)
        unknown = [name for name in file_of if name not in expected and not _is_ignored(name, config)]
        if unknown:
            raise CheckpointError(f"the checkpoint holds {unknown[0]}, which {config.model_type} does not have")
        return cls(file_of, device, dtype, packed)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read one tensor as this checkpoint's dtype, or another.

        Raises:
            CheckpointError: it cannot be read, or holds what is no number, or none in that dtype.
        """
        try:
            stored: torch.Tensor = self.file_of[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} cannot be read: {error}") from error
        tensor = stored.to(device=self.device, dtype=dtype or self.dtype)
        # The smallest and the largest value are NaN if any is.
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise CheckpointError(f"tensor {name} holds NaN or infinity in {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    def optional_tensor(self, name: str, *, present: bool) -> torch.Tensor | None:
        """Read a tensor that only some configurations have."""
        return self.tensor(name) if present else None


def _open_files(path: Path) -> dict[str, Any]:
    """Map each tensor name to its open file."""
    index_path = path / _INDEX_NAME
    if index_path.exists():
        shard_of = _read_weight_map(index_path)
        files = {name: _open_file(path / name) for name in sorted(set(shard_of.values()))}
        return {tensor: file for file in files.values() for tensor in file.keys()}  # noqa: SIM118 - not a mapping
    if not (path / _SINGLE_NAME).exists():
        raise CheckpointError(
            f"{path} holds neither {_SINGLE_NAME} nor {_INDEX_NAME} (weights in pickle files are not read)"
        )
    file = _open_file(path / _SINGLE_NAME)
    return dict.fromkeys(file.keys(), file)


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index_path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index_path} is not a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_path} is not a safetensors index: weight_map is no object")
    for name in weight_map.values():
        # A shard lies beside its index; anything else could name a file outside the checkpoint.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index_path} names a shard outside its directory: {name!r}")
    return weight_map


def _open_file(path: Path) -> Any:  # noqa: ANN401 - safetensors has no public type for it
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_tensor(name: str, shape: Shape, file_of: Mapping[str, Any]) -> None:
    file = file_of.get(name)
    if file is None:
        raise CheckpointError(f"the checkpoint lacks tensor {name}, of shape {shape}")
    header = file.get_slice(name)
    stored_shape = tuple(header.get_shape())
    if stored_shape != shape:
        raise CheckpointError(f"tensor {name} has shape {stored_shape}; config.json asks for {shape}")
    if header.get_dtype() not in _FLOAT_DTYPES:
        raise CheckpointError(f"tensor {name} has dtype {header.get_dtype()}; supported: {', '.join(_FLOAT_DTYPES)}")


def _is_ignored(name: str, config: ModelConfig) -> bool:
    if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
        return True
    layer = _LAYER_PATTERN.match(name)
    return layer is not None and 0 <= int(layer[1]) - config.n_layers < config.n_mtp_layers
