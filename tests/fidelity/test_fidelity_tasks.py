import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.demo.oracle import Oracle
from irminsul.errors import InputError
from irminsul.fidelity import texts
from irminsul.fidelity.tasks import QUICK_TASKS, TASKS, Draft

SHORT_TASKS = [name for name in TASKS if TASKS[name].size <= 2048]


@pytest.fixture(scope="module")
def draft(tokenizer) -> Draft:
    return Draft(tokenizer)


@pytest.fixture(scope="module")
def built(draft):
    return {name: TASKS[name].cases(draft, 4, 0, quick=False) for name in SHORT_TASKS}


def common_prefix(tokens, others) -> int:
    return next(
        (at for at, pair in enumerate(zip(tokens, others, strict=False)) if len(set(pair)) > 1),
        min(len(tokens), len(others)),
    )


@pytest.mark.parametrize("name", SHORT_TASKS)
def test_prompts_fit_and_hold_what_an_earlier_prompt_held(built, name):
    for case in built[name]:
        longest = max(map(len, (*case.donors, case.prompt, case.middle)))
        assert longest + TASKS[name].max_tokens <= TASKS[name].size
        assert 0 < case.session_end < len(case.prompt)
        oracle = Oracle()
        oracle.remember("", case.donors[0])
        prefix = common_prefix(case.prompt, case.donors[0])
        assert oracle.reusable("", case.prompt, prefix=prefix) >= 64, case.note
        through_middle = Oracle()
        through_middle.remember("", case.middle)
        assert through_middle.reusable("", case.prompt, prefix=prefix) >= 64, case.note


@pytest.mark.parametrize("name", [name for name in SHORT_TASKS if name != "continuation"])
def test_the_answer_stands_in_the_reused_text(built, name, tokenizer):
    for case in built[name]:
        earlier = tokenizer.decode(case.prompt[: case.session_end])
        assert case.answer in earlier
        assert case.answer in tokenizer.decode(case.donors[0])
        assert case.answer not in tokenizer.decode(case.prompt[case.session_end :])


def test_the_second_copy_stands_behind_an_exact_prefix_that_holds_the_first(built):
    for case in built["self-copy"]:
        (head,) = case.donors
        assert case.prompt[: len(head)] == head


def test_a_continuation_has_no_right_answer(built):
    assert all(case.answer is None for case in built["continuation"])


def test_cases_depend_on_seed_and_number_alone(draft):
    task = TASKS["qa"]
    one, *_ = task.cases(draft, 1, 7, quick=False)
    assert task.cases(draft, 3, 7, quick=False)[0] == one
    assert task.cases(draft, 1, 8, quick=False)[0] != one


def test_preambles_begin_before_and_behind_the_carve_out_and_move_both_ways(draft):
    cases = TASKS["continuation"].cases(draft, 12, 0, quick=False)
    ends = [len(case.prompt) for case in cases]
    assert len(set(ends)) > 6
    moves = []
    for case in cases:
        donor, prompt = case.donors[0], case.prompt
        window = prompt[-200:-100]
        source = next(at for at in range(len(donor)) if donor[at : at + 100] == window)
        moves.append(len(prompt) - 200 - source)
    assert min(moves) < 0 < max(moves)


def test_a_prompt_that_outgrows_its_task_is_refused(draft):
    task = TASKS["agent"]
    with pytest.raises(InputError, match="task agent has room for 1536 tokens"):
        # As with a tokenizer that needs many more tokens for the same text.
        type(task)(task.name, task.about, task.size, 1500, task.build).cases(draft, 1, 0, quick=False)


def test_without_a_template_conversations_are_plain_text(draft, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert draft.form == "plain text"
    tokens = draft.conversation([("system", "Be brief."), ("user", "Who?")])
    assert tokenizer.decode(tokens) == "system: Be brief.\n\nuser: Who?\n\nassistant:"


def test_quick_tasks_are_tasks():
    assert set(QUICK_TASKS) <= set(TASKS)


@given(st.integers(0, 10_000), st.sampled_from([0, 64, 192]))
def test_a_preamble_keeps_to_its_length_and_begins_with_its_own_line(seed, n_tokens):
    text = texts.preamble(random.Random(seed), lambda words: len(words.split()), n_tokens)
    assert text.startswith("Request ")
    assert len(text.split()) <= max(2, n_tokens)


@given(st.integers(0, 10_000))
def test_every_fact_of_a_record_stands_in_it(seed):
    rng = random.Random(seed)
    facts = texts.facts_about("the old mill", rng)
    record = texts.record("the old mill", facts, rng, lambda words: len(words.split()), 200)
    for fact in facts:
        assert fact.statement in record
        assert fact.answer in fact.statement
        assert fact.answer not in fact.question
    listing, fact = texts.stock_list("the old mill", rng, 5)
    assert len(listing.splitlines()) == 5
    assert fact.statement in listing
