"""The two forms of an answer, chat and plain completion, whole or in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from irminsul.server.answer import AnswerToken, Piece
from irminsul.server.detokenize import TokenSpeller
from irminsul.server.protocol import (
    Alternative,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Usage,
)

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's value."""


class AnswerForm(ABC):
    """Shapes the answer to one request.

    Args:
        model: name of the model.
        speller: text of tokens, if log probabilities were asked for; else None.
    """

    id_prefix: str

    def __init__(self, model: str, speller: TokenSpeller | None) -> None:
        self.request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._model = model
        self._speller = speller
        self._created = int(time.time())

    @abstractmethod
    def chunk(self, piece: Piece, *, first: bool) -> BaseModel:
        """Return the event for one piece of a stream."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> BaseModel:
        """Return the event behind the last piece, for a client that asked for usage."""

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> BaseModel:
        """Return the answer that is not streamed."""


class ChatForm(AnswerForm):
    """The form of /v1/chat/completions."""

    id_prefix = "chatcmpl"

    def chunk(self, piece: Piece, *, first: bool) -> ChatChunk:
        """Return the event for one piece of a stream; the first names the role."""
        delta = Delta(role="assistant", content=piece.text) if first else Delta(content=piece.text)
        if not (first or piece.text):
            delta = Delta()
        choice = ChatChunkChoice(delta=delta, logprobs=self._logprobs(piece.tokens), finish_reason=piece.finish_reason)
        return ChatChunk(id=self.request_id, created=self._created, model=self._model, choices=[choice])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """Return the event behind the last piece, for a client that asked for usage."""
        return ChatChunk(id=self.request_id, created=self._created, model=self._model, choices=[], usage=usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> ChatCompletion:
        """Return the answer that is not streamed."""
        finish_reason = pieces[-1].finish_reason
        assert finish_reason is not None, "unfinished"
        choice = ChatChoice(
            message=AssistantMessage(content=_text(pieces)),
            logprobs=self._logprobs(_tokens(pieces)),
            finish_reason=finish_reason,
        )
        return ChatCompletion(
            id=self.request_id, created=self._created, model=self._model, choices=[choice], usage=usage
        )

    def _logprobs(self, tokens: Iterable[AnswerToken]) -> ChatLogprobs | None:
        if self._speller is None:
            return None
        content = []
        for token in tokens:
            drawn, *others = [
                Alternative(token=self._speller.text(token_id), logprob=logprob, bytes=self._speller.bytes(token_id))
                for token_id, logprob in _drawn_and_top(token)
            ]
            content.append(ChatTokenLogprob(**drawn.model_dump(), top_logprobs=others))
        return ChatLogprobs(content=content)


class CompletionForm(AnswerForm):
    """The form of /v1/completions."""

    id_prefix = "cmpl"

    def chunk(self, piece: Piece, *, first: bool) -> Completion:
        """Return the event for one piece of a stream."""
        del first
        return self._completion([piece], None)

    def usage_chunk(self, usage: Usage) -> Completion:
        """Return the event behind the last piece, for a client that asked for usage."""
        return Completion(id=self.request_id, created=self._created, model=self._model, choices=[], usage=usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Completion:
        """Return the answer that is not streamed."""
        return self._completion(pieces, usage)

    def _completion(self, pieces: Sequence[Piece], usage: Usage | None) -> Completion:
        choice = CompletionChoice(
            text=_text(pieces), logprobs=self._logprobs(_tokens(pieces)), finish_reason=pieces[-1].finish_reason
        )
        return Completion(id=self.request_id, created=self._created, model=self._model, choices=[choice], usage=usage)

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> CompletionLogprobs | None:
        if self._speller is None:
            return None
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            (drawn, drawn_logprob), *others = _drawn_and_top(token)
            logprobs.tokens.append(self._speller.text(drawn))
            logprobs.token_logprobs.append(drawn_logprob)
            logprobs.text_offset.append(token.text_offset)
            # Parts of characters look alike; of tokens with the same text the most likely one is kept.
            top: dict[str, float] = {}
            for token_id, logprob in [*others, (drawn, drawn_logprob)]:
                top.setdefault(self._speller.text(token_id), logprob)
            logprobs.top_logprobs.append(top)
        return logprobs


def _drawn_and_top(token: AnswerToken) -> list[tuple[int, float]]:
    """(token id, log probability): first of the drawn token, then of the most likely ones."""
    output = token.output
    assert output.logprob is not None, "the engine was not asked for log probabilities"
    pairs = [(output.token_id, output.logprob), *output.top_logprobs]
    return [(token_id, max(logprob, LEAST_LOGPROB)) for token_id, logprob in pairs]


def _text(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Iterable[Piece]) -> list[AnswerToken]:
    return [token for piece in pieces for token in piece.tokens]
