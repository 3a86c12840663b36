"""SmolLM2 as multi-head latent attention whose logits are the original's: the checkpoint ``smollm2-lossless``.

All keys of a token, G * D values, become the rotary part of the row and are turned; the values become its latent part.
Every query head finds its own key head because its other coordinates are zeros. Nothing is compressed, so it is no
good row; it tests engines, and stands for the original wherever MLA is expected.

RoPE turns the pair (k[j], k[j + D/2]) of a head; a row keeps its pairs side by side. So keys and queries are reordered.

Shape letters: E hidden size, H query heads, G key heads, D head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from irminsul.checkpoints.grouped_query import AttentionShape, shape_of
from irminsul.engine.config import OWN_MODEL_TYPE


@torch.inference_mode()
def tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by DeepSeek's names, of the dtype of the model; only the attention's change."""
    named = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if ".self_attn." not in name and name != "lm_head.weight"
    }
    for at, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{at}.self_attn."
        old = layer.self_attn
        new = rewrite_attention(old.q_proj.weight, old.k_proj.weight, old.v_proj.weight, shape_of(model))
        named |= {f"{prefix}{name}.weight": tensor.contiguous() for name, tensor in new.items()}
        named[f"{prefix}o_proj.weight"] = old.o_proj.weight.contiguous()
    return named


def config(model: LlamaForCausalLM) -> dict[str, Any]:
    """Return the checkpoint's config.json."""
    source, shape = model.config, shape_of(model)
    return {
        "model_type": OWN_MODEL_TYPE,
        "dtype": "float32",
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "hidden_act": source.hidden_act,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": shape.n_heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.key_dim,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": shape.key_dim,
        "v_head_dim": shape.head_dim,
        "latent_norm": False,
        # float32 values: the original computes its angles from these.
        "rope_inv_freq": [float(frequency) for frequency in model.model.rotary_emb.inv_freq] * shape.n_kv_heads,
        "rope_interleave": True,
        # Scores are those of the original heads, whatever the width of the rewritten query.
        "softmax_scale": shape.head_dim**-0.5,
        "rms_norm_eps": source.rms_norm_eps,
        "max_position_embeddings": source.max_position_embeddings,
        "tie_word_embeddings": source.tie_word_embeddings,
        "attention_bias": source.attention_bias,
        "mlp_bias": source.mlp_bias,
    }


def rewrite_attention(
    query_proj: Tensor, key_proj: Tensor, value_proj: Tensor, shape: AttentionShape
) -> dict[str, Tensor]:
    """Write the projections of one layer as DeepSeek's.

    Args:
        query_proj: [H * D, E], heads half-split.
        key_proj: [G * D, E], heads half-split.
        value_proj: [G * D, E].
        shape: of the attention.

    Returns:
        By DeepSeek's names: ``q_proj`` [H * G * D, E]; ``kv_a_proj_with_mqa`` [2 * G * D, E], rows [values | keys];
        ``kv_b_proj`` [H * D, G * D], which copies the values of each head's key head.
    """
    keys = _paired(key_proj, shape.n_kv_heads).flatten(0, 1)
    queries_HDE = _paired(query_proj, shape.n_heads)
    wide_HGDE = queries_HDE.new_zeros(shape.n_heads, shape.n_kv_heads, *queries_HDE.shape[1:])
    heads = torch.arange(shape.n_heads)
    wide_HGDE[heads, heads // shape.group_size] = queries_HDE
    one_GDX = torch.eye(shape.key_dim, dtype=value_proj.dtype).view(shape.n_kv_heads, shape.head_dim, -1)
    return {
        "q_proj": wide_HGDE.flatten(0, 2),
        "kv_a_proj_with_mqa": torch.cat([value_proj, keys]),
        "kv_b_proj": one_GDX.repeat_interleave(shape.group_size, dim=0).flatten(0, 1),
    }


def _paired(proj: Tensor, n_heads: int) -> Tensor:
    """Reorder half-split heads so that pairs are neighbours: [heads, D, E]."""
    halves = proj.view(n_heads, 2, -1, proj.shape[-1])
    return halves.transpose(1, 2).flatten(1, 2)
