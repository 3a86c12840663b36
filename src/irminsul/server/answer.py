"""From the engine's outputs to an answer: pieces of text, their tokens' log probabilities, and how it ended."""

from collections import deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from irminsul.engine.types import FinishReason, StepOutput, Usage
from irminsul.server.detokenize import Detokenizer, StopStrings
from irminsul.server.metrics import Outcome, RequestTimer
from irminsul.server.runner import EngineFailedError, Generation


@dataclass(frozen=True)
class AnswerToken:
    """A token all of whose text has been sent, with the engine's output (log probabilities) for it."""

    output: StepOutput
    text_offset: int
    """Where its text begins, in characters of the answer."""


@dataclass(frozen=True)
class Piece:
    """What one step adds to an answer."""

    text: str
    tokens: tuple[AnswerToken, ...]
    finish_reason: FinishReason | None = None


class AnswerText:
    """Assembles one answer; knows nothing of clocks or connections.

    A token is released when its last character is, so that log probabilities never tell what a stop string cuts off.

    Args:
        detokenizer: for this output.
        stop_strings: for this output.
        eos_token_ids: as the last token of an output these are its end, not its text.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: StopStrings, eos_token_ids: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._eos_token_ids = eos_token_ids
        self._tokens: deque[tuple[AnswerToken, int]] = deque()
        # Characters decoded and characters sent.
        self._decoded = self._sent = 0

    def push(self, output: StepOutput) -> Piece:
        """Add one output.

        Returns:
            What can be sent now. Its finish reason is set, too, when a stop string was found in an output that is not
            the engine's last.
        """
        decoded = self._decode(output)
        text, stopped = self._stop_strings.push(decoded)
        if output.finish_reason is not None and not stopped:
            text += self._stop_strings.finish()
        self._sent += len(text)
        return Piece(text, self._sent_tokens(), FinishReason.STOP if stopped else output.finish_reason)

    def _decode(self, output: StepOutput) -> str:
        is_end = output.finish_reason is FinishReason.STOP and output.token_id in self._eos_token_ids
        text = "" if is_end else self._detokenizer.push(output.token_id)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        token = AnswerToken(output, self._decoded)
        self._decoded += len(text)
        if not is_end:
            self._tokens.append((token, self._decoded))
        return text

    def _sent_tokens(self) -> tuple[AnswerToken, ...]:
        sent = []
        while self._tokens and self._tokens[0][1] <= self._sent:
            sent.append(self._tokens.popleft()[0])
        return tuple(sent)


class Answer:
    """One accepted request on its way to the client.

    Args:
        generation: the engine's outputs.
        text: assembles them.
        timer: observes them.
    """

    def __init__(self, generation: Generation, text: AnswerText, timer: RequestTimer) -> None:
        self.completion_tokens = 0
        """Tokens drawn so far, the end-of-sequence token included."""
        self._generation = generation
        self._text = text
        self._timer = timer
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage:
        """Where the prompt's rows came from; known from the first piece on."""
        assert self._usage is not None, "no output yet"
        return self._usage

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces that hold something; the last has a finish reason.

        Raises:
            EngineFailedError: the engine failed meanwhile.
            ShuttingDownError: the server was shut down meanwhile.
        """
        try:
            async for output in self._generation:
                piece = self._take(output)
                if piece.text or piece.tokens or piece.finish_reason:
                    yield piece
                if piece.finish_reason:
                    return
        except EngineFailedError:
            self._timer.end(Outcome.ERROR)
            raise

    def close(self) -> None:
        """Abort what is not finished; safe to call again."""
        self._generation.close()
        self._timer.end(Outcome.ABORT)

    def _take(self, output: StepOutput) -> Piece:
        self._timer.output(output)
        if output.usage is not None:
            self._usage = output.usage
        self.completion_tokens += 1
        piece = self._text.push(output)
        if piece.finish_reason is not None:
            self._generation.stop()
            self._timer.end(Outcome(piece.finish_reason))
        return piece
