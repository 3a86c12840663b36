"""Messages of any chat API, as the OpenAI chat API writes them.

``content`` is a string, null, or a list of blocks. Text blocks alone stay one message. Blocks of other kinds become
what the OpenAI API has for them, in the order they stand in, so one message may become several:

* text: a string if it is one plain block, else a list of text parts as they stood in the log;
* thinking: the assistant message's ``reasoning_content``;
* a tool use: an entry of the assistant message's ``tool_calls``, its input as JSON text; text or thinking that follows
  starts another assistant message, because a message thinks first, then says its text, and calls its tools after;
* a tool result: a message of role ``tool``;
* an image, a sound, a file: a text part ``[image 1f8a03c2d5e6]``, where the digits are a digest of the content, so that
  equal ones are equal and others are not. Their own tokens are not counted, and a note says so. A document that is
  text is its text.

Keys that no form names (a block's ``is_error``, say) are kept on what the block becomes.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

from irminsul.trace.lines import LineError, Notes, json_text, kind_of
from irminsul.trace.records import Message, Tool

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

TEXT_BLOCKS = ("text", "input_text", "output_text")
THINKING_BLOCKS = ("thinking", "redacted_thinking")
CALL_BLOCKS = ("tool_use", "server_tool_use", "mcp_tool_use")
MEDIA_BLOCKS = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "search_result": "search result",
    "container_upload": "file",
}
KNOWN_BLOCKS = (*TEXT_BLOCKS, "refusal", *THINKING_BLOCKS, *CALL_BLOCKS, "tool_result", *MEDIA_BLOCKS)
MEDIA_NOTE = "images, sounds and files stand as short placeholders; their own tokens are not counted"
THINKING_NOTE = "encrypted reasoning is left out"

T = TypeVar("T")


def openai_messages(value: object, notes: Notes) -> list[Message]:
    """Turn one logged message into the messages that say the same in OpenAI's form.

    Raises:
        LineError: it is no message, or holds a block that is unknown or cannot stand there.
    """
    message = as_object(value, "a message")
    role = field(message, "role", str)
    if role not in ROLES:
        raise LineError(f"unknown role {role!r}; known roles: {', '.join(ROLES)}")
    if role == "function" or message.get("function_call") is not None:
        message = _without_legacy_names(message)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [message]
    if not isinstance(content, list):
        raise LineError(f"'content' must be a string, null or a list of blocks, got {kind_of(content)}")
    return _from_blocks(message, [as_object(block, "a content block") for block in content], notes)


def all_messages(value: object, notes: Notes, what: str = "messages") -> list[Message]:
    """Turn a list of logged messages into messages in OpenAI's form; LineError as ``openai_messages``."""
    if not isinstance(value, list):
        raise LineError(f"{what!r} must be a list, got {kind_of(value)}")
    return [message for logged in value for message in openai_messages(logged, notes)]


def reply_message(response: object, notes: Notes) -> Message | None:
    """Return the message of an OpenAI (the first choice's) or Anthropic response.

    A response of another form (a stream, an error), or one that is several messages, has no reply to give: None.
    """
    body = response if isinstance(response, dict) else {}
    choices = body.get("choices")
    try:
        message = choices[0]["message"] if choices else {"content": body["content"]}
        replies = openai_messages({"role": "assistant"} | message, notes)
    except (LineError, LookupError, TypeError):
        return None
    return replies[0] if len(replies) == 1 else None


class Conversation:
    """Builds messages part by part; a part goes to the last message if it fits there.

    ``base`` holds the role and the keys besides the content that a new message gets.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def text(self, base: Message, block: dict[str, Any]) -> None:
        """Add a text part."""
        last = self._last(base)
        if last is None or "tool_calls" in last:
            last = self._start(base)
        last["content"].append(block)

    def reasoning(self, base: Message, text: str) -> None:
        """Add what the model thought before it said anything."""
        last = self._last(base)
        if last is None or "tool_calls" in last or last["content"]:
            last = self._start(base)
        last["reasoning_content"] = (last.get("reasoning_content") or "") + text

    def call(self, base: Message, tool_call: dict[str, Any]) -> None:
        """Add a tool call."""
        last = self._last(base) or self._start(base)
        last.setdefault("tool_calls", []).append(tool_call)

    def result(self, message: Message) -> None:
        """Add a message of role ``tool``."""
        self.messages.append(message)

    def finished(self) -> list[Message]:
        """Return the messages, text parts written as strings where that loses nothing."""
        return [message | {"content": plain_text(message["content"])} for message in self.messages]

    def _last(self, base: Message) -> Message | None:
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == base["role"] != "tool" else None

    def _start(self, base: Message) -> Message:
        self.messages.append(base | {"content": []})
        return self.messages[-1]


def tool_schemas(value: object) -> tuple[Tool, ...] | None:
    """Return tool schemas in OpenAI's chat form, whichever API they were written for; None if there are none.

    Raises:
        LineError: they are no list of objects.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise LineError(f"'tools' must be a list, got {kind_of(value)}")
    return tuple(_tool_schema(as_object(tool, "a tool")) for tool in value)


def media_part(block: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Return the text part that stands for an image, a sound or a file, or the text of a document that is text."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        return {"type": "text", "text": source["data"]}
    notes.add(MEDIA_NOTE)
    content = {key: value for key, value in block.items() if key != "cache_control"}
    digest = hashlib.blake2b(json_text(sorted(content.items())).encode(), digest_size=6).hexdigest()
    return {"type": "text", "text": f"[{MEDIA_BLOCKS.get(str(block.get('type')), 'data')} {digest}]"}


def tool_call(name: str, arguments: str, call_id: object, **further: Any) -> dict[str, Any]:  # noqa: ANN401
    """Write a tool call as the OpenAI API does; ``arguments`` is JSON text."""
    return further | {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def plain_text(content: object) -> object:
    """Write text parts as a string where that loses nothing: one part without further keys; none is null."""
    if not isinstance(content, list):
        return content
    if len(content) == 1 and content[0].keys() == {"type", "text"}:
        return content[0]["text"]
    return content or None


def as_object(value: object, what: str) -> dict[str, Any]:
    """Return an object; LineError if it is none."""
    if not isinstance(value, dict):
        raise LineError(f"{what} must be an object, got {kind_of(value)}")
    return value


def field(record: dict[str, Any], key: str, kind: type[T]) -> T:
    """Return a required field of exactly this type; LineError if it is missing or another."""
    if key not in record:
        raise LineError(f"{key!r} is missing")
    value = record[key]
    # bool is an int in Python, and no number in a log.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise LineError(f"{key!r} must be of type {kind.__name__}, got {kind_of(value)}")
    return value


def _from_blocks(message: Message, blocks: Sequence[dict[str, Any]], notes: Notes) -> list[Message]:
    """Split a message where its blocks stop fitting into one OpenAI message, keeping their order."""
    kinds = [field(block, "type", str) for block in blocks]
    if all(kind in TEXT_BLOCKS or kind in MEDIA_BLOCKS or kind == "refusal" for kind in kinds):
        return [message | {"content": plain_text([_text_part(block, notes) for block in blocks]) or ""}]
    _check_blocks_fit(message, kinds)
    conversation = Conversation()
    for kind, block in zip(kinds, blocks, strict=True):
        if kind in CALL_BLOCKS:
            conversation.call(message, _tool_call(block))
        elif kind.endswith("tool_result"):
            conversation.result(_tool_message(block, notes))
        elif kind == "thinking":
            conversation.reasoning(message, field(block, "thinking", str))
        elif kind == "redacted_thinking":
            notes.add(THINKING_NOTE)
        else:
            conversation.text(message, _text_part(block, notes))
    return conversation.finished()


def _check_blocks_fit(message: Message, kinds: Sequence[str]) -> None:
    """Refuse blocks that their message cannot hold."""
    role = message["role"]
    for kind in kinds:
        if kind not in KNOWN_BLOCKS and not kind.endswith("_tool_result"):
            raise LineError(f"unknown content block {kind!r}; known blocks: {', '.join(KNOWN_BLOCKS)}")
        if kind in (*CALL_BLOCKS, *THINKING_BLOCKS) and role != "assistant":
            raise LineError(f"a {kind} block stands in a message of role {role!r}, not 'assistant'")
        if kind == "tool_result" and role != "user":
            raise LineError(f"a tool_result block stands in a message of role {role!r}, not 'user'")
    thought = message.get("reasoning_content")
    if not isinstance(thought, str | None):
        raise LineError(f"'reasoning_content' must be a string or null, got {kind_of(thought)}")
    if "tool_calls" in message and set(kinds) & set(CALL_BLOCKS):
        raise LineError("a message has both tool_calls and tool_use blocks")


def _text_part(block: dict[str, Any], notes: Notes) -> dict[str, Any]:
    kind = block["type"]
    if kind in MEDIA_BLOCKS:
        return media_part(block, notes)
    text = field(block, "refusal" if kind == "refusal" else "text", str)
    return block if kind == "text" else {"type": "text", "text": text}


def _tool_call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = json_text(field(block, "input", dict))
    further = _extra(block, "type", "id", "name", "input", "cache_control")
    return further | tool_call(field(block, "name", str), arguments, field(block, "id", str))


def _tool_message(block: dict[str, Any], notes: Notes) -> Message:
    content = block.get("content")
    if block["type"] != "tool_result":
        # What a provider's own tool returned has a form of its own.
        content = json_text(content)
    elif isinstance(content, list):
        content = plain_text([_result_part(as_object(part, "a content block"), notes) for part in content])
    elif content is not None and not isinstance(content, str):
        raise LineError(
            f"the content of a tool_result must be a string, null or a list of blocks, got {kind_of(content)}"
        )
    message = {"role": "tool", "tool_call_id": field(block, "tool_use_id", str), "content": content or ""}
    return _extra(block, "type", "tool_use_id", "content", "cache_control") | message


def _result_part(block: dict[str, Any], notes: Notes) -> dict[str, Any]:
    kind = field(block, "type", str)
    if kind in TEXT_BLOCKS or kind in MEDIA_BLOCKS:
        return _text_part(block, notes)
    if kind == "tool_reference":
        return {"type": "text", "text": json_text(_extra(block, "cache_control"))}
    known = ", ".join((*TEXT_BLOCKS, *MEDIA_BLOCKS, "tool_reference"))
    raise LineError(f"unknown block {kind!r} in a tool_result; known blocks: {known}")


def _without_legacy_names(message: Message) -> Message:
    """Write ``function_call`` and the role ``function`` as their successors."""
    message = dict(message)
    if message["role"] == "function":
        message["role"] = "tool"
    called = message.pop("function_call", None)
    if called is not None:
        called = as_object(called, "a function_call")
        message["tool_calls"] = [{"id": None, "type": "function", "function": called}]
    return message


def _tool_schema(tool: dict[str, Any]) -> Tool:
    if isinstance(tool.get("function"), dict):
        return tool
    if "input_schema" in tool:
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
    elif tool.get("type") == "function":
        names = {"name": "name", "description": "description", "parameters": "parameters", "strict": "strict"}
    else:
        # A provider's own tool: its text is the provider's secret, its name is all that is known.
        return _extra(tool, "cache_control")
    return {
        "type": "function",
        "function": {to: tool[name] for name, to in names.items() if tool.get(name) is not None},
    }


def _extra(block: dict[str, Any], *known: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in known}
