"""Causes on small logs whose cause is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_log import WordLog, encode, prose

from irminsul.trace.causes import CauseReport, common_tokens, find_causes, first_variations
from irminsul.trace.changes import ChangeClass
from irminsul.trace.records import SpanKind
from irminsul.trace.replay import SHIPPED, ReplayConfig, replay_matcher, replay_prefix

SYSTEM, TOOLS, USER, ASSISTANT = SpanKind.SYSTEM, SpanKind.TOOLS, SpanKind.USER, SpanKind.ASSISTANT
RULES, TASK, ANSWER, MORE = prose(1, 60), prose(2, 40), prose(3, 30), prose(4, 30)


def causes_of(log: WordLog, config: ReplayConfig | None = None) -> CauseReport:
    config = config or ReplayConfig()
    prefix = replay_prefix(log, config, int)
    shipped = replay_matcher(log, "winnow64", prefix, config, int, policy=SHIPPED)
    return find_causes(log, prefix, shipped, replies=config.replies, progress=int)


def only(report: CauseReport) -> ChangeClass:
    assert len(report.causes) == 1, report.causes
    return report.causes[0].kind


def test_a_timestamp_in_the_system_prompt() -> None:
    log = WordLog()
    for minute in range(10, 15):
        text = f"You help people.\nBe kind.\n\nCurrent time: 2026-01-05T10:{minute}:00Z\n{RULES}"
        log.add((SYSTEM, text), (USER, TASK), thread=minute)
    report = causes_of(log)
    cause = report.causes[0]
    assert only(report) is ChangeClass.TIMESTAMP
    assert (cause.where, cause.line, cause.before, cause.calls) == (SYSTEM, 4, "Current time:", 4)
    assert cause.distinct_values == 5
    assert (cause.example_old, cause.example_new) == ("2026-01-05T10:10:00Z", "2026-01-05T10:11:00Z")
    assert cause.example_place == "log:2"
    # All behind the value goes on alike to the end of the prompt, except what stands before the copy's own end.
    behind = len(RULES) + len(TASK)
    assert 4 * behind <= cause.fix_recovers <= cause.tokens_behind
    assert 0 < cause.irminsul_recovers <= cause.tokens_behind
    assert "Move the timestamp" in cause.fix


def test_growth_is_no_variation() -> None:
    log = WordLog()
    log.add((SYSTEM, RULES), (USER, TASK), reply=ANSWER)
    log.add((SYSTEM, RULES), (USER, TASK), (SpanKind.TEMPLATE, "<assistant>"), (ASSISTANT, ANSWER), (USER, MORE))
    report = causes_of(log)
    assert report.causes == ()
    assert (report.compared_calls, report.grown_calls) == (1, 1)
    assert report.grown_tokens == len(MORE) + len("<assistant>")
    assert causes_of(log, ReplayConfig(replies=False)).causes == ()


def test_flattened_growth_inside_one_message_is_no_variation() -> None:
    log = WordLog().add((USER, TASK)).add((USER, TASK + MORE))
    assert causes_of(log).causes == ()


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ([(TOOLS, "{grep}\n{read}\n" + MORE)], [(TOOLS, "{read}\n{grep}\n" + MORE)], ChangeClass.LIST_ORDER),
        ([(TOOLS, "{grep}\n{read}\n")], [(TOOLS, "{grep}\n{write}\n")], ChangeClass.TOOLS),
        ([(SYSTEM, "Be kind. " + RULES)], [(SYSTEM, "Be brief. " + RULES)], ChangeClass.SYSTEM),
        (
            [(SYSTEM, RULES), (USER, TASK), (ASSISTANT, ANSWER), (USER, MORE)],
            [(SYSTEM, RULES), (USER, TASK), (ASSISTANT, "[cleared]"), (USER, MORE)],
            ChangeClass.HISTORY,
        ),
        (
            [(SYSTEM, RULES), (USER, TASK), (ASSISTANT, ANSWER), (USER, MORE)],
            [(SYSTEM, RULES), (USER, TASK), (USER, MORE)],
            ChangeClass.MESSAGE_DROPPED,
        ),
        (
            [(SYSTEM, RULES), (USER, TASK), (USER, ANSWER + "|" + MORE + "|")],
            [(SYSTEM, RULES), (USER, TASK), (USER, MORE + "|" + ANSWER + "|")],
            ChangeClass.LIST_ORDER,
        ),
        ([(SYSTEM, RULES), (USER, TASK)], [(SYSTEM, RULES), (USER, MORE)], ChangeClass.CONVERSATION),
    ],
    ids=["tool order", "tools", "system", "history", "dropped", "order", "conversation"],
)
def test_what_is_no_value_is_told_from_its_place(first: list, second: list, kind: ChangeClass) -> None:
    assert only(causes_of(WordLog().add(*first).add(*second))) is kind


def test_a_reply_that_comes_back_in_other_words() -> None:
    log = WordLog().add((USER, TASK), reply=ANSWER + " well")
    log.add((USER, TASK), (SpanKind.TEMPLATE, "<assistant>"), (ASSISTANT, ANSWER + " good"), (USER, MORE))
    assert only(causes_of(log)) is ChangeClass.REPLY


def test_a_cache_that_forgot_is_its_own_cause() -> None:
    log = WordLog().add((USER, TASK)).add((USER, prose(9, 60)), thread=1).add((USER, TASK + MORE))
    bound = ReplayConfig(cache_tokens=len(prose(9, 60)) + 40)
    kinds = {cause.kind for cause in causes_of(log, bound).causes}
    assert ChangeClass.EVICTED in kinds
    assert ChangeClass.EVICTED not in {cause.kind for cause in causes_of(log).causes}


def test_a_new_thread_is_compared_with_the_call_that_shares_most() -> None:
    log = WordLog()
    log.add((SYSTEM, "Another prompt: " + RULES), (USER, TASK), thread=0)
    log.add((SYSTEM, "Run 7 of " + RULES), (USER, TASK), thread=1)
    log.add((SYSTEM, "Run 8 of " + RULES), (USER, TASK), thread=2)
    report = causes_of(log)
    assert [cause.kind for cause in report.causes] == [ChangeClass.NUMBER]
    assert report.causes[0].example_old == "7"


def test_tenants_are_never_compared() -> None:
    log = WordLog().add((USER, "Run 7 " + TASK), tenant="a").add((USER, "Run 8 " + TASK), tenant="b")
    assert causes_of(log).compared_calls == 0


def test_digits_in_the_text_before_do_not_split_a_cause() -> None:
    log = WordLog()
    for i in range(4):
        log.add((USER, f"{TASK}\nattempt {10 + i} took 1{i}3 ms {MORE}"), thread=i)
    assert [cause.calls for cause in causes_of(log).causes] == [3]


def test_first_variations_leave_out_first_calls() -> None:
    log = WordLog().add((USER, TASK)).add((USER, TASK), thread=1).add((USER, TASK + MORE))
    shares = first_variations(log, replay_prefix(log, ReplayConfig(), int))
    assert shares == [len(TASK) / (len(TASK) + len(MORE) + len("<assistant>"))]


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_common_tokens_is_the_longest_common_prefix(left: list[int], right: list[int]) -> None:
    n = common_tokens(np.array(left, dtype=np.int32), np.array(right, dtype=np.int32))
    assert left[:n] == right[:n]
    assert n == min(len(left), len(right)) or left[n] != right[n]


def test_word_log_decodes_what_it_encodes() -> None:
    assert WordLog().decode(encode("a<b")) == "a<b"
