"""From token ids to text, one token at a time.

Three rules hold for every tokenizer:

* A character is sent once it is complete: its bytes may be spread over several tokens, and no replacement character
  stands in for it meanwhile.
* Text is decoded with its neighbours on the left, so that a leading space survives where a tokenizer drops it at the
  beginning of a string.
* The pieces together are what decoding all tokens at once gives.

And for stop strings: text that may be the beginning of one is held back, and nothing behind a found one is ever sent.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
# A window without a clean end is cut at this many tokens: real text ends a character long before.
_MAX_WINDOW = 32
_CONTEXT_TOKENS = 8


class Tokenizer(Protocol):
    """What the server needs of a tokenizer; every ``transformers`` tokenizer has it."""

    chat_template: Any

    def __len__(self) -> int:
        """Return the number of token ids, added tokens included."""

    def get_vocab(self) -> dict[str, int]:
        """Return every token's spelling and id."""

    def __call__(self, text: str, *, add_special_tokens: bool = ..., verbose: bool = ...) -> Any:  # noqa: ANN401
        """Encode ``text``; the result holds ``input_ids``."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str:
        """Return the text of ``token_ids``."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return the vocabulary's own spelling of one token; None for an id it does not know."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = ...,
        add_generation_prompt: bool = ...,
        tokenize: bool = ...,
        **template_variables: Any,  # noqa: ANN401 -- whatever the template reads
    ) -> Any:  # noqa: ANN401 -- str or ids, by ``tokenize``
        """Render a conversation."""


class Detokenizer:
    """Turns the token ids of one output into text as they arrive.

    Args:
        tokenizer: decodes; special tokens are skipped.
        prompt_ids: the prompt; its last tokens serve as the context of the first output token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._text = ""
        # Characters of _text that have been sent, and the first window token that has not been sent completely.
        self._sent = self._pending_from = 0
        self._keep_context(list(prompt_ids[-_CONTEXT_TOKENS:]))

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is complete now, often its own, sometimes none."""
        text = self._decode([*self._window, token_id])
        if text == self._text and self._pending_from == len(self._window):
            # A token without text (a skipped special one) gives later tokens no context.
            return ""
        self._window.append(token_id)
        self._text = text
        if text.endswith(REPLACEMENT):
            return self._send_complete()
        piece = text[self._sent :]
        self._keep_context(self._window[self._pending_from :])
        return piece

    def finish(self) -> str:
        """Return what is left: the unfinished bytes, as the tokenizer shows them."""
        piece = self._text[self._sent :]
        self._sent = len(self._text)
        return piece

    def _send_complete(self) -> str:
        """Send all but the character at the end that later tokens may still complete."""
        if len(self._window) - self._pending_from < _MAX_CHARACTER_BYTES:
            return ""
        # The oldest pending byte can no longer become part of a character: what stands before the tail is final.
        end = _complete_length(self._text)
        piece = self._text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._window) > _MAX_WINDOW:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._text = self._decode(self._window)
            self._sent = _complete_length(self._text)
            self._pending_from = 0
        return piece

    def _keep_context(self, token_ids: list[int]) -> None:
        """Make ``token_ids``, all of which have been sent, the window."""
        self._window = token_ids
        self._text = self._decode(token_ids)
        self._sent = len(self._text)
        self._pending_from = len(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _complete_length(text: str) -> int:
    """Length of ``text`` without the replacement characters at its end that one unfinished character can cause."""
    unfinished = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - min(unfinished, _MAX_CHARACTER_BYTES - 1)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    The match that is complete first wins (the longest, if several end together), so how the text was cut into pieces
    does not matter.

    Args:
        stops: strings, none of them empty; may be no string at all.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), stops
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return (text that may be sent, whether a stop string was found right behind it)."""
        self._held += text
        match = self._first_match()
        if match is not None:
            released, self._held = self._held[:match], ""
            return released, True
        keep = self._possible_beginning()
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released, False

    def finish(self) -> str:
        """Return the text held back; no stop string was completed."""
        released, self._held = self._held, ""
        return released

    def _first_match(self) -> int | None:
        """Where the match that ends first begins."""
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0


class TokenSpeller:
    """Text and bytes of single tokens, for log probabilities; remembers what it has spelled.

    Args:
        tokenizer: its vocabulary is spelled.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spelled: dict[int, tuple[str, list[int] | None]] = {}

    def text(self, token_id: int) -> str:
        """Return the token's text; a part of a character shows as a replacement character."""
        return self._spell(token_id)[0]

    def bytes(self, token_id: int) -> list[int] | None:
        """Return the token's UTF-8 bytes, exact for parts of characters too; None where they are unknown."""
        return self._spell(token_id)[1]

    def _spell(self, token_id: int) -> tuple[str, list[int] | None]:
        if token_id not in self._spelled:
            text = self._text_inside(token_id)
            whole = REPLACEMENT not in text
            self._spelled[token_id] = (text, list(text.encode()) if whole else self._raw_bytes(token_id))
        return self._spelled[token_id]

    def _text_inside(self, token_id: int) -> str:
        """Text the token has behind other text: a tokenizer may drop a leading space at the beginning."""
        once, twice = (
            self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for ids in ([token_id], [token_id, token_id])
        )
        return twice[len(once) :]

    def _raw_bytes(self, token_id: int) -> list[int] | None:
        spelling = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelling):
            return [int(match[1], 16)]
        values = [_BYTE_OF_CHARACTER.get(character) for character in spelling]
        known = [value for value in values if value is not None]
        return known if known and len(known) == len(values) else None


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()
