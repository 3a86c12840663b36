"""Rendered prompts in pieces, each of which can be encoded on its own.

A tokenizer looks for its added tokens (turn markers and the like) first and encodes the text between them separately.
So a prompt that is cut right before or behind added tokens has the tokens of its pieces, and a piece that was seen
before need not be encoded again. That makes a log of a thousand turns cost little more than its text, and it is exact.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from irminsul.trace.lines import LineError, json_text, kind_of
from irminsul.trace.messages import as_object
from irminsul.trace.records import Chat, Message, SpanKind, Tokens

_KIND_CODES = {kind: index for index, kind in enumerate(SpanKind)}


class Part(NamedTuple):
    """A stretch of text of one kind."""

    text: str
    kind: SpanKind
    message: int | None = None
    """Index of its message, counted from the piece's first."""


class Piece(NamedTuple):
    """Parts that are encoded together: at either end is an added token, or an end of the prompt."""

    parts: tuple[Part, ...]
    first_message: int = 0

    @property
    def text(self) -> str:
        """The text of all parts."""
        return "".join(part.text for part in self.parts)


class IdPiece(NamedTuple):
    """A stretch of a prompt that was logged as token ids."""

    tokens: Tokens
    kind: SpanKind


AnyPiece: TypeAlias = Piece | IdPiece


Split: TypeAlias = Callable[[str], list[tuple[str, bool]]]
"""Splits text at added tokens into (text, whether it is an added token), nothing empty among them."""


class Template(Protocol):
    """Renders conversations."""

    name: str
    fingerprint: str
    """Changes whenever any rendering may."""
    markers: tuple[str, ...]
    """Added tokens that the template writes itself."""
    kind_behind: dict[str, SpanKind]
    """For templates whose markers tell what follows them: the kind of the text behind each. Else empty."""

    def render(self, chat: Chat, ts: float | None, *, generation_prompt: bool = True) -> list[Piece]:
        """Return the prompt's pieces.

        Args:
            chat: the conversation.
            ts: the call's time in seconds since the epoch, for templates that print the date.
            generation_prompt: end where the model's answer begins.

        Raises:
            LineError: the conversation cannot be rendered.
        """


def key_of(piece: AnyPiece) -> bytes:
    """Name a piece by its content: 16 bytes, equal only for pieces of the same tokens and kinds."""
    if isinstance(piece, IdPiece):
        data = b"ids %d\0" % _KIND_CODES[piece.kind] + piece.tokens.tobytes()
    else:
        form = [f"{_KIND_CODES[kind]} {message} {len(text)}" for text, kind, message in piece.parts]
        data = "\0".join([",".join(form), piece.text]).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def message_text(message: Message) -> str:
    """Return a message's text: a string as it is, text parts joined by line ends, null as no text.

    Raises:
        LineError: the content is none of these.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise LineError(f"'content' must be a string, null or a list of parts, got {kind_of(content)}")
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise LineError("a content part has no text")
    return "\n".join(text for text in texts if isinstance(text, str))


class CalledTool(NamedTuple):
    """A tool call as templates write it."""

    name: str
    arguments: str
    """JSON text, as the model wrote it."""


def called_tools(message: Message) -> list[CalledTool]:
    """Return a message's tool calls; LineError if they are malformed."""
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise LineError(f"'tool_calls' must be a list, got {kind_of(calls)}")
    return [_called_tool(as_object(call, "a tool call")) for call in calls]


def reasoning_text(message: Message) -> str:
    """Return what the model thought before it answered; servers name it ``reasoning_content`` or ``reasoning``."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str):
            return str(message[name])
    return ""


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Join all pieces into one, for tokenizers whose pieces cannot be encoded on their own."""
    parts = [
        part._replace(message=None if part.message is None else part.message + piece.first_message)
        for piece in pieces
        for part in piece.parts
    ]
    return [Piece(tuple(parts))] if parts else []


def _called_tool(call: dict[str, Any]) -> CalledTool:
    # "custom" tools take free text under another name.
    function = as_object(call.get("function", call.get("custom")), "the function of a tool call")
    name, arguments = function.get("name"), function.get("arguments", function.get("input"))
    if not isinstance(name, str):
        raise LineError(f"a tool call's name must be a string, got {kind_of(name)}")
    return CalledTool(
        name, arguments if isinstance(arguments, str) else json_text({} if arguments is None else arguments)
    )


def with_kinds(texts: Sequence[tuple[str, bool]], kind_behind: dict[str, SpanKind]) -> list[Piece]:
    """Make pieces of raw text that was split at added tokens.

    Args:
        texts: (text, whether it is an added token), in order.
        kind_behind: see ``Template``.
    """
    known = any(is_token and text in kind_behind for text, is_token in texts)
    kind = SpanKind.SYSTEM if known else SpanKind.TEXT
    pieces = []
    for text, is_token in texts:
        if is_token and text in kind_behind:
            pieces.append(Piece((Part(text, SpanKind.TEMPLATE),)))
            kind = kind_behind[text]
        else:
            pieces.append(Piece((Part(text, kind),)))
    return pieces
