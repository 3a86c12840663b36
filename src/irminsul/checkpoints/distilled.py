"""SmolLM2-135M-Instruct in the strict format of DeepSeek-V2, distilled: the checkpoint ``smollm2-mla``.

The packaged original is rewritten (`deepseek_form`), what training changed is added (`delta`), and the result is
rounded to bfloat16. Every step has one result on every machine, which `digest` of the tensors proves.
"""

import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from irminsul.checkpoints.build_directory import file_sha256
from irminsul.checkpoints.deepseek_form import Array, DeepseekShape, rewrite_attention, widen_values
from irminsul.checkpoints.delta import MLP_MATRICES, Delta, LayerDelta
from irminsul.checkpoints.grouped_query import AttentionShape, shape_of
from irminsul.errors import CheckpointError

SHAPE = DeepseekShape()
VALUE_DIM = 128
"""Of a head; the original's 64 and zeros, because engines have kernels for 192 and 128 and not for 192 and 64."""
NAME = "smollm2_mla.safetensors"
"""The file of the difference."""
SHA256 = "ab3697b30d7c595e0eb73cdcb2934fbbcaa06bbfe149a5f744cc2ce7f1638739"
"""Of that file."""
DIGEST = "f4f4e23253446b751412646a4afedf286a1d87d8c3fd8d11a65d053f8d4ca5eb"
"""`digest` of the tensors that the packaged original and the file above give."""


def read_delta() -> Delta:
    """Read the difference that ships with the package; CheckpointError if it is not the file that shipped."""
    with resources.as_file(resources.files("irminsul.checkpoints") / "data" / NAME) as path:
        try:
            found = file_sha256(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if found != SHA256:
            raise CheckpointError(f"{path} has SHA-256 {found}, but {SHA256} was expected; install irminsul again")
        return Delta.read(path)


@torch.inference_mode()
def tensors(model: LlamaForCausalLM, delta: Delta) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by DeepSeek's names, bfloat16."""
    named = {
        "model.embed_tokens.weight": model.model.embed_tokens.weight.detach(),
        "model.norm.weight": torch.from_numpy(delta.norm),
    }
    for at, (layer, change) in enumerate(zip(model.model.layers, delta.layers, strict=True)):
        prefix = f"model.layers.{at}."
        for name, value in _layer(layer, change, shape_of(model)).items():
            named[f"{prefix}{name}.weight"] = torch.from_numpy(np.ascontiguousarray(value))
    return {name: tensor.to(torch.float32).to(torch.bfloat16) for name, tensor in named.items()}


def config(model: LlamaForCausalLM, delta: Delta) -> dict[str, Any]:
    """Return the checkpoint's config.json, of the keys that transformers' and SGLang's DeepSeek-V2 read."""
    source, shape = model.config, shape_of(model)
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "torch_dtype": "bfloat16",
        "vocab_size": source.vocab_size,
        "hidden_size": source.hidden_size,
        "intermediate_size": source.intermediate_size,
        "hidden_act": source.hidden_act,
        "num_hidden_layers": source.num_hidden_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_heads,
        "q_lora_rank": None,
        "kv_lora_rank": SHAPE.latent,
        "qk_nope_head_dim": SHAPE.nope_dim,
        "qk_rope_head_dim": SHAPE.rope_dim,
        "v_head_dim": VALUE_DIM,
        "rope_theta": delta.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": source.rms_norm_eps,
        "max_position_embeddings": source.max_position_embeddings,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        # All layers are dense. The format still wants to know what its experts would be; these are V2-Lite's.
        "first_k_dense_replace": source.num_hidden_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }


def check(named: Mapping[str, Tensor]) -> None:
    """Compare tensors with `DIGEST`; CheckpointError if they are others."""
    found = digest(named)
    if found != DIGEST:
        raise CheckpointError(f"the tensors of smollm2-mla have digest {found}, but {DIGEST} was expected")


def digest(named: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors in the order of their names: name, shape and bytes of each."""
    sha = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _layer(layer: Any, change: LayerDelta, shape: AttentionShape) -> dict[str, Array]:  # noqa: ANN401
    """Return the tensors of one Llama layer in the new format, by name inside the layer, float64."""
    attention = layer.self_attn
    written = rewrite_attention(
        query_proj=_float64(attention.q_proj),
        key_proj=_float64(attention.k_proj),
        value_proj=_float64(attention.v_proj),
        out_proj=_float64(attention.o_proj),
        norm_E=_float64(layer.input_layernorm),
        recipe=change.recipe,
        old=shape,
        new=SHAPE,
    )
    trained = {name: matrix + change.matrices[name].matrix() for name, matrix in vars(written).items()}
    trained["kv_b_proj"], trained["o_proj"] = widen_values(
        trained["kv_b_proj"], trained["o_proj"], SHAPE.nope_dim, shape.n_heads, VALUE_DIM
    )
    mlp = {name: _float64(getattr(layer.mlp, name)) + change.matrices[name].matrix() for name in MLP_MATRICES}
    norms = {name: change.norms[name] for name in ("input_layernorm", "post_attention_layernorm")}
    return (
        {f"self_attn.{name}": matrix for name, matrix in trained.items()}
        | {"self_attn.kv_a_layernorm": change.norms["kv_a_layernorm"]}
        | {f"mlp.{name}": matrix for name, matrix in mlp.items()}
        | norms
    )


def _float64(module: Any) -> Array:  # noqa: ANN401
    weight: Array = module.weight.detach().double().numpy()
    return weight
