"""OpenAI Responses: a request body a line, bare or in what a proxy puts around it (see ``fields.unwrap``).

``instructions`` becomes the first message, input items become messages as ``response_items.py`` says, tools are put
into the chat API's form. A body with ``previous_response_id`` holds only what is new: if the log has that response,
with its ``id``, the items before it and its output are put in front, as the server does (``instructions`` are not
carried over). If the log has it not, the line is bad. The newest 4,096 responses are remembered.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from irminsul.trace.fields import call_info, unwrap
from irminsul.trace.formats.log_file import LogFile, each_record
from irminsul.trace.lines import LineError, Notes, kind_of
from irminsul.trace.messages import tool_schemas
from irminsul.trace.records import Chat, LoggedCall, Message
from irminsul.trace.response_items import ITEM_TYPES, messages_of_items

_MAX_REMEMBERED = 4096


class OpenAIResponsesFormat:
    """Reads Responses request bodies."""

    name = "openai-responses"

    def __init__(self) -> None:
        self._items: OrderedDict[str, list[Any]] = OrderedDict()
        """Per response id: all items up to and with its output."""

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        del text
        try:
            body = {} if record is None else unwrap(record).body
        except LineError:
            return False
        given = body.get("input")
        if isinstance(given, str):
            # Embedding requests have a text as input, too, and none of these.
            return any(
                name in body for name in ("instructions", "max_output_tokens", "previous_response_id", "tools")
            ) or isinstance(body.get("text"), dict)
        return isinstance(given, list) and any(
            isinstance(item, dict) and ("role" in item or item.get("type") in ITEM_TYPES) for item in given
        )

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format."""

        def parse(record: dict[str, Any], line: int) -> Iterator[LoggedCall]:
            body, response, around = unwrap(record)
            items = self._before(body) + _input_items(body)
            messages = _instructions(body) + messages_of_items(items, file.notes)
            chat = Chat(tuple(messages), tool_schemas(body.get("tools")))
            yield LoggedCall(call_info(file.name, line, [*around, body]), chat, _reply(response, file.notes))
            self._remember(items, response)

        return each_record(file, parse)

    def _before(self, body: dict[str, Any]) -> list[Any]:
        previous = body.get("previous_response_id")
        if previous is None:
            return []
        if not isinstance(previous, str) or previous not in self._items:
            raise LineError(f"its previous_response_id {previous!r} is not in the log before it: the prompt is unknown")
        return self._items[previous]

    def _remember(self, items: list[Any], response: object) -> None:
        output = _output(response)
        if output is not None and isinstance(response, dict) and isinstance(response.get("id"), str):
            self._items[response["id"]] = items + output
            if len(self._items) > _MAX_REMEMBERED:
                self._items.popitem(last=False)


def _input_items(body: dict[str, Any]) -> list[Any]:
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise LineError(f"'input' must be a string or a list of items, got {kind_of(given)}")
    return given


def _instructions(body: dict[str, Any]) -> list[Message]:
    instructions = body.get("instructions")
    if instructions is None:
        return []
    if not isinstance(instructions, str):
        raise LineError(f"'instructions' must be a string, got {kind_of(instructions)}")
    return [{"role": "system", "content": instructions}]


def _output(response: object) -> list[Any] | None:
    output = response.get("output") if isinstance(response, dict) else None
    return output if isinstance(output, list) else None


def _reply(response: object, notes: Notes) -> Message | None:
    """Return the response's message; a response of another form (a stream, an error) has no reply to give."""
    try:
        replies = messages_of_items(_output(response) or [], notes)
    except LineError:
        return None
    return replies[0] if len(replies) == 1 else None
