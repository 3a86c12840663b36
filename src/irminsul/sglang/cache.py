"""SGLang's tree with two more habits: it tells which rows come and go, and keeps derived rows below exact ones.

Everything else (matching, eviction, locks, both tree cores, page sizes) is SGLang's own. Rows stay SGLang's too: the
registry hears of a row when the tree takes it and forgets it when the tree lets it go, and a donor is locked in the
tree from the plan to the copy.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot, FreeDeviceKV, FreeDeviceKVFullOnly
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from torch import Tensor

from irminsul.namespace import Namespace
from irminsul.plan import Run
from irminsul.sglang.donors import DonorIndex, DonorPath
from irminsul.sglang.histories import Histories, mark_tokens
from irminsul.sglang.requests import ATTRIBUTE, ReuseState, new_state, token_array
from irminsul.sglang.settings import Settings


@dataclass(frozen=True, eq=False)
class LockedRun:
    """A run whose donor cannot be evicted, and where the tree holds its rows."""

    run: Run
    slots: Tensor
    """Of each token, [length], on the device."""

    def slice(self, start: int, end: int) -> "LockedRun":
        """Return the part at target positions [start, end), which must lie inside."""
        offset = start - self.run.start
        return LockedRun(self.run.slice(start, end), self.slots[offset : offset + end - start])


class IrminsulRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """The tree of a server that reuses rows by content."""

    donors: DonorIndex | None = None
    """None until the server has been checked; until then this is SGLang's tree."""

    def attach(self, donors: DonorIndex, identity: Namespace, settings: Settings) -> None:
        """Begin to index.

        Args:
            donors: the index.
            identity: model, row format and rope, part of every namespace.
            settings: the server's.
        """
        self.donors = donors
        self.histories = Histories()
        self._identity = identity
        self._settings = settings

    def state_of(self, req: Any) -> ReuseState:  # SGLang's Req
        """Return what is remembered of a request, from its first match on."""
        state: ReuseState | None = getattr(req, ATTRIBUTE, None)
        if state is None:
            state = new_state(req, self._settings, self._identity)
            setattr(req, ATTRIBUTE, state)
            # A tenant has a tree of its own: SGLang makes all further keys of the request from this.
            req.extra_key = state.extra_key
            if state.marked:
                req.skip_radix_cache_insert = True
        return state

    # -- habits of the tree ----------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match as SGLang does, or further, along the request's own derived history."""
        if self.donors is None or params.req is None:
            return super().match_prefix(params)
        state = self.state_of(params.req)
        if params.key.extra_key != state.extra_key or state.marked:
            params = replace(params, key=_scoped(params.key, state))
        exact = super().match_prefix(params)
        state.derived_from, state.indexed = None, 0
        return self._along_history(params, exact, state) if state.follows_history else exact

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert as SGLang does; what is derived goes in under marked tokens."""
        if self._anchor is not None and len(params.key) > self._anchor:
            params.key = _marked(params.key, self._anchor)
        return super().insert(params)

    _anchor: int | None = None
    """While a request with derived rows is inserted: the position they begin at."""

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:  # SGLang's own
        """Publish a request's rows: exact ones as SGLang does, and to the index; derived ones apart."""
        if self.donors is None or self.disable:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            return
        state = self.state_of(req)
        tokens = np.array(req.full_untruncated_fill_ids[:up_to], dtype=np.int64)
        self._anchor = state.derived_from
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        finally:
            self._anchor = None
        held = req.kv.cache_protected_len
        exact = held if state.derived_from is None else min(held, state.derived_from)
        if state.derived_from is not None and held > state.derived_from:
            self.histories.add(state.namespace, tokens, state.derived_from)
        if exact > state.indexed and state.donates:
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :exact]
            self.donors.add(state.namespace, tokens[:exact], row)
            state.indexed = exact

    def _apply_cache_action(self, action: Any) -> None:  # SGLang's own
        """Tell the index of freed rows, before anybody can be given their slots."""
        if self.donors is not None:
            for slots in _freed_slots(action):
                self.donors.drop(slots)
        super()._apply_cache_action(action)

    def reset(self) -> None:
        """Empty the tree and the index."""
        super().reset()
        if self.donors is not None:
            self.donors.clear()
            self.histories.clear()

    # -- what admission uses ---------------------------------------------------------------------------------------

    def lock_donors(
        self, runs: Sequence[Run], tokens: NDArray[np.int32], state: ReuseState
    ) -> tuple[list[LockedRun], list[Any]]:
        """Lock the rows of runs in the tree.

        Args:
            runs: from a search of this step, or of an earlier one of the same request; then donors may have gone.
            tokens: of the request, from position 0.
            state: the request's.

        Returns:
            The runs whose donors the tree still holds, ascending, and the locks to give to ``unlock``.
        """
        assert self.donors is not None
        kept: list[LockedRun] = []
        locks: list[Any] = []
        locked: list[tuple[DonorPath, Any]] = []
        for run in sorted(runs, key=lambda run: -run.source_start - run.length):
            end = run.source_start + run.length
            path = self.donors.path_to(run)
            if path is None or not np.array_equal(path.tokens[run.source_start : end], tokens[run.start : run.end]):
                continue
            slots = next((held for longer, held in locked if longer.covers(path)), None)
            if slots is None:
                # The index may lag behind the tree: the tree decides whether it holds the donor, and in which slots.
                key = RadixKey(array("q", path.tokens.tobytes()), state.extra_key, cache_salt=state.cache_salt)
                found = self._match_tree(MatchPrefixParams(key=key))
                if found.device_prefix_len < len(path.slots):
                    continue
                root = self.root_node_handle(state.extra_key)
                slots = self.tree_core.collect_full_device_indices(found.last_device_node, root)
                locks.append(self.lock(found.last_device_node))
                locked.append((path, slots))
            # A copy: a view would keep the slots of the whole path.
            kept.append(LockedRun(run, slots[run.source_start : end].clone()))
        return sorted(kept, key=lambda locked: locked.run.start), locks

    # -- derived rows ----------------------------------------------------------------------------------------------

    def _along_history(self, params: MatchPrefixParams, exact: MatchResult, state: ReuseState) -> MatchResult:
        """Return the longest match: exact rows, or exact rows up to an anchor and derived ones behind it."""
        key = params.key
        limit = len(key)
        with _viewed(key.token_ids, limit) as tokens:
            best = exact
            for anchor in self.histories.candidates(state.namespace, tokens, exact.device_prefix_len):
                marked = RadixKey(mark_tokens(key.token_ids[:limit], anchor), key.extra_key, cache_salt=key.cache_salt)
                found = self._match_tree(MatchPrefixParams(key=marked))
                if found.device_prefix_len > best.device_prefix_len:
                    best, state.derived_from = found, anchor
        if state.derived_from is not None and not self._keeps_history(params.req, best.device_prefix_len, state):
            best, state.derived_from = exact, None
        return best

    def _keeps_history(self, req: Any, held: int, state: ReuseState) -> bool:  # SGLang's Req
        """Say whether a request goes on from derived rows; asks the index only if they are a smaller part."""
        assert self.donors is not None
        assert state.derived_from is not None
        donors, tokens = self.donors, token_array(req)

        def search() -> list[Run]:
            # As in admission: what the index holds may depend on how many steps have run, and on nothing else.
            donors.settle()
            return donors.find(state.namespace, tokens, held)

        anchor = state.derived_from
        return self._settings.policy.keeps_history(len(tokens), anchor, held - anchor, search)


def _scoped(key: RadixKey, state: ReuseState) -> RadixKey:
    """Return a key in the tree of a request's tenant; an empty one for a request that must meet nothing."""
    limit = 0 if state.marked else key.limit
    return RadixKey(key.token_ids, state.extra_key, is_bigram=key.is_bigram, limit=limit, cache_salt=key.cache_salt)


def _marked(key: RadixKey, anchor: int) -> RadixKey:
    tokens = mark_tokens(key.raw_token_ids(), anchor)
    return RadixKey(tokens, key.extra_key, is_bigram=key.is_bigram, cache_salt=key.cache_salt)


@contextmanager
def _viewed(token_ids: "array[int]", length: int) -> Iterator[NDArray[np.int64]]:
    """View an array of token ids; while it is viewed, its owner cannot append to it."""
    with memoryview(token_ids) as view:
        tokens = np.frombuffer(view, dtype=np.int64)[:length]
        try:
            yield tokens
        finally:
            del tokens


def _freed_slots(action: Any) -> Sequence[Any]:  # SGLang's own
    """Return the device slots that an action of the tree frees."""
    frees = isinstance(action, FreeDeviceKV | FreeDeviceKVFullOnly | FreeComponentDeviceSlot)
    return action.indices if frees else ()
