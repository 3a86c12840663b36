"""What is sent: the calls of request logs or of a pattern, as request bodies, in the order to replay them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.safe_text import encodable
from irminsul.trace.command import parse_tokens
from irminsul.trace.lines import LineError, Notes
from irminsul.trace.patterns import PATTERNS, generate, marker_line
from irminsul.trace.pieces import key_of
from irminsul.trace.readers import AUTO, read_calls
from irminsul.trace.records import BadLine, CallInfo, Chat, LoggedCall, Prompt, Tokens
from irminsul.trace.tokenise import Tokeniser, load_tokeniser

MARKERS = "markers"
NAMESPACES_NOTE = "the log's tenants, salts and adapters are not sent: its calls share what the server lets them share"


class Protocol(StrEnum):
    """How prompts are sent."""

    OPENAI = "openai"
    """/v1/chat/completions: messages and tools; the server renders and encodes them."""
    SGLANG_IDS = "sglang-ids"
    """SGLang's /generate with token ids, for servers without a tokenizer."""


@dataclass(frozen=True)
class LoadOptions:
    """How loads are read."""

    protocol: Protocol
    tokenizer: str
    """See ``load_tokeniser``. It makes token ids, markers and the counts that ``max_prompt_tokens`` needs."""
    form: str = AUTO
    calls: int | None = None
    """At most so many calls of each load."""
    max_prompt_tokens: int | None = None
    """Calls with longer prompts are left out."""
    seed: int = 0
    """Of patterns."""

    @cached_property
    def tokeniser(self) -> Tokeniser:
        """The tokenizer, loaded when it is first needed."""
        return load_tokeniser(self.tokenizer)


@dataclass(frozen=True, eq=False)
class Call:
    """One request."""

    place: str
    """``file:line``, or the pattern and the number of the call."""
    session: int
    """Number of its session in the load, from 0. A session here is one agent's: its calls follow each other."""
    prompt: bytes
    """The members of the request's JSON object that hold the prompt, without braces: written once, not in a block."""
    prompt_tokens: int | None
    """By our tokenizer; None where nothing needed them counted."""


@dataclass(frozen=True, eq=False)
class Load:
    """Calls in the order to start them."""

    name: str
    calls: tuple[Call, ...]
    left_out: int
    """Calls whose prompts were too long, among those that were looked at."""
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Differs for loads that differ in any prompt, in their order or in their sessions."""
        digest = hashlib.blake2b(digest_size=16)
        for call in self.calls:
            digest.update(f"{call.session} {len(call.prompt)}\n".encode())
            digest.update(call.prompt)
        return digest.hexdigest()

    @cached_property
    def predecessors(self) -> tuple[int | None, ...]:
        """For each call, the index of the call of its session before it."""
        latest: dict[int, int] = {}
        found = []
        for index, call in enumerate(self.calls):
            found.append(latest.get(call.session))
            latest[call.session] = index
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        """Return what a result says of its load."""
        lengths = [call.prompt_tokens for call in self.calls if call.prompt_tokens is not None]
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "calls": len(self.calls),
            "sessions": len({call.session for call in self.calls}),
            "left_out": self.left_out,
            **(
                {"prompt_tokens_median": float(np.median(lengths)), "prompt_tokens_max": max(lengths)}
                if lengths
                else {}
            ),
            **({"notes": list(self.notes)} if self.notes else {}),
        }


def read_load(text: str, options: LoadOptions) -> Load:
    """Read a load.

    Args:
        text: a file in any form that ``irminsul analyze`` reads, or ``PATTERN[:LENGTH][:markers]``, like
            ``rerank:32K:markers``.
        options: see there.

    Raises:
        InputError: it is neither, it cannot be read, a prompt does not fit the protocol, or no call is left.
    """
    notes = Notes()
    if Path(text).is_file():
        name, calls = encodable(Path(text).name), _in_time_order(read_calls([text], options.form, notes=notes))
    else:
        name, calls = text, _pattern_calls(text, options)
    load = _chosen(name, calls, options, notes)
    if not load.calls:
        raise InputError(
            f"load {text} has no calls to send"
            + (f": {load.left_out} have more than {options.max_prompt_tokens} tokens" if load.left_out else "")
        )
    return load


def _pattern_calls(text: str, options: LoadOptions) -> Iterator[LoggedCall]:
    name, *settings = text.split(":")
    if name not in PATTERNS:
        raise InputError(
            f"load {text!r} is neither a file nor a pattern; a pattern is written like rerank, rerank:32K or "
            f"rerank:32K:{MARKERS}, with one of {', '.join(PATTERNS)}"
        )
    marker = None
    if settings and settings[-1] == MARKERS:
        settings.pop()
        marker = marker_line(options.tokeniser)
    if len(settings) > 1:
        raise InputError(f"load {text!r}: a pattern takes a length and the word {MARKERS!r}, in this order")
    length = parse_tokens(settings[0]) if settings else None
    made = generate(name, calls=options.calls, seed=options.seed, marker=marker, prompt_tokens=length)
    return (
        LoggedCall(CallInfo(name, number, call.session, call.agent, call.ts), Chat(call.messages, call.tools))
        for number, call in enumerate(made, start=1)
    )


def _in_time_order(calls: Iterable[LoggedCall]) -> Iterator[LoggedCall]:
    """Yield calls as an analysis replays them: by time if every call has one, else as the file gives them."""
    known = list(calls)
    times = [call.info.ts for call in known if call.info.ts is not None]
    order = np.argsort(times, kind="stable").tolist() if len(times) == len(known) else range(len(known))
    return (known[index] for index in order)


def _chosen(name: str, calls: Iterable[LoggedCall], options: LoadOptions, notes: Notes) -> Load:
    chosen: list[Call] = []
    sessions: dict[object, int] = {}
    left_out = 0
    prompts = _Prompts(options)
    for call in calls:
        prompt, n_tokens = prompts.written(call)
        if options.max_prompt_tokens is not None and n_tokens is not None and n_tokens > options.max_prompt_tokens:
            left_out += 1
            continue
        info = call.info
        if info.namespace != Namespace(model=info.namespace.model):
            notes.add(NAMESPACES_NOTE)
        # A log that names no session says nothing of what waited for what.
        key = (info.session, info.thread) if info.session is not None else len(chosen)
        session = sessions.setdefault(key, len(sessions))
        chosen.append(Call(encodable(f"{Path(info.file).name}:{info.line}"), session, prompt, n_tokens))
        if len(chosen) == options.calls:
            break
    return Load(name, tuple(chosen), left_out, tuple(notes.sentences()))


class _Prompts:
    """Writes prompts for a protocol."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._as_ids = options.protocol is Protocol.SGLANG_IDS
        self._known: dict[bytes, Tokens] = {}

    def written(self, call: LoggedCall) -> tuple[bytes, int | None]:
        """Return the members of a request's object, and the prompt's tokens where they are needed."""
        ids = self._ids(call) if self._as_ids or self._options.max_prompt_tokens is not None else None
        members = {"input_ids": ids} if self._as_ids else _messages(call)
        try:
            text = json.dumps(members, allow_nan=False)
        except (ValueError, RecursionError) as error:
            # A log may have 1e999, which Python reads as infinity.
            raise InputError(f"{call.info.place} cannot be sent as JSON: {error}") from None
        return text[1:-1].encode(), None if ids is None else len(ids)

    def _ids(self, call: LoggedCall) -> list[int]:
        if not isinstance(call.prompt, Chat | str):
            return [int(token) for token in call.prompt]
        tokeniser = self._options.tokeniser
        try:
            pieces = tokeniser.pieces(call.prompt, call.info.ts)
        except LineError as error:
            raise InputError(str(BadLine(call.info.file, call.info.line, str(error)))) from error
        # A session repeats its history: a piece is encoded once.
        keys = [key_of(piece) for piece in pieces]
        new = {key: piece for key, piece in zip(keys, pieces, strict=True) if key not in self._known}
        encoded = tokeniser.encode(list(new.values()))
        self._known |= {key: piece.tokens for key, piece in zip(new, encoded, strict=True)}
        return [token for key in keys for token in self._known[key].tolist()]


def _messages(call: LoggedCall) -> dict[str, Any]:
    prompt: Prompt = call.prompt
    if not isinstance(prompt, Chat):
        what = "rendered text" if isinstance(prompt, str) else "token ids"
        raise InputError(f"{call.info.place} logs a prompt as {what}; send it with --protocol {Protocol.SGLANG_IDS}")
    tools: Sequence[Any] | None = prompt.tools
    return {"messages": prompt.messages} | ({} if tools is None else {"tools": tools})
