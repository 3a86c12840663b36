"""The default template: DeepSeek's turn markers, around roles, tools, reasoning and tool calls.

::

    <BOS>system text[

    ## Tools
    one JSON schema a line]
    <|User|>text
    <|Assistant|>[<think>reasoning</think>]text[<|tool_calls_begin|>
        <|tool_call_begin|>name<|tool_sep|>arguments<|tool_call_end|>...<|tool_calls_end|>]<EOS>
    <|tool_output_begin|>text<|tool_output_end|>
    <|Assistant|>                                                  the generation prompt

(The line ends behind ``<BOS>`` ... are the text's own; there are none around the other markers, which are written here
with plain bars.) It follows DeepSeek-V3's template in its markers and their order. What differs is on purpose: the
order of the conversation is never changed and nothing is dropped from it, so that what a log repeats, the tokens
repeat. System (or developer) messages at the beginning are joined by an empty line; a later one stands in its place
without a marker, behind an empty line. Ids of tool calls are not written.
"""

from itertools import takewhile

from irminsul.trace.lines import LineError, json_text
from irminsul.trace.pieces import Part, Piece, called_tools, message_text, reasoning_text
from irminsul.trace.records import Chat, Message, SpanKind


def _marker(words: str) -> str:
    """Write a marker as the vocabulary does: fullwidth bars around it, and a block for each space."""
    bar, block = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    return f"<{bar}{words.replace(' ', block)}{bar}>"


BOS, EOS = _marker("begin of sentence"), _marker("end of sentence")
USER, ASSISTANT = _marker("User"), _marker("Assistant")
CALLS_BEGIN, CALLS_END = _marker("tool calls begin"), _marker("tool calls end")
CALL_BEGIN, CALL_SEP, CALL_END = _marker("tool call begin"), _marker("tool sep"), _marker("tool call end")
OUTPUT_BEGIN, OUTPUT_END = _marker("tool output begin"), _marker("tool output end")
THINK_BEGIN, THINK_END = "<think>", "</think>"

_SYSTEM_ROLES = ("system", "developer")
_TEMPLATE = SpanKind.TEMPLATE


class DeepSeekTemplate:
    """See Template. One piece a message, so that equal messages are equal pieces."""

    name = "deepseek"
    fingerprint = "deepseek-1"
    markers: tuple[str, ...] = (
        BOS,
        EOS,
        USER,
        ASSISTANT,
        CALLS_BEGIN,
        CALLS_END,
        CALL_BEGIN,
        CALL_SEP,
        CALL_END,
        OUTPUT_BEGIN,
        OUTPUT_END,
    )
    # What tells the kinds of a prompt that was logged as text or ids. A system text and its tools are not told apart.
    kind_behind = {  # noqa: RUF012 -- the protocol's attribute; nobody changes it
        BOS: SpanKind.SYSTEM,
        EOS: SpanKind.TEXT,
        USER: SpanKind.USER,
        ASSISTANT: SpanKind.ASSISTANT,
        OUTPUT_BEGIN: SpanKind.TOOL,
        OUTPUT_END: SpanKind.TEXT,
    }

    def render(self, chat: Chat, ts: float | None, *, generation_prompt: bool = True) -> list[Piece]:
        """See Template."""
        del ts
        system = list(takewhile(lambda message: message["role"] in _SYSTEM_ROLES, chat.messages))
        pieces = [_head(chat, system)]
        for index, message in enumerate(chat.messages[len(system) :], start=len(system)):
            parts = _message(message)
            if parts[0].kind is SpanKind.SYSTEM:
                # No marker stands between: what is encoded together is one piece.
                before = pieces.pop()
                moved = tuple(part._replace(message=index - before.first_message) for part in parts)
                pieces.append(before._replace(parts=before.parts + moved))
            else:
                pieces.append(Piece(parts, index))
        if generation_prompt:
            pieces.append(Piece((Part(ASSISTANT, _TEMPLATE),), len(chat.messages)))
        return pieces


def _head(chat: Chat, system: list[Message]) -> Piece:
    parts = [Part(BOS, _TEMPLATE)]
    for index, message in enumerate(system):
        text = message_text(message)
        parts.append(Part(f"\n\n{text}" if index else text, SpanKind.SYSTEM, index))
    if chat.tools:
        schemas = "\n".join(json_text(tool) for tool in chat.tools)
        parts.append(Part(f"\n\n## Tools\n{schemas}", SpanKind.TOOLS))
    return Piece(tuple(part for part in parts if part.text))


def _message(message: Message) -> tuple[Part, ...]:
    role = message["role"]
    if role == "user":
        return _turn(USER, message_text(message), SpanKind.USER)
    if role == "tool":
        return _turn(OUTPUT_BEGIN, message_text(message), SpanKind.TOOL, OUTPUT_END)
    if role == "assistant":
        return _turn(ASSISTANT, _assistant_text(message), SpanKind.ASSISTANT, EOS)
    if role in _SYSTEM_ROLES:
        return (Part(f"\n\n{message_text(message)}", SpanKind.SYSTEM, 0),)
    raise LineError(f"the template has no role {role!r}")


def _turn(begin: str, text: str, kind: SpanKind, end: str = "") -> tuple[Part, ...]:
    parts = (Part(begin, _TEMPLATE), Part(text, kind, 0), Part(end, _TEMPLATE))
    return tuple(part for part in parts if part.text)


def _assistant_text(message: Message) -> str:
    reasoning, calls = reasoning_text(message), called_tools(message)
    thought = f"{THINK_BEGIN}{reasoning}{THINK_END}" if reasoning else ""
    called = "".join(f"{CALL_BEGIN}{call.name}{CALL_SEP}{call.arguments}{CALL_END}" for call in calls)
    return thought + message_text(message) + (f"{CALLS_BEGIN}{called}{CALLS_END}" if called else "")
