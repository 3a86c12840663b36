"""What does matching and planning cost?

    python benchmarks/matching.py [--quick] [--json FILE]

Prediction (written before the first run; the figures of an earlier prototype on real logs stand behind it):

* insert + lookup of every matcher together: at least 15 M tokens/s on one core; fixed128 and cdc the fastest, S1 and
  anchored somewhat slower, winnow the slowest and slower the smaller its guarantee.
* winnow64 and make_plan for a prompt of 32K tokens, all of it tail, beside 2M cached tokens: median at most 5 ms, p99
  at most 15 ms.
* prompts made to hurt (one token, period 7, 128K of padding), also where the registry holds such text: each within ten
  times that, because a search makes a bounded number of comparisons a token.

Protocol: one core (pinned), compiled functions warmed up, garbage collector off while a call is timed. Agent-like
prompts are assembled from a pool of shared documents (some cut short) and text of their own, in sessions that append;
a session's later call has the earlier one as exact prefix, which is what ``start`` says. Rows lie in shuffled pages
of 16, as in a pool that has been in use for a while. Throughput: each call is looked up, then inserted; rounds with
the matchers interleaved, median of the rounds. Latency: one sample a call. Wall clock, and beside it CPU time: where
they differ, other processes had the core. Reported: p20, p50, p80, p99. Last line: one JSON object.
"""

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
from numpy.typing import NDArray

from irminsul.namespace import Namespace
from irminsul.plan import ReusePlan, ReusePolicy, SegmentKind, make_plan
from irminsul.registry import MATCHERS, Registry

SCOPE = Namespace()
VOCABULARY = 128_000
USER, ASSISTANT, TOOL, END = SPECIAL = (128_001, 128_002, 128_003, 128_004)
PAGE = 16
TARGETS_MS = {"p50": 5.0, "p99": 15.0}
PATHOLOGICAL_FACTOR = 10
Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Call:
    """One request: its tokens, the slots of their rows, and where its exact prefix ends."""

    tokens: Tokens
    slots: Tokens
    start: int


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    corpus_tokens: int = 2_000_000
    rounds: int = 5
    prompts: int = 400
    repeats: int = 100


class Corpus:
    """Agent-like text: documents that prompts share, and text that nobody shares."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        lengths = self.rng.lognormal(6.3, 0.9, 600).clip(40, 6000).astype(int)
        self.documents = [self.fresh(int(length)) for length in lengths]
        self.systems = [self.fresh(2500) for _ in range(4)]

    def fresh(self, size: int) -> Tokens:
        """Return text with a natural spread of frequent and rare tokens."""
        return ((self.rng.zipf(1.2, size) * 7919) % VOCABULARY).astype(np.int32)

    def tool_result(self) -> Tokens:
        """Return a document from the pool, popular ones more often, some of them only in part."""
        popularity = int(self.rng.zipf(1.15)) % len(self.documents)
        document = self.documents[popularity]
        if self.rng.random() < 0.25:
            begin = int(self.rng.integers(0, len(document)))
            document = document[begin : begin + 800]
        return document

    def opening(self) -> Tokens:
        """Return a header of its own and one of the shared system prompts."""
        return _join(self.fresh(int(self.rng.integers(20, 80))), self.systems[int(self.rng.integers(4))])

    def turn(self) -> Tokens:
        """Return what a step of an agent appends: thoughts and a call of its own, then a result."""
        own = int(self.rng.integers(40, 300))
        return _join([ASSISTANT], self.fresh(own), [END, TOOL], self.tool_result(), [END, USER])

    def prompt(self, size: int) -> Tokens:
        """Return a whole prompt of ``size`` tokens."""
        parts = [self.opening()]
        while sum(map(len, parts)) < size:
            parts.append(self.turn())
        return _join(*parts)[:size]

    def calls(self, n_tokens: int, slots: Tokens) -> list[Call]:
        """Return calls of sessions that append until they have 30K tokens; together they have ``n_tokens`` rows."""
        calls: list[Call] = []
        used = 0
        while used < n_tokens:
            text = self.opening()
            session_slots = slots[:0]
            while len(text) < 30_000 and used < n_tokens:
                start = len(session_slots)
                text = _join(text, *(self.turn() for _ in range(int(self.rng.integers(1, 4)))))
                new = len(text) - start
                session_slots = np.concatenate([session_slots, slots[used : used + new]])
                used += new
                calls.append(Call(text, session_slots, start))
        return calls


def shuffled_slots(n: int, seed: int) -> Tokens:
    """Return ``n`` slots, a multiple of the page size, in whole pages of random order."""
    assert n % PAGE == 0, n
    pages = np.random.default_rng(seed).permutation(n // PAGE)
    return (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1).astype(np.int32)


def _join(*parts: Tokens | list[int]) -> Tokens:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the garbage collector out of the measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p20, p50, p80 and p99 in milliseconds."""
    values = 1e3 * np.percentile(seconds, [20, 50, 80, 99])
    return {f"p{name}": round(float(value), 3) for name, value in zip((20, 50, 80, 99), values, strict=True)}


class Stopwatch:
    """Adds up wall clock and CPU time, in seconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Time one call."""
        cpu, wall = time.thread_time(), time.perf_counter()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)


# -- (a) throughput --


def measure_throughput(corpus: Corpus, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Replay all calls through every matcher; return M tokens/s and what was found."""
    room = sizes.corpus_tokens + 40_000
    calls = corpus.calls(sizes.corpus_tokens, shuffled_slots(room, 1))
    rounds: dict[str, list[dict[str, float]]] = {matcher: [] for matcher in MATCHERS}
    for _ in range(sizes.rounds):
        for matcher in MATCHERS:
            rounds[matcher].append(_replay(matcher, room, calls))
    return {
        matcher: {name: round(float(np.median([facts[name] for facts in seen])), 1) for name in seen[0]}
        for matcher, seen in rounds.items()
    }


def _replay(matcher: str, room: int, calls: list[Call]) -> dict[str, float]:
    registry = Registry(room, matcher=matcher, seed=7, special_tokens=SPECIAL)
    lookup, insert = Stopwatch(), Stopwatch()
    covered = 0
    with quiet():
        for call in calls:
            with lookup.lap():
                runs = registry.find(SCOPE, call.tokens, call.start)
            with insert.lap():
                registry.add(SCOPE, call.tokens, call.slots, call.start)
            covered += sum(run.length for run in runs)
    tail = sum(len(call.tokens) - call.start for call in calls)
    return {
        "lookup_M_per_s": tail / sum(lookup.wall) / 1e6,
        "insert_M_per_s": tail / sum(insert.wall) / 1e6,
        "lookup_M_per_cpu_s": tail / sum(lookup.cpu) / 1e6,
        "insert_M_per_cpu_s": tail / sum(insert.cpu) / 1e6,
        "both_M_per_cpu_s": tail / (sum(lookup.cpu) + sum(insert.cpu)) / 1e6,
        "found_percent": 100 * covered / tail,
        "entries_per_1000": 1000 * len(registry) / tail,
        "bytes_per_slot": registry.nbytes / room,
    }


# -- (b) latency --


def match_and_plan(registry: Registry, prompt: Tokens) -> ReusePlan:
    """Do what a server does for a prompt whose prefix holds nothing."""
    runs = registry.find(SCOPE, prompt, 0)
    return make_plan(len(prompt), prefix=0, runs=runs, policy=ReusePolicy())


def measure_latency(registry: Registry, prompts: list[Tokens]) -> dict[str, object]:
    """Time each prompt once; return milliseconds and what the plans reuse."""
    watch = Stopwatch()
    shifted = 0
    runs = 0
    for prompt in prompts[:3]:
        match_and_plan(registry, prompt)
    with quiet():
        for prompt in prompts:
            with watch.lap():
                plan = match_and_plan(registry, prompt)
            shifted += plan.tokens(SegmentKind.SHIFTED)
            runs += len(plan.runs)
    return {
        "wall_ms": percentiles(watch.wall),
        "cpu_ms": percentiles(watch.cpu),
        "shifted_percent": round(100 * shifted / sum(map(len, prompts)), 1),
        "runs": round(runs / len(prompts), 1),
        "samples": len(prompts),
    }


def noisy_padding(n: int, seed: int) -> Tokens:
    """Return padding with another token about every hundred."""
    rng = np.random.default_rng(seed)
    tokens = np.full(n, 3, dtype=np.int32)
    at = rng.integers(0, n, n // 100)
    tokens[at] = rng.integers(0, VOCABULARY, len(at))
    return tokens


PATHOLOGICAL: dict[str, tuple[int, Callable[[int, int], Tokens]]] = {
    "one_token_32k": (32_768, lambda n, _: np.full(n, 3, dtype=np.int32)),
    "period_7_32k": (32_768, lambda n, _: np.resize(np.arange(7, dtype=np.int32), n)),
    "padding_128k": (131_072, lambda n, _: np.full(n, 3, dtype=np.int32)),
    "noisy_padding_128k": (131_072, noisy_padding),
}
STEPS = {"held": 10**9, "held_in_steps_of_64": 64, "held_in_steps_of_16": 16}
"""How text like the prompt came into the registry: in one piece, or in increments."""


def fill(corpus: Corpus, sizes: Sizes, extra: list[Tokens], step: int) -> Registry:
    """Return a registry of the corpus and of further sequences, announced in steps."""
    room = sizes.corpus_tokens + 40_000
    slots = shuffled_slots(room + sum(map(len, extra)), 1)
    registry = Registry(len(slots), matcher="winnow64", seed=7)
    for call in corpus.calls(sizes.corpus_tokens, slots):
        registry.add(SCOPE, call.tokens, call.slots, call.start)
    used = room
    for text in extra:
        held = 0
        for end in [*range(step, len(text), step), len(text)]:
            registry.add(SCOPE, text[:end], slots[used : used + end], held)
            held = end
        used += len(text)
    return registry


def measure_pathological(seed: int, sizes: Sizes) -> dict[str, dict[str, object]]:
    """Time each kind of prompt against a registry without such text and against registries with it."""
    results: dict[str, dict[str, object]] = {}
    plain = fill(Corpus(seed), sizes, [], 1)
    for kind, (size, make) in PATHOLOGICAL.items():
        prompts = [_join([VOCABULARY - i], make(size, 1000 + i)) for i in range(sizes.repeats)]
        results[f"{kind}/not_held"] = measure_latency(plain, prompts)
        for name, step in STEPS.items():
            held = [_join([VOCABULARY - 500 - i], make(32_767, i)) for i in range(3)]
            results[f"{kind}/{name}"] = measure_latency(fill(Corpus(seed), sizes, held, step), prompts)
    return results


# -- report --


def machine() -> dict[str, object]:
    """Say what this ran on."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d"),
    }


def within(result: dict[str, object], factor: int) -> dict[str, bool]:
    """Say whether median and p99 keep ``factor`` times the targets, by the wall clock and by CPU time."""
    verdicts = {}
    for clock in ("wall", "cpu"):
        measured = result[f"{clock}_ms"]
        assert isinstance(measured, dict)
        verdicts[clock] = all(measured[name] <= factor * limit for name, limit in TARGETS_MS.items())
    return verdicts


def print_latency(name: str, result: dict[str, object], factor: int) -> None:
    """Print one line of the latency table."""
    wall = " ".join(f"{value:8.2f}" for value in result["wall_ms"].values())
    cpu = " ".join(f"{value:8.2f}" for value in result["cpu_ms"].values())
    verdict = " ".join(f"{clock} {'ok' if kept else 'MISSED'}" for clock, kept in within(result, factor).items())
    print(f"{name:40} {wall} |{cpu} | {result['shifted_percent']:5} % {result['runs']:5} runs  {verdict}", flush=True)


def main() -> None:
    """Measure, print, and write the JSON object."""
    parser = argparse.ArgumentParser(description="What does matching and planning cost?")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the corpus and few samples, to see it run")
    arguments = parser.parse_args()
    sizes = Sizes(200_000, 1, 20, 5) if arguments.quick else Sizes()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    report: dict[str, object] = {"benchmark": "matching", "quick": arguments.quick, "machine": machine()}

    measure_throughput(Corpus(1), Sizes(50_000, 1))  # warm up
    throughput = measure_throughput(Corpus(2), sizes)
    print(" " * 12 + " ".join(f"{name:>18}" for name in throughput["cdc"]))
    for matcher, row in throughput.items():
        print(f"{matcher:12}" + " ".join(f"{value:18}" for value in row.values()), flush=True)

    print(f"\n{'milliseconds':40} wall p20, p50, p80, p99 | CPU p20, p50, p80, p99 | reused")
    corpus = Corpus(3)
    registry = fill(corpus, sizes, [], 1)
    prompts = [corpus.prompt(32_768) for _ in range(sizes.prompts)]
    agent = measure_latency(registry, prompts)
    print_latency("agent_32k", agent, 1)
    pathological = measure_pathological(3, sizes)
    for name, result in pathological.items():
        print_latency(name, result, PATHOLOGICAL_FACTOR)

    report |= {
        "throughput": throughput,
        "agent_32k": agent,
        "pathological": pathological,
        "targets_ms": TARGETS_MS,
        "agent_within_targets": within(agent, 1),
        "pathological_within_10x": {name: within(result, PATHOLOGICAL_FACTOR) for name, result in pathological.items()},
    }
    line = json.dumps(report)
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
