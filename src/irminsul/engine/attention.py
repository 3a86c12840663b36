"""Attention over cached rows ``[c_kv | k_rope]``, in two forms that give the same result.

*Absorbed*: the non-rotary part of a query goes through the key half of ``kv_b_proj`` into the space of the latent, so
that scores are products with the row itself and values are its latent part. All heads share one key and one value, and
nothing is made per row; but a key is C + R wide and a value C wide. Best for few queries.

*Materialised*: the latents of the rows go through ``kv_b_proj`` once, which gives each head its own key, N + R wide,
and value, V wide. Best where many queries read the same rows.

`absorbed_flops` and `materialised_flops` decide for each span, unless the caller does.

Queries are attended in blocks of contiguous positions, a block reading only the keys up to its last query: causal work
is about halved, the scores of one block bound the memory, and only the last keys of a block, as many as it has queries,
need a mask. A span with holes is just more blocks. torch's ``scaled_dot_product_attention`` is not used: on a CPU its
fast form wants keys and values of one width, and was 1.4 times slower with padded values than these products.

Shape letters: T tokens of the batch, A tokens attended in absorbed form, Q queries of a block, S rows of a span,
H heads, D = N + R a query head with its non-rotary and rotary parts, V a value head, C latent, W = C + R a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.config import ModelConfig

_BLOCK_QUERIES = 128
"""Queries of a block; fastest among 64, 128, 256 and 512 for nine heads and 2,048 rows on one core."""
_BLOCK_SCORES = 2**24
"""Scores of a block (64 MiB in float32), from which long spans get smaller blocks, down to ..."""
_SMALLEST_BLOCK = 16

Index = slice | Tensor
"""Rows of a tensor: a slice where they are contiguous, which costs no copy, or int64 indices."""


class AttentionForm(StrEnum):
    """Which form attends a span; the module's documentation compares them."""

    AUTO = "auto"
    """The one with fewer operations, span by span."""
    ABSORBED = "absorbed"
    MATERIALISED = "materialised"


def absorbed_flops(config: ModelConfig, n_queries: int, n_pairs: int) -> int:
    """Floating point operations of a span in absorbed form.

    Args:
        config: the model.
        n_queries: queries of the span.
        n_pairs: (query, visible key) pairs.
    """
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    per_query = latent * (config.qk_nope_head_dim + config.v_head_dim)
    return 2 * config.n_heads * (n_queries * per_query + n_pairs * (latent + rope + latent))


def materialised_flops(config: ModelConfig, n_rows: int, n_pairs: int) -> int:
    """Floating point operations of a span of ``n_rows`` rows and ``n_pairs`` pairs in materialised form."""
    per_row = config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim)
    return 2 * config.n_heads * (n_rows * per_row + n_pairs * (config.qk_head_dim + config.v_head_dim))


@dataclass(frozen=True)
class Block:
    """Queries at contiguous positions: batch rows [start, end), the last of which sees all ``n_keys`` rows."""

    start: int
    end: int
    n_keys: int

    @property
    def n_queries(self) -> int:
        """Queries in the block."""
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class SpanPlan:
    """The rows of a request, and the blocks of its queries."""

    slots: Index
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """How every span of a batch is attended, the same in every layer."""

    absorbed: tuple[SpanPlan, ...]
    """Its blocks count among the absorbed tokens (A), not among those of the batch."""
    absorbed_tokens: Index
    """Batch rows of the absorbed tokens."""
    materialised: tuple[SpanPlan, ...]
    mask_QQ: Tensor
    """Added to the scores of a block with its own positions: -inf behind each query; smaller blocks use its corner."""

    @classmethod
    def of(
        cls, batch: ForwardBatch, config: ModelConfig, form: AttentionForm, device: torch.device, dtype: torch.dtype
    ) -> "AttentionPlan":
        """Plan a batch for a model on ``device`` whose scores are of ``dtype``."""
        absorbed: list[SpanPlan] = []
        materialised: list[SpanPlan] = []
        absorbed_tokens: list[Tensor] = []
        n_absorbed = 0
        for span in batch.spans:
            positions_T = batch.positions_T[span.start : span.end]
            if _is_absorbed(positions_T, config, form):
                absorbed.append(_plan_span(span, positions_T, n_absorbed, config, device))
                absorbed_tokens.append(torch.arange(span.start, span.end))
                n_absorbed += len(positions_T)
            else:
                materialised.append(_plan_span(span, positions_T, span.start, config, device))
        tokens_A = torch.cat(absorbed_tokens) if absorbed_tokens else torch.empty(0, dtype=torch.int64)
        widest = max(block.n_queries for plan in (*absorbed, *materialised) for block in plan.blocks)
        mask_QQ = torch.full((widest, widest), float("-inf"), dtype=dtype, device=device).triu_(1)
        return cls(tuple(absorbed), _as_index(tokens_A, device), tuple(materialised), mask_QQ)


def _is_absorbed(positions_T: Tensor, config: ModelConfig, form: AttentionForm) -> bool:
    if form is not AttentionForm.AUTO:
        return form is AttentionForm.ABSORBED
    n_queries, n_rows = len(positions_T), int(positions_T[-1]) + 1
    n_pairs = int(positions_T.sum()) + n_queries
    return absorbed_flops(config, n_queries, n_pairs) <= materialised_flops(config, n_rows, n_pairs)


def _plan_span(
    span: Span, positions_T: Tensor, first_token: int, config: ModelConfig, device: torch.device
) -> SpanPlan:
    n_rows = len(span.key_slots_S)
    width = max(_SMALLEST_BLOCK, min(_BLOCK_QUERIES, _BLOCK_SCORES // (config.n_heads * n_rows)))
    blocks = tuple(
        Block(first_token + start, first_token + end, int(positions_T[end - 1]) + 1)
        for start, end in _blocks(positions_T, width)
    )
    return SpanPlan(_as_index(span.key_slots_S, device), blocks)


def _blocks(positions_T: Tensor, width: int) -> Iterator[tuple[int, int]]:
    """Cut ascending positions into runs [start, end) of contiguous positions, at most ``width`` long."""
    breaks = (positions_T.diff() != 1).nonzero().flatten() + 1
    cuts = [0, *breaks.tolist(), len(positions_T)]
    for first, last in pairwise(cuts):
        for start in range(first, last, width):
            yield start, min(start + width, last)


def _as_index(indices: Tensor, device: torch.device) -> Index:
    if len(indices) and bool((indices.diff() == 1).all()):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices.to(device)


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """``kv_b_proj`` of one layer, and the two forms of attention by it."""

    kv_b: Tensor
    """[H * (N + V), C]."""
    n_heads: int
    nope_dim: int

    def __call__(self, query_THD: Tensor, rows_SW: Tensor, plan: AttentionPlan) -> Tensor:
        """Attend each query to the rows at its own and all earlier positions.

        Args:
            query_THD: queries of the batch, rotary part turned, times the softmax scale.
            rows_SW: the pool of this layer, rows of the batch written.
            plan: what attends to what.

        Returns:
            [T, H, V].
        """
        out_THV = query_THD.new_empty(*query_THD.shape[:2], self._value_dim)
        if plan.absorbed:
            out_THV[plan.absorbed_tokens] = self._absorbed(query_THD[plan.absorbed_tokens], rows_SW, plan)
        for span in plan.materialised:
            self._materialised(query_THD, rows_SW, span, plan.mask_QQ, out_THV)
        return out_THV

    @property
    def _value_dim(self) -> int:
        return self.kv_b.shape[0] // self.n_heads - self.nope_dim

    def _absorbed(self, query_AHD: Tensor, rows_SW: Tensor, plan: AttentionPlan) -> Tensor:
        latent_dim = self.kv_b.shape[1]
        key_HNC, value_HVC = self.kv_b.view(self.n_heads, -1, latent_dim).tensor_split([self.nope_dim], dim=1)
        nope_AHN, rope_AHR = query_AHD.tensor_split([self.nope_dim], dim=-1)
        latent_query_AHC = torch.bmm(nope_AHN.transpose(0, 1), key_HNC).transpose(0, 1)
        query_AHW = torch.cat([latent_query_AHC, rope_AHR], dim=-1)
        out_AHC = query_AHD.new_empty(*query_AHD.shape[:2], latent_dim)
        for span in plan.absorbed:
            span_rows_SW = rows_SW[span.slots]
            for block in span.blocks:
                keys_SW = span_rows_SW[: block.n_keys]
                # One key for all heads: queries and heads together are the rows of one product.
                scores = query_AHW[block.start : block.end].flatten(0, 1) @ keys_SW.T
                scores_QHS = scores.view(block.n_queries, self.n_heads, block.n_keys)
                weights_QHS = _causal_softmax(scores_QHS, plan.mask_QQ[: block.n_queries, None, : block.n_queries])
                out_AHC[block.start : block.end] = weights_QHS @ keys_SW[:, :latent_dim]
        return torch.bmm(out_AHC.transpose(0, 1), value_HVC.mT).transpose(0, 1)

    def _materialised(
        self, query_THD: Tensor, rows_SW: Tensor, span: SpanPlan, mask_QQ: Tensor, out_THV: Tensor
    ) -> None:
        """Attend the queries of one span, into their rows of ``out_THV``."""
        key_HSD, value_HSV = self._keys_and_values(rows_SW[span.slots])
        for block in span.blocks:
            query_HQD = query_THD[block.start : block.end].transpose(0, 1)
            scores_HQS = query_HQD @ key_HSD[:, : block.n_keys].mT
            weights_HQS = _causal_softmax(scores_HQS, mask_QQ[: block.n_queries, : block.n_queries])
            out_THV[block.start : block.end] = (weights_HQS @ value_HSV[:, : block.n_keys]).transpose(0, 1)

    def _keys_and_values(self, rows_SW: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project rows [S, W] to keys [H, S, D] and values [H, S, V]."""
        latent_SC, rope_SR = rows_SW.tensor_split([self.kv_b.shape[1]], dim=-1)
        up_HSX = F.linear(latent_SC, self.kv_b).view(len(rows_SW), self.n_heads, -1).transpose(0, 1)
        nope_HSN, value_HSV = up_HSX.tensor_split([self.nope_dim], dim=-1)
        key_HSD = torch.cat([nope_HSN, rope_SR.expand(self.n_heads, -1, -1)], dim=-1)
        return key_HSD, value_HSV.contiguous()


def _causal_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension, S, of a block's scores, which are written to.

    The block's own positions are the last Q keys; ``mask`` [..., Q] hides those behind each query. All other keys are
    seen.
    """
    n_queries = mask.shape[-1]
    if n_queries > 1:
        scores[..., -n_queries:].add_(mask)
    return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
