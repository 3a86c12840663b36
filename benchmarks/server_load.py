"""Can the embedded server be left on? Many mixed clients for a long time, some of which hang up, and then too many.

Prediction: after the pool has been filled once, resident memory stays flat within the allocator's noise, because every
table of the engine is allocated at the start; whatever clients do, no slot stays in use or locked behind them.

    python benchmarks/server_load.py [--minutes 2] [--clients 64] [--kill | --kill-from MINUTES] [--json FILE]

``irminsul serve`` runs as a process of its own, with a pool of a quarter of the load's working set. Clients send what
server_traffic.py draws, each its next request a moment after the last one ended. With ``--kill`` three in ten requests
are given up by their client at a random moment: before the first token, or in the middle of a stream. At the end a
burst of more requests than the queue holds arrives on top of it; then the clients leave, and the server is stopped.

The rules, in ``broken_rules``: every request ends within ``--limit-s`` seconds in what must come back for it, or in 429
with Retry-After; a fixed prompt served cold is answered alike at the start, all the time and at the end; no slot is
lost or locked in the end, no thread or file descriptor left; the registry never has more entries than the pool has
slots; memory does not grow. Exit 1 if a rule is broken. ``--leak-kib N`` lets the server keep N KiB of each request:
with enough of it (see MEMORY_TOLERANCE_MIB) the rule about memory must be broken. Needs Linux. The last line is one
JSON object, without the samples.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from irminsul.checkpoints.smollm2 import find_checkpoint
from irminsul.engine.loading import load_tokenizer
from irminsul.errors import InputError
from irminsul.machine import describe_machine
from irminsul.output_files import replace_files, require_writable
from irminsul.reproduce.record import versions
from server_traffic import TENANT_HEADER, Client, Drawn, Messages, text, working_set

MEMORY_TOLERANCE_MIB = 32.0
"""Growth over the last two thirds of a run that is still called flat.

The allocator's noise stays below it (results/server_load.json). A leak of 15 KiB a request, which is less than one
row of the reference model has (68 KiB), exceeds it in an hour of one request a second.
"""
POOL_SHARE = 0.25
"""Of the working set."""
HANG_UP_SHARE = 0.3
RECOVERED_WITHIN_S = 10.0
"""Behind the burst, with all clients gone, a short prompt is answered within it."""
BURST = 3
"""Requests of the burst, in lengths of the queue."""
_KEY = "load-key"
_FILL_TOKENS = 512
_PROBE_SECONDS = 30.0
_PROBE_TOKENS = 16
_THINK_SECONDS = 1.0
_LONGEST_WAIT_BEFORE_HANG_UP_S = 40.0
_START_SECONDS = 300.0
_STOP_SECONDS = 90.0
_MOST_SAMPLES = 400
_PICTURE_POINTS = 120
_HUNG_UP, _STUCK, _BROKEN = "hung up", "stuck", "broken"
# It goes on by itself: where the model is so sure, rounding in a batch changes no token.
PROBE = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday,"

_LEAKING = """
import sys
from irminsul.cli import main
from irminsul.engine.engine import Engine
kept, submit = [], Engine.submit
def keep_some(self, request):
    kept.append(b"x" * ({leak_kib} * 1024))
    submit(self, request)
Engine.submit = keep_some
main()
"""


@dataclass(frozen=True)
class Settings:
    """What is asked for on the command line, and what follows from it."""

    checkpoint: str
    minutes: float
    clients: int
    kill_from: float | None
    """Minutes after which clients hang up; None: never."""
    limit_s: float
    seed: int
    leak_kib: int
    working_set_tokens: int = 0
    pool_tokens: int = 0
    max_waiting: int = 0

    @property
    def sample_seconds(self) -> float:
        """Between two samples."""
        return max(2.0, self.minutes * 60 / _MOST_SAMPLES)


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    kind: str
    status: int | str
    """Of the response, or why there was none."""
    seconds: float
    """From sending to the last byte."""
    expected: bool
    """Whether this is what must come back."""
    ttft_s: float | None = None
    """From sending to the first byte of a stream."""
    text: str = ""
    retry_after: str | None = None
    slow: bool = False
    detail: str = ""

    @property
    def served(self) -> bool:
        """Whether it tells a latency of the server."""
        return self.status == httpx.codes.OK and not self.slow


@dataclass(frozen=True)
class HangUp:
    """When a client gives up: after so many seconds, or so many pieces of the response."""

    seconds: float
    pieces: int


@dataclass(frozen=True)
class Probe:
    """The answer to the fixed prompt in a fresh namespace."""

    minute: float
    seconds: float
    text: str
    cold: bool
    """Whether every token of the prompt was computed."""


@dataclass
class Log:
    """What was seen."""

    began: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    burst: list[Outcome] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    probed: int = 0
    """Probes sent, whatever became of them."""
    killing: bool = False
    calm_outcomes: int = 0
    """Outcomes before the first client hung up."""

    def minute(self) -> float:
        """Return the time since the clients came."""
        return (time.monotonic() - self.began) / 60


# ---------------------------------------------------------------- numbers


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that ``percent`` % of the values do not exceed; None of no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else None


def latencies(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Return percentiles of the seconds of served requests, and of the time to their first byte where they stream."""
    whole = [outcome.seconds for outcome in outcomes if outcome.served]
    first = [outcome.ttft_s for outcome in outcomes if outcome.served and outcome.ttft_s is not None]
    return {
        f"{name}_p{percent}_s": _rounded(percentile(values, percent))
        for name, values in (("whole", whole), ("first_byte", first))
        for percent in (50, 95, 99)
    }


def growth(minutes: Sequence[float], values: Sequence[float]) -> float:
    """Return by how much values grow over the last two thirds: the median slope of all pairs, times that duration.

    A few outliers do not change the median slope, however large they are.
    """
    start = len(values) // 3
    t, v = minutes[start:], values[start:]
    slopes = [(v[j] - v[i]) / (t[j] - t[i]) for i in range(len(t)) for j in range(i + 1, len(t)) if t[j] > t[i]]
    return statistics.median(slopes) * (t[-1] - t[0]) if slopes else 0.0


def parse_metrics(exposition: str) -> dict[str, float]:
    """Read Prometheus' text: values by ``name`` or ``name{labels}``."""
    lines = (line for line in exposition.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def broken_rules(summary: dict[str, Any]) -> list[str]:
    """Return a sentence for each rule that a run broke."""
    end, before, burst, probes = (summary[name] for name in ("end", "before", "burst", "probes"))
    rules = {
        f"{summary['stuck']} requests were stuck": summary["stuck"] == 0,
        f"answers that must not come back: {summary['unexpected']}": not summary["unexpected"],
        f"{summary['server_errors']} answers were 5xx": summary["server_errors"] == 0,
        f"{summary['refused_without_retry_after']} answers of 429 had no Retry-After": (
            summary["refused_without_retry_after"] == 0
        ),
        f"in the end {end['running']:g} requests run and {end['waiting']:g} wait": (
            end["running"] == end["waiting"] == 0
        ),
        f"in the end {end['active']:g} slots are neither free nor cached": end["active"] == 0,
        f"in the end {end['locked']:g} slots are locked": end["locked"] == 0,
        f"the registry had {summary['registry_max']:g} entries for {summary['pool_tokens']} slots": (
            summary["registry_max"] <= summary["pool_tokens"]
        ),
        f"memory grew by {summary['memory_growth_mib']:.1f} MiB": summary["memory_growth_mib"] <= MEMORY_TOLERANCE_MIB,
        f"there were {before['threads']:g} threads before and {end['threads']:g} after": (
            end["threads"] <= before["threads"]
        ),
        f"there were {before['descriptors']:g} file descriptors before and {end['descriptors']:g} after": (
            end["descriptors"] <= before["descriptors"]
        ),
        f"{probes['different']} of {probes['asked']} probes had another answer": probes["different"] == 0,
        f"{probes['not_cold']} of {probes['asked']} probes were not cold": probes["not_cold"] == 0,
        "the burst was not refused anything": burst["refused"] > 0,
        f"after the burst a short prompt took {summary['recovered_s']:.1f} s": (
            summary["recovered_s"] <= RECOVERED_WITHIN_S
        ),
        f"the server ended with {summary['exit_code']}": summary["exit_code"] == 0,
        f"the server logged: {summary['server_log']}": not summary["server_log"],
    }
    return [sentence for sentence, kept in rules.items() if not kept]


# ---------------------------------------------------------------- the server


class ServerProcess:
    """``irminsul serve`` in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        arguments = {
            "--port": 0,
            "--pool-tokens": settings.pool_tokens,
            "--max-waiting": settings.max_waiting,
        }
        program = ["-m", "irminsul"] if not settings.leak_kib else ["-c", _LEAKING.format(leak_kib=settings.leak_kib)]
        flags = [str(word) for pair in arguments.items() for word in pair]
        self.command = [sys.executable, *program, "serve", settings.checkpoint, *flags, "--require-tenant"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed by stop
        self._process = subprocess.Popen(  # noqa: S603
            self.command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"IRMINSUL_API_KEY": _KEY},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("irminsul serves"):
            raise InputError(f"the server did not start: {self.logged()}")
        self.url = line.split()[-1].removesuffix("/v1")
        self.model = line.split()[2]

    def reading(self) -> dict[str, float]:
        """Return resident memory in MiB, threads and open file descriptors."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return {
            "resident_mib": round(int(values["VmRSS"].split()[0]) / 1024, 1),
            "threads": int(values["Threads"]),
            "descriptors": len(list(Path(f"/proc/{self._process.pid}/fd").iterdir())),
        }

    def stop(self) -> tuple[int, str]:
        """Send SIGTERM and return the exit status and what the server logged; a server that stays is killed."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        logged = self.logged()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        return self._process.wait(), logged

    def logged(self) -> str:
        """Return the end of what the server wrote to stderr."""
        self._log.seek(0)
        return self._log.read().strip()[-2000:]


@contextmanager
def running_server(settings: Settings, ended: dict[str, Any]) -> Iterator[ServerProcess]:
    """Start a server, and stop it whatever happens; ``ended`` gets its exit status and what it logged."""
    server = ServerProcess(settings)
    try:
        yield server
    finally:
        ended["exit_code"], ended["server_log"] = server.stop()


# ---------------------------------------------------------------- clients


async def send(http: httpx.AsyncClient, drawn: Drawn, limit_s: float, hang_up: HangUp | None = None) -> Outcome:
    """Send a request and read the response to its end, or until the client hangs up."""
    started = time.monotonic()
    outcome = partial(Outcome, drawn.kind, slow=drawn.slow)
    body, first = b"", None
    try:
        async with asyncio.timeout(limit_s if hang_up is None else min(limit_s, hang_up.seconds)):
            async with http.stream(drawn.method, drawn.path, content=drawn.body, headers=drawn.headers) as response:
                pieces = 0
                async for piece in response.aiter_bytes():
                    if first is None:
                        first = time.monotonic() - started
                    body += piece
                    pieces += 1
                    if hang_up is not None and pieces >= hang_up.pieces:
                        return outcome(_HUNG_UP, time.monotonic() - started, expected=True, ttft_s=first)
                    if drawn.slow:
                        await asyncio.sleep(0.5)
    except TimeoutError:
        seconds = time.monotonic() - started
        gave_up = hang_up is not None and hang_up.seconds < limit_s
        return outcome(_HUNG_UP if gave_up else _STUCK, seconds, expected=gave_up, ttft_s=first)
    except httpx.HTTPError as error:
        return outcome(_BROKEN, time.monotonic() - started, expected=False, detail=repr(error))
    seconds, status = time.monotonic() - started, response.status_code
    if status == httpx.codes.TOO_MANY_REQUESTS and drawn.expected == httpx.codes.OK:
        return outcome(status, seconds, expected=True, retry_after=response.headers.get("retry-after"))
    if status != drawn.expected or status != httpx.codes.OK:
        return outcome(status, seconds, expected=status == drawn.expected, detail=body[:200].decode(errors="replace"))
    answer = read_stream(body) if drawn.stream else read_whole(body)
    return outcome(
        status,
        seconds,
        expected=answer is not None,
        ttft_s=first if drawn.stream else None,
        text=answer or "",
        detail="" if answer is not None else body[-200:].decode(errors="replace"),
    )


def read_whole(body: bytes) -> str | None:
    """Return the text of an answer; None if it has not ended as it must."""
    choice = json.loads(body)["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text if choice["finish_reason"] in {"stop", "length"} else None


def read_stream(body: bytes) -> str | None:
    """Return the text of a stream; None if it has an error in it, or has not ended as it must."""
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events.pop() != b"[DONE]":
        return None
    text, reason = "", None
    for event in map(json.loads, events):
        if "error" in event:
            return None
        for choice in event["choices"]:
            text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            reason = choice["finish_reason"] or reason
    return text if reason in {"stop", "length"} else None


async def run_client(http: httpx.AsyncClient, client: Client, log: Log, stop: asyncio.Event, limit_s: float) -> None:
    """Send one request after the other."""
    # They do not come all at once.
    await asyncio.sleep(client.rng.uniform(0, _THINK_SECONDS * 2))
    while not stop.is_set():
        drawn = client.draw()
        hang_up = None
        if log.killing and client.rng.random() < HANG_UP_SHARE:
            wait_s = client.rng.uniform(0, _LONGEST_WAIT_BEFORE_HANG_UP_S)
            in_stream = drawn.stream and client.rng.random() < 0.5
            hang_up = HangUp(limit_s, client.rng.randint(1, 6)) if in_stream else HangUp(wait_s, 10**9)
        outcomes = await asyncio.gather(*[send(http, drawn, limit_s, hang_up) for _ in range(drawn.copies)])
        log.outcomes += outcomes
        client.learn(drawn, outcomes[0].text)
        waits = [float(outcome.retry_after) for outcome in outcomes if outcome.retry_after is not None]
        await asyncio.sleep(max(waits, default=0.0) + client.rng.expovariate(1 / _THINK_SECONDS))


def generation(model: str, kind: str, tenant: str, **fields: Any) -> Drawn:  # noqa: ANN401 -- fields of the body
    """Make a plain request of a tenant that no client is."""
    body = {"model": model, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {_KEY}", "content-type": "application/json", TENANT_HEADER: tenant}
    return Drawn(kind, json.dumps(body).encode(), headers)


async def probe(http: httpx.AsyncClient, model: str, log: Log, limit_s: float) -> None:
    """Ask the fixed prompt in a namespace that nobody has used."""
    # Also of one that never came back: what it left must not be found.
    log.probed += 1
    salt = f"probe-{log.probed}"
    wanted = {"prompt": PROBE, "max_tokens": _PROBE_TOKENS, "ignore_eos": True, "cache_salt": salt}
    drawn = generation(model, "probe", "probe", **wanted)
    started = time.monotonic()
    try:
        response = await http.post(drawn.path, content=drawn.body, headers=drawn.headers, timeout=limit_s)
    except httpx.HTTPError as error:
        status = _STUCK if isinstance(error, httpx.TimeoutException) else _BROKEN
        log.outcomes.append(Outcome("probe", status, time.monotonic() - started, expected=False, detail=repr(error)))
        return
    seconds, status = time.monotonic() - started, response.status_code
    if status != httpx.codes.OK:
        full = status == httpx.codes.TOO_MANY_REQUESTS
        retry_after = response.headers.get("retry-after")
        log.outcomes.append(
            Outcome("probe", status, seconds, full, retry_after=retry_after, detail=response.text[:200])
        )
        return
    answer = response.json()
    cold = answer["usage"]["irminsul"]["computed"] == answer["usage"]["prompt_tokens"]
    log.probes.append(Probe(round(log.minute(), 2), round(seconds, 3), answer["choices"][0]["text"], cold))


# ---------------------------------------------------------------- one run


class Observer:
    """Looks at the server from outside."""

    def __init__(self, http: httpx.AsyncClient, server: ServerProcess) -> None:
        self._http = http
        self._server = server

    async def look(self) -> dict[str, float]:
        """Return what the process and its metrics show now."""
        metrics = parse_metrics((await self._http.get("/metrics")).raise_for_status().text)
        return self._server.reading() | {
            "running": metrics["irminsul_requests_running"],
            "waiting": metrics["irminsul_requests_waiting"],
            **{state: metrics[f'irminsul_pool_slots{{state="{state}"}}'] for state in ("free", "cached", "active")},
            "locked": metrics["irminsul_pool_locked_slots"],
            "registry": metrics["irminsul_registry_entries"],
            "evicted": metrics["irminsul_evicted_slots_total"],
        }

    async def prompt_tokens(self) -> dict[str, float]:
        """Return how many prompt tokens came from where."""
        metrics = parse_metrics((await self._http.get("/metrics")).text)
        name = "irminsul_prompt_tokens_total"
        sources = ("prefix", "approximate_prefix", "shifted", "computed")
        return {source: metrics[f'{name}{{source="{source}"}}'] for source in sources}

    async def quiet(self, limit_s: float) -> dict[str, float]:
        """Wait until nothing runs or waits, or for ``limit_s``, and look."""
        deadline = time.monotonic() + limit_s
        while True:
            seen = await self.look()
            if seen["running"] == seen["waiting"] == 0 or time.monotonic() > deadline:
                return seen
            await asyncio.sleep(0.5)


async def fill(http: httpx.AsyncClient, observer: Observer, settings: Settings, model: str) -> None:
    """Use every slot once: memory of rows that nobody has written yet is not resident."""
    rng = random.Random(settings.seed)
    while (await observer.look())["evicted"] == 0:
        prompt = [rng.randrange(1000, 40_000) for _ in range(min(_FILL_TOKENS, settings.pool_tokens - 1))]
        outcome = await send(http, generation(model, "fill", "fill", prompt=prompt, max_tokens=1), _START_SECONDS)
        assert outcome.status == httpx.codes.OK, outcome


async def sample(observer: Observer, log: Log, settings: Settings) -> None:
    """Look every few seconds; runs until it is cancelled."""
    ended = 0
    while True:
        await asyncio.sleep(settings.sample_seconds)
        seen = await observer.look()
        new, ended = log.outcomes[ended:], len(log.outcomes)
        log.samples.append(
            {"minute": round(log.minute(), 3), **seen, "ended": len(new), **latencies(new)}
            | {"load_average": round(os.getloadavg()[0], 2)}
        )
        if settings.kill_from is not None and not log.killing and log.minute() >= settings.kill_from:
            log.killing, log.calm_outcomes = True, ended


async def probe_again_and_again(http: httpx.AsyncClient, model: str, log: Log, limit_s: float) -> None:
    """Probe under load; runs until it is cancelled."""
    while True:
        await asyncio.sleep(_PROBE_SECONDS)
        await probe(http, model, log, limit_s)
        last = log.samples[-1]["resident_mib"] if log.samples else float("nan")
        print(f"minute {log.minute():.1f}: {len(log.outcomes)} requests ended, {last:.0f} MiB", flush=True)


async def burst(http: httpx.AsyncClient, model: str, settings: Settings) -> list[Outcome]:
    """Send more requests at once than the queue holds."""
    rng = random.Random(settings.seed)
    requests = [
        generation(model, "burst", "burst", prompt=text(rng, 6), max_tokens=2)
        for _ in range(BURST * settings.max_waiting)
    ]
    return await asyncio.gather(*[send(http, request, settings.limit_s) for request in requests])


async def load(server: ServerProcess, settings: Settings, log: Log) -> dict[str, Any]:
    """Put the whole load on a server and return what is to be judged."""
    anyone = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as own:  # noqa: S113 -- ``send`` has a limit
        observer = Observer(own, server)
        await fill(own, observer, settings, server.model)
        log.began = time.monotonic()
        await probe(own, server.model, log, settings.limit_s)
        before = await observer.quiet(settings.limit_s)
        log.killing = settings.kill_from == 0
        stop = asyncio.Event()
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=anyone) as http:  # noqa: S113
            log.began = time.monotonic()
            watchers = [
                asyncio.create_task(sample(observer, log, settings)),
                asyncio.create_task(probe_again_and_again(http, server.model, log, settings.limit_s)),
            ]
            clients = [
                asyncio.create_task(run_client(http, client, log, stop, settings.limit_s))
                for client in new_clients(settings, server.model)
            ]
            await first_failure(watchers + clients, settings.minutes * 60)
            log.burst = await burst(http, server.model, settings)
            stop.set()
            await asyncio.gather(*clients)
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        await observer.quiet(settings.limit_s)
        await probe(own, server.model, log, settings.limit_s)
        # The server notices within a moment that connections are closed.
        await asyncio.sleep(1.0)
        end = await observer.quiet(settings.limit_s)
        sources = await observer.prompt_tokens()
    return {"before": before, "end": end, "prompt_tokens": sources}


async def first_failure(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait ``seconds``; raise at once what a task raises."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def new_clients(settings: Settings, model: str) -> list[Client]:
    """Make the clients of a run."""
    return [Client(number, settings.seed, model, _KEY) for number in range(settings.clients)]


def summarise(log: Log, judged: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Put a run into the numbers that ``broken_rules`` judges, and into those that people want to know."""
    outcomes = log.outcomes + log.burst
    statuses = Counter(f"{outcome.kind}: {outcome.status}" for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.status == httpx.codes.TOO_MANY_REQUESTS]
    unexpected = [outcome for outcome in outcomes if not outcome.expected]
    kill_from = settings.kill_from
    calm = log.outcomes if kill_from is None else log.outcomes[: log.calm_outcomes]
    burst_refused = [outcome.seconds for outcome in log.burst if outcome.status == httpx.codes.TOO_MANY_REQUESTS]
    minutes = [sample["minute"] for sample in log.samples]
    resident = [sample["resident_mib"] for sample in log.samples]
    return {
        "minutes": settings.minutes,
        "clients": settings.clients,
        "pool_tokens": settings.pool_tokens,
        "requests": len(outcomes),
        "stuck": sum(outcome.status == _STUCK for outcome in outcomes),
        "server_errors": sum(isinstance(outcome.status, int) and outcome.status >= 500 for outcome in outcomes),
        "hung_up": sum(outcome.status == _HUNG_UP for outcome in outcomes),
        "refused": len(refused),
        "refused_without_retry_after": sum(outcome.retry_after is None for outcome in refused),
        "unexpected": [f"{outcome.kind}: {outcome.status} {outcome.detail}" for outcome in unexpected[:5]],
        "longest_s": _rounded(max(outcome.seconds for outcome in outcomes)),
        "latency": {
            "without_hang_ups": latencies(calm),
            "with_hang_ups": None if kill_from is None else latencies(log.outcomes[log.calm_outcomes :]),
        },
        "memory_mib": {"first": resident[0], "median": statistics.median(resident), "last": resident[-1]},
        "memory_growth_mib": round(growth(minutes, resident), 2),
        "memory_tolerance_mib": MEMORY_TOLERANCE_MIB,
        "registry_max": max(sample["registry"] for sample in log.samples),
        "registry_growth": round(growth(minutes, [sample["registry"] for sample in log.samples]), 1),
        "probes": {
            "asked": len(log.probes),
            "different": sum(probe.text != log.probes[0].text for probe in log.probes),
            "not_cold": sum(not probe.cold for probe in log.probes),
        },
        "burst": {
            "requests": len(log.burst),
            "served": sum(outcome.status == httpx.codes.OK for outcome in log.burst),
            "refused": len(burst_refused),
            "refused_p99_s": _rounded(percentile(burst_refused, 99)),
        },
        "recovered_s": log.probes[-1].seconds,
        **judged,
        "statuses": dict(sorted(statuses.items())),
    }


# ---------------------------------------------------------------- what is left behind


def picture(samples: Sequence[dict[str, float]], settings: Settings) -> bytes:
    """Draw the curves as PNG: at most 120 points, each the mean of its samples, of latencies the worst."""
    points = _thinned(samples, _PICTURE_POINTS)
    minutes = [point["minute"] for point in points]
    panels: tuple[tuple[str, dict[str, str]], ...] = (
        ("resident memory, MiB", {"resident_mib": "server process"}),
        ("slots", {"cached": "cached", "active": "held by requests", "locked": "cached and locked", "free": "free"}),
        ("registry entries", {"registry": "fingerprints"}),
        ("requests", {"running": "in flight", "waiting": "queued"}),
        ("whole request, s", {"whole_p50_s": "p50 of a window", "whole_p99_s": "p99 of a window"}),
        ("first byte of a stream, s", {"first_byte_p50_s": "p50 of a window", "first_byte_p99_s": "p99 of a window"}),
    )
    figure = Figure(figsize=(11, 9), dpi=80, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(f"{settings.clients} clients, pool of {settings.pool_tokens} slots, a quarter of the working set")
    for (title, lines), ax in zip(panels, figure.subplots(3, 2, sharex=True).flat, strict=True):
        for name, label in lines.items():
            ax.plot(minutes, [point[name] for point in points], linewidth=1.2, label=label)
        if settings.kill_from:
            ax.axvline(settings.kill_from, color="0.5", linestyle=":", label="clients hang up from here on")
        ax.set_ylim(0, ax.get_ylim()[1] * 1.1)
        ax.set_title(title, fontsize=10)
        ax.grid(visible=True, alpha=0.3)
        ax.legend(fontsize=7.5)
        ax.set_xlabel("minutes")
    with tempfile.TemporaryFile() as drawn:
        canvas.print_png(drawn, metadata={"Software": None})
        drawn.seek(0)
        return drawn.read()


def _thinned(samples: Sequence[dict[str, float]], most: int) -> list[dict[str, float]]:
    size = -(-len(samples) // most)
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [{name: _joined(name, [sample[name] for sample in group]) for name in group[0]} for group in groups]


def _joined(name: str, values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    if not known:
        return float("nan")
    return max(known) if name.endswith("_s") else statistics.fmean(known)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def main() -> None:
    """Load, judge and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="smollm2-mla", help="directory or built-in name")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long clients come")
    parser.add_argument("--clients", type=int, default=64, help="also the length of the queue")
    kill = parser.add_mutually_exclusive_group()
    kill.add_argument("--kill", action="store_const", const=0.0, dest="kill_from", help="clients hang up at random")
    kill.add_argument("--kill-from", type=float, metavar="MINUTES", help="the same, but only after so many minutes")
    parser.add_argument("--limit-s", type=float, default=300.0, help="a request that takes longer is stuck")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak-kib", type=int, default=0, help="let the server keep so much of each request")
    parser.add_argument("--note", default="", help="kept in the result, such as what else ran on the machine")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--picture", type=Path, help="write the curves here, as PNG")
    arguments = parser.parse_args()
    require_writable(*(path for path in (arguments.json, arguments.picture) if path is not None))
    folder = Path(arguments.checkpoint)
    path = folder if folder.is_dir() else find_checkpoint(arguments.checkpoint)
    fields = {name: getattr(arguments, name) for name in ("minutes", "clients", "kill_from", "limit_s", "seed")}
    settings = sized(Settings(str(path), leak_kib=arguments.leak_kib, **fields))
    log, ended, revision = Log(), dict[str, Any](), commit()
    with running_server(settings, ended) as server:
        try:
            judged = asyncio.run(load(server, settings, log))
        except httpx.HTTPError as error:
            raise SystemExit(f"the server does not answer any more: {error!r}; it logged: {server.logged()}") from error
    summary = summarise(log, judged | ended, settings)
    summary["broken_rules"] = broken_rules(summary)
    result = {
        "benchmark": "server_load",
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": revision,
        "machine": asdict(describe_machine("cpu", "float32")),
        "versions": versions() | {"httpx": httpx.__version__, "platform": platform.platform()},
        "note": arguments.note,
        "settings": asdict(settings) | {"checkpoint": path.name},
        "summary": summary,
        "probes": [asdict(probe) for probe in log.probes],
        "samples": {name: [sample[name] for sample in log.samples] for name in log.samples[0]},
    }
    files = {}
    if arguments.json is not None:
        files[arguments.json] = (json.dumps(result) + "\n").encode()
    if arguments.picture is not None:
        files[arguments.picture] = picture(log.samples, settings)
    replace_files(files)
    for sentence in summary["broken_rules"]:
        print(f"BROKEN: {sentence}", file=sys.stderr)
    print(json.dumps(summary))
    if summary["broken_rules"]:
        raise SystemExit(1)


def sized(settings: Settings) -> Settings:
    """Measure the working set, and give the server a quarter of it and a queue for as many requests as clients."""
    tokenizer = load_tokenizer(Path(settings.checkpoint))

    def encode(prompt: str | Messages) -> list[int]:
        shown = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, tokenize=False)
        return tokenizer(shown, add_special_tokens=False)["input_ids"]

    rows = working_set(new_clients(settings, "any"), encode)
    return replace(
        settings, working_set_tokens=rows, pool_tokens=int(rows * POOL_SHARE), max_waiting=max(1, settings.clients)
    )


def commit() -> str:
    """Return the revision of the tree, or unknown where there is none."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
