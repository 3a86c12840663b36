"""Look at the attention of a running model, which returns no weights.

`watched` gives a model that computes the same and shows, layer by layer, the queries and the rows that its attention
gets; `attention_weights` makes the weights of a few of them.

Shape letters: T tokens of the batch, Q chosen queries, S rows (positions 0..S-1), H heads, D query head, N its
non-rotary part, C latent, W row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from irminsul.engine.attention import AttentionPlan, LatentAttention
from irminsul.engine.model import MlaModel

Watch = Callable[[int, LatentAttention, Tensor, Tensor], None]
"""Called in each layer with its number, its attention, the queries [T, H, D] and the layer's pool [S, W]."""


@dataclass(frozen=True, eq=False)
class _WatchedAttention(LatentAttention):
    layer: int
    watch: Watch

    def __call__(self, query_THD: Tensor, rows_SW: Tensor, plan: AttentionPlan) -> Tensor:
        self.watch(self.layer, self, query_THD, rows_SW)
        return super().__call__(query_THD, rows_SW, plan)


def watched(model: MlaModel, watch: Watch) -> MlaModel:
    """Return the same model, on the same weights, with every attention watched."""
    layers = tuple(
        replace(layer, attention=_WatchedAttention(own.kv_b, own.n_heads, own.nope_dim, at, watch))
        for at, layer in enumerate(model.layers)
        for own in [layer.attention]
    )
    return replace(model, layers=layers)


def attention_weights(attention: LatentAttention, query_QHD: Tensor, rows_SW: Tensor, first_position: int) -> Tensor:
    """Compute the weights that queries at contiguous positions give to the rows of their prompt.

    Args:
        attention: of the layer.
        query_QHD: as the attention gets them: turned, and times the softmax scale.
        rows_SW: rows at positions 0..S-1, S > the last query position.
        first_position: of the first query.

    Returns:
        float32 [Q, H, S]; zero behind each query.
    """
    n_queries = len(query_QHD)
    assert first_position + n_queries <= len(rows_SW), (first_position, n_queries, len(rows_SW))
    latent_dim = attention.kv_b.shape[1]
    key_HNC = attention.kv_b.float().view(attention.n_heads, -1, latent_dim)[:, : attention.nope_dim]
    nope_QHN, rope_QHR = query_QHD.float().tensor_split([attention.nope_dim], dim=-1)
    query_QHW = torch.cat([torch.einsum("qhn,hnc->qhc", nope_QHN, key_HNC), rope_QHR], dim=-1)
    scores_QHS = query_QHW @ rows_SW.float().T
    positions_Q = torch.arange(first_position, first_position + n_queries, device=rows_SW.device)
    hidden_QS = torch.arange(len(rows_SW), device=rows_SW.device) > positions_Q[:, None]
    return scores_QHS.masked_fill_(hidden_QS[:, None], float("-inf")).softmax(dim=-1)
