"""The rows of one case: a pool, the engine's caches in front of it, and forwards over any of its sequences.

Prefixes come from the real RadixCache, runs from the real Registry, plans from make_plan, and rows are moved by
move_rows; so what a path reuses is what the engine would reuse. All gaps of a prompt are computed in one forward.

Shape letters: ``S`` slots of the pool, ``N`` tokens of a sequence, ``K`` tokens with logits, ``V`` vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.model import MlaModel
from irminsul.fidelity.paths import History, Movement, Path
from irminsul.kernels.rows import move_rows
from irminsul.namespace import Namespace
from irminsul.plan import ReusePlan, ReusePolicy, Run, make_plan
from irminsul.radix_cache import RadixCache
from irminsul.registry import Registry

Tokens = NDArray[np.int32]
Slots = NDArray[np.int32]

_NAMESPACE = Namespace()
_FINGERPRINT_SEED = 1
"""Fixed: which of several donors is found must not differ from run to run."""
_PREFIX_SLICE = 256
"""Tokens of a forward in which an earlier request computed its prompt."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one sequence contributes to a forward."""

    tokens: Tokens
    """Of the whole sequence, int32 [N]."""
    slots: Slots
    """One a token, int32 [N]."""
    positions: NDArray[np.int64]
    """What is computed, ascending."""
    n_logits: int
    """Logits of so many of the last positions are wanted."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A prompt whose reused rows are in place."""

    plan: ReusePlan
    slots: Slots
    """One for each token of the prompt and of its continuation."""


class RowCache:
    """Caches over a pool that is lent for one case.

    Args:
        model: the model.
        pool_LSW: from ``model.new_pool``; whatever it holds is overwritten.
        matcher: name of the matcher of all paths that name none.
        special_tokens: see Registry.
        extra_matchers: further matchers that paths name.
    """

    def __init__(
        self,
        model: MlaModel,
        pool_LSW: Tensor,
        matcher: str,
        special_tokens: Sequence[int] = (),
        extra_matchers: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._pool_LSW = pool_LSW
        self._matcher = matcher
        self._special_tokens = special_tokens
        self._registries = {name: self._new_registry(name) for name in dict.fromkeys((matcher, *extra_matchers))}
        self._tree = RadixCache(pool_LSW.shape[1], listener=_Listeners(tuple(self._registries.values())))
        self.used = 0
        """Slots taken; lower it to give back the latest ones, which must not be in the caches."""

    def allocate(self, n: int) -> Slots:
        """Take the next ``n`` slots of the pool."""
        slots = np.arange(self.used, self.used + n, dtype=np.int32)
        self.used += n
        assert self.used <= self._pool_LSW.shape[1], (self.used, self._pool_LSW.shape)
        return slots

    def forward(self, parts: Sequence[Part]) -> list[Tensor]:
        """Compute parts in one forward; return the logits of each, float32 [K, V], on the model's device."""
        logits_KV = self._model.forward(_batch(parts), self._pool_LSW)
        return list(logits_KV.tensor_split(np.cumsum([part.n_logits for part in parts])[:-1].tolist()))

    def publish(self, tokens: Tokens) -> None:
        """Serve a prompt as one whose rows are all exact: prefix from the cache, the rest computed, all cached."""
        held = self._tree.match(_NAMESPACE, tokens).slots
        slots = np.concatenate([held, self.allocate(len(tokens) - len(held))])
        if len(held) < len(tokens):
            self.forward([Part(tokens, slots, np.arange(len(held), len(tokens)), 0)])
        self._tree.insert(_NAMESPACE, tokens, slots, exact_end=len(tokens))

    def place(self, path: Path, prompt: Tokens, *, session_end: int, middle: Tokens, extra: int) -> Placed:
        """Put the rows that a path reuses into place, computing whatever its history needs.

        Args:
            path: which rows are reused and how.
            prompt: token ids, int32 [N].
            session_end: see Case.
            middle: see Case, int32.
            extra: slots for tokens behind the prompt.
        """
        match path.history:
            case History.DONORS:
                return self._place(path, self._registries[path.matcher or self._matcher], prompt, extra)
            case History.WHOLE_PROMPT:
                return self._place_prefix(path.policy, prompt, extra)
            case History.OWN_SESSION:
                return self._place_next_turn(path, prompt, session_end, extra)
            case History.SHIFTED_DONOR:
                return self._place(path, self._shifted_donor(path, middle), prompt, extra)

    def slots_needed(self, path: Path, n_prompt: int, n_middle: int, extra: int) -> int:
        """Return how many slots ``place`` takes at most."""
        return n_prompt + extra + (n_middle if path.history is History.SHIFTED_DONOR else 0)

    def _place(self, path: Path, registry: Registry, prompt: Tokens, extra: int) -> Placed:
        prefix = self._tree.match(_NAMESPACE, prompt[:-1]).slots
        runs = registry.find(_NAMESPACE, prompt, len(prefix))
        plan = make_plan(len(prompt), prefix=len(prefix), runs=runs, policy=path.policy)
        slots = np.concatenate([prefix, self.allocate(len(prompt) + extra - len(prefix))])
        self._copy(plan.runs, slots, path.movement)
        return Placed(plan, slots)

    def _place_prefix(self, policy: ReusePolicy, prompt: Tokens, extra: int) -> Placed:
        slots = self.allocate(len(prompt) + extra)
        last = len(prompt) - 1
        for start in range(0, last, _PREFIX_SLICE):
            self.forward([Part(prompt, slots, np.arange(start, min(start + _PREFIX_SLICE, last)), 0)])
        return Placed(make_plan(len(prompt), prefix=last, policy=policy), slots)

    def _place_next_turn(self, path: Path, prompt: Tokens, session_end: int, extra: int) -> Placed:
        registry = self._registries[self._matcher]
        earlier = prompt[:session_end]
        turn = self._place(path, registry, earlier, len(prompt) - session_end + extra)
        self.forward([Part(earlier, turn.slots, turn.plan.computed_positions(), 0)])
        exact = turn.plan.exact_end
        plan = make_plan(
            len(prompt),
            prefix=exact,
            approximate_prefix=session_end - exact,
            runs=registry.find(_NAMESPACE, prompt, session_end),
            policy=path.policy,
        )
        self._copy(plan.runs, turn.slots, path.movement)
        return Placed(plan, turn.slots)

    def _shifted_donor(self, path: Path, middle: Tokens) -> Registry:
        """Serve the middle prompt with shifted rows; return an index that offers them as if they were exact."""
        placed = self._place(path, self._registries[self._matcher], middle, 0)
        self.forward([Part(middle, placed.slots, placed.plan.computed_positions(), 0)])
        registry = self._new_registry(self._matcher)
        registry.add(_NAMESPACE, middle, placed.slots, 0)
        return registry

    def _copy(self, runs: Sequence[Run], slots: Slots, movement: Movement) -> None:
        if not runs:
            return
        targets = np.concatenate([np.arange(run.start, run.end) for run in runs])
        deltas = np.concatenate([np.full(run.length, run.delta) for run in runs])
        claimed = {
            Movement.TURNED: targets,
            Movement.COPIED: targets - deltas,
            Movement.TURNED_BACKWARDS: targets - 2 * deltas,
        }
        move_rows(
            self._pool_LSW,
            self._model.layout,
            self._model.config.rope,
            _int64(np.concatenate([run.slots for run in runs])),
            _int64(slots[targets]),
            _int64(targets - deltas),
            _int64(claimed[movement]),
            self._model.angle_source,
        )

    def _new_registry(self, matcher: str) -> Registry:
        return Registry(
            self._pool_LSW.shape[1], matcher=matcher, seed=_FINGERPRINT_SEED, special_tokens=self._special_tokens
        )


@dataclass(frozen=True)
class _Listeners:
    """Several registries that hear of the same rows."""

    registries: tuple[Registry, ...]

    def add(self, namespace: Namespace, tokens: Tokens, slots: Slots, start: int) -> None:
        for registry in self.registries:
            registry.add(namespace, tokens, slots, start)

    def drop(self, slots: Slots) -> None:
        for registry in self.registries:
            registry.drop(slots)


def _batch(parts: Sequence[Part]) -> ForwardBatch:
    spans, logit_rows, cursor = [], [], 0
    for part in parts:
        end = cursor + len(part.positions)
        spans.append(Span(cursor, end, _int64(part.slots[: int(part.positions[-1]) + 1])))
        logit_rows.append(np.arange(end - part.n_logits, end))
        cursor = end
    return ForwardBatch(
        token_ids_T=_int64(np.concatenate([part.tokens[part.positions] for part in parts])),
        positions_T=_int64(np.concatenate([part.positions for part in parts])),
        out_slots_T=_int64(np.concatenate([part.slots[part.positions] for part in parts])),
        spans=tuple(spans),
        logit_rows_N=_int64(np.concatenate(logit_rows)),
    )


def _int64(values: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
