"""One case on all paths: distributions under teacher forcing, then the text where it differs.

The reference computes the whole prompt in one forward and decodes greedily. Each path then gets the prompt's rows in
its own way and is shown the reference's tokens: one forward computes the gaps of the prompt and those tokens together,
and gives the logits behind each of them. So KL, agreement and the first divergence of the greedy text need no decoding;
only a path whose text diverges before the end, in a task with a right answer, is decoded from there to be scored.

Shape letters: ``K`` tokens of the continuation, ``V`` vocabulary, ``S`` slots of the pool.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from irminsul.engine.model import MlaModel
from irminsul.errors import InputError
from irminsul.fidelity.paths import FULL, Path
from irminsul.fidelity.rows import Part, Placed, RowCache, Tokens
from irminsul.fidelity.tasks import Case
from irminsul.plan import ReusePlan, ReusePolicy, SegmentKind, make_plan

_POOL_BYTES = {"cpu": 2**30, "cuda": 2**34}
"""What the pool may take if the paths of a case can be split into groups."""


@dataclass(frozen=True)
class PathResult:
    """One case on one path; lengths are in tokens."""

    kl: float
    """KL(full || path), nats a token, mean over the continuation."""
    argmax_match: float
    """Share of the continuation's tokens that are the path's first choice."""
    first_divergence: int
    """Tokens of greedy text that agree with the reference's; all of them if none differs."""
    tokens: int
    """Length of the continuation that was compared."""
    score: bool | None
    """Whether the path's own text holds the answer; None without one."""
    prompt_tokens: int
    computed: int
    """Prompt tokens that were not reused."""
    shifted: int
    runs: tuple[tuple[int, int], ...]
    """(length, delta) of each shifted run."""


@dataclass(frozen=True)
class CaseResult:
    """One case on all paths, by name; the reference is one of them."""

    task: str
    number: int
    note: str
    paths: dict[str, PathResult]


class Harness:
    """A model and what is needed to measure cases on it.

    Args:
        model: the model; its pool is allocated on its device.
        decode: token ids to text, for scores.
        matcher: a name from MATCHERS.
        special_tokens: see Registry.
        pool_bytes: what the pool may take, unless one path alone needs more; by device if None.
    """

    def __init__(
        self,
        model: MlaModel,
        decode: Callable[[list[int]], str],
        *,
        matcher: str = "winnow64",
        special_tokens: Sequence[int] = (),
        pool_bytes: int | None = None,
    ) -> None:
        self._model = model
        self._decode = decode
        self._matcher = matcher
        self._special_tokens = special_tokens
        budget = _POOL_BYTES[model.device.type] if pool_bytes is None else pool_bytes
        self._pool_slots = budget // model.layout.bytes_per_token(model.config.n_layers)
        self._pool_LSW = model.new_pool(0)

    def measure(self, task: str, number: int, case: Case, paths: Sequence[Path], max_tokens: int) -> CaseResult:
        """Measure a case.

        Args:
            task: name of the task, for the result.
            number: of the case in its task, for the result.
            case: prompt, donors and answer.
            paths: what to compare with the reference.
            max_tokens: longest continuation, of the reference and of each path's own text.

        Raises:
            InputError: the model's context is too short, or its logits are not finite.
        """
        longest = max(len(tokens) for tokens in (*case.donors, case.prompt, case.middle)) + max_tokens
        if longest > self._model.config.max_position_embeddings:
            raise InputError(
                f"task {task} needs a context of {longest} tokens, and this model has "
                f"{self._model.config.max_position_embeddings}"
            )
        prompt, middle = _array(case.prompt), _array(case.middle)
        slots = self._slots_wanted(case, paths, max_tokens)
        rows = self._rows(slots, paths)
        for donor in case.donors:
            rows.publish(_array(donor))
        mark = rows.used
        reference = self._reference(rows, prompt, max_tokens)
        rows.used = mark
        forced = np.concatenate([prompt, reference.continuation])
        results = {FULL: self._result(case, reference, reference.plan, reference.logits_KV, reference.continuation)}
        for group in _groups(rows, paths, len(prompt), len(middle), max_tokens, slots):
            placed = [
                rows.place(path, prompt, session_end=case.session_end, middle=middle, extra=max_tokens)
                for path in group
            ]
            logits = rows.forward([_forced_part(forced, place, len(prompt)) for place in placed])
            texts = self._own_texts(rows, case, reference, placed, logits, max_tokens)
            for path, place, logits_KV, text in zip(group, placed, logits, texts, strict=True):
                results[path.name] = self._result(case, reference, place.plan, logits_KV, text)
            rows.used = mark
        return CaseResult(task, number, case.note, results)

    def _slots_wanted(self, case: Case, paths: Sequence[Path], max_tokens: int) -> int:
        """Return the slots for all paths of a case, or for as many as the budget holds, at least one.

        Not the size of the pool, which earlier cases may have made larger: what is computed together decides the order
        of sums, and a case's result must not depend on the cases before it.
        """
        donors = sum(map(len, case.donors))
        one = len(case.prompt) + len(case.middle) + max_tokens
        return donors + max(one, min(len(paths) * one, self._pool_slots - donors))

    def _rows(self, wanted: int, paths: Sequence[Path]) -> RowCache:
        """Return caches over the pool, which grows if it is smaller than wanted."""
        matchers = [path.matcher for path in paths if path.matcher is not None]
        if self._pool_LSW.shape[1] < wanted:
            self._pool_LSW = self._model.new_pool(0)  # the old one is freed before the new one is made
            self._pool_LSW = self._model.new_pool(wanted)
        return RowCache(self._model, self._pool_LSW, self._matcher, self._special_tokens, matchers)

    def _reference(self, rows: RowCache, prompt: Tokens, max_tokens: int) -> "_Reference":
        slots = rows.allocate(len(prompt) + max_tokens)
        (logits_KV,) = rows.forward([Part(prompt, slots, np.arange(len(prompt)), 1)])
        seen = [logits_KV]
        text = _Text(prompt, slots, [int(logits_KV.argmax())])
        while len(text.own) < max_tokens and not self._ended(text):
            (logits_KV,) = rows.forward([text.next_part()])
            seen.append(logits_KV)
            text.own.append(int(logits_KV.argmax()))
        return _Reference(len(prompt), _array(text.own), torch.cat(seen))

    def _own_texts(
        self,
        rows: RowCache,
        case: Case,
        reference: "_Reference",
        placed: Sequence[Placed],
        logits: Sequence[Tensor],
        max_tokens: int,
    ) -> list[Tokens]:
        """Return each path's own greedy text; without an answer to look for, only up to where it diverges."""
        texts = []
        prompt = _array(case.prompt)
        for place, logits_KV in zip(placed, logits, strict=True):
            chosen = logits_KV.argmax(dim=-1).cpu().numpy()
            end = _first_divergence(chosen, reference.continuation) + 1
            texts.append(_Text(prompt, place.slots, chosen[:end].tolist()))
        open_texts = [text for text in texts if case.answer is not None]
        while open_texts := [text for text in open_texts if len(text.own) < max_tokens and not self._ended(text)]:
            for text, logits_KV in zip(
                open_texts, rows.forward([text.next_part() for text in open_texts]), strict=True
            ):
                text.own.append(int(logits_KV.argmax()))
        return [_array(text.own) for text in texts]

    def _ended(self, text: "_Text") -> bool:
        return text.own[-1] in self._model.config.eos_token_ids

    def _result(
        self, case: Case, reference: "_Reference", plan: ReusePlan, logits_KV: Tensor, text: Tokens
    ) -> PathResult:
        chosen = logits_KV.argmax(dim=-1).cpu().numpy()
        kl = float(token_kl(reference.logits_KV, logits_KV).mean())
        if not math.isfinite(kl):
            raise InputError(
                "the model's logits are not finite: its checkpoint is damaged, or the dtype is too narrow for it"
            )
        return PathResult(
            kl=kl,
            argmax_match=float((chosen == reference.continuation).mean()),
            first_divergence=_first_divergence(chosen, reference.continuation),
            tokens=len(reference.continuation),
            score=None if case.answer is None else holds(self._decode(text.tolist()), case.answer),
            prompt_tokens=plan.n_tokens,
            computed=plan.tokens(SegmentKind.GAP),
            shifted=plan.tokens(SegmentKind.SHIFTED),
            runs=tuple((run.length, run.delta) for run in plan.runs),
        )


def token_kl(full_KV: Tensor, path_KV: Tensor) -> Tensor:
    """Return KL(full || path) in nats for each row of logits, float64 [K].

    Tokens that are impossible in ``full`` add nothing. Rounding below zero is cut off.
    """
    full = full_KV.double().log_softmax(dim=-1)
    path = path_KV.double().log_softmax(dim=-1)
    terms_KV = torch.where(full == -torch.inf, 0.0, full.exp() * (full - path))
    return terms_KV.sum(dim=-1).clamp_min(0.0)


def holds(text: str, answer: str) -> bool:
    """Say whether a text contains an answer as words of their own, whatever the case of the letters."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


@dataclass(frozen=True, eq=False)
class _Reference:
    """What the full computation gave."""

    n_prompt: int
    continuation: Tokens
    """Greedy tokens up to an end of text, int32 [K]."""
    logits_KV: Tensor
    """float32; row i gave token i."""

    @property
    def plan(self) -> ReusePlan:
        """Everything computed."""
        return make_plan(self.n_prompt, prefix=0, policy=ReusePolicy())


@dataclass(eq=False)
class _Text:
    """A sequence that is decoded."""

    prompt: Tokens
    slots: NDArray[np.int32]
    own: list[int] = field(default_factory=list)
    """What was decoded; the row of its last token does not exist yet."""

    def next_part(self) -> Part:
        """Compute the last token."""
        tokens = np.concatenate([self.prompt, _array(self.own)])
        return Part(tokens, self.slots, np.array([len(tokens) - 1]), 1)


def _forced_part(forced: Tokens, placed: Placed, n_prompt: int) -> Part:
    """Compute the gaps of a prompt and the reference's tokens but the last, with logits for each of those."""
    n_own = len(forced) - n_prompt
    positions = np.concatenate([placed.plan.computed_positions(), np.arange(n_prompt, n_prompt + n_own - 1)])
    return Part(forced, placed.slots, positions, n_own)


def _groups(
    rows: RowCache, paths: Sequence[Path], n_prompt: int, n_middle: int, extra: int, pool_slots: int
) -> Iterator[list[Path]]:
    """Split paths into groups whose rows fit the pool together."""
    group: list[Path] = []
    taken = rows.used
    for path in paths:
        needed = rows.slots_needed(path, n_prompt, n_middle, extra)
        if group and taken + needed > pool_slots:
            yield group
            group, taken = [], rows.used
        group.append(path)
        taken += needed
    if group:
        yield group


def _first_divergence(chosen: NDArray[np.integer], expected: NDArray[np.integer]) -> int:
    differs = np.flatnonzero(chosen != expected)
    return int(differs[0]) if len(differs) else len(expected)


def _array(tokens: Sequence[int]) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)
