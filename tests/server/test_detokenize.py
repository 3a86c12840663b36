import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server_fakes import byte_fallback_tokenizer, byte_level_tokenizer
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from irminsul.server.detokenize import REPLACEMENT, Detokenizer, StopStrings, TokenSpeller

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
BYTE_IDS = [BYTE_LEVEL.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in range(256)]
FALLBACK_BYTE_IDS = [BYTE_FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]


def pieces_of(tokenizer, token_ids, prompt_ids=()):
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


def decode(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.text())
def test_text_comes_back_whole_and_without_replacement_characters(text):
    token_ids = BYTE_LEVEL(text, add_special_tokens=False)["input_ids"]
    pieces = pieces_of(BYTE_LEVEL, token_ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.text())
def test_text_in_single_bytes_comes_back_character_by_character(text):
    pieces = pieces_of(BYTE_LEVEL, [BYTE_IDS[byte] for byte in text.encode()])
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces if REPLACEMENT not in text)


@given(st.binary(max_size=120))
def test_bytes_that_are_not_text_give_what_decoding_at_once_gives(data):
    token_ids = [BYTE_IDS[byte] for byte in data]
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == decode(BYTE_LEVEL, token_ids)


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=120))
def test_any_tokens_give_what_decoding_at_once_gives(token_ids):
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == decode(BYTE_LEVEL, token_ids)


def test_long_nonsense_is_neither_held_back_nor_decoded_again_and_again():
    window_lengths = []

    class Counting:
        def decode(self, token_ids, **options):
            window_lengths.append(len(token_ids))
            return BYTE_LEVEL.decode(token_ids, **options)

    token_ids = [BYTE_IDS[0xE2]] * 500
    pieces = pieces_of(Counting(), token_ids)
    assert "".join(pieces) == decode(BYTE_LEVEL, token_ids)
    assert len("".join(pieces[:100])) >= 90
    assert max(window_lengths) <= 40


@given(st.text())
def test_byte_fallback_text_comes_back(text):
    token_ids = [FALLBACK_BYTE_IDS[byte] for byte in ("x" + text).encode()]
    pieces = pieces_of(BYTE_FALLBACK, token_ids[1:], token_ids[:1])
    assert "".join(pieces) == text


def test_the_space_of_a_first_word_is_kept_behind_a_prompt():
    the, sun = BYTE_FALLBACK.convert_tokens_to_ids(["▁the", "▁sun"])
    assert decode(BYTE_FALLBACK, [sun]) == "sun", "this tokenizer drops a leading space"
    assert pieces_of(BYTE_FALLBACK, [sun, sun], [the]) == [" sun", " sun", ""]


def test_special_tokens_are_skipped_and_do_not_take_the_context_away():
    the, sun, end = BYTE_FALLBACK.convert_tokens_to_ids(["▁the", "▁sun", "</s>"])
    assert pieces_of(BYTE_FALLBACK, [the, *[end] * 40, sun]) == ["the", *[""] * 40, " sun", ""]


def test_unfinished_bytes_are_shown_at_the_end():
    token_ids = [BYTE_IDS[byte] for byte in b"ok" + "🙂".encode()[:3]]
    assert pieces_of(BYTE_LEVEL, token_ids) == ["o", "k", "", "", "", REPLACEMENT]


def cut(text, stops, sizes):
    """The text that is sent when it arrives in pieces of these sizes, and whether a stop string was found."""
    matcher, sent, at = StopStrings(stops), "", 0
    for size in [*sizes, len(text)]:
        released, found = matcher.push(text[at : at + size])
        sent, at = sent + released, at + size
        if found:
            return sent, True
    return sent + matcher.finish(), False


def plain_cut(text, stops):
    """Character by character: the first position at which a stop string ends."""
    for end in range(1, len(text) + 1):
        if ends := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ends))], True
    return text, False


few_letters = st.text("ab", max_size=30)


@example("xabab", ["abab", "b"], [])
@given(few_letters, st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 4)))
def test_stop_strings_do_not_depend_on_how_text_is_cut(text, stops, sizes):
    assert cut(text, stops, sizes) == plain_cut(text, stops)


def test_only_what_may_begin_a_stop_string_is_held_back():
    matcher = StopStrings(["STOP", "\n\n"])
    assert matcher.push("one ST") == ("one ", False)
    assert matcher.push("IR\n") == ("STIR", False)
    assert matcher.push("x") == ("\nx", False)
    assert matcher.push("S") == ("", False)
    assert matcher.finish() == "S"
    assert StopStrings([]).push("one ST") == ("one ST", False)


def test_tokens_are_spelled_with_exact_bytes():
    speller = TokenSpeller(BYTE_LEVEL)
    assert speller.bytes(BYTE_IDS[0xF0]) == [0xF0]
    assert speller.text(BYTE_IDS[0xF0]) == REPLACEMENT
    space_a = BYTE_LEVEL(" a")["input_ids"][0]
    assert speller.text(space_a).encode() == bytes(speller.bytes(space_a))
    assert speller.text(BYTE_LEVEL.eos_token_id) == "<|im_end|>"
    fallback = TokenSpeller(BYTE_FALLBACK)
    assert fallback.bytes(FALLBACK_BYTE_IDS[0xE2]) == [0xE2]
    assert fallback.text(BYTE_FALLBACK.convert_tokens_to_ids("▁sun")) == " sun"


@pytest.mark.parametrize("byte", range(256))
def test_byte_alphabet_is_that_of_transformers(byte):
    character = bytes_to_unicode()[byte]
    assert character in pre_tokenizers.ByteLevel.alphabet()
    assert TokenSpeller(BYTE_LEVEL).bytes(BYTE_IDS[byte]) == [byte]
