"""The model of the embedded engine: a DeepSeek-style decoder whose cache is a pool of MLA rows.

A forward computes any tokens of any requests, at any positions; what a token sees is the pool rows its span names. In
each layer the rows of all tokens are written to the pool first, then every token attends to the rows at its own and
all earlier positions of its request. The results are those of transformers' DeepseekV2ForCausalLM and
DeepseekV3ForCausalLM, whatever part of the rows was in the pool before.

Shape letters: T tokens of the batch, E hidden size, H heads, D query head, R rotary part, P rotary pairs, L layers,
S slots of the pool, W row width, V value head.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from irminsul.choices import parse_choice
from irminsul.engine.attention import AttentionForm, AttentionPlan, LatentAttention
from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.config import ModelConfig
from irminsul.engine.moe import Mlp, MoeMlp
from irminsul.engine.weights import Checkpoint
from irminsul.errors import InputError
from irminsul.layout import RowLayout
from irminsul.rope import AngleSource, Turn

__all__ = ["AttentionForm", "ForwardBatch", "MlaModel", "Span"]

_LORA_NORM_EPS = 1e-6
"""DeepSeek's norms on the compressed query and the latent ignore ``rms_norm_eps``."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """One decoder layer."""

    input_norm_E: Tensor
    query_and_row: Tensor
    """The first projection of the query (``q_a_proj``, or ``q_proj``) on top of ``kv_a_proj_with_mqa``: one product."""
    query_and_row_bias: Tensor | None
    query_norm: Tensor | None
    """``q_a_layernorm``, or None: the first projection gives the queries."""
    query_b: Tensor | None
    latent_norm: Tensor | None
    softmax_scale: float
    attention: LatentAttention
    out: Tensor
    """[E, H * V]."""
    out_bias: Tensor | None
    post_attention_norm_E: Tensor
    mlp: Mlp | MoeMlp
    latent_dim: int
    row_width: int
    norm_eps: float

    @classmethod
    def load(cls, checkpoint: Checkpoint, layer: int, config: ModelConfig) -> "_Layer":
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        has_query_lora = config.q_lora_rank is not None
        firsts = [attention + ("q_a_proj" if has_query_lora else "q_proj"), attention + "kv_a_proj_with_mqa"]
        mlp_class = MoeMlp if config.is_moe_layer(layer) else Mlp
        return cls(
            input_norm_E=checkpoint.tensor(prefix + "input_layernorm.weight"),
            query_and_row=torch.cat([checkpoint.tensor(name + ".weight") for name in firsts]),
            query_and_row_bias=_query_and_row_bias(checkpoint, attention, config),
            query_norm=checkpoint.optional_tensor(attention + "q_a_layernorm.weight", present=has_query_lora),
            query_b=checkpoint.optional_tensor(attention + "q_b_proj.weight", present=has_query_lora),
            latent_norm=checkpoint.optional_tensor(attention + "kv_a_layernorm.weight", present=config.latent_norm),
            softmax_scale=config.softmax_scale,
            attention=LatentAttention(
                checkpoint.tensor(attention + "kv_b_proj.weight"), config.n_heads, config.qk_nope_head_dim
            ),
            out=checkpoint.tensor(attention + "o_proj.weight"),
            out_bias=checkpoint.optional_tensor(attention + "o_proj.bias", present=config.attention_bias),
            post_attention_norm_E=checkpoint.tensor(prefix + "post_attention_layernorm.weight"),
            mlp=mlp_class.load(checkpoint, prefix + "mlp.", config),
            latent_dim=config.kv_lora_rank,
            row_width=config.kv_lora_rank + config.qk_rope_head_dim,
            norm_eps=config.rms_norm_eps,
        )

    def __call__(self, x_TE: Tensor, rows_SW: Tensor, step: "_Step") -> Tensor:
        """Write the rows of the batch, then attend and transform: [T, E] to [T, E]."""
        query_THD, row_TW = self._query_and_row(_rms_norm(x_TE, self.input_norm_E, self.norm_eps), step)
        rows_SW.index_copy_(0, step.out_slots_T, row_TW)
        attended_THV = self.attention(query_THD, rows_SW, step.plan)
        x_TE = x_TE + F.linear(attended_THV.flatten(1), self.out, self.out_bias)
        return x_TE + self.mlp(_rms_norm(x_TE, self.post_attention_norm_E, self.norm_eps))

    def _query_and_row(self, x_TE: Tensor, step: "_Step") -> tuple[Tensor, Tensor]:
        """Project normed tokens to queries [T, H, D], times the softmax scale, and rows [T, W], both turned."""
        both = F.linear(x_TE, self.query_and_row, self.query_and_row_bias)
        query, row_TW = both.tensor_split([both.shape[-1] - self.row_width], dim=-1)
        if self.query_norm is not None and self.query_b is not None:
            query = F.linear(_rms_norm(query, self.query_norm, _LORA_NORM_EPS), self.query_b)
        query_THD = query.reshape(len(x_TE), self.attention.n_heads, -1)
        # Both are fresh, so they are changed in place. The key is turned as one more head.
        latent_TC, key_TR = row_TW.tensor_split([self.latent_dim], dim=-1)
        if self.latent_norm is not None:
            latent_TC.copy_(_rms_norm(latent_TC, self.latent_norm, _LORA_NORM_EPS))
        rotary_THR = query_THD[..., self.attention.nope_dim :]
        turned_THR = step.turn(torch.cat([rotary_THR, key_TR[:, None]], dim=1))
        rotary_THR.copy_(turned_THR[:, :-1])
        key_TR.copy_(turned_THR[:, -1])
        return query_THD.mul_(self.softmax_scale), row_TW


@dataclass(frozen=True, eq=False)
class _Step:
    """What all layers of one forward share, on the model's device."""

    turn: Turn
    """Of vectors [T, heads, R]."""
    out_slots_T: Tensor
    plan: AttentionPlan


@dataclass(frozen=True, eq=False)
class MlaModel:
    """A loaded model; `load` makes it, `forward` computes."""

    angle_source: ClassVar[AngleSource] = AngleSource.EXACT
    """How fresh rows get their angles; a moved row agrees with a fresh one if it is moved by the same."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    embedding: Tensor
    """[vocabulary, E]."""
    layers: tuple[_Layer, ...]
    final_norm_E: Tensor
    output: Tensor
    """[vocabulary, E]; the embedding itself if tied."""

    @classmethod
    def load(
        cls, path: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> "MlaModel":
        """Load a checkpoint directory.

        Args:
            path: directory of config.json and safetensors files.
            device: a torch device.
            dtype: of weights, activations and rows: float32, bfloat16 or float16. Routers stay in float32.

        Raises:
            CheckpointError: a file cannot be read, or does not hold what config.json says.
            UnsupportedModelError: a model or dtype that has not been shown to work.
        """
        config = ModelConfig.from_checkpoint(path)
        config.layout(dtype)  # refuses other dtypes
        device = torch.device(device)
        checkpoint = Checkpoint.open(path, config, device=device, dtype=dtype)
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        return cls(
            config=config,
            device=device,
            dtype=dtype,
            embedding=embedding,
            layers=tuple(_Layer.load(checkpoint, layer, config) for layer in range(config.n_layers)),
            final_norm_E=checkpoint.tensor("model.norm.weight"),
            output=embedding if config.tie_word_embeddings else checkpoint.tensor("lm_head.weight"),
        )

    @property
    def layout(self) -> RowLayout:
        """What a row of its pool is."""
        return self.config.layout(self.dtype)

    def new_pool(self, n_slots: int) -> Tensor:
        """Return an empty pool: zeros [layers, n_slots, row width] of the model's dtype, on its device.

        Raises:
            InputError: there is not so much memory.
        """
        shape = (self.config.n_layers, n_slots, self.layout.width)
        try:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        except RuntimeError:  # so torch calls it, on a CPU and on a GPU
            gib = math.prod(shape) * self.dtype.itemsize / 2**30
            raise InputError(
                f"a pool of {n_slots} token rows takes {gib:,.1f} GiB of memory, which could not be had; take fewer"
            ) from None

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool_LSW: Tensor, *, attention: str = "auto") -> Tensor:
        """Compute a batch.

        Args:
            batch: tokens, and the rows they see.
            pool_LSW: from `new_pool`; the rows of the batch are written to it.
            attention: "absorbed" or "materialised" for all spans, or "auto" for the cheaper one of each.

        Returns:
            Logits float32 [len(batch.logit_rows_N), vocabulary], on the model's device.

        Raises:
            InputError: an unknown form of attention.
        """
        form = parse_choice(AttentionForm, attention, "attention form", "forms")
        positions_T = batch.positions_T.to(self.device)
        rope = self.config.rope
        angles_TP = rope.position_angles(positions_T, self.angle_source)
        step = _Step(
            turn=Turn.by(angles_TP[:, None], rope.pairing, rope.mscale),
            out_slots_T=batch.out_slots_T.to(self.device),
            plan=AttentionPlan.of(batch, self.config, form, self.device, self.dtype),
        )
        x_TE = F.embedding(batch.token_ids_T.to(self.device), self.embedding)
        for layer, rows_SW in zip(self.layers, pool_LSW, strict=True):
            x_TE = layer(x_TE, rows_SW, step)
        x_TE = _rms_norm(x_TE[batch.logit_rows_N.to(self.device)], self.final_norm_E, self.config.rms_norm_eps)
        return F.linear(x_TE, self.output).to(torch.float32)


def _query_and_row_bias(checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> Tensor | None:
    if not config.attention_bias:
        return None
    row_bias = checkpoint.tensor(prefix + "kv_a_proj_with_mqa.bias")
    if config.q_lora_rank is not None:
        return torch.cat([checkpoint.tensor(prefix + "q_a_proj.bias"), row_bias])
    # DeepSeek's q_proj never has a bias.
    return torch.cat([row_bias.new_zeros(config.n_heads * config.qk_head_dim), row_bias])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
