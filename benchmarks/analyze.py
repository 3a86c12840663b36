"""How fast is the analyser, where does its time go, and what memory does it need?

    python benchmarks/analyze.py [FILES...] [--synthetic 31M] [--token-cache DIR] [--profile]

Prediction (written before the first run of this script): a winnow pass, from pieces of tokens to plans and back into
the cache, serves at least 5M prompt tokens/s on one core after tokenising; all passes over 31M tokens take under a
minute; 150M tokens need less than 4 GiB.

Protocol: CPU time of each pass of ``analyse`` in this process (one thread), compiled functions warmed up on a small
log first. Peak memory is the process's. Files are read with their tokens cached, if a directory is given and this is
not the first run; reading is timed apart. Without files a synthetic log is served: sessions that append, half of them
on the documents of others. ``--profile`` adds the ten functions with most time of their own. Last line: one JSON
object.
"""

import argparse
import cProfile
import json
import platform
import pstats
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba
import numpy as np

from irminsul.trace.analysis import Analysis, AnalysisConfig, analyse
from irminsul.trace.command import parse_tokens
from irminsul.trace.cost import MEASURED_H200
from irminsul.trace.records import CallInfo, Span, SpanKind, TokenisedCall, TokenLog, Tokens
from irminsul.trace.replay import Progress
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.tokenise import load_tokeniser

VOCABULARY = 129_280
DOCUMENTS, TURNS, FIRST = 2000, 20, 3000


class SyntheticLog:
    """Sessions of 20 calls. Each call appends a document that other sessions read too, or text of its own."""

    notes = ()
    special_ids = np.array([0], dtype=np.int32)

    def __init__(self, prompt_tokens: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._documents = [self._text(int(n)) for n in self._random.integers(100, 1500, DOCUMENTS)]
        self._system = self._text(FIRST)
        self._sessions: list[list[Tokens]] = []
        self._total = 0
        while self._total < prompt_tokens:
            parts = [self._next_part() for _ in range(TURNS)]
            self._sessions.append(parts)
            self._total += sum(FIRST + int(n) for n in np.cumsum([len(part) for part in parts]))

    def _text(self, length: int) -> Tokens:
        return self._random.integers(1, VOCABULARY, length).astype(np.int32)

    def _next_part(self) -> Tokens:
        if self._random.random() < 0.5:
            return self._documents[int(self._random.integers(DOCUMENTS))]
        return self._text(int(self._random.integers(50, 800)))

    def __len__(self) -> int:
        """See TokenLog."""
        return TURNS * len(self._sessions)

    def __getitem__(self, index: int) -> TokenisedCall:
        """See TokenLog."""
        # Sessions are served side by side, eight at a time.
        block, place = divmod(index, 8 * TURNS)
        width = min(8, len(self._sessions) - 8 * block)
        turn, column = divmod(place, width)
        session = 8 * block + column
        tokens = np.concatenate([self._system, *self._sessions[session][: turn + 1]])
        return TokenisedCall(CallInfo("made", index + 1), tokens, (Span(SpanKind.TEXT, 0, len(tokens)),), session)

    def __iter__(self) -> Iterator[TokenisedCall]:
        """See TokenLog."""
        return (self[i] for i in range(len(self)))

    def prompt_tokens(self) -> int:
        """See TokenLog."""
        return self._total

    def decode(self, tokens: Tokens) -> str:
        """See TokenLog."""
        return " ".join(map(str, tokens.tolist()))


class TimedStages:
    """CPU seconds of each pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        """See analysis.Stages."""
        start = time.process_time()
        yield lambda _: None
        self.seconds[name] = time.process_time() - start


def analysed(log: TokenLog) -> tuple[Analysis, TimedStages]:
    """Run all passes."""
    stages = TimedStages()
    return analyse(log, AnalysisConfig(), MEASURED_H200, None, stages), stages


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--synthetic", default="31M", type=parse_tokens)
    parser.add_argument("--token-cache", type=Path)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    analysed(SyntheticLog(1))
    start = time.process_time()
    log: TokenLog = (
        read_token_log(options.files, load_tokeniser(), cache=options.token_cache)
        if options.files
        else SyntheticLog(options.synthetic)
    )
    reading = time.process_time() - start
    tokens = log.prompt_tokens()
    profile = cProfile.Profile()
    wall = time.perf_counter()
    if options.profile:
        profile.enable()
    analysis, stages = analysed(log)
    profile.disable()
    wall = time.perf_counter() - wall
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(log):,} calls, {tokens:,} prompt tokens; read or made in {reading:.1f} s CPU")
    for name, seconds in stages.seconds.items():
        print(f"  {name:22} {seconds:8.2f} s  {tokens / seconds / 1e6:7.1f} M tokens/s")
    print(f"  {'all passes':22} {sum(stages.seconds.values()):8.2f} s CPU, {wall:.1f} s wall; peak {peak_gib:.2f} GiB")
    if options.profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(10)
    print(
        json.dumps(
            {
                "calls": len(log),
                "prompt_tokens": tokens,
                "tail_tokens": analysis.totals.tail_tokens,
                "read_cpu_s": round(reading, 2),
                "pass_cpu_s": {name: round(seconds, 3) for name, seconds in stages.seconds.items()},
                "wall_s": round(wall, 2),
                "peak_gib": round(peak_gib, 3),
                "python": platform.python_version(),
                "numba": numba.__version__,
                "numpy": np.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
