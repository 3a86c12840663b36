"""The ChatML template: SmolLM2's own on plain conversations, and what tools look like."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from irminsul.checkpoints.smollm2 import chat_template

DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Today\'s "weather" in Tromsø',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TOOL_LIST = (
    "\n\nYou can call these tools:\n<tools>\n"
    + json.dumps(WEATHER, ensure_ascii=False)
    + "\n</tools>\nTo call one, write its name and arguments as JSON:\n"
    + '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)
BARE = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=chat_template())


def render(messages, *, tokenizer=BARE, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def call(name, arguments):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_plain_conversation_with_its_own_system_message():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n"},
        {"role": "assistant", "content": " Hello. "},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi\n<|im_end|>\n"
        "<|im_start|>assistant\n Hello. <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_conversation_without_system_message_gets_the_default_one():
    expected = DEFAULT_SYSTEM + "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render([{"role": "user", "content": "Hi"}]) == expected


CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}),
    min_size=1,
)


@pytest.mark.checkpoint
@pytest.mark.slow
def test_plain_conversations_are_byte_identical_to_the_original_template(source):
    original = source.original_template
    assert original
    assert original != chat_template()

    @settings(max_examples=200)
    @given(messages=CONVERSATIONS, add_generation_prompt=st.booleans())
    def compare(messages, add_generation_prompt):
        options = {"add_generation_prompt": add_generation_prompt}
        assert render(messages, **options) == render(messages, chat_template=original, **options)

    compare()


def test_tools_join_the_system_message_the_conversation_has():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = f"<|im_start|>system\nBe brief.{TOOL_LIST}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(messages, tools=[WEATHER]) == expected


def test_tools_join_the_default_system_message():
    expected = f"{DEFAULT_SYSTEM}{TOOL_LIST}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render([{"role": "user", "content": "Hi"}], tools=[WEATHER]) == expected


def test_a_call_and_its_result():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city":"Tromsø"}')]},
        {"role": "tool", "tool_call_id": "1", "content": '{"high": -2}'},
    ]
    assert render(messages) == (
        "<|im_start|>system\nS<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city":"Tromsø"}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>tool\n{"high": -2}<|im_end|>\n'
    )


def test_text_before_several_calls():
    calls = [call("weather", {"city": "Oslo"}), call("time", {})]
    rendered = render(
        [{"role": "system", "content": "S"}, {"role": "assistant", "content": "Let me look.", "tool_calls": calls}]
    )
    assert rendered.endswith(
        "<|im_start|>assistant\nLet me look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


@given(
    arguments=st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_arguments_as_an_object_and_as_its_json_text_look_alike(arguments):
    as_object = render([{"role": "assistant", "content": "", "tool_calls": [call("f", arguments)]}])
    text = json.dumps(arguments, ensure_ascii=False)
    assert as_object == render([{"role": "assistant", "content": "", "tool_calls": [call("f", text)]}])
    assert f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' in as_object


def test_content_in_text_parts_is_joined():
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "a\nb"}])
    assert render([{"role": "tool", "content": parts}]) == render([{"role": "tool", "content": "a\nb"}])


def test_a_developer_message_is_a_system_message():
    turns = [{"role": "user", "content": "Hi"}]
    developer = render([{"role": "developer", "content": "D"}, *turns], tools=[WEATHER])
    assert developer == render([{"role": "system", "content": "D"}, *turns], tools=[WEATHER])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "parts of type image_url"),
        ({"a": 1}, "content must be"),
        (3, "content must be"),
    ],
)
def test_other_content_is_refused(content, message):
    with pytest.raises(TemplateError, match=message):
        render([{"role": "user", "content": content}])
