"""Messages of Anthropic and OpenAI, in OpenAI's form."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.trace.lines import LineError, Notes
from irminsul.trace.messages import MEDIA_NOTE, THINKING_NOTE, openai_messages, reply_message, tool_schemas

RESULT = {"type": "tool_result", "tool_use_id": "c1"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}


def converted(message, notes=None):
    return openai_messages(message, Notes() if notes is None else notes)


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(value, **further):
    return {"type": "text", "text": value, **further}


def test_messages_without_blocks_stay_as_they_are():
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "ok", "tool_call_id": "1", "name": "f"}
    for message in (call, result, {"role": "assistant", "content": None}):
        assert converted(message) == [message]


@pytest.mark.parametrize(
    ("blocks", "content"),
    [
        ([text("one")], "one"),
        ([], ""),
        ([text("a"), text("b")], None),
        ([text("a", cache_control={"type": "ephemeral"})], None),
        ([{"type": "input_text", "text": "a"}], "a"),
        (
            [{"type": "output_text", "text": "a", "annotations": []}, {"type": "refusal", "refusal": "no"}],
            [text("a"), text("no")],
        ),
    ],
)
def test_text_blocks_become_a_string_only_where_nothing_is_lost(blocks, content):
    expected = blocks if content is None else content
    assert converted({"role": "user", "name": "eva", "content": blocks}) == [
        {"role": "user", "name": "eva", "content": expected}
    ]


def test_text_parts_beside_tool_calls_stay_one_message():
    message = {"role": "assistant", "tool_calls": [{"id": "1"}], "content": [text("a")]}
    assert converted(message) == [message | {"content": "a"}]


def test_tool_use_becomes_a_tool_call():
    (message,) = converted(
        assistant(
            text("Looking."),
            {"type": "tool_use", "id": "c1", "name": "find", "input": {"név": "Ödön", "n": None}},
            {"type": "server_tool_use", "id": "c2", "name": "now", "input": {}, "caller": "loop"},
        )
    )
    assert message["content"] == "Looking."
    first, second = message["tool_calls"]
    assert (first["id"], first["type"], first["function"]["name"]) == ("c1", "function", "find")
    assert first["function"]["arguments"] == '{"név": "Ödön", "n": null}'
    assert second["caller"] == "loop"


def test_thinking_comes_first_and_starts_a_message_of_its_own_otherwise():
    think = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    call = {"type": "tool_use", "id": "c1", "name": "now", "input": {}}
    notes = Notes()
    first, second = converted(
        assistant(think, text("So."), call, {"type": "redacted_thinking", "data": "?"}, think), notes
    )
    assert (first["reasoning_content"], first["content"]) == ("Hm.", "So.")
    assert second == {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    assert notes.sentences() == [THINKING_NOTE]


def test_tool_results_become_tool_messages_in_order():
    parts = [text("x"), text("y")]
    blocks = [
        text("before"),
        RESULT | {"content": "done", "is_error": True, "cache_control": {"type": "ephemeral"}},
        {"type": "tool_result", "tool_use_id": "c2", "content": parts},
        text("after"),
        {"type": "tool_result", "tool_use_id": "c3"},
    ]
    assert converted(user(*blocks)) == [
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "c1", "content": "done", "is_error": True},
        {"role": "tool", "tool_call_id": "c2", "content": parts},
        {"role": "user", "content": "after"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    ]


def test_what_a_providers_own_tool_returned_is_json_text():
    found = {
        "type": "web_search_tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "web_search_result", "url": "u"}],
    }
    _, message = converted(assistant({"type": "server_tool_use", "id": "c1", "name": "web_search", "input": {}}, found))
    assert message == {"role": "tool", "tool_call_id": "c1", "content": '[{"type": "web_search_result", "url": "u"}]'}


def test_media_are_placeholders_that_tell_equal_from_different():
    notes = Notes()
    other = IMAGE | {"source": IMAGE["source"] | {"data": "b3RoZXI="}}
    cached = IMAGE | {"cache_control": {"type": "ephemeral"}}
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    (message,) = converted(user(IMAGE, other, cached, url, text("What is this?")), notes)
    first, second, third, fourth, question = (part["text"] for part in message["content"])
    assert first == third != second
    assert first.startswith("[image ")
    assert fourth.startswith("[image ")
    assert question == "What is this?"
    assert notes.sentences() == [f"{MEDIA_NOTE} (4 times)"]


def test_a_document_that_is_text_is_its_text():
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Chapter 1"}}
    notes = Notes()
    (message,) = converted(user(document), notes)
    assert message["content"] == "Chapter 1"
    assert notes.sentences() == []


def test_images_in_tool_results_are_placeholders_too():
    (message,) = converted(user(RESULT | {"content": [text("shot:"), IMAGE]}))
    assert [part["text"][:7] for part in message["content"]] == ["shot:", "[image "]


def test_the_older_names_of_tool_calls_are_read():
    (call,) = converted({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}})
    assert call["tool_calls"] == [{"id": None, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert converted({"role": "function", "name": "f", "content": "1"}) == [
        {"role": "tool", "name": "f", "content": "1"}
    ]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hello", "a message must be an object, got str"),
        ({"content": "hello"}, "'role' is missing"),
        ({"role": "wizard"}, "unknown role 'wizard'; known roles: system"),
        ({"role": "user", "content": 3}, "'content' must be a string, null or a list of blocks, got int"),
        (user("a"), "a content block must be an object, got str"),
        (user({"text": "a"}), "'type' is missing"),
        (user({"type": "text"}), "'text' is missing"),
        (user({"type": "hologram"}), "unknown content block 'hologram'; known blocks: text"),
        (user({"type": "tool_use"}), "a tool_use block stands in a message of role 'user'"),
        (user({"type": "thinking"}), "a thinking block stands in a message of role 'user'"),
        (assistant({"type": "tool_result"}), "a tool_result block stands in a message of role 'assistant'"),
        (user({"type": "tool_result"}), "'tool_use_id' is missing"),
        (user(RESULT | {"content": [{"type": "hologram"}]}), "unknown block 'hologram' in a tool_result"),
        (user(RESULT | {"content": 5}), "the content of a tool_result must be a string, null or a list of blocks"),
        (assistant({"type": "tool_use"}) | {"tool_calls": []}, "a message has both tool_calls and tool_use blocks"),
        (
            assistant({"type": "tool_use", "id": "1", "name": "f", "input": "x"}),
            "'input' must be of type dict, got str",
        ),
        (assistant({"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1e999}}), "a number is out of range"),
    ],
)
def test_a_message_that_cannot_be_read_has_a_reason(message, reason):
    with pytest.raises(LineError) as caught:
        converted(message)
    assert str(caught.value).startswith(reason)


def test_tools_of_every_api_become_function_schemas():
    schema = {"type": "object", "properties": {}}
    chat = {"type": "function", "function": {"name": "f", "parameters": schema}}
    responses = {"type": "function", "name": "f", "parameters": schema}
    anthropic = {"name": "f", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    own = {"type": "web_search_20250305", "name": "web_search", "cache_control": {}}
    assert tool_schemas([chat, responses, anthropic, own]) == (
        chat,
        chat,
        chat,
        {"type": "web_search_20250305", "name": "web_search"},
    )
    assert tool_schemas(None) is None
    for wrong in ("all", ["f"]):
        with pytest.raises(LineError, match="must be"):
            tool_schemas(wrong)


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ({"choices": [{"message": {"role": "assistant", "content": "Berth 4."}}]}, "Berth 4."),
        ({"role": "assistant", "content": [text("Berth 4.")]}, "Berth 4."),
        ({"choices": []}, None),
        ({"error": {"message": "overloaded"}}, None),
        ({"choices": [{"delta": {}}]}, None),
        ({"choices": [5]}, None),
        ({"choices": {"a": 1}}, None),
        ("data: {}", None),
        (None, None),
    ],
)
def test_the_reply_is_taken_out_of_a_response_where_it_has_one(response, content):
    reply = reply_message(response, Notes())
    assert (reply and reply["content"]) == content


text_block = st.builds(text, st.text(max_size=5))
tool_use = st.builds(
    lambda name, given: {"type": "tool_use", "id": name, "name": name, "input": given},
    st.text(max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers() | st.none() | st.text(max_size=3), max_size=2),
)
thinking = st.builds(lambda value: {"type": "thinking", "thinking": value}, st.text(min_size=1, max_size=5))
tool_result = st.builds(
    lambda name, value: {"type": "tool_result", "tool_use_id": name, "content": value},
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
        if "reasoning_content" in message:
            yield {"type": "thinking", "thinking": message["reasoning_content"]}
        if content is not None:
            yield from [text(content)] if isinstance(content, str) else content
        for call in message.get("tool_calls", []):
            function = call["function"]
            given = json.loads(function["arguments"])
            yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def joined(blocks):
    """Blocks with neighbouring thoughts as one: a message has one place for them."""
    out = []
    for block in blocks:
        if out and block["type"] == out[-1]["type"] == "thinking":
            out[-1] = {"type": "thinking", "thinking": out[-1]["thinking"] + block["thinking"]}
        else:
            out.append(block)
    return out


@given(
    st.tuples(st.just("assistant"), st.lists(text_block | tool_use | thinking, min_size=1))
    | st.tuples(st.just("user"), st.lists(text_block | tool_result, min_size=1))
)
def test_no_block_is_lost_or_moved(role_and_blocks):
    role, blocks = role_and_blocks
    assert list(blocks_again(converted({"role": role, "content": blocks}))) == joined(blocks)
