"""The forms that are a record a line, and the logs of SGLang and vLLM. Lines are of our own writing."""

import json

import numpy as np
import pytest

from irminsul.namespace import Namespace
from irminsul.trace.formats import openai_responses, sglang_log, vllm_log
from irminsul.trace.messages import MEDIA_NOTE, THINKING_NOTE
from irminsul.trace.response_items import ITEM_TYPES

SYSTEM = {"role": "system", "content": "You run a harbour."}
QUESTION = {"role": "user", "content": "Which berth is free?"}
ANSWER = {"role": "assistant", "content": "Berth 4."}
SCHEMA = {"type": "object", "properties": {"size": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "berths", "description": "Lists berths.", "parameters": SCHEMA}}


def function(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# openai-chat


def test_chat_bodies_bare_and_wrapped(log):
    body = {"model": "m", "messages": [SYSTEM, QUESTION], "tools": [TOOL], "temperature": 0}
    response = {"id": "r", "choices": [{"index": 0, "message": ANSWER | {"refusal": None}}]}
    bare, wrapped, batch = log.calls(
        body,
        {"timestamp": "2026-01-31T12:00:00Z", "session_id": "s", "request": body, "response": response},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
    )
    for call in (bare, wrapped, batch):
        assert (call.prompt.messages, call.prompt.tools) == ((SYSTEM, QUESTION), (TOOL,))
        assert call.info.namespace == Namespace(model="m")
    assert (wrapped.info.session, wrapped.info.ts) == ("s", 1_769_860_800.0)
    assert wrapped.reply["content"] == "Berth 4."
    assert bare.reply is batch.reply is None


def test_the_older_functions_are_tools(log):
    call = log.call({"messages": [QUESTION], "functions": [TOOL["function"]]})
    assert call.prompt.tools == (TOOL,)


def test_images_in_a_chat_are_noted(log):
    part = {"type": "image_url", "image_url": {"url": "https://example.org/ship.png"}}
    call = log.call({"messages": [{"role": "user", "content": [{"type": "text", "text": "See:"}, part]}]})
    assert call.prompt.messages[0]["content"][1]["text"].startswith("[image ")
    assert log.notes.sentences() == [MEDIA_NOTE]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"messages": "hello"}, "'messages' must be a list, got str"),
        ({"messages": [5]}, "a message must be an object, got int"),
        ({"messages": [QUESTION], "tools": {}}, "'tools' must be a list, got dict"),
        ({"messages": [QUESTION], "tools": [], "functions": []}, "has both 'tools' and 'functions'"),
        ({"messages": [QUESTION], "system": "s"}, "'system' beside the messages is Anthropic's form"),
        ({"messages": [QUESTION], "cache_salt": {}}, "'cache_salt' must be a string or a number, got dict"),
        ({"model": "m"}, "no request body"),
        ({"prompt": "x"}, "'messages' must be a list, got null"),
    ],
)
def test_a_bad_chat_body_has_a_reason(log, line, reason):
    good = {"messages": [QUESTION]}
    (found,) = log.reasons(good, line, good, form="openai-chat")
    assert found.startswith(f"2: {reason}")


# anthropic


def test_messages_bodies(log):
    body = {
        "model": "claude-x",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "You run a harbour.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "berths", "description": "Lists berths.", "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": "Which berth is free?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I should look.", "signature": "sig"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "berths", "input": {"size": 40}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4, 7"}]}
                ],
            },
        ],
    }
    response = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Berths 4 and 7."}]}
    call = log.call({"request": body, "response": response})
    system, question, turn, result = call.prompt.messages
    assert (system["role"], question["content"]) == ("system", "Which berth is free?")
    assert turn["reasoning_content"] == "I should look."
    assert turn["content"] == "Looking."
    assert turn["tool_calls"] == [function("berths", '{"size": 40}', "t1")]
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "4, 7"}
    assert call.prompt.tools == (TOOL,)
    assert call.reply["content"] == "Berths 4 and 7."


@pytest.mark.parametrize("system", ["You run a harbour.", None])
def test_a_system_text_may_be_plain_or_missing(log, system):
    call = log.call({"system": system, "max_tokens": 1, "messages": [QUESTION]}, form="anthropic")
    assert call.prompt.messages == (*((SYSTEM,) if system else ()), QUESTION)


def test_a_bad_system_text_has_a_reason(log):
    assert log.reasons({"system": 5, "messages": [QUESTION]}) == [
        "1: 'system' must be a string or a list of blocks, got int"
    ]


# openai-responses


def test_responses_bodies(log):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Which berth is free?"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "I should look."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "berths", "arguments": '{"size": 40}'},
        {"type": "function_call", "call_id": "c2", "name": "berths", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4, 7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "all"}]},
        {"type": "message", "role": "user", "content": "Thanks."},
    ]
    tool = {"type": "function", "name": "berths", "description": "Lists berths.", "parameters": SCHEMA}
    call = log.call({"model": "m", "instructions": "You run a harbour.", "input": items, "tools": [tool]})
    system, question, turn, first, second, thanks = call.prompt.messages
    assert system == SYSTEM
    assert question == QUESTION
    assert turn == {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "I should look.",
        "tool_calls": [function("berths", '{"size": 40}'), function("berths", "{}", "c2")],
    }
    assert (first["content"], second["content"]) == ("4, 7", "all")
    assert thanks == {"role": "user", "content": "Thanks."}
    assert call.prompt.tools == (TOOL,)


def test_a_text_as_input(log):
    call = log.call({"input": "Which berth is free?", "instructions": "You run a harbour."})
    assert call.prompt.messages == (SYSTEM, QUESTION)


def test_a_previous_response_is_put_in_front(log):
    output = [
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Berth 4."}]}
    ]
    first, second, third = log.calls(
        {"request": {"input": "Which berth is free?", "tools": []}, "response": {"id": "r1", "output": output}},
        {"request": {"input": "And now?", "previous_response_id": "r1"}, "response": {"id": "r2", "output": output}},
        {"request": {"input": "Thanks.", "previous_response_id": "r2"}},
    )
    assert first.reply == ANSWER
    now, thanks = {"role": "user", "content": "And now?"}, {"role": "user", "content": "Thanks."}
    assert second.prompt.messages == (QUESTION, ANSWER, now)
    assert third.prompt.messages == (QUESTION, ANSWER, now, ANSWER, thanks)


def test_only_the_newest_responses_are_remembered(log, monkeypatch):
    monkeypatch.setattr(openai_responses, "_MAX_REMEMBERED", 1)
    lines = [{"request": {"input": [QUESTION]}, "response": {"id": name, "output": []}} for name in "ab"]
    found = log.reasons(
        *lines, {"input": "x", "previous_response_id": "b"}, {"input": "x", "previous_response_id": "a"}
    )
    assert found == ["4: its previous_response_id 'a' is not in the log before it: the prompt is unknown"]


def test_other_calls_and_their_outputs(log):
    items = [
        QUESTION,
        {"type": "local_shell_call", "id": "x", "call_id": "c1", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c1", "output": "pier.txt"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "u"}]},
        {"type": "computer_call_output", "call_id": "c3", "output": {"type": "screenshot"}},
        {"type": "reasoning", "encrypted_content": "?", "summary": []},
        {"type": "compaction", "encrypted_content": "?"},
    ]
    _, shell, listing, patch, image, screen = log.call({"input": items}).prompt.messages
    assert shell["tool_calls"] == [function("local_shell_call", '{"action": {"command": ["ls"]}}')]
    assert (listing["content"], screen["content"]) == ("pier.txt", '{"type": "screenshot"}')
    assert patch["tool_calls"] == [function("patch", "*** begin", "c2")]
    assert image["content"].startswith("[image ")
    assert len(log.notes.sentences()) == 3
    assert THINKING_NOTE in log.notes.sentences()


@pytest.mark.parametrize("kind", ITEM_TYPES)
def test_every_kind_of_item_is_read_or_refused_in_words(log, kind):
    item = {"type": kind, "id": "i", "call_id": "c", "name": "f", "arguments": "{}", "input": "x", "output": "y"}
    item |= {"role": "user", "content": "z"} if kind == "message" else {}
    log.calls({"input": [QUESTION, item]})
    refused = [bad.reason for bad in log.bad.first]
    assert refused == ([] if kind != "item_reference" else refused)
    assert all("cannot use an input item of type 'item_reference'" in reason for reason in refused)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": 5}, "'input' must be a string or a list of items, got int"),
        ({"input": ["x"]}, "an input item must be an object, got str"),
        ({"input": [{"id": "x"}]}, "'type' is missing"),
        ({"input": [{"type": "function_call"}]}, "'arguments' is missing"),
        ({"input": [{"type": "seance"}]}, "cannot use an input item of type 'seance'; known items: message"),
        ({"input": "x", "instructions": []}, "'instructions' must be a string, got list"),
        ({"input": "x", "previous_response_id": "r9"}, "its previous_response_id 'r9' is not in the log before it"),
    ],
)
def test_a_bad_responses_body_has_a_reason(log, body, reason):
    (found,) = log.reasons(body, form="openai-responses")
    assert found.startswith(f"1: {reason}")


# plain


def test_plain_prompts_of_every_kind(log):
    calls = log.calls(
        {"prompt": "one", "session": "s"},
        {"text": "two"},
        {"input_ids": [1, 2, 3], "text": "not this"},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["three", "four"]},
        {"request": {"prompt": "five"}, "response": {"choices": [{"text": " six"}]}},
    )
    prompts = [call.prompt.tolist() if isinstance(call.prompt, np.ndarray) else call.prompt for call in calls]
    assert prompts == ["one", "two", [1, 2, 3], [1, 2], [3], "three", "four", "five"]
    assert [call.info.line for call in calls] == [1, 2, 3, 4, 4, 5, 5, 6]
    assert [call.reply for call in calls] == [None] * 7 + [" six"]
    assert calls[2].prompt.dtype == np.int32


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": ""}, "'prompt' is empty"),
        ({"input_ids": []}, "'input_ids' is empty"),
        ({"input_ids": [1, "2"]}, "'input_ids' must hold token ids, got str"),
        ({"input_ids": [1, True]}, "'input_ids' must hold token ids, got bool"),
        ({"input_ids": [1.5]}, "'input_ids' must hold token ids, got float"),
        ({"input_ids": [-1]}, "'input_ids' holds -1, which is no token id"),
        ({"input_ids": [2**31]}, "'input_ids' holds 2147483648, which is no token id"),
        ({"prompt": ["a", 5]}, "'prompt' must be a list of token ids, got int"),
        ({"messages": []}, "holds no prompt: none of input_ids"),
        ({}, "no request body"),
    ],
)
def test_a_bad_plain_line_has_a_reason(log, line, reason):
    (found,) = log.reasons(line, form="plain")
    assert found.startswith(f"1: {reason}")


# sglang


def sglang(event, rid, out=None, at="2026-01-31T12:00:00.500000", **obj):
    record = {"timestamp": at, "event": f"request.{event}", "rid": rid, "obj": {"rid": rid, "stream": False} | obj}
    return "[2026-01-31 12:00:00] " + json.dumps(record | ({} if out is None else {"out": out}), ensure_ascii=False)


def test_sglang_events_become_calls(log):
    calls = log.calls(
        "[2026-01-31 12:00:00] server_args=ServerArgs(...)",
        sglang("received.openai", None, model="m", messages=[QUESTION]),
        sglang("received", "a", input_ids=[1, 2], text=None, extra_key="k", lora_path="l", session_id="s"),
        sglang("received", "b", input_ids=None, text="Which berth?", cache_salt="t"),
        "[2026-01-31 12:00:01] Prefill batch, #new-seq: 2",
        sglang("finished", "b", {"text": " Berth 4.", "meta_info": {}}, text="Which berth?"),
        sglang("finished", "a", {"output_ids": [7, 8], "meta_info": {}}, input_ids=[1, 2], text="decoded"),
        sglang("received", "c", input_ids=[5], text=None, at="2026-01-31T12:00:09"),
    )
    b, a, c = calls
    assert (b.prompt, b.reply, b.info.namespace) == ("Which berth?", " Berth 4.", Namespace(cache_salt="t"))
    assert (a.prompt.tolist(), a.reply.tolist()) == ([1, 2], [7, 8])
    assert (a.info.session, a.info.namespace) == ("s", Namespace(extra_key="k", lora="l"))
    assert (a.info.line, a.info.ts) == (3, 1_769_860_800.5)
    assert (c.prompt.tolist(), c.reply, c.info.ts) == ([5], None, 1_769_860_809.0)


def test_a_sglang_batch_ends_one_by_one(log):
    calls = log.calls(
        sglang("received", ["a", "b"], text=["x", "y"], extra_key=["k", "l"], lora_path=["m", None]),
        sglang("finished", "b", {"text": "2"}, text="y"),
        sglang("finished", "a", {"text": "1"}, text="x"),
    )
    assert [(call.prompt, call.reply) for call in calls] == [("y", "2"), ("x", "1")]
    assert [call.info.namespace for call in calls] == [Namespace(extra_key="l"), Namespace(extra_key="k", lora="m")]


def test_a_sglang_end_without_its_beginning_is_the_call(log):
    call = log.call(sglang("finished", "a", {"text": "1"}, text="x"))
    assert (call.prompt, call.reply) == ("x", "1")


def test_ids_that_come_again_lose_no_call(log):
    lines = [sglang("received", "a", text=text) for text in "xy"]
    assert [call.prompt for call in log.calls(*lines)] == ["x", "y"]
    assert [call.prompt for call in log.calls(vllm("a", "x"), vllm("a", "y"))] == ["x", "y"]


def test_a_sglang_log_of_beginnings_only_passes_through(log, monkeypatch):
    monkeypatch.setattr(sglang_log, "_MAX_OPEN", 2)
    calls = log.calls(*(sglang("received", str(number), text=str(number)) for number in range(6)))
    assert [call.prompt for call in calls] == list("012345")


def test_sglang_compact_json_of_a_log_shipper(log):
    line = json.dumps(json.loads(sglang("received", "a", text="x").partition("] ")[2]), separators=(",", ":"))
    assert log.call(line).prompt == "x"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            sglang("received", "a", sampling_params={}),
            "the log holds no prompts; run SGLang with --log-requests-level 3",
        ),
        (sglang("received", "a", text="a" * 1024 + "..." + "b" * 1024), "the prompt was cut when it was logged; run"),
        (sglang("received", "a", input_ids=[*range(1024), "...", *range(1024)]), "the prompt was cut"),
        (sglang("received", "a", input_ids=[[1, "..."]]), "the prompt was cut"),
        (sglang("received", "a", input_ids=[1.5]), "'input_ids' must hold token ids, got float"),
        (sglang("received", "a", text="x", at="noon"), "'timestamp': 'noon' is no time"),
        (sglang("received", "a", text="x").replace('"obj": {', '"obj": [{'), "not JSON"),
        ('{"timestamp": "2026-01-31", "event": "request.received", "rid": "a", "obj": 5}', "'obj' must be an object"),
    ],
)
def test_a_bad_sglang_line_has_a_reason(log, line, reason):
    (found,) = log.reasons(line, sglang("received", "b", text="y"))
    assert found.startswith(f"1: {reason}")


# vllm

PARAMS = "SamplingParams(n=1, temperature=0.0, stop=['a', \"b\"])"


def vllm(request, prompt, ids=None, at="07-01 12:00:00", lora=None):
    return (
        f"INFO {at} [logger.py:40] Received request {request}: prompt: {prompt!r}, params: {PARAMS}, "
        f"prompt_token_ids: {ids}, prompt_embeds shape: None, lora_request: {lora}."
    )


def vllm_debug(request, prompt, ids=None):
    return (
        f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m DEBUG 07-01 12:00:00 [request_logger.py:44] Request {request} details: "
        f"prompt: {prompt!r}, prompt_token_ids: {ids}, prompt_embeds shape: None."
    )


def vllm_output(request, text, ids, how=""):
    return (
        f"INFO 07-01 12:00:05 [logger.py:71] Generated response {request}{how}: output: {text!r}, "
        f"output_token_ids: {ids}, finish_reason: stop"
    )


def test_vllm_requests_of_both_wordings(log):
    lora = "LoRARequest(lora_name='docks', lora_int_id=1, lora_path='/models/docks')"
    calls = log.calls(
        "INFO 07-01 11:59:59 [api_server.py:1] Starting",
        vllm("a-1", "It's a \"quay\"\n\\ 'ok' \N{SHIP}", None, lora=lora),
        vllm_debug("b-1", "decoded", [5, 6, 7]),
        f"INFO 07-01 12:00:00 [logger.py:50] Received request b-1: params: {PARAMS}, lora_request: None.",
        vllm_output("b-1", "no", [1], " (streaming delta)"),
        vllm_output("b-1", " Berth", [8, 9], " (streaming complete)"),
        vllm_output("a-1", " Berth", None),
    )
    b, a = calls
    assert (b.prompt.tolist(), b.reply.tolist()) == ([5, 6, 7], [8, 9])
    assert (a.prompt, a.reply) == ("It's a \"quay\"\n\\ 'ok' \N{SHIP}", " Berth")
    assert a.info.namespace == Namespace(lora="docks")
    assert log.notes.sentences() == []


def test_vllm_lines_of_a_json_logger(log):
    message = vllm_debug("a", "x").partition("] ")[2]
    first, second = log.calls(
        {"timestamp": "2026-01-31T12:00:00Z", "level": "DEBUG", "message": message},
        {"ts": 5, "msg": vllm("b", "y").partition("] ")[2]},
    )
    assert (first.prompt, first.info.ts) == ("x", 1_769_860_800.0)
    assert (second.prompt, second.info.ts) == ("y", 5.0)


def test_vllm_times_go_on_over_the_end_of_a_year(log):
    days = ["12-31 23:59:59", "01-01 00:00:01", "2026-02-01 00:00:00"]
    times = [call.info.ts for call in log.calls(*(vllm("a", day, at=day) for day in days))]
    assert times[1] - times[0] == 2.0
    assert times[2] == 1_769_904_000.0


def test_a_vllm_log_without_a_clock(log):
    assert log.call(vllm("a", "x").partition("] ")[2]).info.ts is None


def test_vllm_prompts_that_may_be_cut_are_noted(log):
    log.calls(vllm("a", "x" * 50), vllm("b", "y" * 50), vllm("c", "z"))
    (note,) = log.notes.sentences()
    assert "2 prompts have the greatest length, 50" in note


def test_a_vllm_log_of_beginnings_only_passes_through(log, monkeypatch):
    monkeypatch.setattr(vllm_log, "_MAX_OPEN", 2)
    assert [call.prompt for call in log.calls(*(vllm(name, name) for name in "abcd"))] == list("abcd")


def test_a_vllm_log_without_prompts_says_how_to_get_them(log):
    line = f"INFO 07-01 12:00:00 [logger.py:50] Received request b-1: params: {PARAMS}, lora_request: None."
    assert log.reasons(line, line) == ["1: the log holds no prompts; set VLLM_LOGGING_LEVEL=DEBUG where vLLM runs"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (vllm("a", None), "holds neither the prompt's text nor its token ids"),
        (vllm("a", "x").partition("x")[0], "the prompt is not written as vLLM writes it, or the line is cut"),
        (vllm("a", "x").replace("'x'", r"'\ud800'"), "the prompt is not written as Python writes a string"),
        (vllm("a", "x").replace("'x'", r"'\xg'"), "the prompt is not written as Python writes a string"),
        (vllm("a", "x", at="13-41 12:00:00"), "'13-41 12:00:00' is no time"),
        (vllm("a", None, [2**40]), "'prompt_token_ids' holds 1099511627776, which is no token id"),
    ],
)
def test_a_bad_vllm_line_has_a_reason(log, line, reason):
    found = log.reasons(vllm("good", "y"), line)
    assert found == [f"2: {reason}"]
