"""Anthropic Messages: a request body a line, bare or in what a proxy puts around it (see ``fields.unwrap``).

``system`` (text or blocks) becomes the first message, ``tools`` with ``input_schema`` become function schemas, content
blocks become OpenAI messages as ``messages.py`` says. ``cache_control`` is ignored: it changes what is billed, not what
the model reads. A response gives the reply. Anthropic's real template is not public, so the text around the messages
is that of the chosen tokenizer's template.
"""

from collections.abc import Iterator
from typing import Any

from irminsul.trace.fields import call_info, unwrap
from irminsul.trace.formats.log_file import LogFile, each_record
from irminsul.trace.lines import LineError, Notes, kind_of
from irminsul.trace.messages import (
    CALL_BLOCKS,
    THINKING_BLOCKS,
    all_messages,
    openai_messages,
    reply_message,
    tool_schemas,
)
from irminsul.trace.records import Chat, LoggedCall, Message

_BLOCKS = (*CALL_BLOCKS, *THINKING_BLOCKS, "tool_result")


class AnthropicFormat:
    """Reads Messages request bodies."""

    name = "anthropic"

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format. A body without anything that is Anthropic's own reads the same in OpenAI's form."""
        del text
        try:
            body = {} if record is None else unwrap(record).body
        except LineError:
            return False
        messages, tools = body.get("messages"), body.get("tools")
        if not isinstance(messages, list):
            return False
        return (
            "system" in body
            or "anthropic_version" in body
            or (isinstance(tools, list) and any("input_schema" in tool for tool in tools if isinstance(tool, dict)))
            or any(_has_own_block(message) for message in messages)
        )

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format."""

        def parse(record: dict[str, Any], line: int) -> Iterator[LoggedCall]:
            body, response, around = unwrap(record)
            messages = _system(body.get("system"), file.notes) + all_messages(body.get("messages"), file.notes)
            chat = Chat(tuple(messages), tool_schemas(body.get("tools")))
            yield LoggedCall(call_info(file.name, line, [*around, body]), chat, reply_message(response, file.notes))

        return each_record(file, parse)


def _has_own_block(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    return isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") in _BLOCKS for block in content
    )


def _system(system: object, notes: Notes) -> list[Message]:
    if system is None:
        return []
    if not isinstance(system, str | list):
        raise LineError(f"'system' must be a string or a list of blocks, got {kind_of(system)}")
    return openai_messages({"role": "system", "content": system}, notes)
