import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.trace.delta import TraceCall, read_trace

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Which berth is free?"}
ANSWER = {"role": "assistant", "content": "Berth 4."}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
TOOL = {"type": "function", "function": {"name": "berths", "parameters": {"type": "object"}}}


def line(**changes):
    return {"session": "s", "agent": "main", "turn": 0, "ts": None, "keep": 0, "append": [], "tools": None} | changes


def write(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def calls(tmp_path, *records) -> list[TraceCall]:
    return list(read_trace(write(tmp_path / "log.jsonl", *records)))


def converted(tmp_path, message) -> list[dict]:
    (call,) = calls(tmp_path, line(append=[message]))
    return list(call.messages)


def refused(tmp_path, *records) -> str:
    with pytest.raises(InputError) as caught:
        calls(tmp_path, *records)
    return str(caught.value)


def test_keep_and_append_build_on_the_previous_call(tmp_path):
    first, second, third = calls(
        tmp_path,
        line(append=[SYSTEM, QUESTION], ts=17),
        line(keep=2, append=[ANSWER, QUESTION], turn=1, ts=18.5),
        line(keep=1, append=[ANSWER], turn=2),
    )
    assert first == TraceCall("s", "main", 0, 17, (SYSTEM, QUESTION), None)
    assert second.messages == (SYSTEM, QUESTION, ANSWER, QUESTION)
    assert (second.turn, second.ts) == (1, 18.5)
    assert third.messages == (SYSTEM, ANSWER)


def test_a_call_may_repeat_the_one_before_it(tmp_path):
    first, second = calls(tmp_path, line(append=[QUESTION]), line(keep=1))
    assert second.messages == first.messages == (QUESTION,)


def test_threads_are_told_apart_by_session_and_agent(tmp_path):
    _, _, _, by_agent, by_session = calls(
        tmp_path,
        line(append=[SYSTEM, QUESTION], tools=[TOOL]),
        line(agent="critic", append=[ANSWER]),
        line(session="t", append=[QUESTION]),
        line(agent="critic", keep=1, append=[QUESTION], tools="="),
        line(keep=2, append=[ANSWER], tools="="),
    )
    assert by_agent.messages == (ANSWER, QUESTION)
    assert by_agent.tools is None
    assert by_session.messages == (SYSTEM, QUESTION, ANSWER)
    assert by_session.tools == (TOOL,)


def test_tools_are_given_repeated_dropped_or_emptied(tmp_path):
    tools = [
        call.tools
        for call in calls(
            tmp_path,
            line(tools="="),
            line(tools=[TOOL]),
            line(tools="="),
            line(tools=[]),
            line(tools="="),
            line(tools=None),
            line(tools="="),
        )
    ]
    assert tools == [None, (TOOL,), (TOOL,), (), (), None, None]


def test_keep_counts_logged_messages_not_what_they_became(tmp_path):
    results = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "1"},
            {"type": "tool_result", "tool_use_id": "b", "content": "2"},
        ],
    }
    first, second = calls(tmp_path, line(append=[results, QUESTION]), line(keep=1, append=[ANSWER]))
    assert len(first.messages) == 3
    assert [message["content"] for message in second.messages] == ["1", "2", "Berth 4."]


def test_messages_without_blocks_stay_as_they_are(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "ok", "tool_call_id": "1", "name": "f"}
    log = [SYSTEM, call, result, {"role": "assistant", "content": None}]
    (read,) = calls(tmp_path, line(append=log))
    assert list(read.messages) == log


@pytest.mark.parametrize(
    ("blocks", "content"),
    [
        ([{"type": "text", "text": "one"}], "one"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], None),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], None),
    ],
)
def test_text_blocks_become_a_string_only_where_nothing_is_lost(tmp_path, blocks, content):
    expected = blocks if content is None else content
    assert converted(tmp_path, {"role": "user", "name": "eva", "content": blocks}) == [
        {"role": "user", "name": "eva", "content": expected}
    ]


def test_text_parts_beside_tool_calls_stay_one_message(tmp_path):
    message = {"role": "assistant", "tool_calls": [{"id": "1"}], "content": [{"type": "text", "text": "a"}]}
    assert converted(tmp_path, message) == [message | {"content": "a"}]


def test_tool_use_becomes_a_tool_call(tmp_path):
    blocks = [
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "c1", "name": "find", "input": {"név": "Ödön", "n": None}},
        {"type": "tool_use", "id": "c2", "name": "now", "input": {}, "caller": "loop"},
    ]
    (message,) = converted(tmp_path, {"role": "assistant", "content": blocks})
    assert message["content"] == "Looking."
    first, second = message["tool_calls"]
    assert (first["id"], first["type"], first["function"]["name"]) == ("c1", "function", "find")
    assert first["function"]["arguments"] == '{"név": "Ödön", "n": null}'
    assert second["caller"] == "loop"


def test_a_tool_use_without_text_has_null_content(tmp_path):
    blocks = [{"type": "tool_use", "id": "c1", "name": "now", "input": {}}]
    (message,) = converted(tmp_path, {"role": "assistant", "content": blocks})
    assert message["content"] is None


def test_text_after_a_tool_use_starts_another_message(tmp_path):
    blocks = [
        {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
        {"type": "text", "text": "And then:"},
        {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
    ]
    first, second = converted(tmp_path, {"role": "assistant", "content": blocks})
    assert [call["id"] for call in first["tool_calls"]] == ["c1"]
    assert second["content"] == "And then:"
    assert [call["id"] for call in second["tool_calls"]] == ["c2"]


def test_tool_results_become_tool_messages_in_order(tmp_path):
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    blocks = [
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "c1", "content": "done", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c2", "content": parts},
        {"type": "text", "text": "after"},
        {"type": "tool_result", "tool_use_id": "c3"},
    ]
    assert converted(tmp_path, {"role": "user", "content": blocks}) == [
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "c1", "content": "done", "is_error": True},
        {"role": "tool", "tool_call_id": "c2", "content": parts},
        {"role": "user", "content": "after"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]


text_block = st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=5))
tool_use = st.builds(
    lambda name, given: {"type": "tool_use", "id": name, "name": name, "input": given},
    st.text(max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.text(max_size=3), max_size=2),
)
tool_result = st.builds(
    lambda name, text: {"type": "tool_result", "tool_use_id": name, "content": text},
    st.text(max_size=5),
    st.text(max_size=5),
)


def blocks_again(messages):
    """The inverse of the conversion: what the messages say, block by block."""
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            yield {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            continue
        if content is not None:
            yield from [{"type": "text", "text": content}] if isinstance(content, str) else content
        for call in message.get("tool_calls", []):
            function = call["function"]
            given = json.loads(function["arguments"])
            yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


@given(
    st.tuples(st.just("assistant"), st.lists(text_block | tool_use, min_size=1))
    | st.tuples(st.just("user"), st.lists(text_block | tool_result, min_size=1))
)
def test_no_block_is_lost_or_moved(tmp_path_factory, role_and_blocks):
    role, blocks = role_and_blocks
    messages = converted(tmp_path_factory.mktemp("blocks"), {"role": role, "content": blocks})
    assert list(blocks_again(messages)) == blocks


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.sampled_from([SYSTEM, QUESTION, ANSWER]), max_size=3)), max_size=8
    )
)
def test_delta_form_is_the_inverse_of_its_definition(tmp_path_factory, steps):
    records, prompts = [], []
    for at_most, append in steps:
        before = prompts[-1] if prompts else ()
        keep = min(at_most, len(before))
        records.append(line(keep=keep, append=append))
        prompts.append(before[:keep] + tuple(append))
    assert [call.messages for call in calls(tmp_path_factory.mktemp("delta"), *records)] == prompts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keep": 1}, "keep is 1, but the call before it of session 's', agent 'main' has 0 messages"),
        ({"keep": -1}, "keep is -1"),
        ({"keep": True}, "'keep' must be of type int, got bool"),
        ({"session": None}, "'session' must be of type str, got null"),
        ({"append": {}}, "'append' must be of type list, got dict"),
        ({"append": ["hello"]}, "a message must be an object, got str"),
        ({"append": [{"content": "hello"}]}, "'role' is missing"),
        ({"append": [{"role": "wizard", "content": "hello"}]}, "unknown role 'wizard'; known roles: system"),
        ({"append": [{"role": "user", "content": 3}]}, "'content' must be a string, null or a list of blocks, got int"),
        ({"append": [{"role": "user", "content": ["a"]}]}, "a content block must be an object, got str"),
        ({"append": [{"role": "user", "content": [{"text": "a"}]}]}, "'type' is missing"),
        ({"append": [{"role": "user", "content": [{"type": "text"}]}]}, "'text' is missing"),
        ({"append": [{"role": "user", "content": [{"type": "image"}]}]}, "unknown content block 'image'"),
        ({"append": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "a tool_use block stands in a message of"),
        ({"append": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "a tool_result block stands in"),
        ({"append": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "'tool_use_id' is missing"),
        (
            {"append": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "a tool_result may hold text only, got a block of type 'image'",
        ),
        (
            {"append": [{"role": "user", "content": [RESULT | {"content": 5}]}]},
            "the content of a tool_result must be a string, null or a list of blocks, got int",
        ),
        (
            {"append": [{"role": "assistant", "tool_calls": [], "content": [{"type": "tool_use"}]}]},
            "a message has both tool_calls and tool_use blocks",
        ),
        ({"tools": "all"}, "'tools' must be a list, null or \"=\", got str"),
        ({"tools": ["berths"]}, "a tool must be an object, got str"),
        ({"ts": "noon"}, "'ts' must be a number or null, got str"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(tmp_path, changes, reason):
    message = refused(tmp_path, line(session="other"), line(**changes))
    assert message.startswith(f"{tmp_path / 'log.jsonl'}, line 2: {reason}")


@pytest.mark.parametrize("key", ["session", "agent", "turn", "keep", "append"])
def test_a_missing_field_is_named(tmp_path, key):
    record = line()
    del record[key]
    assert refused(tmp_path, record).endswith(f"line 1: '{key}' is missing")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"session": \n', "line 3: not JSON"),
        (b"[]\n", "line 3: the line must be an object, got list"),
        (b'"\xff"\n', "line 3: not UTF-8 (invalid start byte at byte 1)"),
    ],
)
def test_lines_that_are_no_objects_are_named_and_empty_ones_skipped(tmp_path, text, reason):
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(line()).encode() + b"\n\n" + text)
    reader = read_trace(path)
    next(reader)
    with pytest.raises(InputError, match="line 3") as caught:
        next(reader)
    assert reason in str(caught.value)


def test_gzip_is_read(tmp_path):
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line(append=[QUESTION])).encode()))
    assert [call.messages for call in read_trace(path)] == [(QUESTION,)]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-12], lambda data: b"plain", lambda data: data[:10] + b"\xff" * 20]
)
def test_damaged_gzip_is_an_input_error(tmp_path, damage):
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(damage(gzip.compress(json.dumps(line()).encode() * 50)))
    with pytest.raises(InputError, match=r"cannot read .* after line"):
        list(read_trace(path))


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*absent.jsonl after line 0"):
        list(read_trace(tmp_path / "absent.jsonl"))


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"must end in .jsonl, .jsonl.gz or .jsonl.zst"):
        list(read_trace(tmp_path / "log.csv"))


def test_zst_without_zstandard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InputError, match=r"needs the zstandard package; run `pip install zstandard`"):
        list(read_trace(tmp_path / "log.jsonl.zst"))


def test_zst_is_read_with_zstandard_and_damage_named(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "log.jsonl.zst"
    path.write_bytes(zstandard.compress(json.dumps(line(append=[QUESTION])).encode()))
    assert [call.messages for call in read_trace(path)] == [(QUESTION,)]
    path.write_bytes(b"no frame")
    with pytest.raises(InputError, match="cannot read"):
        list(read_trace(path))
