"""When each call of a load is sent: how many at once or how many a second, and the pauses inside sessions.

Of the calls that may start, the first of the load starts. A call may start when its session's call before it has ended
and the session has paused.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from irminsul.bench.load import Load
from irminsul.errors import InputError

EXPONENTIAL = "exponential"
_LEAST_RATE = 0.001
_MOST_DIGITS = 15

Send: TypeAlias = Callable[[int], Awaitable[None]]
"""Sends a call, given its index; returns when it has ended."""


@dataclass(frozen=True)
class AtOnce:
    """A closed loop: as soon as a request ends, the next one starts."""

    requests: int
    """In flight, unless sessions keep calls back."""

    def __str__(self) -> str:
        return f"{self.requests} at once"


@dataclass(frozen=True)
class PerSecond:
    """An open loop: requests arrive by a Poisson process, however many are in flight."""

    rate: float
    """Requests a second."""

    def __str__(self) -> str:
        return f"{self.rate:g} a second"


Pace: TypeAlias = AtOnce | PerSecond


@dataclass(frozen=True)
class ThinkTime:
    """How long a session pauses before each of its calls but the first."""

    mean_s: float
    exponential: bool = False
    """Drawn from an exponential distribution; else always the mean."""

    def __str__(self) -> str:
        return f"{EXPONENTIAL}:{self.mean_s:g}" if self.exponential else f"{self.mean_s:g}"

    def draw(self, calls: int, seed: int) -> list[float]:
        """Return seconds for each call of a load; the same seed gives the same."""
        rng = random.Random(f"think {seed}")  # noqa: S311
        return [rng.expovariate(1 / self.mean_s) if self.exponential else self.mean_s for _ in range(calls)]


def parse_think_time(text: str) -> ThinkTime:
    """Read ``SECONDS`` or ``exponential:MEAN``; InputError if it is neither."""
    kind, _, mean = text.rpartition(":")
    # The mean of what is drawn is above 0; no pause is written 0.
    seconds = _positive(mean, zero=not kind)
    if kind not in ("", EXPONENTIAL) or seconds is None:
        raise InputError(f"a think time is written like 0, 1.5 or {EXPONENTIAL}:1.5 (seconds), got {text!r}")
    return ThinkTime(seconds, exponential=bool(kind))


def parse_paces(concurrency: str | None, arrival_rate: str | None) -> tuple[Pace, ...]:
    """Read numbers separated by commas, of one of the two; one request at once if neither is given.

    Raises:
        InputError: both are given, or something is no such number.
    """
    if concurrency is not None and arrival_rate is not None:
        raise InputError("give --concurrency (a closed loop) or --arrival-rate (an open one), not both")
    if arrival_rate is not None:
        rates = [_positive(text) or 0.0 for text in arrival_rate.split(",")]
        if min(rates) < _LEAST_RATE:
            raise InputError(
                f"arrival rates are numbers of at least {_LEAST_RATE} (requests a second), separated by commas, got "
                f"{arrival_rate!r}"
            )
        return tuple(map(PerSecond, dict.fromkeys(rates)))
    text = "1" if concurrency is None else concurrency
    counts = [_count(part.strip()) for part in text.split(",")]
    if min(counts) < 1:
        raise InputError(f"concurrencies are whole numbers of at least 1, separated by commas, got {text!r}")
    return tuple(AtOnce(count) for count in dict.fromkeys(counts))


def arrivals(calls: int, rate: float, seed: int) -> list[float]:
    """Return the seconds at which calls arrive, ascending: a Poisson process of that rate."""
    rng = random.Random(f"arrivals {seed}")  # noqa: S311
    return list(accumulate(rng.expovariate(rate) for _ in range(calls)))


async def replay(load: Load, pace: Pace, think_time: ThinkTime, seed: int, send: Send) -> None:
    """Send all calls of a load; return when the last has ended."""
    pauses = think_time.draw(len(load.calls), seed)
    if isinstance(pace, AtOnce):
        await _closed(load.predecessors, pace.requests, pauses, send)
    else:
        await _open(load.predecessors, arrivals(len(load.calls), pace.rate, seed), pauses, send)


async def _closed(predecessors: Sequence[int | None], at_once: int, pauses: Sequence[float], send: Send) -> None:
    followers = {before: index for index, before in enumerate(predecessors) if before is not None}
    ready: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
    for index, before in enumerate(predecessors):
        if before is None:
            ready.put_nowait(index)
    left = end = len(predecessors)
    workers = min(at_once, end)

    async def worker() -> None:
        nonlocal left
        while (index := await ready.get()) != end:
            await send(index)
            follower = followers.get(index)
            if follower is not None:
                _put_later(ready, follower, pauses[follower])
            left -= 1
            if left == 0:
                for _ in range(workers):
                    ready.put_nowait(end)

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(worker())


def _put_later(ready: asyncio.PriorityQueue[int], index: int, seconds: float) -> None:
    if seconds > 0:
        asyncio.get_running_loop().call_later(seconds, ready.put_nowait, index)
    else:
        # At once: otherwise a later call of the load might be taken first.
        ready.put_nowait(index)


async def _open(
    predecessors: Sequence[int | None], arrive: Sequence[float], pauses: Sequence[float], send: Send
) -> None:
    began = asyncio.get_running_loop().time()
    ended = [asyncio.Event() for _ in predecessors]

    async def one(index: int, before: int | None) -> None:
        await asyncio.sleep(began + arrive[index] - asyncio.get_running_loop().time())
        if before is not None:
            await ended[before].wait()
            await asyncio.sleep(pauses[index])
        await send(index)
        ended[index].set()

    async with asyncio.TaskGroup() as group:
        for index, before in enumerate(predecessors):
            group.create_task(one(index, before))


def _count(text: str) -> int:
    """Read a whole number; 0 if it is none. Python itself refuses thousands of digits."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _positive(text: str, *, zero: bool = False) -> float | None:
    """Read a finite number above 0 (or 0, if it may be that); None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and (value > 0 or (zero and value == 0)) else None
