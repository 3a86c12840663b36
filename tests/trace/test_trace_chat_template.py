"""Chat templates: the same text as the transformers package, and what kind each part of it is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.trace.chat_template import ChatTemplate, load_chat_template
from irminsul.trace.lines import LineError
from irminsul.trace.records import CallInfo, Chat, LoggedCall
from irminsul.trace.token_log_builder import encode_call

SYSTEM = {"role": "system", "content": "You run a harbour."}
QUESTION = {"role": "user", "content": " Which berth is free?\n"}
CALL = {"id": "c1", "type": "function", "function": {"name": "berths", "arguments": '{"size": 40}'}}
TURN = {"role": "assistant", "content": "Looking.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": " 4, 7 "}
TOOL = {"type": "function", "function": {"name": "berths", "description": "Köln <b>", "parameters": {"type": "object"}}}

EACH_CALL = "{{% for message in messages %}}{{% for call in message.tool_calls or [] %}}{}{{% endfor %}}{{% endfor %}}"


def template(source, **tokens):
    return ChatTemplate({"default": source}, tokens, lambda text: [(text, False)] if text else [], ())


def rendered(source, *messages, tools=None, ts=None, **tokens):
    return "".join(piece.text for piece in template(source, **tokens).render(Chat(messages, tools), ts))


def spans_as_text(tokeniser, chat):
    call = encode_call(LoggedCall(CallInfo("log", 1), chat), tokeniser)
    return [(str(span.kind), tokeniser.decode(call.tokens[span.start : span.end]), span.message) for span in call.spans]


def test_spans_of_a_conversation_with_tools(chatml):
    schema = json.dumps(TOOL, ensure_ascii=False)
    assert spans_as_text(chatml, Chat((SYSTEM, QUESTION, TURN, RESULT), (TOOL,))) == [
        ("template", "<|im_start|>", None),
        ("tools", "system\n", None),
        ("system", "You run a harbour.", 0),
        ("tools", f"\n\n# Tools\n<tools>\n{schema}\n</tools>", None),
        ("template", "<|im_end|>\n<|im_start|>user\n ", None),
        ("user", "Which berth is free?", 1),
        ("template", "\n<|im_end|>\n<|im_start|>assistant\n", None),
        (
            "assistant",
            'Looking.<tool_call>\n{"name": "berths", "arguments": {"size": "40"}}\n</tool_call>'.replace('"40"', "40"),
            2,
        ),
        ("template", "<|im_end|>\n<|im_start|>tool\n", None),
        ("tool", "4, 7", 3),
        ("template", "<|im_end|>\n<|im_start|>assistant\n", None),
    ]


def test_special_ids_are_those_of_the_tokenizer_and_the_template(chatml):
    assert [chatml.decode(chatml.special_ids[index : index + 1]) for index in range(len(chatml.special_ids))] == [
        "<|im_start|>",
        "<|im_end|>",
        "<tool_call>",
        "</tool_call>",
    ]


words = st.sampled_from(
    ["a", " ", "\n", "<|im_end|>", "<tool_call>", "Ö", '"', "{{", "\N{SHIP}", "\ufdd0", "\ufdd07\ufdd1"]
)
texts = st.lists(words, max_size=6).map("".join)
turns = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant", "tool"]), texts)
    | st.builds(
        lambda text, size: {
            "role": "assistant",
            "content": text,
            "tool_calls": [CALL | {"function": {"name": "f", "arguments": json.dumps({"size": size})}}],
        },
        texts | st.none(),
        texts,
    ),
    max_size=5,
)


@pytest.fixture(scope="module")
def reference(bytes_directory):
    """The same directory as the transformers package reads it."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(bytes_directory))


def as_objects(messages):
    """The messages as servers give them to a template that wants arguments as objects."""
    return [
        message
        | {
            "tool_calls": [
                call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


@settings(deadline=None)
@given(st.booleans(), turns, st.booleans())
def test_tokens_are_those_of_transformers(chatml, reference, with_system, conversation, with_tools):
    messages = [*([SYSTEM] if with_system else []), *(conversation or [QUESTION])]
    tools = [TOOL] if with_tools else None
    call = encode_call(LoggedCall(CallInfo("log", 1), Chat(tuple(messages), tools and tuple(tools))), chatml)
    text = reference.apply_chat_template(as_objects(messages), tools=tools, add_generation_prompt=True, tokenize=False)
    assert call.tokens.tolist() == reference(text, add_special_tokens=False)["input_ids"]
    assert call.spans[-1].end == len(call.tokens)


def test_the_reply_ends_where_the_turn_does(chatml):
    from irminsul.trace.token_log_builder import build_token_log

    prompts = [(SYSTEM, QUESTION), (SYSTEM, QUESTION, TURN, RESULT)]
    log = build_token_log([LoggedCall(CallInfo("log", 1), Chat(messages)) for messages in prompts], chatml)
    assert (
        chatml.decode(log[0].reply)
        == 'Looking.<tool_call>\n{"name": "berths", "arguments": {"size": 40}}\n</tool_call>'
    )
    assert log[0].thread == log[1].thread


def test_a_template_that_looks_at_its_texts_has_spans_of_unknown_kind():
    source = "{% for message in messages %}{{ message.content | length }}:{{ message.content }}{% endfor %}"
    (piece,) = template(source).render(Chat((SYSTEM,)), None)
    assert [(str(part.kind), part.text) for part in piece.parts] == [("text", "18:You run a harbour.")]


def test_a_template_that_moves_texts_still_tells_them_apart():
    source = "{% for message in messages | reverse %}[{{ message.content | trim }}]{% endfor %}"
    (piece,) = template(source).render(Chat((SYSTEM, QUESTION)), None)
    assert [(part.text, str(part.kind)) for part in piece.parts if part.kind != "template"] == [
        ("Which berth is free?", "user"),
        ("You run a harbour.", "system"),
    ]


def test_a_text_of_which_the_template_drops_the_beginning_ends_where_it_ends():
    source = "{% for message in messages %}<{{ message.content.split('|')[-1] }}>{% endfor %}"
    (piece,) = template(source).render(Chat(({"role": "user", "content": "thought|said"},)), None)
    assert "".join(part.text for part in piece.parts) == "<said>"


def test_a_text_twice_in_the_prompt_does_not_break_it():
    source = "{% for message in messages %}{{ message.content }}{% endfor %}{{ messages[0].content }}"
    (piece,) = template(source).render(Chat((SYSTEM, QUESTION)), None)
    assert "".join(part.text for part in piece.parts) == f"{SYSTEM['content']}{QUESTION['content']}{SYSTEM['content']}"
    assert {str(part.kind) for part in piece.parts} == {"text"}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}|{{ documents }}|{{ tools }}", "<s></s>|None|None"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("  {% if true %}\nx\n  {% endif %}", "x\n"),
        ("{{ {'b': 'Ö', 'a': 1.5} | tojson }}", '{"b": "Ö", "a": 1.5}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ messages | length }}{{ add_generation_prompt }}", "0True"),
    ],
)
def test_templates_have_what_transformers_gives_them(source, text):
    assert rendered(source, bos_token="<s>", eos_token="</s>") == text


def test_the_time_is_that_of_the_call():
    source = "{{ strftime_now('%Y-%m-%d %H:%M') }}"
    assert rendered(source, ts=1_769_860_800.0) == "2026-01-31 12:00"
    assert rendered(source) == "1970-01-01 00:00"


@pytest.mark.parametrize(
    ("written", "shown"),
    [("{{ call.function.arguments | tojson }}", '{"a": 1}'), ("{{ call.function.arguments }}", '{"a": 1}')],
)
def test_arguments_come_as_the_template_wants_them(written, shown):
    source = EACH_CALL.format(written)
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    assert rendered(source, message) == shown


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        ("{{ raise_exception('no system here') }}", (SYSTEM,), "no system here"),
        ("{{ messages[0].content + 1 }}", (SYSTEM,), "cannot render this conversation"),
        ("{{ messages[3].content.x.y }}", (SYSTEM,), "cannot render this conversation"),
        ("{{ messages.append(1) }}", (SYSTEM,), "cannot render this conversation"),
        ("{{ ''.__class__.__mro__ }}", (SYSTEM,), "cannot render this conversation"),
        ("{{ messages[0].x | tojson }}", (SYSTEM | {"x": 1e999},), "cannot render this conversation"),
        ("{{ messages[0].content }}", (SYSTEM | {"content": 5},), "'content' must be a string"),
    ],
)
def test_what_cannot_be_rendered_has_a_reason(source, messages, reason):
    with pytest.raises(LineError, match=reason):
        rendered(source, *messages)


def test_arguments_with_half_a_surrogate_pair_are_refused():
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    source = EACH_CALL.format("{{ call.function.arguments | tojson }}")
    with pytest.raises(LineError, match="surrogates not allowed"):
        rendered(source, {"role": "assistant", "tool_calls": [call]})


def split(text):
    return [(text, False)] if text else []


def test_where_templates_are_looked_for(tmp_path):
    assert load_chat_template(tmp_path, split, ()) is None
    config = {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    def texts():
        found = load_chat_template(tmp_path, split, ())
        return [found.render(Chat((), tools), None)[0].text for tools in (None, (TOOL,))]

    assert texts() == ["d", "t"]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert texts() == ["j", "j"]
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "E"}}))
    assert texts() == ["E", "E"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chat_template.jinja", "{% if %}", "the chat template cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "must hold an object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "'chat_template' must be a text or a list of named texts"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "no chat template is named"),
    ],
)
def test_a_template_that_cannot_be_read_is_an_input_error(tmp_path, name, content, reason):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=reason):
        load_chat_template(tmp_path, split, ())
