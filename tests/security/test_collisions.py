"""Collisions and floods (the class of CVE-2025-25183): bounded work, never a wrong row, and none that is prepared."""

import numpy as np
import pytest
from text_cache import NOBODY, TextCache, as_tokens, count_comparisons

from irminsul.matching import winnow
from irminsul.matching.cdc import splitmix64
from irminsul.matching.fingerprint_index import MAX_CHAIN, FingerprintIndex, index_get, index_put
from irminsul.matching.winnow import MAX_WORK, WinnowMatcher, kgram_hashes
from irminsul.namespace import Namespace
from irminsul.registry import Registry

VOCABULARY = 129_280
"""DeepSeek's: the larger it is, the more an attacker can choose."""


def product(*factors):
    """Multiply polynomials, lists of coefficients."""
    result = [1]
    for factor in factors:
        result = np.convolve(result, factor).tolist()
    return result


def prepared_pairs(k):
    """Yield pairs of k-grams whose difference is a polynomial with as many zeros modulo powers of two as fit in.

    Every odd number is close to a zero of (x - 1)(x + 1)(x**2 + 1), in the 2-adic sense. The best of these pairs met
    under 18 % of all seeds while token ids themselves were the coefficients of the rolling hash.
    """
    for ones in range(k):
        for minus in range(k - ones):
            for squares in range((k - ones - minus) // 2 + 1):
                difference = product(*[[1, -1]] * ones, *[[1, 1]] * minus, *[[1, 0, 1]] * squares)
                largest = max(map(abs, difference))
                if len(difference) > k or ones + minus + squares < 3 or largest >= VOCABULARY:
                    continue
                scaled = np.array(difference) * (1 << int(np.log2(VOCABULARY / largest)))
                scaled = np.pad(scaled, (0, k - len(scaled)))
                yield np.maximum(scaled, 0).astype(np.int32), np.maximum(-scaled, 0).astype(np.int32)


def alternating_pair(k):
    """Return the Thue-Morse word of two tokens and its complement: of 2,048 letters they break any polynomial hash."""
    word = np.array([i.bit_count() % 2 for i in range(k)], dtype=np.int32)
    return word, 1 - word


@pytest.mark.parametrize("guarantee", [32, 64, 128])
def test_pairs_prepared_without_the_seed_do_not_meet(guarantee):
    config = winnow.WinnowConfig.for_guarantee(guarantee)
    pairs = [*prepared_pairs(config.k), alternating_pair(config.k)]
    assert len(pairs) > 400
    # Pairs one after the other: the hash of each stands at its last token.
    left, right = (np.concatenate(side) for side in zip(*pairs, strict=True))
    at = np.arange(len(pairs)) * config.k
    for seed in range(100):
        matcher = WinnowMatcher(16, config, seed)
        hashes = [kgram_hashes(text, config.k, matcher._base, matcher._salt(0))[at] for text in (left, right)]
        assert (hashes[0] != hashes[1]).all(), seed


def test_the_pairs_are_dangerous():
    """Control: with token ids for coefficients and any odd base, prepared pairs meet under many seeds."""
    bases = np.array([splitmix64(seed) | 1 for seed in range(200)], dtype=np.uint64)
    met = [(polynomials(left, bases) == polynomials(right, bases)).mean() for left, right in prepared_pairs(24)]
    assert max(met) > 0.1


def polynomials(tokens, bases):
    """Evaluate one polynomial modulo 2**64 at many bases."""
    values = np.zeros(len(bases), dtype=np.uint64)
    for token in tokens:
        values = values * bases + np.uint64(token)
    return values


@pytest.fixture
def few_fingerprints(monkeypatch):
    """Let the hash be the worst an attacker could wish for: three values, the same for every text."""

    def hashes(tokens, k, base, salt):
        return np.resize(np.array([5, 3, 9], dtype=np.uint64), max(0, len(tokens) - k + 1))

    monkeypatch.setattr(winnow, "kgram_hashes", hashes)
    # Compiled code has the true hash built in.
    for name in ("_register", "_search"):
        monkeypatch.setattr(winnow, name, getattr(winnow, name).py_func)


def test_texts_that_all_collide_cost_bounded_work_and_give_no_wrong_row(few_fingerprints, monkeypatch):
    rng = np.random.default_rng(1)
    cache = TextCache(capacity=60_000)
    texts = [rng.integers(0, 1000, 200).astype(np.int32) for _ in range(250)]
    for text in texts:
        cache.add(text)
    assert len(cache.registry) <= 4 * 3, "however many texts, four places a fingerprint"
    config = cache.registry.matcher.config
    for prompt in (texts[0], texts[-1], as_tokens(texts[3], texts[-2], rng.integers(0, 1000, 300))):
        counted = count_comparisons(monkeypatch)
        # ``find`` of the text cache checks each row of each run against its model.
        cache.find(as_tokens([1001], prompt))
        bound = (config.candidates * (config.k + 2) + MAX_WORK + 2 * config.candidates) * (len(prompt) + 1)
        assert 0 < sum(counted) <= bound


class Counted:
    """A column of the index that counts how often it is read."""

    def __init__(self, column):
        self.column, self.reads = column, 0

    def __getitem__(self, at):
        self.reads += 1
        return self.column[at]

    def __setitem__(self, at, value):
        self.column[at] = value


def test_a_crowded_bucket_costs_no_more_than_its_cap():
    """Distinct fingerprints in one bucket, which needs the seed: 20,000 of them are walked no further than 64."""
    index = FingerprintIndex(20_001)
    buckets = len(index.arrays.head)
    for slot in range(20_000):
        index.put(slot, 7 + buckets * (slot + 1))
    older = Counted(index.arrays.older)
    arrays = index.arrays._replace(older=older)
    found = np.empty(4, dtype=np.int32)
    assert index_get.py_func(arrays, np.uint64(7), found) == 0
    assert older.reads == MAX_CHAIN
    older.reads = 0
    index_put.py_func(arrays, 20_000, np.uint64(7), 4)
    assert older.reads == MAX_CHAIN
    assert index.get(7).tolist() == [20_000]


def test_a_flood_of_one_passage_costs_four_candidates_a_seed_and_hides_nobody_elses(monkeypatch):
    rng = np.random.default_rng(2)
    passage = rng.integers(0, 1000, 100).astype(np.int32)
    attacker, victim = Namespace(tenant="attacker"), Namespace(tenant="victim")
    cache = TextCache(capacity=150_000)
    own = cache.add(as_tokens(rng.integers(0, 1000, 30), passage), victim)
    for i in range(1000):
        cache.add(as_tokens([i], rng.integers(1000, 2000, 20), passage), attacker)
    (run,) = cache.find(as_tokens([9999], passage), namespace=victim)
    assert run.slots.tolist() == own[30:].tolist()
    monkeypatch.setattr(winnow, "_search", winnow._search.py_func)
    counted = count_comparisons(monkeypatch)
    (run,) = cache.find(as_tokens([9999], passage), namespace=attacker)
    assert run.length == 100
    config = cache.registry.matcher.config
    assert sum(counted) <= config.candidates * (config.k + 2 * 102) * 101


@pytest.mark.parametrize("matcher", ["winnow32", "winnow64", "winnow128", "cdc", "cdc_s1", "fixed128"])
def test_every_matcher_forgets_a_flood_with_its_rows(matcher):
    registry = Registry(50_000, matcher=matcher, seed=3)
    rng = np.random.default_rng(3)
    slots = np.arange(50_000, dtype=np.int32).reshape(50, 1000)
    passage = rng.integers(0, 1000, 900)
    for i in range(50):
        registry.add(NOBODY, as_tokens(rng.integers(0, 1000, 100), passage), slots[i], 0)
    registry.drop(slots.reshape(-1))
    assert (len(registry), registry.store.live, registry.store.namespaces) == (0, 0, 0)
    assert registry.find(NOBODY, as_tokens(passage), 0) == []
