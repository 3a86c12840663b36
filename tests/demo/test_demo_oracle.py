import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.demo.oracle import Oracle
from irminsul.plan import ReusePolicy

TEXT = list(range(1000, 1200))
NEW = list(range(200))


def test_moved_text_is_reusable_but_for_its_last_token():
    oracle = Oracle()
    oracle.remember("a", TEXT)
    assert oracle.reusable("a", [*NEW[:70], *TEXT], prefix=0) == len(TEXT) - 1
    assert oracle.reusable("a", [*NEW[:70], *TEXT, *NEW[70:75]], prefix=0) == len(TEXT)


@pytest.mark.parametrize(("length", "expected"), [(63, 0), (64, 64), (65, 65)])
def test_runs_count_from_64_tokens(length, expected):
    oracle = Oracle()
    oracle.remember("a", TEXT)
    assert oracle.reusable("a", [*NEW[:70], *TEXT[10 : 10 + length], *NEW[70:80]], prefix=0) == expected


def test_positions_of_the_engines_carve_out_never_count():
    carve_out = ReusePolicy().carve_out
    oracle = Oracle()
    oracle.remember("a", TEXT)
    assert oracle.reusable("a", [*NEW[:10], *TEXT[:100], *NEW[10:20]], prefix=0) == 100 - (carve_out - 10)


def test_only_what_lies_beyond_the_prefix_counts_even_if_the_run_begins_before():
    oracle = Oracle()
    oracle.remember("a", TEXT)
    prompt = [*TEXT, *NEW[:5]]
    assert oracle.reusable("a", prefix=170, prompt=prompt) == 30
    assert oracle.reusable("a", prefix=200, prompt=prompt) == 0


def test_namespaces_and_the_prompt_itself_are_no_source():
    oracle = Oracle()
    oracle.remember("a", TEXT)
    twice = [*NEW[:70], *TEXT[:80], *NEW[70:80], *TEXT[:80], 1]
    assert oracle.reusable("b", twice, prefix=0) == 0
    assert oracle.reusable("a", twice, prefix=0) == 160


def test_texts_are_not_joined():
    oracle = Oracle()
    oracle.remember("a", TEXT[:60])
    oracle.remember("a", TEXT[60:120])
    assert oracle.reusable("a", [*NEW[:70], *TEXT[:120], 1], prefix=0) == 0


tokens = st.lists(st.integers(0, 2), max_size=24)


@given(st.lists(tokens, max_size=3), tokens.filter(bool), st.integers(0, 24), st.integers(1, 5), st.integers(0, 6))
def test_oracle_counts_what_its_definition_says(texts, prompt, prefix, min_run, carve_out):
    oracle = Oracle(min_run=min_run, carve_out=carve_out)
    for text in texts:
        oracle.remember("a", text)

    def stands_somewhere(run):
        return any(text[at : at + len(run)] == run for text in texts for at in range(len(text) - len(run) + 1))

    def counts(position):
        return any(
            stands_somewhere(prompt[start:end])
            for start in range(position + 1)
            for end in range(max(position + 1, start + min_run), len(prompt) + 1)
        )

    tail = range(max(prefix, carve_out), len(prompt) - 1)
    assert oracle.reusable("a", prompt, prefix=prefix) == sum(counts(position) for position in tail)
