"""Winnowing: the guarantee of a seed, true and maximal runs against an oracle, bounded work."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cache import NOBODY, TextCache, agent_mix, as_tokens, count_comparisons, cover_of, oracle_cover

from irminsul.errors import InputError
from irminsul.matching import winnow
from irminsul.matching.slot_store import SlotStore
from irminsul.matching.winnow import MAX_WORK, WinnowConfig, WinnowMatcher, kgram_hashes, select
from irminsul.namespace import Namespace

CONFIGS = {32: (16, 17), 64: (24, 41), 128: (32, 97)}
BASE = np.uint64(0x9E3779B97F4A7C15)
SALT = np.uint64(12345)


@st.composite
def random_ids(draw, min_size=0, max_size=300):
    """Draw ids; an alphabet of one or two makes periodic text and equal hashes."""
    size = draw(st.integers(min_size, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    alphabet = draw(st.sampled_from([1, 2, 5, 50_000]))
    return rng.integers(0, alphabet, size).astype(np.int32)


def unique_text(seed, size, first=0):
    """Return ``size`` different ids in random order."""
    return (first + np.random.default_rng(seed).permutation(size)).astype(np.int32)


def selected(tokens, k, w):
    return set(select(kgram_hashes(tokens, k, BASE, SALT), w).tolist())


# -- 1. the guarantee --


@given(random_ids(max_size=200), random_ids(), random_ids(), random_ids(), random_ids(), st.sampled_from([32, 64, 128]))
def test_every_guaranteed_run_has_a_seed_on_both_sides(shared, head, rest, donor_head, donor_rest, guarantee):
    k, w = CONFIGS[guarantee]
    tail = as_tokens(head, shared, rest)
    donor = as_tokens(donor_head, shared, donor_rest)
    at_tail, at_donor = selected(tail, k, w), selected(donor, k, w)
    starts = {}
    for j in range(len(donor) - guarantee + 1):
        starts.setdefault(donor[j : j + guarantee].tobytes(), []).append(j)
    for i in range(len(tail) - guarantee + 1):
        for j in starts.get(tail[i : i + guarantee].tobytes(), ())[:3]:
            assert any(i + o in at_tail and j + o in at_donor for o in range(w))


@given(st.integers(0, 2**32), st.lists(st.integers(1, 700), max_size=8), st.sampled_from([32, 64, 128]))
def test_increments_index_what_one_piece_does(seed, steps, guarantee):
    tokens = unique_text(seed, 700)
    whole, pieces = (TextCache(f"winnow{guarantee}", capacity=700) for _ in range(2))
    whole.add(tokens)
    pieces.add(tokens, steps=steps)
    wanted, given_ = (cache.registry.matcher._index.arrays.fingerprint for cache in (whole, pieces))
    assert (wanted != 0).sum() >= 700 // guarantee
    assert np.array_equal(given_[wanted != 0], wanted[wanted != 0])


@given(random_ids(), st.sampled_from([16, 24, 32]))
def test_hashes_are_those_of_each_kgram_alone(tokens, k):
    hashes = kgram_hashes(tokens, k, BASE, SALT)
    assert len(hashes) == max(0, len(tokens) - k + 1)
    assert all(hashes[i] == kgram_hashes(tokens[i : i + k], k, BASE, SALT)[0] for i in range(0, len(hashes), 17))
    assert (hashes != 0).all()


@given(st.lists(st.integers(1, 6), max_size=80), st.integers(1, 12))
def test_select_takes_the_rightmost_least_of_every_window(values, w):
    windows = [values[left : left + w] for left in range(len(values) - w + 1)]
    expected = sorted({left + w - 1 - window[::-1].index(min(window)) for left, window in enumerate(windows)})
    assert select(np.array(values, dtype=np.uint64), w).tolist() == expected


# -- 2. against an oracle --


@st.composite
def histories(draw):
    """Draw cached texts (namespace, pieces, increments, how much is dropped again) and a prompt of the same pieces."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    alphabet = draw(st.sampled_from([2, 5, 2000]))
    pool = [rng.integers(0, alphabet, int(rng.integers(20, 200))).astype(np.int32) for _ in range(5)]
    piece = st.integers(0, len(pool) - 1)
    text = st.lists(piece, min_size=1, max_size=5)
    cached = draw(
        st.lists(
            st.tuples(text, st.sampled_from(["", "b"]), st.lists(st.integers(1, 600), max_size=3), st.integers(0, 300)),
            min_size=1,
            max_size=5,
        )
    )
    prompt = as_tokens(rng.integers(0, alphabet, 10), *(pool[i] for i in draw(text)))
    return pool, cached, prompt, draw(st.integers(0, len(prompt)))


@given(histories(), st.sampled_from(["winnow32", "winnow64"]))
def test_every_run_is_a_true_match_in_live_rows_of_its_namespace(history, matcher):
    pool, cached, prompt, start = history
    cache = TextCache(matcher, capacity=6000)
    for pieces, tenant, steps, dropped in cached:
        slots = cache.add(as_tokens(*(pool[i] for i in pieces)), Namespace(tenant=tenant), steps)
        cache.drop(slots[len(slots) - min(dropped, len(slots)) :])
    for tenant in ("", "b", "unknown"):
        runs = cache.find(prompt, start, Namespace(tenant=tenant))
        assert all(run.length >= cache.registry.matcher.config.k for run in runs)
        covered = cover_of(runs, len(prompt))
        possible = oracle_cover(cache.texts(Namespace(tenant=tenant)), prompt, start, 16)
        assert not (covered & ~possible).any()


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 1999), st.integers(1, 300)), max_size=8), st.data())
def test_a_donor_without_repeats_is_found_completely(seed, slices, data):
    donor = unique_text(seed, 2000)
    parts = []
    for i, (begin, length) in enumerate(slices):
        parts += [donor[begin : begin + length], [100_000 + i] * data.draw(st.integers(0, 3))]
    prompt = as_tokens([99_999], *parts)
    start = data.draw(st.integers(0, len(prompt)))
    cache = TextCache("winnow64", capacity=2000)
    cache.add(donor)
    runs = cache.find(prompt, start)
    assert not (oracle_cover([donor.tolist()], prompt, start, 64) & ~cover_of(runs, len(prompt))).any()
    for before, after in itertools.pairwise(runs):
        assert before.end < after.start or before.delta != after.delta, "a run is maximal"


@pytest.mark.parametrize(("matcher", "length"), [("winnow32", 32), ("winnow64", 64), ("winnow128", 128)])
def test_agent_prompts_reach_the_oracle(matcher, length):
    rng = np.random.default_rng(7)
    pool = [rng.zipf(1.3, int(rng.integers(60, 500))).clip(max=20_000).astype(np.int32) for _ in range(20)]
    cache = TextCache(matcher)
    found = possible = 0
    for _ in range(8):
        prompt = agent_mix(rng, pool, 6)
        oracle = oracle_cover(cache.texts(), prompt, 0, length)
        found += int((cover_of(cache.find(prompt), len(prompt)) & oracle).sum())
        possible += int(oracle.sum())
        cache.add(prompt)
    assert possible > 4000
    assert found >= 0.95 * possible


def test_short_tails_and_empty_registries_find_nothing():
    cache = TextCache("winnow64", capacity=300)
    text = unique_text(0, 300)
    assert cache.find(text) == []
    cache.add(text)
    assert [(run.start, run.length, run.delta) for run in cache.find(text)] == [(0, 300, 0)]
    assert cache.find(text[:63]) == []
    assert cache.find(text, start=300) == []
    assert [run.length for run in cache.find(text[:64])] == [64]


# -- 3. branches --


def test_a_run_goes_on_into_the_request_that_continued_its_donor():
    prefix, first, second = unique_text(1, 200), unique_text(2, 90, 1000), unique_text(3, 90, 2000)
    cache = TextCache(capacity=500)
    old = cache.add(as_tokens(prefix, first))
    new = cache.add(as_tokens(prefix, second))
    assert new[:200].tolist() == old[:200].tolist()
    for tail, slots in ((first, old), (second, new)):
        (run,) = cache.find(as_tokens([9999], prefix, tail))
        assert (run.start, run.source_start) == (1, 0)
        assert run.slots.tolist() == slots.tolist()


def test_a_branch_behind_many_siblings_is_reached_by_its_own_seed():
    prefix = unique_text(1, 100)
    cache = TextCache(capacity=5000)
    oldest = cache.add(as_tokens(prefix, unique_text(0, 80, 1000)))
    for i in range(20):
        cache.add(as_tokens(prefix, unique_text(i, 80, 2000 + 100 * i)))
    (run,) = cache.find(as_tokens([9999], prefix, unique_text(0, 80, 1000)))
    assert run.slots.tolist() == oldest.tolist()


def test_the_longer_of_two_overlapping_runs_keeps_the_overlap():
    a, b, c = unique_text(1, 80), unique_text(2, 70, 1000), unique_text(3, 200, 2000)
    cache = TextCache(capacity=600)
    cache.add(as_tokens(a, b))
    cache.add(as_tokens([9999], b, c))
    runs = cache.find(as_tokens(a, b, c))
    assert [(run.start, run.end) for run in runs] == [(0, 80), (80, 350)]


def test_of_donors_that_reach_equally_far_the_one_that_began_earlier_is_taken():
    """The newer donor is tried first, and holds the end of the text only."""
    for seed in range(20):
        head, shared = unique_text(seed, 30), unique_text(seed, 70, 1000)
        cache = TextCache(capacity=400)
        older = cache.add(as_tokens(head, shared))
        cache.add(as_tokens([9999], shared))
        (run,) = cache.find(as_tokens(head, shared))
        assert run.slots.tolist() == older.tolist()


# -- 4. and 5. death and namespaces --


def test_dropped_rows_are_never_returned():
    text = unique_text(1, 400)
    cache = TextCache(capacity=400)
    slots = cache.add(text)
    cache.drop(slots[250:])
    assert [(run.start, run.length) for run in cache.find(as_tokens([999], text))] == [(1, 250)]
    cache.drop(slots)
    assert cache.find(as_tokens([999], text)) == []
    assert len(cache.registry) == 0
    assert cache.registry.store.live == 0


def test_reused_slots_answer_for_their_new_text_only():
    old, new = unique_text(1, 300), unique_text(2, 300, 1000)
    cache = TextCache(capacity=300)
    cache.drop(cache.add(old))
    cache.add(new)
    assert cache.find(as_tokens([9999], old)) == []
    assert [run.length for run in cache.find(as_tokens([9999], new))] == [300]


def test_namespaces_never_mix():
    text = unique_text(1, 300)
    cache = TextCache(capacity=900)
    cache.add(text, Namespace(tenant="a"))
    cache.add(text, Namespace(tenant="a", cache_salt="s"))
    mine = cache.find(as_tokens([999], text), namespace=Namespace(tenant="a"))
    salted = cache.find(as_tokens([999], text), namespace=Namespace(tenant="a", cache_salt="s"))
    assert not set(mine[0].slots.tolist()) & set(salted[0].slots.tolist())
    assert cache.find(as_tokens([999], text), namespace=NOBODY) == []
    prints = [set(kgram_hashes(text, 24, BASE, cache.registry.matcher._salt(number)).tolist()) for number in (0, 1)]
    assert not prints[0] & prints[1], "not even fingerprints meet"


# -- 6. collisions --


def test_tokens_decide_when_fingerprints_collide():
    """Every k-gram of the prompt is claimed by rows that hold other text, newer than the true donor."""
    k = WinnowConfig().k
    text, other = unique_text(1, 100), unique_text(2, 100, 1000)
    cache = TextCache(capacity=300)
    true_slots = cache.add(text)
    matcher = cache.registry.matcher
    matcher.add = lambda *args: None  # the liars have no entries of their own
    liars = cache.add(other)
    number = cache.registry.store.namespace_id(NOBODY)
    for i, fingerprint in enumerate(kgram_hashes(text, k, matcher._base, matcher._salt(number)).tolist()):
        matcher._index.put(int(liars[i + k - 1]), fingerprint)
        assert int(liars[i + k - 1]) in matcher._index.get(fingerprint)
    (run,) = cache.find(as_tokens([9999], text))
    assert run.slots.tolist() == true_slots.tolist()
    cache.drop(true_slots)
    assert cache.find(as_tokens([9999], text)) == []


def test_a_fingerprint_of_another_namespace_is_refused_by_the_store():
    text = unique_text(1, 100)
    cache = TextCache(capacity=300)
    slots = cache.add(text, Namespace(tenant="a"))
    cache.add(unique_text(2, 100, 1000), NOBODY)
    matcher = cache.registry.matcher
    matcher.drop(slots)
    number = cache.registry.store.namespace_id(NOBODY)
    for i, fingerprint in enumerate(kgram_hashes(text, 24, matcher._base, matcher._salt(number)).tolist()):
        matcher._index.put(int(slots[i + 23]), fingerprint)
    assert cache.find(as_tokens([9999], text)) == []


# -- 7. bounded work --


def padding(n, seed):
    """Make almost one token only: every hundredth is another."""
    rng = np.random.default_rng(seed)
    tokens = np.full(n, 7, dtype=np.int32)
    at = rng.integers(0, n, n // 100)
    tokens[at] = rng.integers(10, 1000, len(at))
    return tokens


PATHOLOGICAL = {
    "one token": lambda n, seed: np.full(n, 7, dtype=np.int32),
    "period 7": lambda n, seed: np.resize(np.arange(7, dtype=np.int32), n),
    "period 41": lambda n, seed: np.resize(np.arange(41, dtype=np.int32), n),
    "padding": padding,
}


def comparisons(kind, step, size, monkeypatch):
    """Search three donors of the kind for a prompt of it; return the token comparisons and their proven bound.

    Each of at most n seeds verifies a k-gram with every candidate. Extensions spend MAX_WORK * n, and one seed more;
    after that, each goes left to what is covered and right over tokens that are covered from then on. An extension
    makes one comparison more than it has tokens.
    """
    cache = TextCache(capacity=4 * size)
    for i in range(3):
        cache.add(as_tokens([50_000 + i], PATHOLOGICAL[kind](size, i)), steps=range(step, size, step))
    config = cache.registry.matcher.config
    counted = count_comparisons(monkeypatch)
    monkeypatch.setattr(winnow, "_search", winnow._search.py_func)
    cache.registry.find(NOBODY, PATHOLOGICAL[kind](size, 99), 0)
    return sum(counted), (config.candidates * (config.k + 2) + MAX_WORK + 2 * config.candidates) * size


@pytest.mark.parametrize("size", [2000, 8000])
@pytest.mark.parametrize("step", [16, 100_000])
@pytest.mark.parametrize("kind", PATHOLOGICAL)
def test_comparisons_stay_linear(kind, step, size, monkeypatch):
    made, bound = comparisons(kind, step, size, monkeypatch)
    assert size < made <= bound


def test_comparisons_grow_with_the_square_without_a_budget(monkeypatch):
    """Control: the bound above is one that the search would break."""
    monkeypatch.setattr(winnow, "MAX_WORK", 10**9)
    made, bound = comparisons("one token", 16, 8000, monkeypatch)
    assert made > bound


def test_a_stretch_of_short_period_is_seeded_at_its_beginning():
    """What follows a periodic stretch may be missed, but only if it is itself below the guarantee."""
    cache = TextCache(capacity=2000)
    short, enough = unique_text(1, 30, 100), unique_text(2, 64, 1000)
    cache.add(as_tokens([7] * 500, short))
    cache.add(as_tokens([8] * 500, enough))
    assert sum(run.length for run in cache.find(as_tokens([7] * 100, short))) >= 100
    assert sum(run.length for run in cache.find(as_tokens([8] * 100, enough))) == 164


# -- settings --


def test_settings_give_their_guarantee_and_nothing_else_is_accepted():
    for guarantee, (k, w) in CONFIGS.items():
        config = WinnowConfig.for_guarantee(guarantee)
        assert (config.k, config.w, config.guarantee) == (k, w, guarantee)
    with pytest.raises(InputError, match="valid guarantees: 32, 64, 128"):
        WinnowConfig.for_guarantee(48)
    for wrong in ({"k": 1}, {"w": 0}, {"candidates": 0}):
        with pytest.raises(InputError, match="winnow needs"):
            WinnowConfig(**wrong)


def test_seeds_make_fingerprints_of_their_own():
    text = unique_text(1, 200)
    prints = []
    for seed in (1, 2):
        store, matcher = SlotStore(200), WinnowMatcher(200, WinnowConfig(), seed)
        slots = np.arange(200, dtype=np.int32)
        matcher.add(store, store.add(NOBODY, text, slots, 0), text, slots, 0)
        prints.append({int(value) for value in matcher._index.arrays.fingerprint if value})
        assert matcher.nbytes > 0
        assert len(matcher) == len(prints[-1])
    assert prints[0]
    assert not prints[0] & prints[1]
