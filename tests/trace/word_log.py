"""A token log made of words: text that a test can read, spans and threads included."""

from collections.abc import Iterator, Sequence

import numpy as np

from irminsul.namespace import Namespace
from irminsul.trace.records import CallInfo, Span, SpanKind, TokenisedCall, Tokens

Part = tuple[SpanKind, str]
GENERATION = "<assistant>"


class CallList:
    """What every token log that is a list of calls has."""

    calls: list[TokenisedCall]

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> TokenisedCall:
        return self.calls[index]

    def __iter__(self) -> Iterator[TokenisedCall]:
        return iter(self.calls)

    def prompt_tokens(self) -> int:
        return sum(len(call.tokens) for call in self.calls)


class WordLog(CallList):
    """Prompts whose tokens are characters, so that decoding is exact."""

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self.notes = notes
        self.special_ids = np.array([ord("<")], dtype=np.int32)
        self.calls: list[TokenisedCall] = []

    def add(
        self, *parts: Part, thread: int = 0, reply: str | None = None, tenant: str = "", file: str = "log"
    ) -> "WordLog":
        """Append a call; a generation prompt is put at its end."""
        spans: list[Span] = []
        text = ""
        for message, (kind, words) in enumerate((*parts, (SpanKind.TEMPLATE, GENERATION))):
            own = None if kind in (SpanKind.TEMPLATE, SpanKind.TOOLS) else message
            spans.append(Span(kind, len(text), len(text) + len(words), own))
            text += words
        info = CallInfo(file, len(self.calls) + 1, namespace=Namespace(tenant=tenant))
        encoded = None if reply is None else encode(reply)
        self.calls.append(TokenisedCall(info, encode(text), spans, thread, encoded))
        return self

    def decode(self, tokens: Tokens) -> str:
        return "".join(map(chr, tokens.tolist()))


def encode(text: str) -> Tokens:
    return np.array([ord(char) for char in text], dtype=np.int32)


def prose(seed: int, words: int) -> str:
    """Text without digits or slashes that repeats nothing."""
    random = np.random.default_rng(seed)
    letters: Sequence[str] = list("abcdefghijklmnopqrstuvwxyz")
    return " ".join("".join(random.choice(letters, random.integers(3, 9))) for _ in range(words))
