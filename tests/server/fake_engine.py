"""An engine that says what it is told to."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from irminsul.engine.types import FinishReason, Request, StepOutput, Usage
from irminsul.errors import InputError, OverloadedError
from irminsul.plan import Mode


@dataclass(frozen=True)
class FakeStats:
    running: int
    waiting: int
    pool_slots: int
    free_slots: int
    cached_slots: int
    locked_slots: int = 3
    registry_entries: int = 7
    evicted_slots: int = 5


class FakeEngine:
    """Answers each request with the tokens that ``answer`` gives for it, one a step.

    A request holds one slot for each token of its prompt and for each drawn one; at its normal end they are cached.
    ``hold()`` stops all steps until ``release()``.
    """

    def __init__(self, answer: Callable[[Request], list[int]], *, eos: int, mode: Mode = Mode.LIVE) -> None:
        self.mode = mode
        self.max_prompt_tokens = 2000
        self.eos_token_ids = frozenset({eos})
        self.answer = answer
        self.max_waiting = 100
        self.step_seconds = 0.0
        self.error: Exception | None = None
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self._running: dict[str, tuple[Request, list[int]]] = {}
        self._cached = 0
        self._may_step = threading.Event()
        self._may_step.set()
        self._threads: set[int] = set()

    def hold(self) -> None:
        self._may_step.clear()

    def release(self) -> None:
        self._may_step.set()

    def submit(self, request: Request) -> None:
        self._same_thread()
        if not request.token_ids:
            raise InputError("the prompt is empty; it needs at least one token")
        if len(self._running) >= self.max_waiting:
            raise OverloadedError("too many requests are waiting already; try again later")
        self.submitted.append(request)
        self._running[request.request_id] = (request, [])

    def abort(self, request_id: str) -> None:
        self._same_thread()
        if self._running.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def stop(self, request_id: str) -> None:
        self._same_thread()
        self.stopped.append(request_id)
        self._finish(request_id)

    def step(self) -> list[StepOutput]:
        self._same_thread()
        if not self._may_step.wait(0.01):
            return []
        if self.error is not None:
            raise self.error
        time.sleep(self.step_seconds)
        outputs = [self._next(request, drawn) for request, drawn in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                self._finish(output.request_id)
        return outputs

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def stats(self) -> FakeStats:
        held = sum(len(request.token_ids) + len(drawn) for request, drawn in self._running.values())
        return FakeStats(len(self._running), 0, 10_000, 10_000 - held - self._cached, self._cached)

    def _finish(self, request_id: str) -> None:
        request, drawn = self._running.pop(request_id)
        self._cached += len(request.token_ids) + len(drawn)

    def _next(self, request: Request, drawn: list[int]) -> StepOutput:
        answer = self.answer(request)
        token_id = answer[len(drawn) % len(answer)]
        drawn.append(token_id)
        ends = token_id in self.eos_token_ids and not request.sampling.ignore_eos
        out_of_room = len(drawn) == request.sampling.max_tokens
        output = StepOutput(
            request.request_id,
            token_id,
            usage=_usage(len(request.token_ids)) if len(drawn) == 1 else None,
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH if out_of_room else None,
        )
        alternatives = request.sampling.top_logprobs
        if alternatives is None:
            return output
        top = tuple((token, -0.5 - n) for n, token in enumerate([token_id, 10, 11, 12][:alternatives]))
        return replace(output, logprob=-0.5, top_logprobs=top)

    def _same_thread(self) -> None:
        self._threads.add(threading.get_ident())
        assert len(self._threads) == 1, "two threads use the engine"


def _usage(n_tokens: int) -> Usage:
    """A fifth each of prefix, approximate prefix and shifted; the rest is computed, in two gaps."""
    part = n_tokens // 5
    return Usage(
        prompt_tokens=n_tokens,
        prefix=part,
        approximate_prefix=part,
        shifted=part,
        computed=n_tokens - 3 * part,
        gaps=2,
        planned_shifted=part,
        match_seconds=0.0015,
        queue_seconds=0.02,
        prefill_seconds=0.1,
    )
