import json

import pytest

from irminsul.demo.prompts import Prompt, encode, scenario_prompts, trace_prompts
from irminsul.demo.scenarios import SCENARIOS, DemoRequest
from irminsul.errors import InputError

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "look"}}


def decoded(prompt: Prompt, tokenizer) -> str:
    return tokenizer.decode(list(prompt.token_ids))


def write_log(path, *prompts):
    lines = [
        json.dumps({"session": "s", "agent": "a", "turn": at, "ts": None, "keep": 0, "append": messages, "tools": None})
        for at, messages in enumerate(prompts)
    ]
    path.write_text("\n".join(lines))
    return path


def test_requests_go_through_the_chat_template(tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = (
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "blue"},
    )
    (prompt,) = encode([DemoRequest("x", messages, (TOOL,))], tokenizer)
    assert prompt.scenario == "x"
    assert decoded(prompt, tokenizer) == (
        '[{"type": "function", "function": {"name": "look"}}]'
        '<user>Hello<assistant>(look {"at": "sky"})<tool>blue<assistant>'
    )


def test_all_conversations_of_the_demo_can_be_encoded(tokenizer):
    prompts = list(scenario_prompts(tokenizer))
    assert list(dict.fromkeys(prompt.scenario for prompt in prompts)) == list(SCENARIOS)
    assert all(len(prompt.token_ids) > 5000 for prompt in prompts), "a token is a byte here"


def test_a_trace_is_a_scenario_and_is_read_up_to_the_limit(tokenizer, tmp_path):
    one = write_log(tmp_path / "one.jsonl", [HELLO], [HELLO, HELLO], [{"role": "user", "content": 5}])
    two = write_log(tmp_path / "two.v1.jsonl", [HELLO])
    prompts = list(trace_prompts([one, two], 2, tokenizer))
    assert [prompt.scenario for prompt in prompts] == ["one", "one", "two.v1"]
    assert decoded(prompts[1], tokenizer) == "<user>Hello<user>Hello<assistant>"


def test_traces_of_one_name_are_refused(tokenizer, tmp_path):
    (tmp_path / "sub").mkdir()
    paths = [write_log(tmp_path / "log.jsonl", [HELLO]), write_log(tmp_path / "sub" / "log.jsonl", [HELLO])]
    with pytest.raises(InputError, match="two traces are named 'log'; rename one"):
        list(trace_prompts(paths, 1, tokenizer))


def test_a_request_that_the_server_would_refuse_is_named(tokenizer):
    requests = [DemoRequest("x", (HELLO,)), DemoRequest("x", ({"role": "user", "content": None},))]
    with pytest.raises(InputError, match=r"request 2 of x: messages.0: content is required"):
        list(encode(requests, tokenizer))


def test_a_conversation_that_the_template_refuses_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no tools here') }}")
    with pytest.raises(InputError, match="request 1 of x: the chat template cannot render this: no tools here"):
        list(encode([DemoRequest("x", (HELLO,))], tokenizer))
