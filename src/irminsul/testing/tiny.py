"""Tiny random checkpoints, written by transformers, in which attention and position matter.

transformers' own initialisation (standard deviation 0.02) makes attention nearly uniform: a test on it passes with
wrong positions or a wrong mask. Here each matrix keeps the size of what passes through it, and queries are made larger
so that the softmax is decided.
"""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from irminsul.errors import InputError

_QUERY_GAIN = 3.0
"""Standard deviation of attention scores, about."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
"""``mscale`` and ``mscale_all_dim`` differ, so that cos and sin carry a factor too."""


def write_tiny_checkpoint(
    path: str | Path,
    family: Literal["v2", "v3"] = "v3",
    *,
    moe: bool = True,
    q_lora: bool = False,
    yarn: bool = False,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Write a checkpoint of 3 layers, 4 heads, hidden size 64, rows of 32 + 16 values and 512 tokens.

    Args:
        path: directory to make; config.json, generation_config.json and model.safetensors are written to it.
        family: DeepSeek V2 (softmax router, greedy) or V3 (sigmoid router with correction bias and groups).
        moe: experts in all layers but the first; otherwise all layers are dense.
        q_lora: compressed queries.
        yarn: YaRN with a factor on cos and sin, in place of plain rotary frequencies.
        seed: of the weights; the same seed and arguments give the same weights.
        **overrides: further fields of transformers' configuration class, by its names.

    Returns:
        The directory.
    """
    path = Path(path)
    model = _new_model(family, _config_values(family, moe=moe, q_lora=q_lora, yarn=yarn) | overrides)
    _randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(path)
    return path


def _new_model(family: str, values: dict[str, Any]) -> Any:  # noqa: ANN401 - transformers is untyped
    if family == "v2":
        return DeepseekV2ForCausalLM(DeepseekV2Config(**values))
    if family == "v3":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**values))
    raise InputError(f"unknown family {family!r}; valid families: v2, v3")


def _config_values(family: str, *, moe: bool, q_lora: bool, yarn: bool) -> dict[str, Any]:
    n_layers = 3
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24 if q_lora else None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "first_k_dense_replace": 1 if moe else n_layers,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": dict(_YARN) if yarn else {"rope_type": "default", "rope_theta": 10000.0},
    }
    if family == "v2":
        values["topk_method"] = "greedy"
    return values


@torch.no_grad()
def _randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted((name, tensor) for name, tensor in tensors if "inv_freq" not in name):
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.copy_(1.0 + 0.2 * noise)
        elif tensor.dim() == 1:  # biases
            tensor.copy_(0.2 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(noise)
        else:
            gain = _QUERY_GAIN if "q_proj" in name or "q_b_proj" in name else 1.0
            tensor.copy_(noise * gain / math.sqrt(tensor.shape[-1]))
