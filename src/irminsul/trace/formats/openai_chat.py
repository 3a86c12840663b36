"""OpenAI chat completions: a request body a line, bare or in what a batch file or a proxy puts around it.

Bare: ``{"model": ..., "messages": [...], "tools": [...]}``. Around it: ``{"request": body, "response": body}``,
``{"body": body}`` (OpenAI's batch input), and what else ``fields.unwrap`` finds. A response gives the reply.
``functions``, the older form of ``tools``, is read too. Every choice of a response shares one prompt; the first one is
the reply.
"""

from collections.abc import Iterator
from typing import Any

from irminsul.trace.fields import call_info, unwrap
from irminsul.trace.formats.log_file import LogFile, each_record
from irminsul.trace.lines import LineError
from irminsul.trace.messages import all_messages, as_object, field, reply_message, tool_schemas
from irminsul.trace.records import Chat, LoggedCall, Tool


class OpenAIChatFormat:
    """Reads chat-completions request bodies."""

    name = "openai-chat"

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        del text
        try:
            return record is not None and isinstance(unwrap(record).body.get("messages"), list)
        except LineError:
            return False

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format."""

        def parse(record: dict[str, Any], line: int) -> Iterator[LoggedCall]:
            body, response, around = unwrap(record)
            if "system" in body:
                raise LineError("'system' beside the messages is Anthropic's form; use --format anthropic")
            chat = Chat(tuple(all_messages(body.get("messages"), file.notes)), _tools(body))
            yield LoggedCall(call_info(file.name, line, [*around, body]), chat, reply_message(response, file.notes))

        return each_record(file, parse)


def _tools(body: dict[str, Any]) -> tuple[Tool, ...] | None:
    if body.get("functions") is not None:
        if body.get("tools") is not None:
            raise LineError("has both 'tools' and 'functions'")
        functions = [as_object(function, "a function") for function in field(body, "functions", list)]
        return tool_schemas([{"type": "function", "function": function} for function in functions])
    return tool_schemas(body.get("tools"))
