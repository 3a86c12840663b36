"""The delta form, and the demo's way to read it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.trace.delta import TraceCall, read_trace

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Which berth is free?"}
ANSWER = {"role": "assistant", "content": "Berth 4."}
TOOL = {"type": "function", "function": {"name": "berths", "parameters": {"type": "object"}}}


def line(**changes):
    return {"session": "s", "agent": "main", "turn": 0, "ts": None, "keep": 0, "append": [], "tools": None} | changes


def prompts(log, *records):
    return [call.prompt.messages for call in log.calls(*records)]


def test_keep_and_append_build_on_the_previous_call(log):
    first, second, third = log.calls(
        line(append=[SYSTEM, QUESTION], ts=17),
        line(keep=2, append=[ANSWER, QUESTION], turn=1, ts=18.5, tenant="t"),
        line(keep=1, append=[ANSWER], turn=2),
    )
    assert first.prompt.messages == (SYSTEM, QUESTION)
    assert (first.info.session, first.info.thread, first.info.ts, first.info.line) == ("s", "main", 17.0, 1)
    assert second.prompt.messages == (SYSTEM, QUESTION, ANSWER, QUESTION)
    assert (second.info.ts, second.info.namespace) == (18.5, Namespace(tenant="t"))
    assert third.prompt.messages == (SYSTEM, ANSWER)


def test_threads_are_told_apart_by_session_and_agent(log):
    records = [
        line(append=[SYSTEM, QUESTION], tools=[TOOL]),
        line(agent="critic", append=[ANSWER]),
        line(session="t", append=[QUESTION]),
        line(agent="critic", keep=1, append=[QUESTION], tools="="),
        line(keep=2, append=[ANSWER], tools="="),
    ]
    *_, by_agent, by_session = log.calls(*records)
    assert (by_agent.prompt.messages, by_agent.prompt.tools) == ((ANSWER, QUESTION), None)
    assert (by_session.prompt.messages, by_session.prompt.tools) == ((SYSTEM, QUESTION, ANSWER), (TOOL,))


def test_a_log_without_agents_has_one_thread_a_session(log):
    records = [line(append=[QUESTION]), line(keep=1, append=[ANSWER])]
    for record in records:
        del record["agent"], record["turn"]
    assert prompts(log, *records) == [(QUESTION,), (QUESTION, ANSWER)]


def test_tools_are_given_repeated_dropped_or_emptied(log):
    given_tools = ["=", [TOOL], "=", [], "=", None, "="]
    calls = log.calls(*(line(tools=tools) for tools in given_tools))
    assert [call.prompt.tools for call in calls] == [None, (TOOL,), (TOOL,), (), (), None, None]


def test_keep_counts_logged_messages_not_what_they_became(log):
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in "ab"]
    first, second = prompts(
        log, line(append=[{"role": "user", "content": results}, QUESTION]), line(keep=1, append=[ANSWER])
    )
    assert len(first) == 3
    assert [message["content"] for message in second] == ["a", "b", "Berth 4."]


def test_calls_share_their_messages(log):
    first, second = prompts(log, line(append=[SYSTEM, QUESTION]), line(keep=2, append=[ANSWER]))
    assert all(one is other for one, other in zip(first, second, strict=False))


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.sampled_from([SYSTEM, QUESTION, ANSWER]), max_size=3)), max_size=8
    )
)
def test_delta_form_is_the_inverse_of_its_definition(tmp_path_factory, steps):
    records, expected = [], []
    for at_most, append in steps:
        before = expected[-1] if expected else ()
        keep = min(at_most, len(before))
        records.append(line(keep=keep, append=append))
        expected.append(before[:keep] + tuple(append))
    path = tmp_path_factory.mktemp("delta") / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [call.messages for call in read_trace(path)] == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keep": 1}, "keep is 1, but the call before it of session 's', agent 'main' has 0 messages"),
        ({"keep": -1}, "keep is -1"),
        ({"keep": True}, "'keep' must be of type int, got bool"),
        ({"session": None}, "'session' must be of type str, got null"),
        ({"append": {}}, "'append' must be of type list, got dict"),
        ({"append": ["hello"]}, "a message must be an object, got str"),
        ({"tools": "all"}, "'tools' must be a list, null or \"=\", got str"),
        ({"tools": ["berths"]}, "a tool must be an object, got str"),
        ({"ts": "noon"}, "'ts': 'noon' is no time in ISO 8601"),
    ],
)
def test_a_bad_line_is_named_and_changes_no_thread(log, changes, reason):
    records = [line(session="other"), line(**changes), line(append=[QUESTION])]
    calls = log.calls(*records)
    assert [str(bad).partition("log.jsonl, ")[2].startswith(f"line 2: {reason}") for bad in log.bad.first] == [True]
    assert calls[-1].prompt.messages == (QUESTION,)


def test_the_demo_reads_its_own_form_of_call(log):
    path = log.write(line(append=[QUESTION], ts=5, tools=[TOOL]), name="log.jsonl.gz")
    assert list(read_trace(path)) == [TraceCall("s", "main", 5.0, (QUESTION,), (TOOL,))]


@pytest.mark.parametrize("key", ["session", "keep", "append"])
def test_a_missing_field_stops_the_demo(log, key):
    record = line()
    del record[key]
    with pytest.raises(InputError, match=f"log.jsonl, line 1: '{key}' is missing"):
        list(read_trace(log.write(record)))
