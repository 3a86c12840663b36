"""Chat templates of other models, rendered as the ``transformers`` package renders them, without it.

The same sandbox (immutable, blocks trimmed, loop controls), the same functions (``raise_exception``, ``strftime_now``,
a ``tojson`` that leaves characters and key order alone, the ``generation`` tag) and the same variables (``messages``,
``tools``, ``add_generation_prompt`` and the special tokens by name). Two things differ: ``strftime_now`` tells the time
of the logged call in UTC, so that two replays have the same tokens; and a tool call's arguments are given as the
template wants them, as text or as an object, which is found out by trying both.

To know what kind of text a token belongs to, the prompt is rendered a second time with marks (characters that no text
has) around each message's text and each tool's name. If that rendering, marks removed, is another one, the template
looked at its texts, and the spans of that prompt are of the kind ``text``.
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from irminsul.errors import InputError
from irminsul.template_errors import COMPILING_ERRORS, RENDERING_ERRORS
from irminsul.trace.lines import LineError
from irminsul.trace.messages import tool_call
from irminsul.trace.pieces import Part, Piece, Split, called_tools, message_text, reasoning_text
from irminsul.trace.records import Chat, Message, SpanKind, Tool

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT, _WITH_TOOLS = "default", "tool_use"

# Noncharacters: Unicode keeps them free for use inside a program.
_OPEN, _CLOSE, _SEP = "\ufdd0", "\ufdd2", "\ufdd1"
_MARK = re.compile(f"([{_OPEN}{_CLOSE}])(\\d+){_SEP}")
_PROBE = {"irminsul_probe": "7"}

_KIND_OF_ROLE = {
    "system": SpanKind.SYSTEM,
    "developer": SpanKind.SYSTEM,
    "user": SpanKind.USER,
    "assistant": SpanKind.ASSISTANT,
    "tool": SpanKind.TOOL,
}


class _Region(NamedTuple):
    """Characters [start, end) of a rendered prompt that belong to a message."""

    start: int
    end: int
    kind: SpanKind
    message: int


class ChatTemplate:
    """See Template.

    Args:
        sources: template texts by name; ``default`` is needed, ``tool_use`` is taken for calls with tools.
        tokens: texts of special tokens by their names, as the template reads them.
        split: splits text at the tokenizer's added tokens.
        added: the texts of these.

    Raises:
        InputError: a template cannot be compiled.
    """

    name = "chat template"

    def __init__(self, sources: dict[str, str], tokens: dict[str, Any], split: Split, added: Sequence[str]) -> None:
        self._tokens = tokens
        self._split = split
        self._compiled = {name: _compile(source) for name, source in sources.items()}
        text = "".join(sources.values())
        special = {token for token in tokens.values() if isinstance(token, str)}
        self.markers = tuple(token for token in added if token in text or token in special)
        self.kind_behind: dict[str, SpanKind] = {}
        self.fingerprint = hashlib.blake2b(json.dumps([sources, tokens, 1]).encode(), digest_size=16).hexdigest()
        self._arguments_as_objects = self._wants_argument_objects()

    def render(self, chat: Chat, ts: float | None, *, generation_prompt: bool = True) -> list[Piece]:
        """See Template."""
        messages = [self._template_message(message) for message in chat.messages]
        text = self._text(messages, chat.tools, ts, generation_prompt=generation_prompt)
        if _MARK.search(text):
            return self._pieces(text, None, None)
        marked = self._text(
            [_marked_message(message, index) for index, message in enumerate(messages)],
            _marked_tools(chat.tools, len(messages)),
            ts,
            generation_prompt=generation_prompt,
        )
        if _MARK.sub("", marked) != text:
            return self._pieces(text, None, None)
        bounds = _bounds(marked)
        tools = [bound for index, bound in bounds.items() if index >= len(messages)]
        core = (min(start for start, _ in tools), max(end for _, end in tools)) if tools else None
        return self._pieces(text, self._regions(text, messages, bounds), core)

    def _text(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, ts: float | None, *, generation_prompt: bool
    ) -> str:
        template = self._compiled.get(_WITH_TOOLS if tools else _DEFAULT, self._compiled[_DEFAULT])
        moment = datetime.fromtimestamp(ts or 0.0, UTC)
        try:
            text: str = template.render(
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=generation_prompt,
                strftime_now=moment.strftime,
                **self._tokens,
            )
            # Arguments that were parsed here may hold half of a surrogate pair, which is not text.
            text.encode()
        except RENDERING_ERRORS as error:
            reason = str(error) or "not enough memory"
            raise LineError(f"the chat template cannot render this conversation: {reason}") from error
        return text

    def _template_message(self, message: Message) -> Message:
        """Write a message as templates expect it: one text, tool calls in OpenAI's form."""
        written = dict(message)
        if message.get("content") is not None:
            written["content"] = message_text(message)
        calls = called_tools(message)
        if calls:
            ids = [call.get("id") for call in message["tool_calls"]]
            written["tool_calls"] = [
                tool_call(call.name, self._arguments(call.arguments), call_id)
                for call, call_id in zip(calls, ids, strict=True)
            ]
        return written

    def _arguments(self, text: str) -> Any:  # noqa: ANN401 -- text or an object, as the template wants it
        if not self._arguments_as_objects:
            return text
        try:
            return json.loads(text or "{}")
        except (ValueError, RecursionError):
            # The model wrote no JSON; servers that need an object fail here, and the text is what it wrote.
            return text

    def _wants_argument_objects(self) -> bool:
        """Try whether a tool call's arguments are to be an object: the right form shows them as JSON, quoted once."""
        as_object, as_text = self._rendered_probe(_PROBE), self._rendered_probe(json.dumps(_PROBE))
        wanted = f'"{next(iter(_PROBE))}"'
        return wanted in as_object and wanted not in as_text

    def _rendered_probe(self, arguments: object) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        conversation: list[Message] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "-"},
        ]
        try:
            return self._text(conversation, None, None, generation_prompt=True)
        except LineError:
            return ""

    def _regions(
        self, text: str, messages: Sequence[Message], bounds: dict[int, tuple[int, int]]
    ) -> list[_Region] | None:
        """Return where each message's text stands, in order; None if they overlap."""
        regions = sorted(
            _Region(*bounds[index], _KIND_OF_ROLE.get(message["role"], SpanKind.TEXT), index)
            for index, message in enumerate(messages)
            if index in bounds
        )
        limits = [region.start for region in regions[1:]] + [len(text)]
        regions = [
            region._replace(end=self._end_of_calls(text, region.end, limit))
            if messages[region.message].get("tool_calls")
            else region
            # The last limit has no region where no message has text.
            for region, limit in zip(regions, limits, strict=False)
        ]
        return regions if all(left.end <= right.start for left, right in pairwise(regions)) else None

    def _end_of_calls(self, text: str, end: int, limit: int) -> int:
        """Return where a message with tool calls ends: at the end-of-text token, if it stands before the next text."""
        token = self._tokens.get("eos_token")
        found = text.find(token, end, limit) if isinstance(token, str) and token else -1
        return end if found < 0 else found

    def _pieces(self, text: str, regions: list[_Region] | None, tools: tuple[int, int] | None) -> list[Piece]:
        """Cut a rendered prompt at added tokens, and each piece where its kind changes."""
        pieces, start = [], 0
        # Regions are in order and do not overlap.
        starts, ends = [region.start for region in regions or ()], [region.end for region in regions or ()]
        for stretch, _ in self._split(text):
            end = start + len(stretch)
            around = SpanKind.TEMPLATE if tools is None or tools[1] <= start or end <= tools[0] else SpanKind.TOOLS
            here = None if regions is None else regions[bisect_right(ends, start) : bisect_left(starts, end)]
            pieces.append(_piece(text, start, end, here, around))
            start = end
        return pieces


def load_chat_template(directory: Path, split: Split, added: Sequence[str]) -> ChatTemplate | None:
    """Find the chat template of a tokenizer.

    Args:
        directory: with ``chat_template.jinja``, ``chat_template.json`` or ``tokenizer_config.json``, the first that has
            one; the latter two may name several.
        split: splits text at the tokenizer's added tokens.
        added: the texts of these.

    Returns:
        The template, or None if there is none.

    Raises:
        InputError: a file cannot be read, or the template cannot be compiled.
    """
    config = _read_json(directory / "tokenizer_config.json")
    older = _read_json(directory / "special_tokens_map.json")
    tokens = {name: _token_text(config.get(name, older.get(name))) for name in _TOKEN_NAMES}
    sources = _sources(directory, config)
    if sources is None:
        return None
    return ChatTemplate(sources, {name: token for name, token in tokens.items() if token is not None}, split, added)


def _sources(directory: Path, config: dict[str, Any]) -> dict[str, str] | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return {_DEFAULT: _read_text(path)}
    found = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if found is None:
        return None
    if isinstance(found, str):
        return {_DEFAULT: found}
    try:
        sources = {str(named["name"]): str(named["template"]) for named in found}
    except (TypeError, LookupError):
        raise InputError(f"{directory}: 'chat_template' must be a text or a list of named texts") from None
    if _DEFAULT not in sources:
        raise InputError(f"{directory}: no chat template is named {_DEFAULT!r}, only {', '.join(sources)}")
    return sources


def _piece(text: str, start: int, end: int, here: list[_Region] | None, around: SpanKind) -> Piece:
    """Make the piece [start, end) of a prompt from the regions in it; what none holds is of the kind ``around``."""
    if here is None:
        return Piece((Part(text[start:end], SpanKind.TEXT),))
    first = here[0].message if here else 0
    parts: list[Part] = []
    for region in here:
        parts.append(Part(text[start : region.start], around))
        inside = max(start, region.start), min(end, region.end)
        parts.append(Part(text[inside[0] : inside[1]], region.kind, region.message - first))
        start = inside[1]
    parts.append(Part(text[start:end], around))
    return Piece(tuple(part for part in parts if part.text), first)


def _bounds(marked: str) -> dict[int, tuple[int, int]]:
    """Return, for each marked index, the first and last place of its marks in the text without marks."""
    bounds: dict[int, tuple[int, int]] = {}
    removed = 0
    for mark in _MARK.finditer(marked):
        index, place = int(mark[2]), mark.start() - removed
        removed += len(mark[0])
        bounds[index] = (bounds.get(index, (place, place))[0], place)
    return bounds


def _marked(text: str, index: int) -> str:
    """Put marks around a text, inside its outer white space, which templates like to trim."""
    inner = text.strip()
    if not inner:
        return text
    before, behind = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return f"{before}{_OPEN}{index}{_SEP}{inner}{_CLOSE}{index}{_SEP}{behind}"


def _marked_message(message: Message, index: int) -> Message:
    marked = dict(message)
    if isinstance(message.get("content"), str):
        marked["content"] = _marked(message["content"], index)
    if isinstance(message.get("reasoning_content"), str) and reasoning_text(message):
        marked["reasoning_content"] = _marked(message["reasoning_content"], index)
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            call | {"function": call["function"] | {"name": _marked(call["function"]["name"], index)}}
            for call in message["tool_calls"]
        ]
    return marked


def _marked_tools(tools: Sequence[Tool] | None, first: int) -> list[Tool] | None:
    if tools is None:
        return None
    return [_marked_tool(tool, index) for index, tool in enumerate(tools, start=first)]


def _marked_tool(tool: Tool, index: int) -> Tool:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return tool
    return tool | {"function": function | {"name": _marked(function["name"], index)}}


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what a model is trained on; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 -- as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> Any:  # noqa: ANN401 -- a jinja2 template
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except COMPILING_ERRORS as error:
        raise InputError(f"the chat template cannot be read: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 -- the arguments that templates pass
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=False
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Read an object; an absent file is an empty one."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold an object")
    return found
