"""Text to measure on that every Python carries: pages of its reference, and sources of its library.

Blocks, whose rows are compared, come from the pages; what surrounds them comes from the sources, so that no block
stands in its own surroundings. Both differ a little between versions of Python; results name the version.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from irminsul.errors import InputError

MODULES = (
    *("argparse", "asyncio.base_events", "bdb", "configparser", "csv", "dataclasses", "difflib", "dis", "doctest"),
    *("enum", "fractions", "ftplib", "functools", "gettext", "http.client", "http.cookiejar", "inspect", "ipaddress"),
    *("logging", "mailbox", "optparse", "pdb", "pickle", "platform", "pprint", "random", "shutil", "smtplib", "socket"),
    *("statistics", "subprocess", "tempfile", "threading", "traceback", "urllib.parse", "urllib.request", "zipfile"),
)
"""Modules of the standard library whose sources surround blocks: about 400,000 tokens."""


@dataclass(frozen=True, eq=False)
class Material:
    """Token ids to cut texts from."""

    pages_T: Tensor
    """int64; blocks come from here."""
    sources_T: Tensor
    """int64; surroundings come from here."""

    def passages(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw pieces of the pages that do not overlap: int64 [count, length].

        Raises InputError if there are not so many.
        """
        return _pieces(self.pages_T, count, length, generator)

    def surroundings(self, length: int, generator: torch.Generator) -> Tensor:
        """Draw a piece of the sources at any place: int64 [length]; pieces of two calls may overlap.

        Raises InputError if the sources are shorter.
        """
        room = len(self.sources_T) - length
        if room < 0:
            raise InputError(f"{length} tokens of surrounding text were asked for, but there are {len(self.sources_T)}")
        start = int(torch.randint(room + 1, (1,), generator=generator))
        return self.sources_T[start : start + length]


def python_material(tokenizer: Any) -> Material:  # noqa: ANN401 - transformers is untyped
    """Encode the texts that come with this Python, without special tokens."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    pages = [text for _, text in sorted(topics.items())]
    return Material(_encode(tokenizer, pages), _encode(tokenizer, [_source(name) for name in MODULES]))


def _encode(tokenizer: Any, texts: list[str]) -> Tensor:  # noqa: ANN401 - transformers is untyped
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    return torch.tensor([token for text in ids for token in text])


def _source(name: str) -> str:
    """Read the source of a module without running it."""
    spec = find_spec(name)
    assert spec is not None, name
    assert spec.origin is not None, name
    return Path(spec.origin).read_text(encoding="utf-8")


def _pieces(tokens_T: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    available = len(tokens_T) // length
    if available < count:
        raise InputError(f"{count} passages of {length} tokens were asked for, but the pages hold {available}")
    chosen = torch.randperm(available, generator=generator)[:count]
    return tokens_T[: available * length].view(available, length)[chosen]
