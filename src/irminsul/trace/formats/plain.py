"""Prompts that are rendered already: ``{"prompt": ...}``, ``{"text": ...}``, ``{"input_ids": ...}`` a line.

The value is a text, a list of token ids, or a list of several of either (a batch: one call each), as the completions
APIs and SGLang's ``/generate`` take them. Token ids also stand under ``prompt_token_ids``, ``prompt_ids`` and
``token_ids``, and are taken before text. Bodies may stand in what a proxy puts around them (see ``fields.unwrap``).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from irminsul.trace.fields import call_info, unwrap
from irminsul.trace.formats.log_file import LogFile, each_record
from irminsul.trace.lines import LineError, kind_of
from irminsul.trace.records import LoggedCall, Tokens

NAMES = ("input_ids", "prompt_token_ids", "prompt_ids", "token_ids", "prompt", "text")
_MAX_ID = 2**31


class PlainFormat:
    """Reads prompts as text or token ids."""

    name = "plain"

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        del text
        try:
            return record is not None and bool(_present(unwrap(record).body))
        except LineError:
            return False

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format."""

        def parse(record: dict[str, Any], line: int) -> Iterator[LoggedCall]:
            body, response, around = unwrap(record)
            name = _present(body)
            if name is None:
                raise LineError(f"holds no prompt: none of {', '.join(NAMES)} is there")
            prompts = prompts_of(body[name], name)
            info = call_info(file.name, line, [*around, body])
            reply = _reply(response) if len(prompts) == 1 else None
            for prompt in prompts:
                yield LoggedCall(info, prompt, reply if isinstance(prompt, str) else None)

        return each_record(file, parse)


def prompts_of(value: object, name: str) -> list[str | Tokens]:
    """Return the prompts in a field: one text, one list of token ids, or a list of either.

    Raises:
        LineError: it is none of these, or a prompt is empty.
    """
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = [_prompt(prompt, name) for prompt in (value if several else [value])]  # type: ignore[attr-defined]
    if not all(len(prompt) for prompt in prompts):
        raise LineError(f"{name!r} is empty")
    return prompts


def token_ids(value: object, name: str) -> Tokens:
    """Return token ids as an array; LineError if they are no list of ids."""
    if not isinstance(value, list):
        raise LineError(f"{name!r} must be a list of token ids, got {kind_of(value)}")
    for token in value:
        # bool is an int in Python, and no token id.
        if type(token) is not int:
            raise LineError(f"{name!r} must hold token ids, got {kind_of(token)}")
        if not 0 <= token < _MAX_ID:
            raise LineError(f"{name!r} holds {token}, which is no token id")
    return np.array(value, dtype=np.int32)


def _present(body: dict[str, Any]) -> str | None:
    return next((name for name in NAMES if isinstance(body.get(name), str | list)), None)


def _prompt(value: object, name: str) -> str | Tokens:
    return value if isinstance(value, str) else token_ids(value, name)


def _reply(response: object) -> str | None:
    if isinstance(response, str):
        return response
    try:
        text = response["choices"][0]["text"]  # type: ignore[index]
    except (LookupError, TypeError):
        return None
    return text if isinstance(text, str) else None
