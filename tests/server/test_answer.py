from hypothesis import given
from hypothesis import strategies as st
from server_fakes import byte_level_tokenizer

from irminsul.engine.types import FinishReason, StepOutput
from irminsul.server.answer import AnswerText
from irminsul.server.detokenize import Detokenizer, StopStrings

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id


def pieces_of(token_ids, stops=(), reason=FinishReason.STOP):
    """The pieces of an answer, up to the one that ends it."""
    text = AnswerText(Detokenizer(TOKENIZER), StopStrings(stops), {END})
    pieces = []
    for at, token_id in enumerate(token_ids):
        last = at == len(token_ids) - 1
        pieces.append(text.push(StepOutput("r", token_id, finish_reason=reason if last else None)))
        if pieces[-1].finish_reason:
            break
    return pieces


def token_ids_of(pieces):
    return [token.output.token_id for piece in pieces for token in piece.tokens]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_the_end_token_is_neither_text_nor_token():
    pieces = pieces_of([*encode("fine"), END])
    assert text_of(pieces) == "fine"
    assert token_ids_of(pieces) == encode("fine")
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_an_end_token_that_is_ignored_is_a_token_without_text():
    token_ids = [*encode("a"), END, *encode("b")]
    pieces = pieces_of(token_ids, reason=FinishReason.LENGTH)
    assert (text_of(pieces), token_ids_of(pieces)) == ("ab", token_ids)


def test_nothing_behind_a_stop_string_leaks_not_even_as_a_token():
    pieces = pieces_of([*encode("The answer is fine. "), *encode("STOP there"), END], stops=["e. S"])
    assert text_of(pieces) == "The answer is fin"
    assert pieces[-1].finish_reason is FinishReason.STOP
    shown = "".join(TOKENIZER.decode([token_id]) for token_id in token_ids_of(pieces))
    assert "The answer is fin".startswith(shown)


def test_a_stop_string_at_the_length_limit_counts_as_stop():
    assert pieces_of(encode("it."), stops=["."], reason=FinishReason.LENGTH)[-1].finish_reason is FinishReason.STOP


def test_text_held_back_is_sent_at_the_end():
    pieces = pieces_of([*encode("a ST"), END], stops=["STOP"])
    assert text_of(pieces) == "a ST"
    assert token_ids_of(pieces) == encode("a ST")


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=4))
def test_the_answer_is_the_text_before_the_first_stop_string(text, stops):
    pieces = pieces_of([*encode(text), END], stops)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert text_of(pieces) == expected
    if not ends:
        assert token_ids_of(pieces) == encode(text)
    offsets = [token.text_offset for piece in pieces for token in piece.tokens]
    assert offsets == sorted(offsets)
    assert all(offset <= len(expected) for offset in offsets)
