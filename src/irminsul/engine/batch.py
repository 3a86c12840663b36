"""What one forward computes: the tokens of a batch and the cached rows each of them may see.

Shape suffixes: T tokens of the batch, S rows of one request (positions 0..S-1), N tokens with logits.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Span:
    """The batch rows [start, end) of one request.

    The query positions of a span ascend but may have holes: all gaps of one request are computed in one forward, and
    the rows between them are in the pool already.
    """

    start: int
    end: int
    key_slots_S: torch.Tensor
    """Pool slot of the request's row at each position 0..S-1, int64, on the CPU; S is the last query position + 1."""


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward: every token's id, position and the pool slot its new row is written to.

    The index tensors live on the CPU, whatever the model's device: the attention is planned there without waiting for
    the device. Spans are in order and tile the batch.
    """

    token_ids_T: torch.Tensor
    """int64."""
    positions_T: torch.Tensor
    """int64; ascending within a span."""
    out_slots_T: torch.Tensor
    """int64; no slot twice."""
    spans: tuple[Span, ...]
    logit_rows_N: torch.Tensor
    """int64 indices into T."""

    def __post_init__(self) -> None:
        n_tokens = len(self.token_ids_T)
        assert n_tokens == len(self.positions_T) == len(self.out_slots_T)
        for tensor in (self.token_ids_T, self.positions_T, self.out_slots_T, self.logit_rows_N):
            assert tensor.dtype == torch.int64, tensor.dtype
            assert tensor.device.type == "cpu", tensor.device
        cursor = 0
        for span in self.spans:
            assert cursor == span.start < span.end, (cursor, span.start, span.end)
            assert span.key_slots_S.device.type == "cpu", span.key_slots_S.device
            assert len(span.key_slots_S) == int(self.positions_T[span.end - 1]) + 1
            cursor = span.end
        assert cursor == n_tokens, (cursor, n_tokens)
