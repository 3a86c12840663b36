import pytest
from pydantic import ValidationError

from irminsul.engine.types import SamplingParams
from irminsul.engine.types import Usage as EngineUsage
from irminsul.server.protocol import ChatBody, CompletionBody, RequestError, Usage

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


def chat(**fields):
    body = ChatBody.model_validate(CHAT | fields)
    body.refuse_what_is_not_implemented()
    return body


def completion(**fields):
    body = CompletionBody.model_validate(COMPLETION | fields)
    body.refuse_what_is_not_implemented()
    return body


def test_absent_and_null_mean_the_defaults():
    nulls = dict.fromkeys(["temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs", "tools", "stream"])
    for body in (chat(), chat(**nulls)):
        assert body.sampling(5) == SamplingParams(max_tokens=5)
        assert body.stop_strings == ()
        assert body.wanted_tokens is None


def test_parameters_reach_the_engine():
    body = chat(temperature=0, top_p=0.5, top_k=3, seed=-1, logprobs=True, top_logprobs=4, ignore_eos=True)
    expected = SamplingParams(0.0, 0.5, 3, 9, seed=-1, top_logprobs=4, ignore_eos=True)
    assert body.sampling(9) == expected
    assert chat(logprobs=True).wanted_logprobs == 0
    assert chat(logprobs=False).wanted_logprobs is None
    assert completion(logprobs=0).wanted_logprobs == 0
    assert chat(top_k=-1).sampling(1).top_k == 0
    assert chat(max_tokens=3, max_completion_tokens=3).wanted_tokens == chat(max_completion_tokens=3).wanted_tokens == 3
    assert chat(stop="x").stop_strings == ("x",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 7}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"stream_options": {"include": True}}, "stream_options"),
    ],
)
def test_wrong_values_are_refused_at_their_place(fields, param):
    with pytest.raises(ValidationError) as caught:
        chat(**fields)
    assert caught.value.errors()[0]["loc"][0] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(fields, param):
    for build in (chat, completion):
        with pytest.raises(RequestError, match=param) as caught:
            build(**fields)
        assert caught.value.param == param
        assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "best_of": 1, "echo": False, "suffix": None},
        {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "parallel_tool_calls": True},
        {"user": "someone", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields):
    chat(**fields)
    completion(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"top_logprobs": 2},
        {"max_tokens": 5, "max_completion_tokens": 6},
    ],
)
def test_chat_refuses_contradictions_and_forced_tools(fields):
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == next(iter(fields))


def test_tools_are_hidden_if_none_may_be_called():
    tools = [{"type": "function", "function": {"name": "f", "b": 1, "a": 2}}]
    assert chat(tools=tools).shown_tools == tools
    assert list(chat(tools=tools).shown_tools[0]["function"]) == ["name", "b", "a"]
    assert chat(tools=tools, tool_choice="none").shown_tools is None
    assert chat(tools=[]).shown_tools is None


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("hi", "hi"), ([1, 2], (1, 2)), (["hi"], "hi"), ([[1, 2]], (1, 2)), ([5], (5,)), ([], ()), ("", "")],
)
def test_a_prompt_is_text_or_token_ids(prompt, read):
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [1.5], [True], 5, None, {"a": 1}, [None]])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(ValidationError) as caught:
        completion(prompt=prompt)
    assert caught.value.errors()[0]["loc"] == ("prompt",)


def test_only_the_lossless_prefix_counts_as_cached():
    engine_usage = EngineUsage(100, 10, 20, 30, 40, 3, 30, 0.00125, 0.5, 0.5)
    usage = Usage.of(engine_usage, 7).model_dump()
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 7, 107)
    reuse = usage["irminsul"]
    assert reuse["prefix"] + reuse["approximate_prefix"] + reuse["shifted"] + reuse["computed"] == 100
    assert (reuse["gaps"], reuse["planned_shifted"], reuse["match_ms"]) == (3, 30, 1.25)
