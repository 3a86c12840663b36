"""Which form of MLA attention the batch rows of a request take, and keys and values that they share.

Absorbed attention (MLA) reads the latents themselves, at 2·C + R products a query, head and key. Up-projected attention
(MHA) reads keys and values of full heads, at K + R + V, but has to make them from the latents first. SGLang makes them
for each batch row anew; rows of one request are prefixes of one another, so here they are made once, for the longest::

    blocks       [---- keys of request 0, to the end of its last row ----][---- of request 1 ----]
    batch row 0  [ used      ]
    batch row 1  [ used                         ]
    batch row 2  [ used                                                 ]
    batch row 3                                                           [ used                ]

FlashAttention 3 takes the begin of each row's keys and how many it uses.

Which form is chosen follows from a count of products. Up-projected attention computes whole tiles of queries for each
head, which short rows do not fill; absorbed attention fills them with heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUERY_TILE = 128
"""Queries that FlashAttention 3 computes at once for heads of 192."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an MLA model's attention, on one rank."""

    heads: int
    latent: int
    """C: ``kv_lora_rank``."""
    rope: int
    """R: ``qk_rope_head_dim``."""
    nope: int
    """K: ``qk_nope_head_dim``."""
    value: int
    """V: ``v_head_dim``."""


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """Keys and values of each request's longest batch row, one block behind the other."""

    lengths: tuple[int, ...]
    """Of each request's block."""
    starts_B: NDArray[np.int64]
    """Where the block of each batch row's request begins."""
    ends_B: NDArray[np.int64]
    """How many keys of it the row uses."""

    @classmethod
    def of(cls, owners_B: NDArray[np.int64], ends_B: NDArray[np.int64]) -> "KeyBlocks":
        """Lay out blocks.

        Args:
            owners_B: request of each batch row, ascending from 0 without a gap.
            ends_B: one past the last position of each row.
        """
        lengths = np.zeros(int(owners_B[-1]) + 1, dtype=np.int64)
        np.maximum.at(lengths, owners_B, ends_B)
        starts = np.cumsum(lengths) - lengths
        return cls(tuple(lengths.tolist()), starts[owners_B], ends_B)

    @property
    def total(self) -> int:
        """Keys of all blocks."""
        return sum(self.lengths)

    def slots(self, table: Tensor, lines: list[int]) -> Tensor:
        """Return the slots of all keys, int32 [total].

        Args:
            table: SGLang's slot table, [requests, positions].
            lines: line of each request.
        """
        parts = [table[line, :length] for line, length in zip(lines, self.lengths, strict=True)]
        return torch.cat(parts).to(torch.int32)


@dataclass(frozen=True, eq=False)
class SharedKeys:
    """Key blocks on the device, in the words of FlashAttention's variable-length call."""

    slots: Tensor
    cu_seqlens_k: Tensor
    """First key of each batch row, and one more number that is not used, int32 [B + 1]."""
    seqused_k: Tensor
    """Keys of each batch row, int32 [B]."""
    max_seqlen_k: int

    @classmethod
    def of(cls, blocks: KeyBlocks, table: Tensor, lines: list[int]) -> "SharedKeys":
        """Put a layout on the device of the slot table."""
        starts = np.append(blocks.starts_B, blocks.total)
        numbers = to_device(np.concatenate([starts, blocks.ends_B]).astype(np.int32), table.device)
        return cls(blocks.slots(table, lines), numbers[: len(starts)], numbers[len(starts) :], max(blocks.lengths))

    def meant_by(self, call: dict[str, Any]) -> bool:
        """Say whether a call of FlashAttention has these keys; others may be made meanwhile, by a vision tower say."""
        keys = call.get("k")
        return keys is not None and len(keys) == len(self.slots) and bool(call.get("causal"))

    def arguments(self) -> dict[str, Any]:
        """Return what the call is told instead of SGLang's own."""
        return {
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_k": self.seqused_k,
            "max_seqlen_k": self.max_seqlen_k,
        }


def to_device(array: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Copy integers to a device without waiting for it."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def attention_products(
    shape: AttentionShape,
    starts_B: NDArray[np.int64],
    ends_B: NDArray[np.int64],
    up_projected: int,
) -> tuple[float, float]:
    """Return multiply-adds of one layer for batch rows [start, end): (up-projected, absorbed).

    Args:
        shape: of the attention.
        starts_B: first position each row computes.
        ends_B: one past the last.
        up_projected: latents of which keys and values are made.
    """
    lengths_B = (ends_B - starts_B).astype(np.float64)
    tiled_B = np.ceil(lengths_B / QUERY_TILE) * QUERY_TILE
    # Each of a row's queries reads all keys before it and its own.
    keys_B = (starts_B + ends_B + 1) / 2
    projection = shape.latent * (shape.nope + shape.value)
    mha_pairs, mla_pairs = float((tiled_B * keys_B).sum()), float((lengths_B * keys_B).sum())
    mha = shape.heads * (mha_pairs * (shape.nope + shape.rope + shape.value) + up_projected * projection)
    mla = shape.heads * (mla_pairs * (2 * shape.latent + shape.rope) + float(lengths_B.sum()) * projection)
    return mha, mla


def absorbed_is_cheaper(
    shape: AttentionShape, starts_B: NDArray[np.int64], ends_B: NDArray[np.int64], up_projected: int
) -> bool:
    """Say whether absorbed attention needs fewer multiply-adds; see `attention_products`."""
    mha, mla = attention_products(shape, starts_B, ends_B, up_projected)
    return mla < mha
