"""The tokens that are trained and measured on: files of uint16 (little endian), in sequences of one length a file."""

import itertools
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from irminsul.errors import InputError
from training.config import TrainingConfig

Sequences = NDArray[np.uint16]
"""[sequences, tokens]."""


@dataclass(frozen=True, eq=False)
class TrainingText:
    """All tokens of a run."""

    long: Sequences
    short: Sequences
    held_out: Mapping[str, Sequences]
    """Long sequences by kind."""

    @classmethod
    def read(cls, folder: Path, config: TrainingConfig, vocabulary: int) -> "TrainingText":
        """Read train_8k*.bin[.xz], train_2k*.bin[.xz] and eval_KIND.bin[.xz].

        Args:
            folder: where they lie.
            config: says how long a sequence is.
            vocabulary: every token is below it.

        Raises:
            InputError: a kind of file is missing, or a file is damaged, not whole sequences, or of other tokens.
        """
        return cls(
            long=_joined(folder, "train_8k*.bin*", config.long, vocabulary),
            short=_joined(folder, "train_2k*.bin*", config.short, vocabulary),
            held_out={
                path.name.split(".")[0].removeprefix("eval_"): read_sequences(path, config.long, vocabulary)
                for path in _files(folder, "eval_*.bin*")
            },
        )

    def watched(self, config: TrainingConfig) -> list[Tensor]:
        """Beginnings of long sequences from all over the text, int64 [watched_length] each."""
        step = max(1, len(self.long) // config.watched)
        return [_tokens(row[: config.watched_length]) for row in self.long[::step][: config.watched]]

    def batches(self, tokens_per_step: int, skip: int) -> Iterator[Tensor]:
        """Shuffled batches of one length each, int64 [B, T], for ever; the first ``skip`` are left out.

        Raises:
            InputError: a pool of sequences is too small for a batch.
        """
        for pool in (self.long, self.short):
            if pool.size < tokens_per_step:
                raise InputError(f"{len(pool)} sequences of {pool.shape[1]} are fewer tokens than {tokens_per_step}")
        return itertools.islice(self._all_batches(tokens_per_step), skip, None)

    def _all_batches(self, tokens_per_step: int) -> Iterator[Tensor]:
        for epoch in itertools.count():
            rng = np.random.default_rng(epoch)
            order = [rows for pool in (self.long, self.short) for rows in _cut(pool, tokens_per_step, rng)]
            for at in rng.permutation(len(order)):
                yield _tokens(order[at])


def read_sequences(path: Path, length: int, vocabulary: int) -> Sequences:
    """Read one file; InputError if it is damaged, not whole sequences, or has a token that is not in the vocabulary."""
    try:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except (OSError, lzma.LZMAError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not raw or len(raw) % (2 * length):
        raise InputError(f"{path} has {len(raw)} bytes, which are not whole sequences of {length} tokens of 2 bytes")
    tokens = np.frombuffer(raw, dtype="<u2").reshape(-1, length)
    if tokens.max() >= vocabulary:
        raise InputError(f"{path} has the token {tokens.max()}, but the vocabulary has {vocabulary}")
    return tokens


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if not found:
        raise InputError(f"{folder} has no {pattern}")
    return found


def _joined(folder: Path, pattern: str, length: int, vocabulary: int) -> Sequences:
    return np.concatenate([read_sequences(path, length, vocabulary) for path in _files(folder, pattern)])


def _cut(pool: Sequences, tokens_per_step: int, rng: np.random.Generator) -> list[Sequences]:
    """Shuffle a pool and cut it into whole batches."""
    n = tokens_per_step // pool.shape[1]
    rows = rng.permutation(len(pool))
    return [pool[rows[at : at + n]] for at in range(0, len(rows) - n + 1, n)]


def _tokens(ids: Sequences) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))
