import pytest
from server_fakes import byte_level_tokenizer

from irminsul.errors import CheckpointError
from irminsul.server.chat import PromptEncoder
from irminsul.server.protocol import ChatMessage, RequestError

USER = ChatMessage(role="user", content="What is 6 x 7?")
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"zeta": 1, "alpha": 2}}}]
CALL = {"id": "c1", "function": {"name": "multiply", "arguments": '{"b": 7, "a": "né"}'}}
CALLING = ChatMessage.model_validate({"role": "assistant", "content": "", "tool_calls": [CALL]})


def templated(template):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, *messages, tools=None, tool_choice=None):
    return tokenizer.decode(PromptEncoder(tokenizer).chat(messages, tools, tool_choice))


def test_a_conversation_is_what_the_tokenizer_itself_makes_of_it(tokenizer):
    encoded = PromptEncoder(tokenizer).chat([USER], TOOLS, None)
    conversation = [{"role": "user", "content": "What is 6 x 7?"}]
    expected = tokenizer.apply_chat_template(conversation, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert list(encoded) == expected
    text = tokenizer.decode(encoded)
    assert '"parameters": {"zeta": 1, "alpha": 2}' in text, "tools are shown as they were sent"
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("spelled", "shown"),
    [
        ("{{ call.function.arguments | tojson }}", '{"b": 7, "a": "né"}'),
        ("{{ 'args: ' + call.function.arguments }}", 'args: {"b": 7, "a": "né"}'),
        ("{{ call.function.arguments }}", '{"b": 7, "a": "né"}'),
        ("{% for key in call.function.arguments %}{{ key | tojson }}{% endfor %}", '"b""a"'),
    ],
)
def test_arguments_are_given_in_the_form_the_template_reads(spelled, shown):
    template = f"{{% for m in messages %}}{{% for call in m.tool_calls %}}{spelled}{{% endfor %}}{{% endfor %}}"
    assert rendered(templated(template), CALLING) == shown


@pytest.mark.parametrize(("arguments", "reason"), [("{oops", "is not JSON"), ("[1]", "must be a JSON object")])
def test_broken_arguments_are_named_where_the_template_needs_an_object(tokenizer, arguments, reason):
    call = {"id": "c1", "function": {"name": "f", "arguments": arguments}}
    calling = ChatMessage.model_validate({"role": "assistant", "tool_calls": [CALL, call]})
    with pytest.raises(RequestError, match=reason) as caught:
        PromptEncoder(tokenizer).chat([USER, calling], None, None)
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


def test_text_parts_and_unknown_fields_reach_the_template():
    template = "{% for m in messages %}{{ m.content }}/{{ m.reasoning_content }}{% endfor %}{{ tool_choice }}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = ChatMessage.model_validate({"role": "user", "content": parts, "reasoning_content": "hm"})
    assert rendered(templated(template), message, tool_choice="auto") == "one\ntwo/hmauto"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{{ 1 // 0 }}"],
)
def test_what_the_template_refuses_is_the_clients_error(template):
    with pytest.raises(RequestError, match=r"chat template cannot render this: .") as caught:
        rendered(templated(template), USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("\n{% if %}", "does not compile: line 2: Expected an expression"),
        ("Hello.", "shows nothing of a conversation: 'Hel"),
    ],
)
def test_a_template_that_works_for_nobody_is_not_the_clients_error(template, told):
    with pytest.raises(CheckpointError, match=told):
        PromptEncoder(templated(template))


def test_without_a_template_there_is_no_chat():
    with pytest.raises(RequestError, match="no chat template"):
        rendered(templated(None), USER)


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        PromptEncoder(tokenizer).text("\ud83d")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(tokenizer):
    encoder = PromptEncoder(tokenizer, max_tokens=10)
    longest = max(map(len, tokenizer.get_vocab()))
    with pytest.raises(RequestError, match="characters") as refused:
        encoder.text("x" * (10 * longest + 1))
    assert refused.value.code == "context_length_exceeded"
    assert encoder.text("x" * 10 * longest)
