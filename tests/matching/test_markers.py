"""Markers: the report against the real chunker, generated ones on real tokenizers, and what they are good for."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_cache import TextCache, as_tokens, cover_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from irminsul.errors import InputError
from irminsul.matching.cdc import MASK, MAX_CHUNK, MEMORY, MIN_CHUNK, cut_points, gear_step
from irminsul.matching.markers import MARKER_TOKENS, check_marker, generate_marker

SENTENCES = [
    "The harbor crane lifts the copper coil onto the barge before noon.",
    "Every boundary between two shared sections is a line of words of its own.",
    "Rain fell on the orchard, the mill and the stone bridge all winter.",
    '{"tool": "read_file", "path": "src/engine/window.py", "lines": [1, 200]}',
]


def byte_level_bpe(pattern=None):
    """Train a small real tokenizer; ``pattern`` splits as newer models do (newlines by themselves)."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def bpe_codec(pattern=None):
    tokenizer = byte_level_bpe(pattern)
    return (lambda text: tokenizer.encode(text).ids), tokenizer.decode


def character_codec():
    return (lambda text: [ord(character) for character in text]), lambda tokens: "".join(map(chr, tokens))


CODECS = {
    "bpe, gpt-2 split": bpe_codec,
    "bpe, newline split": lambda: bpe_codec(r"[^\S\n]?\p{L}+|\p{N}{1,3}|[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"),
    "characters": character_codec,
}


def random_text(seed, size):
    return np.random.default_rng(seed).integers(0, 50_000, size).astype(np.int32)


def without_candidate():
    """Return a token whose repetition has no candidate, so that its chunks end at 512."""
    return next(token for token in range(100) if cut_points(np.full(600, token, dtype=np.int32))[1] == MAX_CHUNK)


def last_cut(head, marker):
    """Return the last cut inside the marker behind a head, in tokens of the marker, as the chunker makes it."""
    cuts = cut_points(as_tokens(head, marker, random_text(0, 40))) - len(head)
    inside = [int(cut) for cut in cuts if 0 < cut <= len(marker)]
    return inside[-1] if inside else None


def permits_cut(tokens):
    h = 0
    for token in tokens:
        h = gear_step(h, token)
    return h & MASK == 0


def marker_with(candidates, seed=0):
    """Search a text of 64 tokens with candidates in exactly these places: change the tokens in front of each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50_000, MARKER_TOKENS).tolist()
    for place in range(MEMORY, MARKER_TOKENS + 1):
        while permits_cut(tokens[place - MEMORY : place]) != (place in candidates):
            tokens[place - 1] = int(rng.integers(0, 50_000))
    return tokens


# -- the report --


@pytest.mark.parametrize(
    ("candidates", "cut", "always", "sentence"),
    [
        ([], None, False, "contains no cut candidate"),
        ([20], None, False, "depends on where the chunk before it began"),
        ([37], None, False, "accepted in any case from 38 on"),
        ([38], 38, False, "unless a chunk reaches 512 tokens inside it"),
        ([64], 64, False, "cuts behind its token 64, unless"),
        ([36, 50], None, False, "depends on"),
        ([40, 60], 40, False, "cuts behind its token 40"),
        ([7, 39], 39, True, "always cuts behind its token 39"),
        ([32, 64], 64, True, "always"),
        ([33, 64], None, False, "only 32 tokens behind it"),
        ([12, 51, 60], 51, True, "always"),
        ([12, 30, 60], None, False, "depends on"),
    ],
)
def test_the_report_says_whether_and_where_it_cuts(candidates, cut, always, sentence):
    report = check_marker(marker_with(candidates))
    assert report.candidates == tuple(candidates)
    assert (report.n_tokens, report.cut, report.always) == (64, cut, always)
    assert report.helps == (cut is not None)
    assert sentence in report.reason
    assert str(report) == f"64 tokens: {report.reason}"


def test_short_texts_are_no_markers():
    for size in (0, 1, MEMORY - 1, MEMORY, MIN_CHUNK):
        assert not check_marker(random_text(1, size).tolist()).helps


@given(st.sets(st.integers(MEMORY, MARKER_TOKENS), max_size=4), st.integers(0, 2**32), st.integers(0, 400))
def test_the_report_agrees_with_the_chunker(places, seed, head_size):
    """Whatever precedes a marker that always cuts; whatever precedes one that helps, if no chunk gets to 512 tokens."""
    marker = marker_with(sorted(places), seed)
    report = check_marker(marker)
    if report.helps:
        assert last_cut(random_text(seed, head_size), marker) == report.cut
    endless = [last_cut([without_candidate()] * size, marker) for size in range(0, 1200, 7)]
    if report.always:
        assert set(endless) == {report.cut}


@pytest.mark.parametrize("candidates", [[50], [7, 39], [20], []])
def test_every_length_of_text_without_a_cut_before_it(candidates):
    """All chunk starts before the marker, one by one; a lone candidate fails where the limit falls inside it."""
    marker = marker_with(candidates)
    report = check_marker(marker)
    outcomes = {last_cut([without_candidate()] * size, marker) for size in range(2 * MAX_CHUNK)}
    assert (outcomes == {report.cut}) == report.always
    if candidates == [50]:
        assert report.helps
        assert outcomes > {50}


# -- generating --


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(3))
def test_a_generated_marker_always_cuts_and_keeps_its_tokens(codec, seed):
    encode, decode = CODECS[codec]()
    text = generate_marker(encode, decode, seed=seed)
    tokens = encode(text)
    report = check_marker(tokens)
    assert len(tokens) == MARKER_TOKENS
    assert report.always
    assert text.replace(" ", "").isalpha(), "words that a model can read"
    for before, after in itertools.product(["\n", "Answer:\n", "};\n\n", "\t\n"], ["\n", "\n## Next", "\n\n\n", "\n1"]):
        around = encode(before + text + after)
        at = len(encode(before))
        assert around[at : at + MARKER_TOKENS] == tokens


def test_seeds_give_the_same_marker_again_and_others_another():
    encode, decode = character_codec()
    texts = [generate_marker(encode, decode, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert generate_marker(encode, decode) == generate_marker(encode, decode, seed=0)


@pytest.mark.parametrize(
    ("encode", "decode"),
    [
        (lambda text: [0], lambda tokens: ""),
        (lambda text: [1, *map(ord, text)], lambda tokens: "".join(map(chr, tokens[1:]))),
        (lambda text: list(map(ord, text)), lambda tokens: "".join(map(chr, tokens)).upper()),
    ],
    ids=["too few tokens", "a special token in front", "decode is no inverse"],
)
def test_a_tokenizer_that_allows_none_is_refused(encode, decode, monkeypatch):
    monkeypatch.setattr("irminsul.matching.markers.TRIES", 500)
    with pytest.raises(InputError, match="no marker found for this tokenizer in 500 tries"):
        generate_marker(encode, decode)


# -- what it is good for --


BODY = 300


def recovered(marker, seed):
    """Return how many tokens of a body behind marker and header are found again behind another header, plain CDC."""
    rng = np.random.default_rng(seed)
    body = rng.integers(0, 50_000, BODY)
    cache = TextCache("cdc", capacity=1000)
    cache.add(as_tokens(rng.integers(0, 50_000, int(rng.integers(20, 80))), marker, body))
    prompt = as_tokens(rng.integers(0, 50_000, int(rng.integers(20, 80))), marker, body)
    return int(cover_of(cache.find(prompt), len(prompt))[-BODY:].sum())


def test_a_good_marker_makes_recovery_deterministic():
    encode, decode = bpe_codec()
    for marker in (encode(generate_marker(encode, decode)), marker_with([50])):
        assert {recovered(marker, seed) for seed in range(60)} == {BODY}


def test_a_marker_without_a_candidate_leaves_it_to_chance():
    found = [recovered(marker_with([], seed), seed) for seed in range(60)]
    assert min(found) == 0
    assert len(set(found)) > 20


def test_most_random_texts_are_no_markers():
    """(127/128)**58, about 63 %, have no candidate."""
    none = sum(not check_marker(random_text(seed, 64).tolist()).candidates for seed in range(300))
    assert 0.55 * 300 <= none <= 0.71 * 300
