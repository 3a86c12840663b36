"""A plan for each request that is about to run.

SGLang admits requests to a prefill batch one by one, each up to what is left of the batch's budget of computed tokens.
Here a request is planned first, with its donors locked, and admitted as if the tokens it will copy cost nothing: the
budget is raised by them before SGLang decides, and set right after. So a long prompt with few new tokens is one
forward, not one for each prefill chunk. Slots are another matter: the request gets one for every token, as always.

A plan lives for one step of the scheduler: made here, carried out by the forward of the same step
(`irminsul.sglang.forward`), its donors unlocked when the copy is on its way. A prompt that does not fit is cut as
SGLang cuts it, and its rest is planned anew in the next step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.utils.rank_consensus_checker import rank_consensus

from irminsul.plan import Mode, ReusePlan, ReusePolicy, Run, make_plan
from irminsul.sglang.cache import IrminsulRadixCache, LockedRun
from irminsul.sglang.requests import ATTRIBUTE, INFO_KEY, FoundRuns, ReuseState, StepTokens, token_array


@dataclass(frozen=True, eq=False)
class OpenPlan:
    """A plan between admission and copy: the part of a prompt that one forward computes, and the rows copied for it."""

    start: int
    """First position of this step; everything before it is in the cache."""
    end: int
    copies: tuple[LockedRun, ...]
    """What is copied, ascending, inside [start, end)."""
    locks: list[Any] = field(repr=False)

    @property
    def runs(self) -> list[Run]:
        """The stretches of the prompt that are copied."""
        return [copied.run for copied in self.copies]

    @property
    def shifted(self) -> int:
        """Tokens that are copied."""
        return sum(run.length for run in self.runs)

    def gaps(self) -> list[tuple[int, int]]:
        """Return the stretches to compute; they and the runs tile [start, end)."""
        edges = [self.start, *(edge for run in self.runs for edge in (run.start, run.end)), self.end]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


class Planner:
    """Plans of the requests of one scheduler.

    Args:
        cache: the tree, with an index.
        policy: the knobs of a plan.
        on_step: told what became of the tokens of each step.
        mixed: whether decoding requests are put into batches of prefills.
    """

    def __init__(
        self,
        cache: IrminsulRadixCache,
        policy: ReusePolicy,
        on_step: Callable[[ReuseState, StepTokens], None],
        *,
        mixed: bool,
    ) -> None:
        assert cache.donors is not None
        self._cache = cache
        self._donors = cache.donors
        self._policy = policy
        self._decided = replace(policy, min_known=0)
        self._on_step = on_step
        self._mixed = mixed

    def take(self, req: Any) -> OpenPlan | None:
        """Return the plan that a request was admitted with, once; its donors are still locked."""
        state = self._cache.state_of(req)
        plan: OpenPlan | None = state.open_plan
        state.open_plan = None
        return plan

    def close(self, plan: OpenPlan) -> None:
        """Unlock a plan's donors: its copy has been launched, and later work follows it on the same stream."""
        for lock in plan.locks:
            self._cache.unlock(lock)
        plan.locks.clear()

    def launched(self) -> None:
        """A batch is about to be launched."""
        self._donors.launched()

    def processed(self) -> None:
        """The result of a batch is about to be processed: its forward has ended."""
        self._donors.processed()

    def settle(self) -> None:
        """Bring the index up to date while the GPU is busy, so that the next search need not."""
        self._donors.settle(wait=False)

    def admit(self, adder: PrefillAdder, req: Any, run: Callable[[], Any], *, first: bool) -> Any:
        """Let SGLang admit a request, charging it for computed tokens only.

        Args:
            adder: SGLang's bookkeeping of the batch being built.
            req: the request, matched against the tree.
            run: SGLang's own admission.
            first: False if the request continues after a prefill chunk.
        """
        state = self._cache.state_of(req)
        if (left := self.take(req)) is not None:
            self.close(left)  # admitted before, and never run
        # What the index holds may depend on how many steps have run, and on nothing else: ranks must agree on plans.
        self._donors.settle()
        if first:
            self._begin(req, state)
        plan = self._plan(req, state, self._most_rows(adder), first=first)
        rows = len(plan.gaps) if plan is not None and state.mode is Mode.LIVE else 1
        if first and rows > self._rows_left(adder):
            # As a prompt for which there is no budget: the next batch begins with it.
            return AddReqResult.OTHER
        opened: OpenPlan | None = None
        if plan is None or state.mode is not Mode.LIVE or not plan.runs:
            result = run()
        else:
            opened, result = self._admit_with(plan, adder, req, run, state)
            if not _admitted(adder, req) and result is not AddReqResult.OTHER:
                # Donors that are locked cannot be evicted: a request that needs their room gets it, and no plan.
                result = run()
                state.declined += _admitted(adder, req)
        if _admitted(adder, req):
            rows = 1 if opened is None else len(opened.gaps())
            setattr(adder, ATTRIBUTE, getattr(adder, ATTRIBUTE, 0) + rows)
            if opened is not None:
                agreed_plan(req.rid, [(run.start, run.source_start, run.length) for run in opened.runs])
                state.open_plan = opened
                if state.derived_from is None:
                    state.derived_from = opened.runs[0].start // self._cache.page_size * self._cache.page_size
            self._count(req, state, plan, opened)
        return self._verdict(adder, result) if first else result

    def _begin(self, req: Any, state: ReuseState) -> None:
        if state.derived_from is not None and req.prefix_len <= state.derived_from:
            state.derived_from = None  # SGLang took less of the match than was offered
        state.inherited, state.found = state.derived_from, self._find(req, state)
        if not req.retracted_stain:
            state.steps = []

    def _verdict(self, adder: PrefillAdder, result: Any) -> Any:
        """Return whether another request may follow; SGLang judged by a raised budget, and of unsplit batches."""
        if result is not AddReqResult.CONTINUE:
            return result
        # SGLang can keep one request that was cut. What a raised budget leaves could cut a second.
        if adder.new_chunked_req is not None or self._rows_left(adder) < 1:
            return AddReqResult.OTHER
        return adder.budget_state()

    def _most_rows(self, adder: PrefillAdder) -> int:
        """Return how many batch rows a prefill may have: buffers of attention and graphs have one a request slot."""
        most: int = self._cache.req_to_token_pool.size
        # Decoding requests are rows of a mixed batch.
        return most - len(adder.running_batch.reqs) if self._mixed and adder.running_batch is not None else most

    def _rows_left(self, adder: PrefillAdder) -> int:
        """Return how many more rows fit into this batch, whose bookkeeping says how many it has."""
        rows: int = getattr(adder, ATTRIBUTE, 0)
        return self._most_rows(adder) - rows

    def _admit_with(
        self,
        plan: ReusePlan,
        adder: PrefillAdder,
        req: Any,
        run: Callable[[], Any],
        state: ReuseState,
    ) -> tuple[OpenPlan | None, Any]:
        """Return SGLang's answer, and what is to be copied for the request if it was admitted; else nothing is held."""
        copies, locks = self._cache.lock_donors(plan.runs, token_array(req), state)
        whole = OpenPlan(req.prefix_len, plan.n_tokens, tuple(copies), locks)
        raised = _affordable(whole, adder.rem_chunk_tokens, adder.page_size)
        opened: OpenPlan | None = None
        if adder.rem_total_tokens < _step_tokens(whole, adder.rem_chunk_tokens, raised):
            # A later chunk is admitted by SGLang even if nothing is left, because it could evict what is locked here.
            self.close(whole)
            return None, None
        _raise_budgets(adder, raised)
        try:
            result = run()
            if _admitted(adder, req):
                opened = _cut(whole, req.extend_end)
                adder.log_input_tokens -= opened.shifted
        finally:
            _raise_budgets(adder, (opened.shifted if opened else 0) - raised)
            if opened is None or not opened.copies:
                self.close(whole)
        return (opened if opened is not None and opened.copies else None), result

    def _plan(self, req: Any, state: ReuseState, max_gaps: int, *, first: bool) -> ReusePlan | None:
        if state.found is None:
            return None
        exact = req.prefix_len if state.derived_from is None else state.derived_from
        plan = make_plan(
            len(req.full_untruncated_fill_ids),
            prefix=exact,
            approximate_prefix=req.prefix_len - exact,
            runs=[run for run in state.found.runs if run.end > req.prefix_len],
            policy=self._policy if first else self._decided,
            reuse_limit=_reuse_limit(req),
            max_gaps=max(1, max_gaps),
        )
        if first and not plan.runs:
            # Decided for the whole prompt; of its rest more or less might seem to be known.
            state.found = replace(state.found, runs=[])
        return plan

    def _find(self, req: Any, state: ReuseState) -> FoundRuns | None:
        """Search for a request, once for all its chunks, and while it waits again only if the index has changed."""
        tail = _reuse_limit(req) - req.prefix_len
        if state.mode is Mode.OFF or state.refusal is not None or tail < self._policy.min_run:
            return None
        depends_on = (self._donors.epoch, req.prefix_len, len(req.full_untruncated_fill_ids))
        if state.found is not None and state.found.depends_on == depends_on:
            return state.found
        return FoundRuns(depends_on, self._donors.find(state.namespace, token_array(req), req.prefix_len))

    def _count(self, req: Any, state: ReuseState, plan: ReusePlan | None, opened: OpenPlan | None) -> None:
        # What a retracted request computes again, its own output too, says nothing of the prompt.
        if state.mode is Mode.OFF or req.retracted_stain:
            return
        step = opened or OpenPlan(req.prefix_len, req.extend_end, (), [])
        if plan is not None and state.mode is Mode.OBSERVE:
            step = _cut(OpenPlan(req.prefix_len, plan.n_tokens, _unlocked(plan.runs), []), req.extend_end)
        exact = req.prefix_len if state.inherited is None else state.inherited
        first = not state.steps
        tokens = StepTokens(
            prefix=exact if first else 0,
            history=req.prefix_len - exact if first else 0,
            shifted=step.shifted,
            computed=step.end - step.start - step.shifted,
            gaps=len(step.gaps()),
            runs=len(step.runs),
        )
        state.steps.append(tokens)
        self._on_step(state, tokens)
        req.customized_info = {**(req.customized_info or {}), INFO_KEY: [state.report()]}


@rank_consensus(same_params=True)  # type: ignore[untyped-decorator]
def agreed_plan(rid: str, runs: list[tuple[int, int, int]]) -> None:
    """Let SGLang compare the plans of all ranks, where SGLANG_ENABLE_RANK_CONSENSUS_CHECKER is set; else do nothing."""


def _reuse_limit(req: Any) -> int:
    """Return where reuse must end: the rule that the tree's own matches obey."""
    limit: int = req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))  # noqa: SLF001
    return limit


def _admitted(adder: PrefillAdder, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _raise_budgets(adder: PrefillAdder, tokens: int) -> None:
    adder.rem_input_tokens += tokens
    if adder.chunked_req_limit is not None:
        adder.chunked_req_limit += tokens
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens += tokens


def _step_tokens(plan: OpenPlan, budget: int | None, copied: int) -> int:
    """Return how many slots a step of a plan takes."""
    tail = plan.end - plan.start
    return tail if budget is None else min(tail, budget + copied)


def _affordable(plan: OpenPlan, budget: int | None, page_size: int) -> int:
    """Return how many tokens are copied before the budget of computed ones runs out.

    The next cut falls at ``start + budget + copied``, if the whole does not fit.
    """
    if budget is None:
        return plan.shifted
    copied = 0
    left = budget
    cursor = plan.start
    for run in plan.runs:
        left -= run.start - cursor
        if left <= 0:
            return copied
        copied += run.length
        cursor = run.end
    # Charges are rounded up to whole pages.
    return copied + (-(plan.end - plan.start) % page_size if left >= plan.end - cursor else 0)


def _cut(plan: OpenPlan, end: int) -> OpenPlan:
    """Return the part of a plan below ``end``; the locks go with it. Its last token is computed."""
    last = end - 1
    copies = tuple(
        copied if copied.run.end <= last else copied.slice(copied.run.start, last)
        for copied in plan.copies
        if copied.run.start < last
    )
    return OpenPlan(plan.start, end, copies, plan.locks)


def _unlocked(runs: Sequence[Run]) -> tuple[LockedRun, ...]:
    """Return runs that nobody will copy, for counting."""
    return tuple(LockedRun(run, torch.from_numpy(run.slots)) for run in runs)
