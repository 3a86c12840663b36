"""The ceiling of recovery: how much of a prompt beyond its exact prefix has been seen before, by brute force.

A token of the tail counts if it lies in a run of at least ``min_run`` tokens that stands, at any place, in the prompt
or output of an earlier request of the same namespace. The tail begins where the exact prefix ends, as an engine with
prefix caching alone measured it; a run may begin before. Two kinds of token never count, because every plan computes
them: those at absolute positions below ``carve_out`` and the last one of the prompt.

An engine recovers less where a run begins behind a shifted hit, whose rows are never copied again, and where the piece
of a run that is left is shorter than ``min_run``. Nothing of the matcher is used here, so that the two can disagree.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from irminsul.plan import ReusePolicy

_ENGINE = ReusePolicy()
"""What the engine does by default; counted with other lengths, tokens would seem to be missing."""


class Oracle:
    """Remembers every window of the texts it was shown; memory grows with what is new in them.

    Args:
        min_run: shortest run that counts, in tokens.
        carve_out: positions below this never count.
    """

    def __init__(self, *, min_run: int = _ENGINE.min_run, carve_out: int = _ENGINE.carve_out) -> None:
        self._min_run = min_run
        self._carve_out = carve_out
        self._seen: defaultdict[str, set[bytes]] = defaultdict(set)

    def remember(self, namespace: str, tokens: Sequence[int]) -> None:
        """Take in the prompt and output of a request that has ended."""
        self._seen[namespace].update(self._windows(tokens))

    def reusable(self, namespace: str, prompt: Sequence[int], *, prefix: int) -> int:
        """Count the tokens that reuse beyond an exact prefix of ``prefix`` tokens could save at most."""
        seen = self._seen[namespace]
        covered = np.zeros(len(prompt), dtype=np.bool_)
        for start, window in enumerate(self._windows(prompt)):
            if window in seen:
                covered[start : start + self._min_run] = True
        return int(covered[max(prefix, self._carve_out) : len(prompt) - 1].sum())

    def _windows(self, tokens: Sequence[int]) -> list[bytes]:
        """Return every run of exactly ``min_run`` tokens, by start."""
        ids = np.asarray(tokens, dtype=np.int32)
        return [ids[start : start + self._min_run].tobytes() for start in range(len(ids) - self._min_run + 1)]
