"""Builds a PieceLog: interns pieces, orders calls by time, finds the replies.

A reply is known where a later call shows it: the next call of the thread begins with this call's tokens and continues
with an assistant message. Threads are named by the log. Where it names no session, a call continues the latest earlier
call of its namespace whose messages it begins with, and which nothing has continued yet. If no call shows the reply
and the log gives the response, its tokens are what the template makes of prompt and response behind the prompt.
"""

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from irminsul.namespace import Namespace
from irminsul.trace.lines import LineError, Notes, OnBad, refuse_bad_lines
from irminsul.trace.pieces import AnyPiece, IdPiece, Piece, key_of
from irminsul.trace.records import BadLine, Chat, LoggedCall, ReplySource, Span, SpanKind, TokenisedCall, Tokens
from irminsul.trace.token_log import (
    KINDS,
    NO_MESSAGE,
    NO_REPLY,
    SOURCES,
    CallTable,
    Names,
    PieceLog,
    PieceTable,
    piece_spans,
    piece_tokens,
    prompt_lengths,
)
from irminsul.trace.tokenise import EncodedPiece, Tokeniser

WHOLE_NOTE = "tokenizer {} cannot encode prompts in pieces, so each was encoded whole, which is slow"
IDS_NOTE = "prompts were logged as token ids; reports show their text as tokenizer {} reads it"
ORDER_NOTE = "some calls have no time, so all are replayed in the order of the files"

# Characters of unseen text that are encoded together: enough to keep all cores busy, little to hold.
_BATCH_CHARS = 2**21
_KIND_CODE = {kind: code for code, kind in enumerate(KINDS)}
_NEXT_CALL, _LOGGED = SOURCES.index(ReplySource.NEXT_CALL), SOURCES.index(ReplySource.LOGGED)

H = TypeVar("H", bound=Hashable)


def build_token_log(
    calls: Iterable[LoggedCall],
    tokeniser: Tokeniser,
    *,
    on_bad: OnBad = refuse_bad_lines,
    notes: Notes | None = None,
) -> PieceLog:
    """Tokenise calls.

    Args:
        calls: as ``readers.read_calls`` gives them.
        tokeniser: renders and encodes.
        on_bad: takes calls that the template cannot render, and empty ones.
        notes: as given to the reader; more are added.

    Returns:
        The calls in replay order: by time if every one has a time (equal times in the order given), else as given.

    Raises:
        InputError: what ``on_bad`` raises; or a conversation meets a tokenizer without a template.
    """
    notes = Notes() if notes is None else notes
    builder = _Builder(tokeniser, notes)
    for call in calls:
        try:
            builder.add(call)
        except LineError as reason:
            on_bad(BadLine(call.info.file, call.info.line, str(reason)))
    return builder.finish(on_bad)


def encode_call(call: LoggedCall, tokeniser: Tokeniser) -> TokenisedCall:
    """Tokenise one call by itself.

    Raises:
        InputError: the template cannot render it, or it has no token.
    """
    return build_token_log([call], tokeniser)[0]


class _Interned(dict[H, int]):
    """Numbers values in the order they come."""

    def number(self, value: H) -> int:
        return self.setdefault(value, len(self))


class _PieceStore:
    """Numbers pieces by their content and encodes the new ones, many at a time."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._tokeniser = tokeniser
        self._numbers: _Interned[bytes] = _Interned()
        self._waiting: list[AnyPiece] = []
        self._waiting_chars = 0
        self._tokens, self._token_start = array("i"), array("q", [0])
        self._part_start, self._part_kind = array("q", [0]), array("B")
        self._part_end, self._part_message = array("i"), array("i")

    def number(self, piece: AnyPiece) -> int:
        """Return the number of a piece."""
        known = len(self._numbers)
        number = self._numbers.number(key_of(piece))
        if number == known:
            self._waiting.append(piece)
            self._waiting_chars += sum(len(part.text) for part in piece.parts) if isinstance(piece, Piece) else 0
            if self._waiting_chars >= _BATCH_CHARS:
                self._encode_waiting()
        return number

    def table(self) -> PieceTable:
        """Return all pieces so far. No piece can be added while the table is in use."""
        self._encode_waiting()
        return PieceTable(
            tokens=np.frombuffer(self._tokens, dtype=np.int32),
            token_start=np.frombuffer(self._token_start, dtype=np.int64),
            part_start=np.frombuffer(self._part_start, dtype=np.int64),
            part_kind=np.frombuffer(self._part_kind, dtype=np.uint8),
            part_end=np.frombuffer(self._part_end, dtype=np.int32),
            part_message=np.frombuffer(self._part_message, dtype=np.int32),
        )

    def _encode_waiting(self) -> None:
        waiting, self._waiting, self._waiting_chars = self._waiting, [], 0
        for piece in self._tokeniser.encode(waiting):
            self._append(piece)

    def _append(self, piece: EncodedPiece) -> None:
        self._tokens.frombytes(np.ascontiguousarray(piece.tokens, dtype=np.int32).tobytes())
        self._token_start.append(len(self._tokens))
        self._part_kind.extend(_KIND_CODE[kind] for kind in piece.kinds)
        self._part_end.extend(piece.ends)
        self._part_message.extend(NO_MESSAGE if message is None else message for message in piece.messages)
        self._part_start.append(len(self._part_kind))


class _References(NamedTuple):
    """A prompt as pieces, [R]."""

    piece: NDArray[np.int32]
    first_message: NDArray[np.int32]


class _Builder:
    """Collects calls in columns; see CallTable for the names."""

    def __init__(self, tokeniser: Tokeniser, notes: Notes) -> None:
        self._tokeniser = tokeniser
        self._notes = notes
        self._store = _PieceStore(tokeniser)
        self._begin, self._end = array("q"), array("q")
        self._piece, self._first_message = array("i"), array("i")
        self._line, self._ts = array("q"), array("d")
        self._files, self._sessions = _Interned[str](), _Interned[str | None]()
        self._agents, self._namespaces = _Interned[str](), _Interned[Namespace]()
        self._file, self._session, self._agent, self._namespace = array("i"), array("i"), array("i"), array("i")
        self._answered: dict[int, _References] = {}
        """Per call whose response was logged: prompt and response together."""
        self._replies: dict[int, _References] = {}
        """Per call whose response was logged as text or ids: the response."""

    def add(self, call: LoggedCall) -> None:
        """Add a call; LineError if it cannot be rendered."""
        info = call.info
        references = self._numbered(self._tokeniser.pieces(call.prompt, info.ts))
        self._add_reply(len(self._begin), call)
        self._begin.append(len(self._piece))
        self._piece.frombytes(references.piece.tobytes())
        self._first_message.frombytes(references.first_message.tobytes())
        self._end.append(len(self._piece))
        self._file.append(self._files.number(info.file))
        self._line.append(info.line)
        self._session.append(self._sessions.number(info.session))
        self._agent.append(self._agents.number(info.thread))
        self._ts.append(np.nan if info.ts is None else info.ts)
        self._namespace.append(self._namespaces.number(info.namespace))
        if isinstance(call.prompt, np.ndarray):
            self._notes.add(IDS_NOTE.format(self._tokeniser.name))

    def finish(self, on_bad: OnBad) -> PieceLog:
        """Return the log. The builder is used up."""
        if not self._tokeniser.piecewise:
            self._notes.add(WHOLE_NOTE.format(self._tokeniser.name))
        pieces = self._store.table()
        calls, origin = self._in_replay_order(self._columns(), pieces, on_bad)
        replies = _Replies(pieces, calls, self._sessions.number(None))
        replies.find_shown()
        replies.take_logged(self._answered, self._replies, origin)
        pieces, reply = replies.stored()
        calls = calls._replace(thread=replies.thread, reply=reply, reply_source=replies.source)
        names = Names(tuple(self._files), tuple(self._sessions), tuple(self._agents), tuple(self._namespaces))
        return PieceLog(pieces, calls, names, self._notes.sentences(), self._tokeniser)

    def _numbered(self, pieces: Sequence[AnyPiece]) -> _References:
        numbers = [self._store.number(piece) for piece in pieces]
        first = [0 if isinstance(piece, IdPiece) else piece.first_message for piece in pieces]
        return _References(np.array(numbers, dtype=np.int32), np.array(first, dtype=np.int32))

    def _add_reply(self, index: int, call: LoggedCall) -> None:
        reply, prompt = call.reply, call.prompt
        if isinstance(prompt, Chat) and isinstance(reply, dict):
            answered = Chat((*prompt.messages, reply), prompt.tools)
            try:
                pieces = self._tokeniser.pieces(answered, call.info.ts, generation_prompt=False)
            except LineError:
                # The prompt is fine; a reply that the template cannot write is only not known.
                return
            self._answered[index] = self._numbered(pieces)
        elif isinstance(reply, str) and reply and not isinstance(prompt, Chat):
            self._replies[index] = self._numbered(self._tokeniser.pieces(reply))
        elif isinstance(reply, np.ndarray) and len(reply) > 1:
            # The row of the last token is never computed: it ends the reply.
            self._replies[index] = self._numbered(self._tokeniser.pieces(reply[:-1]))

    def _columns(self) -> CallTable:
        count = len(self._begin)
        return CallTable(
            begin=np.array(self._begin, dtype=np.int64),
            end=np.array(self._end, dtype=np.int64),
            piece=np.frombuffer(self._piece, dtype=np.int32),
            first_message=np.frombuffer(self._first_message, dtype=np.int32),
            file=np.array(self._file, dtype=np.int32),
            line=np.array(self._line, dtype=np.int64),
            session=np.array(self._session, dtype=np.int32),
            agent=np.array(self._agent, dtype=np.int32),
            ts=np.array(self._ts, dtype=np.float64),
            namespace=np.array(self._namespace, dtype=np.int32),
            thread=np.zeros(count, dtype=np.int32),
            reply=np.full(count, NO_REPLY, dtype=np.int32),
            reply_source=np.zeros(count, dtype=np.uint8),
        )

    def _in_replay_order(
        self, calls: CallTable, pieces: PieceTable, on_bad: OnBad
    ) -> tuple[CallTable, NDArray[np.int64]]:
        """Order the calls and drop empty ones; also return the place of each in the order given."""
        lengths = prompt_lengths(pieces, calls)
        files = list(self._files)
        for index in np.flatnonzero(lengths == 0):
            on_bad(BadLine(files[calls.file[index]], int(calls.line[index]), "the prompt has no token"))
        has_no_time = np.isnan(calls.ts)
        order = np.arange(len(calls.ts)) if has_no_time.any() else np.argsort(calls.ts, kind="stable")
        if has_no_time.any() and not has_no_time.all():
            self._notes.add(ORDER_NOTE)
        origin = order[lengths[order] > 0].astype(np.int64)
        per_call = {
            name: column[origin] for name, column in calls._asdict().items() if name not in ("piece", "first_message")
        }
        return calls._replace(**per_call), origin


class _Replies:
    """Finds the replies of calls in replay order, and the threads."""

    def __init__(self, pieces: PieceTable, calls: CallTable, no_session: int | None) -> None:
        count = len(calls.begin)
        self._pieces = pieces
        self._calls = calls
        self._no_session = no_session
        self._reply: list[Tokens | None] = [None] * count
        self.source = np.zeros(count, dtype=np.uint8)
        self.thread = np.zeros(count, dtype=np.int32)

    def find_shown(self) -> None:
        """Find the replies that a later call shows, and number the threads."""
        threads: _Interned[tuple[int, ...]] = _Interned()
        latest: dict[int, int] = {}
        unclaimed = _Continuations(self._pieces, self._calls)
        calls = self._calls
        for later in range(len(calls.begin)):
            if calls.session[later] == self._no_session:
                earlier = unclaimed.continued_by(later)
                if earlier is not None and self._show(earlier, later):
                    self.thread[later] = self.thread[earlier]
                    unclaimed.claim(earlier)
                else:
                    self.thread[later] = threads.number((later,))
                unclaimed.add(later)
                continue
            key = (int(calls.namespace[later]), int(calls.session[later]), int(calls.agent[later]))
            thread = self.thread[later] = threads.number(key)
            if thread in latest:
                self._show(latest[thread], later)
            latest[thread] = later

    def take_logged(
        self, answered: dict[int, _References], replies: dict[int, _References], origin: NDArray[np.int64]
    ) -> None:
        """Take logged responses where no later call shows the reply."""
        for index, place in enumerate(origin.tolist()):
            if self._reply[index] is not None:
                continue
            if place in answered:
                self._reply[index] = self._behind(index, answered[place])
            elif place in replies:
                self._reply[index] = piece_tokens(self._pieces, replies[place].piece)
            self.source[index] = 0 if self._reply[index] is None else _LOGGED

    def stored(self) -> tuple[PieceTable, NDArray[np.int32]]:
        """Return the pieces with those of the replies behind them, and the piece of each call's reply."""
        known = len(self._pieces.token_start) - 1
        numbers: _Interned[bytes] = _Interned()
        reply = np.array(
            [NO_REPLY if tokens is None else known + numbers.number(tokens.tobytes()) for tokens in self._reply],
            dtype=np.int32,
        )
        new = [np.frombuffer(tokens, dtype=np.int32) for tokens in numbers]
        lengths = np.array([len(tokens) for tokens in new], dtype=np.int64)
        old = self._pieces
        table = PieceTable(
            tokens=np.concatenate([old.tokens, *new]),
            token_start=np.concatenate([old.token_start, old.token_start[-1] + np.cumsum(lengths)]),
            part_start=np.concatenate([old.part_start, old.part_start[-1] + 1 + np.arange(len(new))]),
            part_kind=np.concatenate(
                [old.part_kind, np.full(len(new), _KIND_CODE[SpanKind.ASSISTANT], dtype=np.uint8)]
            ),
            part_end=np.concatenate([old.part_end, lengths.astype(np.int32)]),
            part_message=np.concatenate([old.part_message, np.full(len(new), NO_MESSAGE, dtype=np.int32)]),
        )
        return table, reply

    def _show(self, earlier: int, later: int) -> bool:
        """Take the reply to a call from another one; say whether that one shows it."""
        self._reply[earlier] = self._behind(earlier, self._references(later))
        if self._reply[earlier] is None:
            return False
        self.source[earlier] = _NEXT_CALL
        return True

    def _references(self, index: int) -> _References:
        references = slice(int(self._calls.begin[index]), int(self._calls.end[index]))
        return _References(self._calls.piece[references], self._calls.first_message[references])

    def _behind(self, index: int, longer: _References) -> Tokens | None:
        """Return the assistant's text that stands behind a call's prompt in a longer prompt, if there is some."""
        prompt = piece_tokens(self._pieces, self._references(index).piece)
        tokens = piece_tokens(self._pieces, longer.piece)
        start = len(prompt)
        if len(tokens) <= start or not np.array_equal(tokens[:start], prompt):
            return None
        spans = self._spans_behind(start, longer)
        first = next((span for span in spans if span.message is not None), None)
        if first is None or first.kind is not SpanKind.ASSISTANT:
            return None
        same = [span.end for span in spans if span.kind is SpanKind.ASSISTANT and span.message == first.message]
        # A copy: a view would hold the whole prompt.
        return tokens[start : max(same)].copy()

    def _spans_behind(self, start: int, prompt: _References) -> list[Span]:
        """Return the spans of a prompt that end behind a place."""
        table = self._pieces
        ends = np.cumsum(table.token_start[prompt.piece + 1] - table.token_start[prompt.piece])
        first = int(np.searchsorted(ends, start, side="right"))
        before = int(ends[first - 1]) if first else 0
        spans = piece_spans(table, prompt.piece[first:], prompt.first_message[first:], before)
        return [span for span in spans if span.end > start]


class _Continuations:
    """Finds the call that another one continues, where the log names no sessions.

    A prompt is known by its pieces up to its last message, without the generation prompt.
    """

    def __init__(self, pieces: PieceTable, calls: CallTable) -> None:
        self._pieces = pieces
        self._calls = calls
        messages: NDArray[np.int64] = np.concatenate([[0], np.cumsum(pieces.part_message != NO_MESSAGE)])
        self._has_message = np.diff(messages[pieces.part_start]) > 0
        self._waiting: dict[tuple[int, int, int], list[int]] = {}
        self._own: dict[int, tuple[int, int, int]] = {}

    def continued_by(self, index: int) -> int | None:
        """Return the call with the longest prompt that this call's prompt begins with."""
        found = [self._waiting.get(key) for key in self._keys(index)[:-1]]
        return next((calls[-1] for calls in reversed(found) if calls), None)

    def add(self, index: int) -> None:
        """Let a call be continued."""
        keys = self._keys(index)
        if keys:
            self._waiting.setdefault(keys[-1], []).append(index)
            self._own[index] = keys[-1]

    def claim(self, index: int) -> None:
        """Let a call not be continued again."""
        self._waiting[self._own.pop(index)].remove(index)

    def _keys(self, index: int) -> list[tuple[int, int, int]]:
        """Return a key for the prompt up to each of its messages. Equal keys only nominate: tokens decide."""
        calls = self._calls
        pieces = calls.piece[calls.begin[index] : calls.end[index]]
        scope = (int(calls.namespace[index]), int(calls.agent[index]))
        keys, digest = [], 0
        for piece, ends_message in zip(pieces.tolist(), self._has_message[pieces].tolist(), strict=True):
            digest = hash((digest, piece))
            if ends_message:
                keys.append((*scope, digest))
        return keys
