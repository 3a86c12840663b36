"""One request inside the engine: its tokens, its slots and which of them are still its own."""

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from irminsul.engine.sampler import SamplingState
from irminsul.engine.types import Request, Usage
from irminsul.namespace import Namespace
from irminsul.plan import Mode, ReusePlan, SegmentKind
from irminsul.radix_cache import NO_SLOTS, Node


@dataclass(eq=False)
class Sequence:
    """State of a request from submission to its end.

    Slots: position i of the sequence lies in ``slots[i]``. Slots are the tree's or the sequence's own (``owned``)::

        |-- prefix hits: the tree's --|-- own until published --|-- allocated, not written yet --|
        0                            held                     n_rows                        len(slots)
    """

    request: Request
    namespace: Namespace
    mode: Mode
    sampling: SamplingState
    submitted: float = field(default_factory=time.perf_counter)
    output: list[int] = field(default_factory=list)
    slots: NDArray[np.int32] = field(default_factory=lambda: NO_SLOTS)
    owned: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    node: Node | None = None
    """The locked node of the tree that holds the sequence's cached rows; unlocked when the sequence ends."""
    plan: ReusePlan | None = None
    planned_shifted: int = 0
    pending: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Prompt positions that are still to be computed, ascending."""
    match_seconds: float = 0.0
    scheduled: float = 0.0
    prompt: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.request.token_ids, dtype=np.int32)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and output."""
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])

    @property
    def total(self) -> int:
        """Rows the sequence may need at most."""
        return len(self.prompt) + self.request.sampling.max_tokens

    @property
    def n_rows(self) -> int:
        """Rows that exist once the prompt is computed: all but that of the token drawn last."""
        return len(self.prompt) + max(0, len(self.output) - 1)

    @property
    def exact_end(self) -> int:
        """Rows at and beyond this position are derived."""
        assert self.plan is not None
        return self.plan.exact_end if self.plan.exact_end < self.plan.n_tokens else self.total

    def hold(self, slots: NDArray[np.int32]) -> None:
        """Start from rows of the tree."""
        self.slots = slots
        self.owned = np.zeros(len(slots), dtype=np.bool_)

    def take(self, slots: NDArray[np.int32]) -> None:
        """Append newly allocated slots, which are the sequence's own."""
        self.slots = np.concatenate([self.slots, slots])
        self.owned = np.concatenate([self.owned, np.ones(len(slots), dtype=np.bool_)])

    def exchange(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Go on with the tree's slots for the first rows; return the sequence's own ones that they replace."""
        n = len(slots)
        replaced: NDArray[np.int32] = self.slots[:n][self.owned[:n] & (self.slots[:n] != slots)]
        self.slots[:n] = slots
        self.owned[:n] = False
        return replaced

    def usage(self, plan: ReusePlan) -> Usage:
        """Account for the prompt; called when the first token is drawn."""
        return Usage(
            prompt_tokens=plan.n_tokens,
            prefix=plan.tokens(SegmentKind.PREFIX),
            approximate_prefix=plan.tokens(SegmentKind.APPROXIMATE_PREFIX),
            shifted=plan.tokens(SegmentKind.SHIFTED),
            computed=plan.tokens(SegmentKind.GAP),
            gaps=len(plan.gaps),
            planned_shifted=self.planned_shifted,
            match_seconds=self.match_seconds,
            queue_seconds=self.scheduled - self.submitted,
            prefill_seconds=time.perf_counter() - self.scheduled,
        )
