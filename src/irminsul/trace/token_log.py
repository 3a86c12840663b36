"""A log as tokens, small: each distinct piece of text once, and each call as a list of pieces.

::

    pieces   piece 0 | piece 1 | piece 2 | ...            tokens of all pieces, one behind the other
    calls    [0, 4, 5], [0, 4, 5, 6, 7], ...              the pieces of each prompt, in replay order

An agent's call repeats the call before it and adds a little, so hundreds of millions of prompt tokens are a few million
tokens of pieces. Memory is about 4 bytes a distinct token, 200 bytes a distinct piece and 8 bytes a message of a call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from irminsul.namespace import Namespace
from irminsul.trace.records import CallInfo, ReplySource, Span, SpanKind, TokenisedCall, Tokens
from irminsul.trace.tokenise import Tokeniser

NO_MESSAGE, NO_REPLY = -1, -1
KINDS = tuple(SpanKind)
SOURCES = tuple(ReplySource)


class PieceTable(NamedTuple):
    """All pieces, in columns: P pieces, N tokens, Q parts."""

    tokens: Tokens
    """int32 [N]."""
    token_start: NDArray[np.int64]
    """[P + 1]: piece p has tokens [token_start[p], token_start[p + 1])."""
    part_start: NDArray[np.int64]
    """[P + 1]: piece p has parts [part_start[p], part_start[p + 1])."""
    part_kind: NDArray[np.uint8]
    """[Q], index into KINDS."""
    part_end: NDArray[np.int32]
    """[Q], offset in the piece behind the part's last token."""
    part_message: NDArray[np.int32]
    """[Q], index of the message counted from the piece's first, or NO_MESSAGE."""


class CallTable(NamedTuple):
    """All calls in replay order, in columns: C calls, R references to pieces."""

    begin: NDArray[np.int64]
    """[C], the first reference."""
    end: NDArray[np.int64]
    """[C], behind the last reference."""
    piece: NDArray[np.int32]
    """[R], a piece."""
    first_message: NDArray[np.int32]
    """[R], index of the piece's first message in the call."""
    file: NDArray[np.int32]
    """[C], index into Names.files."""
    line: NDArray[np.int64]
    """[C]."""
    session: NDArray[np.int32]
    """[C], index into Names.sessions."""
    agent: NDArray[np.int32]
    """[C], index into Names.agents."""
    ts: NDArray[np.float64]
    """[C], NaN where there is none."""
    namespace: NDArray[np.int32]
    """[C], index into Names.namespaces."""
    thread: NDArray[np.int32]
    """[C], see TokenisedCall."""
    reply: NDArray[np.int32]
    """[C], the piece that is the reply, or NO_REPLY."""
    reply_source: NDArray[np.uint8]
    """[C], index into SOURCES; 0 where there is no reply."""


@dataclass(frozen=True)
class Names:
    """What the columns of CallTable index."""

    files: tuple[str, ...]
    sessions: tuple[str | None, ...]
    agents: tuple[str, ...]
    namespaces: tuple[Namespace, ...]


class PieceLog:
    """A TokenLog (see there) made of pieces. ``token_log_builder.py`` builds it, ``token_cache.py`` stores it."""

    def __init__(
        self, pieces: PieceTable, calls: CallTable, names: Names, notes: Sequence[str], tokeniser: Tokeniser
    ) -> None:
        self.pieces = pieces
        self.calls = calls
        self.names = names
        self.notes = tuple(notes)
        self.special_ids: Tokens = tokeniser.special_ids
        self._tokeniser = tokeniser

    def __len__(self) -> int:
        """See TokenLog."""
        return len(self.calls.begin)

    def __getitem__(self, index: int) -> TokenisedCall:
        """See TokenLog."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        calls = self.calls
        references = slice(int(calls.begin[index]), int(calls.end[index]))
        reply = int(calls.reply[index])
        return TokenisedCall(
            info=self._info(index),
            tokens=piece_tokens(self.pieces, calls.piece[references]),
            spans=_Spans(self.pieces, calls.piece[references], calls.first_message[references]),
            thread=int(calls.thread[index]),
            reply=None if reply == NO_REPLY else piece_tokens(self.pieces, calls.reply[index : index + 1]),
            reply_source=None if reply == NO_REPLY else SOURCES[calls.reply_source[index]],
        )

    def __iter__(self) -> Iterator[TokenisedCall]:
        """See TokenLog."""
        return (self[index] for index in range(len(self)))

    def prompt_tokens(self) -> int:
        """See TokenLog."""
        return int(prompt_lengths(self.pieces, self.calls).sum())

    def decode(self, tokens: Tokens) -> str:
        """See TokenLog."""
        return self._tokeniser.decode(tokens)

    def _info(self, index: int) -> CallInfo:
        calls, names = self.calls, self.names
        ts = float(calls.ts[index])
        return CallInfo(
            file=names.files[calls.file[index]],
            line=int(calls.line[index]),
            session=names.sessions[calls.session[index]],
            thread=names.agents[calls.agent[index]],
            ts=None if np.isnan(ts) else ts,
            namespace=names.namespaces[calls.namespace[index]],
        )


def piece_tokens(pieces: PieceTable, references: NDArray[np.int32]) -> Tokens:
    """Return the tokens of pieces, one behind the other."""
    starts = pieces.token_start[references].tolist()
    ends = pieces.token_start[references + 1].tolist()
    if not starts:
        return np.empty(0, dtype=np.int32)
    return np.concatenate([pieces.tokens[start:end] for start, end in zip(starts, ends, strict=True)])


def piece_spans(
    pieces: PieceTable, references: NDArray[np.int32], first_message: NDArray[np.int32], before: int = 0
) -> tuple[Span, ...]:
    """Return the spans of consecutive pieces; neighbours of one kind and message are one.

    Args:
        pieces: all pieces.
        references: which of them, [R].
        first_message: index of the first message of each, [R].
        before: tokens of the prompt before the first of the pieces.
    """
    spans: list[Span] = []
    begin = before
    for piece, first in zip(references.tolist(), first_message.tolist(), strict=True):
        for part in range(pieces.part_start[piece], pieces.part_start[piece + 1]):
            kind, offset = KINDS[pieces.part_kind[part]], int(pieces.part_message[part])
            message = None if offset == NO_MESSAGE else first + offset
            start, end = spans[-1].end if spans else begin, before + int(pieces.part_end[part])
            if spans and (spans[-1].kind, spans[-1].message) == (kind, message):
                spans[-1] = Span(kind, spans[-1].start, end, message)
            elif end > start:
                spans.append(Span(kind, start, end, message))
        before += int(pieces.token_start[piece + 1] - pieces.token_start[piece])
    assert all(left.end == right.start for left, right in pairwise(spans))
    return tuple(spans)


def prompt_lengths(pieces: PieceTable, calls: CallTable) -> NDArray[np.int64]:
    """Return the number of tokens of each prompt, [C]."""
    lengths = np.diff(pieces.token_start)[calls.piece]
    behind: NDArray[np.int64] = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return behind[calls.end] - behind[calls.begin]


class _Spans(Sequence[Span]):
    """Spans that are made when somebody looks: most replays never do."""

    def __init__(self, pieces: PieceTable, references: NDArray[np.int32], first_message: NDArray[np.int32]) -> None:
        self._arguments = (pieces, references, first_message)
        self._made: tuple[Span, ...] | None = None

    def _spans(self) -> tuple[Span, ...]:
        if self._made is None:
            self._made = piece_spans(*self._arguments)
        return self._made

    def __len__(self) -> int:
        return len(self._spans())

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._spans()[index]
