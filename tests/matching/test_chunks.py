"""The chunk matchers: what they find, what they miss by design, and that tokens decide."""

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from text_cache import NOBODY, TextCache, agent_mix, as_tokens, cover_of, oracle_cover

from irminsul.errors import InputError
from irminsul.matching.cdc import MAX_CHUNK, cut_points, cut_points_reference, forced_cut_table, splitmix64
from irminsul.matching.chunks import (
    CHUNK_MATCHERS,
    WINDOW,
    anchored_chunks,
    fixed_blocks,
    make_chunk_matcher,
    tail_chunks,
)
from irminsul.matching.winnow import WinnowMatcher
from irminsul.namespace import Namespace
from irminsul.registry import MATCHERS, Registry, make_matcher

USER, TOOL, END = SPECIAL = (60_001, 60_002, 60_003)


def cache_of(matcher, capacity=20_000):
    return TextCache(matcher, capacity=capacity, special_tokens=SPECIAL)


def text_of(seed, size):
    return np.random.default_rng(seed).integers(0, 50_000, size).astype(np.int32)


def spans(runs):
    return [(run.start, run.end, run.source_start) for run in runs]


# -- names --


def test_names_build_matchers_and_unknown_ones_are_told_which_are_valid():
    assert (*CHUNK_MATCHERS, "winnow32", "winnow64", "winnow128") == MATCHERS
    for name in MATCHERS:
        matcher = make_matcher(name, 100, 1, SPECIAL)
        assert isinstance(matcher, WinnowMatcher) == name.startswith("winnow")
        assert len(matcher) == 0
        assert matcher.nbytes > 0
    with pytest.raises(InputError, match=f"valid matchers: {', '.join(MATCHERS)}"):
        Registry(100, matcher="winnow")
    with pytest.raises(InputError, match=f"valid chunk matchers: {', '.join(CHUNK_MATCHERS)}"):
        make_chunk_matcher("winnow64", 100, 1)


@pytest.mark.parametrize("matcher", ["anchored", "anchored_s1"])
def test_anchored_matchers_refuse_to_run_without_special_tokens(matcher):
    with pytest.raises(InputError, match=f"{matcher}.*special token ids"):
        Registry(100, matcher=matcher)
    with pytest.raises(InputError, match=">= 0"):
        Registry(100, matcher=matcher, special_tokens=[-1])


# -- chunkers --


@given(st.integers(0, 2000), st.data())
def test_fixed_blocks_lie_at_absolute_multiples(size, data):
    start = data.draw(st.integers(0, size))
    cuts = fixed_blocks(np.zeros(size, dtype=np.int32), start).tolist()
    expected = [block for block in range(0, size - WINDOW + 1, WINDOW) if block + WINDOW > start]
    assert cuts[:-1] == expected
    assert cuts[-1] == (expected[-1] + WINDOW if expected else cuts[-1])


def test_tail_chunks_depend_on_where_the_tail_starts():
    tokens = text_of(1, 3000)
    assert tail_chunks(tokens, 0).tolist() == cut_points(tokens).tolist()
    differ = 0
    for start in range(0, 2900, 50):
        moved = tail_chunks(tokens, start)
        assert moved.tolist() == (start + cut_points(tokens[start:])).tolist()
        differ += moved[1] not in cut_points(tokens)
    assert differ > 0, "the example shows nothing"


@given(st.integers(0, 2**32), st.integers(0, 3000), st.sampled_from([3, 400, 50_000]), st.data())
def test_anchored_chunks_are_those_of_the_whole_prompt(seed, size, alphabet, data):
    special = {0, 7}
    tokens = np.random.default_rng(seed).integers(0, alphabet, size).astype(np.int32)
    start = data.draw(st.integers(0, size))
    whole = cut_points_reference(tokens.tolist(), special)
    expected = [cut for cut in whole if cut > start]
    cuts = anchored_chunks(forced_cut_table(special), tokens, start).tolist()
    assert cuts[1:] == expected
    assert cuts[0] == max(cut for cut in whole if cut <= start)


# -- all matchers against the model --


@st.composite
def histories(draw):
    """Draw cached texts (namespace, pieces, increments, how much is dropped again) and a prompt of the same pieces."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    alphabet = draw(st.sampled_from([2, 2000]))
    pool = [as_tokens([TOOL], rng.integers(0, alphabet, int(rng.integers(20, 400))), [END]) for _ in range(5)]
    text = st.lists(st.integers(0, 4), min_size=1, max_size=5)
    increments = st.lists(st.integers(1, 900), max_size=3)
    added = st.tuples(text, st.sampled_from(["", "b"]), increments, st.integers(0, 300))
    cached = draw(st.lists(added, min_size=1, max_size=5))
    prompt = as_tokens(rng.integers(0, alphabet, 10), *(pool[i] for i in draw(text)))
    return pool, cached, prompt, draw(st.integers(0, len(prompt)))


@given(histories(), st.sampled_from(CHUNK_MATCHERS))
def test_every_run_is_a_true_match_in_live_rows_of_its_namespace(history, matcher):
    pool, cached, prompt, start = history
    cache = cache_of(matcher, capacity=11_000)
    for pieces, tenant, steps, dropped in cached:
        slots = cache.add(as_tokens(*(pool[i] for i in pieces)), Namespace(tenant=tenant), steps)
        cache.drop(slots[len(slots) - min(dropped, len(slots)) :])
    for tenant in ("", "b", "unknown"):
        runs = cache.find(prompt, start, Namespace(tenant=tenant))
        for before, after in itertools.pairwise(runs):
            goes_on = cache.model[int(after.slots[0])][3] == int(before.slots[-1])
            assert not (before.end == after.start and goes_on), "chunks that continue each other are one run"


@pytest.mark.parametrize("matcher", CHUNK_MATCHERS)
def test_a_sequence_that_was_cached_is_found_again_at_its_place(matcher):
    cache = cache_of(matcher)
    text = text_of(1, 1000)
    slots = cache.add(text)
    (run,) = cache.find(text)
    size = 1000 // WINDOW * WINDOW if matcher == "fixed128" else 1000
    assert spans([run]) == [(0, size, 0)]
    assert run.slots.tolist() == slots[:size].tolist()
    assert cache.find(text, start=1000) == []
    assert cache.find(text_of(2, 1000)) == []


@pytest.mark.parametrize("matcher", CHUNK_MATCHERS)
def test_dropped_rows_are_never_returned(matcher):
    cache = cache_of(matcher, capacity=2000)
    text = text_of(1, 2000)
    slots = cache.add(text)
    cache.drop(slots[900:])
    assert all(run.end <= 900 for run in cache.find(text))
    assert cover_of(cache.find(text), 2000)[:300].all()
    cache.drop(slots)
    assert cache.find(text) == []
    assert len(cache.registry) == 0


@pytest.mark.parametrize("matcher", CHUNK_MATCHERS)
def test_namespaces_never_mix(matcher):
    cache = cache_of(matcher)
    text = text_of(1, 1000)
    cache.add(text, Namespace(tenant="a"))
    cache.add(text_of(2, 1000), NOBODY)
    assert cache.find(text, namespace=NOBODY) == []
    assert cache.find(text, namespace=Namespace(tenant="a")) != []


# -- what sets them apart --


def shared_cover(matcher, cached, prompt, start=0):
    """Return how many tokens of the prompt are found, and the runs."""
    cache = cache_of(matcher)
    cache.add(cached)
    runs = cache.find(prompt, start)
    return sum(run.length for run in runs), runs


@pytest.mark.parametrize(
    ("shift", "found"), [(0, True), (WINDOW, True), (1, False), (WINDOW - 1, False), (5 * WINDOW, True)]
)
def test_fixed_blocks_hit_only_moves_by_whole_blocks(shift, found):
    body = text_of(1, 1000)
    _, runs = shared_cover("fixed128", body, as_tokens(text_of(2, shift), body))
    assert spans(runs) == ([(shift, shift + 896, 0)] if found else [])


def test_fixed_block_that_straddles_the_prefix_gives_its_part_in_the_tail():
    body = text_of(1, 1000)
    _, runs = shared_cover("fixed128", body, as_tokens(text_of(2, 256), body), start=300)
    assert spans(runs) == [(300, 256 + 896, 44)]


def test_cdc_finds_a_moved_body_up_to_the_first_common_cut():
    body = text_of(1, 6000)
    covered, runs = shared_cover("cdc", as_tokens(text_of(2, 70), body), as_tokens(text_of(3, 31), body))
    assert len(runs) == 1, "one donor, one shift: one run"
    assert runs[0].delta == 31 - 70
    assert 6000 - 1024 <= covered <= 6000


def test_cdc_registers_chunks_of_the_tail_it_is_told():
    """The same text behind the same header is cut elsewhere where the prefix ended elsewhere (the paper's chunker)."""
    header, body = text_of(1, 100), text_of(2, 400)
    tail_only = cache_of("cdc")
    tail_only.add(as_tokens(header, body), steps=[100])
    assert spans(tail_only.find(as_tokens([5], body), start=1)) == [(1, 401, 100)]
    whole = cache_of("cdc")
    whole.add(as_tokens(header, body))
    assert sum(run.length for run in whole.find(as_tokens([5], body), start=1)) < 400


def test_windows_recover_what_a_missing_chunk_had_in_common():
    """The end of a chunk differs: without windows it is lost as a whole."""
    body = text_of(1, 4000)
    cuts = cut_points(body)
    begin, end = max(itertools.pairwise(cuts.tolist()), key=lambda cut: cut[1] - cut[0])
    changed = body.copy()
    changed[end - 1 - (end - begin) % WINDOW] = 50_001
    lost = {matcher: shared_cover(matcher, body, changed)[1] for matcher in ("cdc", "cdc_s1")}
    with_windows, without = (cover_of(lost[name], 4000) for name in ("cdc_s1", "cdc"))
    whole_windows = (end - begin) // WINDOW - ((end - begin) % WINDOW == 0)
    assert end - begin >= 2 * WINDOW
    assert with_windows[begin : begin + WINDOW * (whole_windows - 1)].all()
    assert not without[begin:end].any()
    assert not (without & ~with_windows).any()


def test_windows_have_an_index_of_their_own():
    """A chunk of exactly 128 or 512 tokens and its last window end at the same slot."""
    constant = np.full(MAX_CHUNK, 7, dtype=np.int32)
    assert cut_points(constant).tolist() == [0, MAX_CHUNK], "pick a token whose gear makes no cut"
    cache = cache_of("cdc_s1")
    tokens = as_tokens(constant, text_of(1, 20))
    cache.add(tokens)
    chunks, windows = cache.registry.matcher._indexes
    assert (len(chunks), len(windows)) == (2, MAX_CHUNK // WINDOW)
    assert cache.registry.nbytes > cache_of("cdc").registry.nbytes


@pytest.mark.parametrize("start", [0, 1, 40, 77, 300, 391])
def test_anchored_chunks_do_not_care_where_the_prefix_ended(start):
    """A tool result behind other headers is found completely, wherever its prompt's prefix happened to end."""
    document = as_tokens([TOOL], text_of(1, 500), [END])
    donor = as_tokens([USER], text_of(2, 90), document, [USER], text_of(3, 40))
    prompt = as_tokens([USER], text_of(4, 390), document, [USER], text_of(5, 20))
    cache = cache_of("anchored")
    cache.add(donor, steps=[60])
    # The [END] at the end is a chunk [END] by itself: the next special token cuts behind it.
    assert spans(cache.find(prompt, start)) == [(391, 391 + len(document), 91)]
    if start > 0:
        plain = cache_of("cdc")
        plain.add(donor, steps=[60])
        assert sum(run.length for run in plain.find(prompt, start)) < len(document)


def test_anchored_straddling_chunk_gives_its_part_in_the_tail():
    document = as_tokens([TOOL], text_of(1, 25), [END])
    cache = cache_of("anchored")
    cache.add(as_tokens([USER], text_of(2, 90), document, [USER]))
    prompt = as_tokens([USER], text_of(3, 50), document, [USER])
    assert spans(cache.find(prompt, 51)) == [(51, 79, 91)]
    assert spans(cache.find(prompt, 60)) == [(60, 79, 100)]
    changed = prompt.copy()
    changed[55] += 1
    assert spans(cache.find(changed, 60)) == [(77, 79, 117)], "it is verified as a whole, the prefix part too"


@given(st.integers(0, 2**32), st.lists(st.integers(1, 900), max_size=8), st.sampled_from(["fixed128", "anchored_s1"]))
def test_increments_index_what_one_piece_does(seed, steps, matcher):
    """And more: the ends of the increments, which were the ends of a sequence for a while."""
    rng = np.random.default_rng(seed)
    tokens = rng.permutation(900).astype(np.int32)
    tokens[rng.integers(0, 900, 3)] = SPECIAL
    whole, pieces = (cache_of(matcher, capacity=900) for _ in range(2))
    whole.add(tokens)
    pieces.add(tokens, steps=steps)
    assert len(whole.registry.matcher) > 0
    for wanted, indexed in zip(whole.registry.matcher._indexes, pieces.registry.matcher._indexes, strict=True):
        entries = wanted.arrays.fingerprint != 0
        assert np.array_equal(indexed.arrays.fingerprint[entries], wanted.arrays.fingerprint[entries])


def test_the_end_of_a_sequence_is_indexed():
    """What comes next begins with a special token, which would have cut there as well."""
    answer = text_of(1, 40)
    cache = cache_of("anchored")
    cache.add(as_tokens([USER], text_of(2, 30), [TOOL], answer))
    assert spans(cache.find(as_tokens([END], text_of(3, 9), [TOOL], answer, [USER]))) == [(10, 51, 31)]


# -- runs and donors --


def test_a_chunk_everybody_has_does_not_break_a_run():
    """Its newest copies are elsewhere, but the donor of the chunk before it has it too."""
    rare, boiler, more = (as_tokens([USER], text_of(i, 300)) for i in range(3))
    cache = cache_of("anchored")
    donor = cache.add(as_tokens(rare, boiler, more))
    for i in range(10):
        cache.add(as_tokens(text_of(10 + i, 50), boiler, [END]))
    (run,) = cache.find(as_tokens([5], rare, boiler, more))
    assert run.slots.tolist() == donor.tolist()
    (alone,) = cache.find(as_tokens(text_of(99, 5), boiler))
    assert alone.slots[0] not in donor, "by itself it comes from the newest donor"


def test_a_run_goes_on_into_the_request_that_continued_its_donor():
    shared, first, second = (as_tokens([USER], text_of(i, 300)) for i in range(3))
    cache = cache_of("anchored")
    old = cache.add(as_tokens(shared, first))
    new = cache.add(as_tokens(shared, second))
    for tail, slots in ((first, old), (second, new)):
        (run,) = cache.find(as_tokens([END, 5], shared, tail))
        assert run.slots.tolist() == slots.tolist()


def test_a_branch_behind_many_siblings_still_continues_its_run():
    """The forward walk looks at a few continuations only; a donor found by its fingerprint is joined all the same."""
    shared, old = as_tokens([USER], text_of(1, 200)), as_tokens([TOOL], text_of(2, 200))
    cache = cache_of("anchored")
    slots = cache.add(as_tokens(shared, old))
    for i in range(20):
        cache.add(as_tokens(shared, [TOOL], text_of(10 + i, 20)))
    (run,) = cache.find(as_tokens([5], shared, old))
    assert run.slots.tolist() == slots.tolist()


def test_chunks_of_different_donors_are_different_runs():
    a, b = (as_tokens([USER], text_of(i, 200)) for i in range(2))
    cache = cache_of("anchored")
    cache.add(as_tokens([END], text_of(5, 10), a, [END]))
    cache.add(as_tokens([END], text_of(6, 10), b, [END]))
    assert spans(cache.find(as_tokens(a, b))) == [(0, 201, 11), (201, 402, 11)]


@pytest.mark.parametrize("matcher", CHUNK_MATCHERS)
def test_tokens_decide_when_fingerprints_collide(matcher, monkeypatch):
    """Every piece has the same fingerprint."""
    text = text_of(1, 384)
    cache = cache_of(matcher)
    monkeypatch.setattr(xxhash, "xxh64_intdigest", lambda data, seed: 0)
    slots = cache.add(text)
    cache.add(text_of(2, 100))
    assert len(cache.registry) > 0
    runs = cache.find(as_tokens(text, [5]))
    assert all(set(run.slots.tolist()) <= set(slots.tolist()) for run in runs)
    assert cache.find(text_of(3, 384)) == []
    cache.registry.drop(np.arange(20_000, dtype=np.int32))
    assert len(cache.registry) == 0, "even the hash 0 makes an entry that can be dropped"


def test_fingerprints_are_keyed_by_namespace_and_seed():
    text = text_of(1, 40)
    prints = []
    for seed, namespaces in ((1, [NOBODY, Namespace(tenant="a")]), (100, [NOBODY])):
        cache = TextCache("cdc", seed=seed)
        for namespace in namespaces:
            slot = int(cache.add(text, namespace)[cut_points(text)[1] - 1])
            prints.append(int(cache.registry.matcher._indexes[0].arrays.fingerprint[slot]))
    data = text[: cut_points(text)[1]].astype("<i4").tobytes()
    assert prints[0] == xxhash.xxh64_intdigest(data, splitmix64(1 ^ 1))
    assert len(set(prints)) == 3


# -- what they are worth --


def test_windows_and_anchors_help_on_agent_prompts():
    """Share of the 64-token oracle on prompts assembled from documents: the order that real logs show, too."""
    rng = np.random.default_rng(3)
    pool = [as_tokens([TOOL], rng.integers(0, 50_000, int(rng.integers(60, 700))), [END]) for _ in range(20)]
    prompts = [agent_mix(rng, pool, 6) for _ in range(12)]
    oracles = [oracle_cover(prompts[:i], prompt, 0, 64) for i, prompt in enumerate(prompts)]
    share = {}
    for matcher in MATCHERS:
        cache = cache_of(matcher, capacity=40_000)
        found = 0
        for prompt, oracle in zip(prompts, oracles, strict=True):
            found += int((cover_of(cache.find(prompt), len(prompt)) & oracle).sum())
            cache.add(prompt)
        share[matcher] = found / sum(int(oracle.sum()) for oracle in oracles)
    assert share["fixed128"] < 0.1 < share["cdc"] < share["cdc_s1"]
    assert share["cdc"] < share["anchored"] <= share["anchored_s1"] < share["winnow64"]
    assert share["winnow64"] > 0.95
