"""Bugs to plant in the core and the engine: the random operations must find each."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from world import LIFE, Broken, live

from irminsul.engine import sequence
from irminsul.matching.winnow import WinnowMatcher
from irminsul.plan import ReusePlan, Run, SegmentKind
from irminsul.radix_cache import NO_SLOTS, PrefixMatch, RadixCache
from irminsul.registry import Registry
from irminsul.slot_pool import SlotPool

LIVES = 8
"""Within how many lives of 2,000 operations a bug must be found."""


def donors_are_not_locked(patch):
    @contextmanager
    def lock_rows(self, slots):
        yield

    patch.setattr(RadixCache, "lock_rows", lock_rows)


def one_lock_in_fifty_is_skipped(patch):
    plain, calls = RadixCache.lock, []

    def lock(self, node):
        calls.append(node)
        if len(calls) % 50:
            plain(self, node)

    patch.setattr(RadixCache, "lock", lock)


def a_split_loses_its_locks(patch):
    plain = RadixCache._split

    def split(self, node, at):
        upper = plain(self, node, at)
        upper.locks = 0
        return upper

    patch.setattr(RadixCache, "_split", split)


def a_match_may_end_inside_a_page(patch):
    def common(self, held, tokens):
        length = min(len(held), len(tokens))
        differs = held[:length] != tokens[:length]
        return int(np.argmax(differs)) if differs.any() else length

    patch.setattr(RadixCache, "_common", common)


def derived_rows_are_matched_as_exact(patch):
    plain = RadixCache.match

    def match(self, namespace, tokens, *, derived=False):
        found = plain(self, namespace, tokens, derived=derived)
        return PrefixMatch(np.concatenate([found.slots, found.derived_slots]), NO_SLOTS, found.node)

    patch.setattr(RadixCache, "match", match)


def all_tenants_have_one_tree(patch):
    match, insert = RadixCache.match, RadixCache.insert

    def shared(plain):
        return lambda self, namespace, *args, **kwargs: plain(self, replace(namespace, tenant=""), *args, **kwargs)

    patch.setattr(RadixCache, "match", shared(match))
    patch.setattr(RadixCache, "insert", shared(insert))


def the_registry_forgets_the_salt(patch):
    add, find = Registry.add, Registry.find

    def unsalted(plain):
        return lambda self, namespace, *args: plain(self, replace(namespace, cache_salt=""), *args)

    patch.setattr(Registry, "add", unsalted(add))
    patch.setattr(Registry, "find", unsalted(find))


def dead_donors_stay(patch):
    patch.setattr(Registry, "drop", lambda self, slots: None)


def fingerprints_of_dead_donors_stay(patch):
    patch.setattr(WinnowMatcher, "drop", lambda self, slots: None)


def derived_rows_are_published_as_exact(patch):
    patch.setattr(ReusePlan, "exact_end", property(lambda self: self.n_tokens))


def the_first_shifted_row_is_published_as_exact(patch):
    def exact_end(self):
        starts = (segment.start + 1 for segment in self.segments if segment.kind is SegmentKind.SHIFTED)
        return next(starts, self.n_tokens)

    patch.setattr(ReusePlan, "exact_end", property(exact_end))


def delta_is_off_by_one(patch):
    patch.setattr(Run, "delta", property(lambda self: self.start - self.source_start + 1))


def a_cut_run_names_the_slots_beside_it(patch):
    def cut(self, start, end):
        offset = start - self.start
        first = max(0, offset - 1)
        return Run(start, self.source_start + offset, self.slots[first : first + end - start])

    patch.setattr(Run, "slice", cut)


def a_run_is_found_one_token_late(patch):
    plain = WinnowMatcher.find

    def find(self, store, number, tokens, start):
        runs = plain(self, store, number, tokens, start)
        return [Run(run.start + 1, run.source_start, run.slots) for run in runs if run.end < len(tokens)]

    patch.setattr(WinnowMatcher, "find", find)


def rows_that_the_tree_had_are_not_given_back(patch):
    plain = sequence.Sequence.exchange

    def exchange(self, slots):
        plain(self, slots)
        return NO_SLOTS

    patch.setattr(sequence.Sequence, "exchange", exchange)


def all_but_five_tokens_of_gaps_are_never_computed(patch):
    plain = ReusePlan.computed_positions
    patch.setattr(ReusePlan, "computed_positions", lambda self: plain(self)[-5:])


def prefix_hits_are_computed_again_in_place(patch):
    patch.setattr(ReusePlan, "computed_positions", lambda self: np.arange(self.n_tokens))


def pages_are_lost(patch):
    plain = SlotPool.free
    patch.setattr(SlotPool, "free", lambda self, slots: plain(self, slots[self.page_size :]))


BUGS = (
    donors_are_not_locked,
    one_lock_in_fifty_is_skipped,
    a_split_loses_its_locks,
    a_match_may_end_inside_a_page,
    derived_rows_are_matched_as_exact,
    all_tenants_have_one_tree,
    the_registry_forgets_the_salt,
    dead_donors_stay,
    fingerprints_of_dead_donors_stay,
    derived_rows_are_published_as_exact,
    the_first_shifted_row_is_published_as_exact,
    delta_is_off_by_one,
    a_cut_run_names_the_slots_beside_it,
    a_run_is_found_one_token_late,
    rows_that_the_tree_had_are_not_given_back,
    all_but_five_tokens_of_gaps_are_never_computed,
    prefix_hits_are_computed_again_in_place,
    pages_are_lost,
)
OF_THE_ENGINE_TOO = (
    donors_are_not_locked,
    one_lock_in_fifty_is_skipped,
    the_registry_forgets_the_salt,
    dead_donors_stay,
    derived_rows_are_published_as_exact,
    delta_is_off_by_one,
    rows_that_the_tree_had_are_not_given_back,
    all_but_five_tokens_of_gaps_are_never_computed,
    prefix_hits_are_computed_again_in_place,
    pages_are_lost,
)
PLANTED = (*(("core", bug) for bug in BUGS), *(("engine", bug) for bug in OF_THE_ENGINE_TOO))


def operations_until_found(host, bug):
    """Plant a bug and return how many operations it took to find it, or None."""
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for lived in range(LIVES):
            try:
                live(host, lived)
            except Broken as broken:
                return LIFE * lived + broken.operations
    return None
