"""What readers give, what tokenising makes of it, and what a replay needs.

::

    files -> readers.read_calls -> LoggedCall -> token_log.build_token_log -> TokenLog -> TokenisedCall, one at a time

Every chat format is turned into messages and tools as the OpenAI chat API writes them; a template renders these. A call
whose text or token ids were logged after rendering skips the template.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from irminsul.namespace import Namespace

Message: TypeAlias = dict[str, Any]
"""One message of a chat, as the OpenAI API writes it."""
Tool: TypeAlias = dict[str, Any]
"""One tool schema, as the OpenAI API writes it."""
Tokens: TypeAlias = NDArray[np.int32]
"""Token ids, shape [T]."""


@dataclass(frozen=True)
class CallInfo:
    """Where a call was logged, and what it belongs to."""

    file: str
    """As it was named; ``-`` is the standard input."""
    line: int
    """From 1; where the call was logged, or began to be."""
    session: str | None = None
    """A conversation or task; None where the log does not say."""
    thread: str = ""
    """One agent inside the session; a thread's calls follow each other."""
    ts: float | None = None
    """Seconds since the epoch (or since any fixed moment); None where the log has no clock."""
    namespace: Namespace = field(default_factory=Namespace)
    """What the log says of tenant, cache salt, extra key, LoRA and model. Calls share rows only inside it."""

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, eq=False)
class Chat:
    """A conversation and its tools.

    Calls of one thread may share their message objects: treat them as read-only.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None = None


Prompt: TypeAlias = Chat | str | NDArray[np.int32]
"""A conversation to render, rendered text, or token ids, shape [T]."""


@dataclass(frozen=True, eq=False)
class LoggedCall:
    """One LLM call as a log gives it."""

    info: CallInfo
    prompt: Prompt
    reply: Message | str | NDArray[np.int32] | None = None
    """The response, where the log has it, in the form that goes with the prompt."""


@dataclass(frozen=True)
class BadLine:
    """A line that is no call."""

    file: str
    line: int
    """From 1."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


class SpanKind(StrEnum):
    """What kind of text a token belongs to."""

    SYSTEM = "system"
    TOOLS = "tools"
    """Schemas of the tools offered."""
    USER = "user"
    ASSISTANT = "assistant"
    """What the model wrote: text, reasoning and tool calls."""
    TOOL = "tool"
    """What tools returned."""
    TEMPLATE = "template"
    """What the chat template puts around the rest: role markers, ends of turns, the generation prompt."""
    TEXT = "text"
    """A prompt, or a part of one, of which the log does not say more."""


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of one kind."""

    kind: SpanKind
    start: int
    end: int
    message: int | None = None
    """Index of the message the tokens come from; None for tools, template and text."""


class ReplySource(StrEnum):
    """How the reply to a call is known."""

    NEXT_CALL = "next_call"
    """A later call of the thread (of the namespace, where the log names no sessions) begins with this call's prompt
    and continues with an assistant message: these tokens."""
    LOGGED = "logged"
    """The log gives the response, and no later call shows its tokens; they are encoded as the template writes them."""


@dataclass(frozen=True, eq=False)
class TokenisedCall:
    """One call as tokens."""

    info: CallInfo
    tokens: Tokens
    """The prompt with the generation prompt at its end; at least one token."""
    spans: Sequence[Span]
    """They tile [0, len(tokens))."""
    thread: int
    """Number of the call's thread in the log, from 0. A logged (session, thread), or, where the log names no session,
    calls linked by ``ReplySource.NEXT_CALL``."""
    reply: Tokens | None = None
    """What the server generated, without the token that ended it (whose row is never computed): ``tokens`` and then
    ``reply`` is what a server that keeps decoded rows holds afterwards. None if unknown."""
    reply_source: ReplySource | None = None

    def span_at(self, position: int) -> Span:
        """Return the span that holds a position of the prompt."""
        assert 0 <= position < len(self.tokens), position
        return next(span for span in self.spans if position < span.end)


class TokenLog(Protocol):
    """A whole log as tokens, in the order to replay it.

    It holds each distinct piece of text once, so it is far smaller than the sum of its prompts.
    """

    notes: tuple[str, ...]
    """What a reader of the results should know: skipped lines, missing system prompts, ..."""
    special_ids: NDArray[np.int32]
    """Ids of the tokenizer's special tokens (turn and tool markers), ascending."""

    def __len__(self) -> int:
        """Return the number of calls."""

    def __getitem__(self, index: int) -> TokenisedCall:
        """Return the call at a place of the replay order."""

    def __iter__(self) -> Iterator[TokenisedCall]:
        """Yield the calls in replay order: by time if every call has one, else as the files give them."""

    def prompt_tokens(self) -> int:
        """Return the sum of the lengths of all prompts."""

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens; incomplete characters at either end appear as U+FFFD."""
