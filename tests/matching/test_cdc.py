"""The chunker's format (golden), its compiled form against the rules, and what makes it content-defined."""

import itertools
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.matching import cdc
from irminsul.matching.cdc import (
    MASK,
    MAX_CHUNK,
    MEMORY,
    MIN_CHUNK,
    chunk_ids,
    cut_points,
    cut_points_reference,
    forced_cut_table,
    gear,
    gear_step,
    splitmix64,
)

RESYNC = 1024
"""Distance behind a change at which random text must be cut as before; the longest seen in 3,200 changes was 570."""


def never_forgets(h, token):
    """Roll a polynomial hash without a window: every token stays in its low bits for good."""
    return (h * 0x9E3779B97F4A7C15 + gear(token)) % 2**64


@st.composite
def texts(draw, max_size=3000):
    """Draw random ids; small vocabularies make repeats, forced chunk lengths and stretches without a candidate."""
    size = draw(st.integers(0, max_size))
    vocabulary = draw(st.sampled_from([1, 2, 7, 300, 129280]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.integers(0, vocabulary, size).astype(np.int32)


def random_text(seed, size):
    return np.random.default_rng(seed).integers(0, 129280, size).astype(np.int32)


# -- golden: another value here is another format, and needs another VERSION --

GOLDEN_TEXT = np.array([i * i * i % 50021 for i in range(1500)], dtype=np.int32)


def ids_of(tokens, cuts, seed=0):
    return chunk_ids(tokens, cuts[:-1], cuts[1:], seed).tolist()


def test_golden_gears():
    # splitmix64's published first outputs for the seeds 0 and 1234567.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317
    expected = [0xC42C5A1AA3820138, 0x204391A6FD59956F, 0x116D28AC6CB50F40, 0xB0CAED0A7BF9C2C8]
    assert [gear(token) for token in (0, 1, 128814, -1)] == expected


def test_golden_parameters():
    assert (MASK, MIN_CHUNK, MAX_CHUNK, MEMORY) == (0x7F, 32, 512, 7)


def test_golden_cuts_and_ids():
    cuts = cut_points(GOLDEN_TEXT)
    assert cuts.tolist() == [0, 100, 309, 358, 683, 811, 914, 1161, 1194, 1293, 1345, 1500]
    assert ids_of(GOLDEN_TEXT, cuts) == [
        0x8794C89C92A57FF0,
        0x1304C597C8D3A260,
        0xB9C03960C5FB8D9D,
        0xD9FF567ACEC61CC5,
        0xE222DE9E2A304E56,
        0x744AF4A7CE0E6440,
        0xA945F1EEB3AB2663,
        0x4E7F83A3A931175E,
        0xF75D52882BE51B35,
        0xE0D02439ED4B2C75,
        0x3848FB63227DBA08,
    ]


def test_golden_forced_cuts():
    tokens = GOLDEN_TEXT.copy()
    tokens[[100, 400, 401, 1200]] = 8  # position 2 holds an 8 by itself
    cuts = cut_points(tokens, forced_cut_table([8, 27000]))
    assert cuts.tolist() == [0, 2, 30, 100, 309, 358, 400, 401, 683, 811, 914, 1161, 1194, 1200, 1293, 1345, 1500]
    assert ids_of(tokens, cuts)[:4] == [0xCA6084DF268EA2A9, 0x6A6B4506794BB674, 0xD5E4096B4C966939, 0x0D048EF88D4C8250]


def test_chunk_id_is_xxhash64_of_little_endian_int32():
    tokens = np.array([5, 1, 70000, 129279, 3], dtype=np.int32)
    starts, ends = np.array([0, 1]), np.array([1, 4])
    expected = [xxhash.xxh64_intdigest(struct.pack(form, *part)) for form, part in (("<i", [5]), ("<3i", tokens[1:4]))]
    assert chunk_ids(tokens, starts, ends).tolist() == expected
    assert chunk_ids(tokens, starts, ends, seed=1).tolist() != expected


def test_another_process_cuts_alike():
    """No part of the format hangs on the process (string hash seeds, addresses)."""
    program = (
        "import numpy as np; from irminsul.matching.cdc import cut_points_reference as cut\n"
        "print(cut([i * i * i % 50021 for i in range(1500)]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(cut_points(GOLDEN_TEXT).tolist())


# -- the compiled function is the reference --


@given(texts(), st.sets(st.integers(0, 400), max_size=3))
def test_compiled_equals_reference(tokens, special):
    cuts = cut_points(tokens, forced_cut_table(special))
    assert cuts.tolist() == cut_points_reference(tokens.tolist(), special)


@given(st.integers(-(2**31), 2**31 - 1))
def test_compiled_gear_is_the_gear(token):
    assert int(cdc._gear(np.int32(token))) == gear(token)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300))
def test_any_int32_is_a_token(ids):
    tokens = np.array(ids, dtype=np.int32)
    assert cut_points(tokens).tolist() == cut_points_reference(ids)
    assert cut_points(tokens, forced_cut_table([3])).tolist() == cut_points_reference(ids, {3})


# -- what holds for all texts --


@given(texts(), st.sets(st.integers(0, 400), max_size=3))
def test_chunks_join_to_the_text_and_keep_their_bounds(tokens, special):
    cuts = cut_points(tokens, forced_cut_table(special))
    chunks = [tokens[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate([*chunks, tokens[:0]]), tokens)
    for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
        assert 1 <= len(chunk) <= MAX_CHUNK
        ended_by_force = following is None or int(following[0]) in special
        assert len(chunk) >= MIN_CHUNK or ended_by_force
        assert not set(chunk[1:].tolist()) & special


@given(texts(), st.data())
def test_cuts_before_a_change_stay(tokens, data):
    at = data.draw(st.integers(0, len(tokens)))
    changed = np.insert(tokens, at, 11)
    before = cut_points(tokens)
    after = cut_points(changed)
    assert before[before < at].tolist() == after[after < at].tolist()


@given(texts(), texts(), st.integers(0, 400))
def test_nothing_before_a_forced_cut_matters_behind_it(head, body, special):
    table = forced_cut_table([special])
    body = np.concatenate([np.array([special], dtype=np.int32), body])
    cuts = cut_points(np.concatenate([head, body]), table)
    assert (cuts[cuts >= len(head)] - len(head)).tolist() == cut_points(body, table).tolist()


def resync_distance(cut, seed):
    """Insert one token into a random text; return how far behind it the last cut lies that moved."""
    tokens = random_text(seed, 4000)
    at = 37 * seed % 1000
    before = {position + 1 for position in cut(tokens) if position >= at}
    after = {position for position in cut(np.insert(tokens, at, 7)) if position > at}
    return max(before ^ after, default=at) - at


def test_cuts_resynchronise_behind_a_change():
    distances = [resync_distance(lambda tokens: cut_points(tokens).tolist(), seed) for seed in range(200)]
    assert max(distances) <= RESYNC
    assert any(distances), "no insertion moved a cut: the test shows nothing"


def test_a_hash_that_never_forgets_does_not_resynchronise():
    """Control: the same check notices a state whose low bits remember everything since the last cut."""

    def cut(tokens):
        return cut_points_reference(tokens.tolist(), step=never_forgets)

    distances = [resync_distance(cut, seed) for seed in range(12)]
    assert sum(distance > RESYNC for distance in distances) >= 10


def gear_hash(tokens):
    h = 0
    for token in tokens:
        h = gear_step(h, token)
    return h


def test_exactly_the_last_seven_tokens_decide():
    unheard = []
    for seed in range(20):
        tokens = random_text(seed, 60).tolist()
        assert (gear_hash(tokens) ^ gear_hash(tokens[-MEMORY:])) & MASK == 0
        unheard.append((gear_hash(tokens) ^ gear_hash(tokens[1 - MEMORY :])) & MASK)
    assert set(unheard) == {0, 64}, "the seventh token from the end is heard in the top masked bit alone"


def test_lengths_of_chunks_of_random_text():
    """After 32 tokens each has 1 chance in 128: the mean is about 31 + 128, less what the clamp at 512 takes."""
    lengths = np.diff(cut_points(random_text(2, 200_000)))
    assert 145 <= lengths.mean() <= 165
    assert (lengths[:-1].min(), lengths.max()) == (MIN_CHUNK, MAX_CHUNK), "both limits are themselves allowed"


def test_forced_cut_table_refuses_negative_ids():
    with pytest.raises(InputError, match="-4"):
        forced_cut_table([7, -4])
    assert forced_cut_table([]).tolist() == []
    assert forced_cut_table([2, 0]).tolist() == [True, False, True]
