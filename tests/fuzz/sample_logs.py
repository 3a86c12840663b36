"""A small log of each form that the analyser reads, as real ones look, one JSON value or line of text an entry."""

import json
from typing import Any

TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "Find a file.", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM = {"role": "system", "content": "You are a careful agent. Today is 2026-01-31."}
USER = {"role": "user", "content": "Where is the harbour log?"}
CALL = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "I should look.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"name": "harbour"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "logs/harbour.txt"}]}
ANSWER = {"role": "assistant", "content": "In logs/harbour.txt."}

_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "find", "input": {"name": "harbour"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        ],
    },
]
_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "f1", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "f1", "output": "one"},
]


def _node(number: int, kind: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {
        "uuid": f"u{number}",
        "parentUuid": f"u{number - 1}" if number else None,
        "sessionId": "s",
        "timestamp": f"2026-01-31T12:00:0{number}Z",
        "type": kind,
        "message": {"role": kind, "content": content} | fields,
    }


def _sglang(event: str, rid: str, **fields: Any) -> str:
    record = {
        "timestamp": "2026-01-31T12:00:00",
        "event": event,
        "rid": rid,
        "obj": {"text": "You are. Look."},
    } | fields
    return f"[2026-01-31 12:00:00] {json.dumps(record)}"


LOGS: dict[str, list[Any]] = {
    "openai-chat": [
        {"ts": 1769860800, "session": "s", "model": "m", "messages": [SYSTEM, USER], "tools": [TOOL]},
        {"ts": 1769860801, "session": "s", "model": "m", "messages": [SYSTEM, USER, CALL, RESULT], "tools": [TOOL]},
        {
            "request": {"messages": [SYSTEM, USER], "functions": [TOOL["function"]]},
            "response": {"choices": [{"message": ANSWER}]},
            "metadata": {"user_id": "user_session_01234567-89ab-cdef-0123-456789abcdef"},
        },
    ],
    "openai-responses": [
        {"body": {"input": _ITEMS, "instructions": "Be brief.", "tools": [TOOL["function"] | {"type": "function"}]}},
        {"request": {"input": "Look."}, "response": {"id": "r1", "output": _ITEMS[:1]}},
        {"input": [{"role": "user", "content": "And?"}], "previous_response_id": "r1"},
    ],
    "anthropic": [
        {"system": "Be brief.", "messages": _BLOCKS[:1], "tools": [{"name": "find", "input_schema": {}}]},
        {"request": {"system": [{"type": "text", "text": "Be brief."}], "messages": _BLOCKS}, "response": _BLOCKS[1]},
    ],
    "sglang": [
        "[2026-01-31 12:00:00] loading weights",
        _sglang("request.received", "a"),
        _sglang("request.finished", "a", out={"text": "I look."}),
        _sglang("request.received", "b", obj={"input_ids": [5, 6, 7], "cache_salt": "x", "lora_path": "y"}),
        _sglang("request.received", ["c", "d"], obj={"text": ["One.", "Two."], "session_id": ["s", "t"]}),
    ],
    "vllm": [
        (
            "INFO 07-01 12:00:00 [logger.py:40] Received request a: prompt: 'You are. Look.', params: P(n=1), "
            "prompt_token_ids: [5, 6, 7], lora_request: LoRARequest(lora_name='y')."
        ),
        'DEBUG 07-01 12:00:01 [request_logger.py:44] Request b details: prompt: "It\'s.", prompt_token_ids: None, x.',
        (
            "INFO 07-01 12:00:02 [logger.py:50] Generated response b (streaming complete): output: 'Yes.', "
            "output_token_ids: [8, 9], finish_reason: stop"
        ),
        {"message": "Request c details: prompt: 'x', prompt_token_ids: [1].", "timestamp": "2026-07-01T12:00:03Z"},
    ],
    "claude-code": [
        {"type": "summary", "summary": "Harbours", "leafUuid": "u3"},
        _node(0, "user", "Where?"),
        _node(1, "assistant", [{"type": "thinking", "thinking": "Hm."}], id="m1", model="c"),
        _node(2, "assistant", [{"type": "tool_use", "id": "t1", "name": "find", "input": {}}], id="m1", model="c"),
        _node(3, "user", [{"type": "tool_result", "tool_use_id": "t1", "content": "one"}]),
        _node(4, "assistant", [{"type": "text", "text": "There."}], id="m2", model="c"),
    ],
    "delta": [
        {"session": "s", "agent": "a", "turn": 0, "ts": 1, "keep": 0, "append": [SYSTEM, USER], "tools": [TOOL]},
        {"session": "s", "agent": "a", "turn": 1, "ts": 2, "keep": 2, "append": [CALL, RESULT], "tools": "="},
        {"session": "s", "agent": "a", "turn": 2, "ts": 3, "keep": 4, "append": [ANSWER, USER], "tools": None},
    ],
    "plain": [
        {"prompt": "You are a careful agent. Look.", "session": "s", "ts": 1},
        {"prompt": ["One.", "Two."], "tenant": "t"},
        {"input_ids": [5, 6, 7, 8], "cache_salt": "x"},
        {"text": "<|im_start|>user\nLook.<|im_end|>", "response": {"choices": [{"text": "Yes."}]}},
    ],
}
