"""Items of the OpenAI Responses API, as messages of the chat API.

====================================================  ==============================================================
item                                                  becomes
====================================================  ==============================================================
``message``, or an item with a role and no type       a message
``reasoning``                                         ``reasoning_content`` of the assistant message that follows: its
                                                      text, or else its summary; encrypted text is left out
``function_call``, ``custom_tool_call``               a tool call
any other ``..._call`` (shell, web search, ...)       a tool call named after the type, the item's other keys as its
                                                      arguments
``..._call_output``                                   a message of role ``tool``
``compaction``, ``item_reference``                    nothing that can be known: the first is left out with a note,
                                                      a line with the second is bad
====================================================  ==============================================================

Parts of one turn of the model (reasoning, text, calls) are one message, as in ``messages.py``.
"""

from collections.abc import Sequence
from typing import Any

from irminsul.trace.lines import LineError, Notes, json_text
from irminsul.trace.messages import (
    THINKING_NOTE,
    Conversation,
    as_object,
    field,
    media_part,
    openai_messages,
    tool_call,
)
from irminsul.trace.records import Message

ITEM_TYPES = (
    "message",
    "reasoning",
    "compaction",
    "item_reference",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "computer_call",
    "computer_call_output",
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)

_ASSISTANT = {"role": "assistant"}


def messages_of_items(items: Sequence[object], notes: Notes) -> list[Message]:
    """Turn items into messages; LineError if one is unknown or malformed."""
    conversation = Conversation()
    for value in items:
        _add(conversation, as_object(value, "an input item"), notes)
    return conversation.finished()


def _add(conversation: Conversation, item: dict[str, Any], notes: Notes) -> None:
    kind = field(item, "type", str) if "type" in item or "role" not in item else "message"
    if kind == "message":
        _add_message(conversation, item, notes)
    elif kind == "reasoning":
        text = _reasoning(item, notes)
        if text:
            conversation.reasoning(_ASSISTANT, text)
    elif kind == "compaction":
        notes.add("history that the provider compacted and encrypted is left out")
    elif kind == "item_reference" or kind not in ITEM_TYPES:
        raise LineError(f"cannot use an input item of type {kind!r}; known items: {', '.join(ITEM_TYPES)}")
    elif kind.endswith(("_output", "_response")):
        conversation.result({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item, notes)})
    elif kind == "function_call":
        arguments = field(item, "arguments", str)
        conversation.call(_ASSISTANT, tool_call(field(item, "name", str), arguments, item.get("call_id")))
    elif kind == "custom_tool_call":
        given = field(item, "input", str)
        conversation.call(_ASSISTANT, tool_call(field(item, "name", str), given, item.get("call_id")))
    else:
        rest = {key: value for key, value in item.items() if key not in {"type", "id", "call_id", "status"}}
        conversation.call(_ASSISTANT, tool_call(kind, json_text(rest), item.get("call_id")))


def _add_message(conversation: Conversation, item: dict[str, Any], notes: Notes) -> None:
    (message,) = openai_messages({key: item[key] for key in ("role", "content") if key in item}, notes)
    content = message.get("content")
    if message["role"] != "assistant":
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        conversation.messages.append(message | {"content": parts})
        return
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or []:
        conversation.text(_ASSISTANT, part)


def _reasoning(item: dict[str, Any], notes: Notes) -> str:
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            return "\n".join(field(as_object(part, "a part of the reasoning"), "text", str) for part in parts)
    notes.add(THINKING_NOTE)
    return ""


def _output_part(part: dict[str, Any], notes: Notes) -> dict[str, Any]:
    if field(part, "type", str).endswith("text"):
        return {"type": "text", "text": field(part, "text", str)}
    return media_part(part, notes)


def _output(item: dict[str, Any], notes: Notes) -> object:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output):
        return [
            {"type": "text", "text": field(part, "text", str)}
            if part["type"].endswith("text")
            else media_part(part, notes)
            for part in output
        ]
    rest = {key: value for key, value in item.items() if key not in {"type", "id", "call_id", "status"}}
    return json_text(rest if output is None else output)
