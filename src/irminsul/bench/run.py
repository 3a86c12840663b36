"""Blocks: one load, at one pace, on one server, from one state of its cache; in turn over the servers.

With two servers the order is A B, B A, A B, ...: what drifts over time meets both alike.
"""

import asyncio
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from irminsul import __version__
from irminsul.bench.client import Measured, RequestForm, request_form, send
from irminsul.bench.load import Load, Protocol
from irminsul.bench.pace import AtOnce, Pace, ThinkTime, replay
from irminsul.bench.results import FORMAT, Block, ResultFiles, digest
from irminsul.bench.server import BenchError, CacheAtStart, Server, Target
from irminsul.bench.summary import pool_change, summarise
from irminsul.errors import InputError
from irminsul.machine import cpu_name, usable_cores
from irminsul.progress import progress_bar
from irminsul.safe_text import encodable, printable

_CONNECT_SECONDS = 10
# Shorter than servers keep an idle connection: one that the server is just closing would count as an error.
_KEEP_ALIVE_SECONDS = 2


@dataclass(frozen=True)
class BenchConfig:
    """How blocks are measured."""

    protocol: Protocol
    paces: tuple[Pace, ...]
    repeats: int
    warm_up: int
    """Requests in front of each block that do not count: the first ones of its load."""
    max_tokens: int
    think_time: ThinkTime
    seed: int
    timeout_s: float
    """Longest silence of a server."""
    keep_cache: bool
    keep_requests: bool
    api_key: str | None = None


@dataclass(frozen=True)
class BlockPlan:
    """A block that is to be measured."""

    server: Server
    load: Load
    pace: Pace
    repeat: int
    """From 0."""
    cache: CacheAtStart
    settings: dict[str, Any]
    """What blocks must have in common to be compared."""

    @property
    def server_facts(self) -> dict[str, Any]:
        """What this server is, and how it was met."""
        server = self.server
        return {
            "name": server.target.name,
            "kind": server.kind.value,
            "model": server.model,
            "facts": server.facts,
            "cache_at_start": self.cache.value,
            "ignore_eos": server.knows_ignore_eos,
        }

    @property
    def identity(self) -> str:
        """Equal for blocks that need not be measured twice."""
        return digest([self.settings, self.server_facts, self.repeat])

    def __str__(self) -> str:
        return f"{self.load.name}, {self.pace}, {self.server.target.name}, repeat {self.repeat + 1}"


def check_servers(targets: Sequence[Target], config: BenchConfig) -> None:
    """Ask servers what they are, before loads are read, which may take long.

    Raises:
        InputError: a server does not answer, or cannot do what is asked for.
    """

    async def check() -> None:
        async with AsyncExitStack() as stack:
            for server in await _connected(targets, config, stack):
                server.cache_at_start(keep=config.keep_cache)

    asyncio.run(check())


def run(
    targets: Sequence[Target], loads: Sequence[Load], config: BenchConfig, files: ResultFiles, console: Console
) -> list[Block]:
    """Measure every block that is not in the files yet, and keep each as it ends.

    Returns:
        The blocks measured now.

    Raises:
        InputError: a server does not answer, or cannot do what is asked for.
        BenchError: a server failed in a block; that block is not kept, those before it are.
    """
    return asyncio.run(_run(targets, loads, config, files, console))


async def _run(
    targets: Sequence[Target], loads: Sequence[Load], config: BenchConfig, files: ResultFiles, console: Console
) -> list[Block]:
    async with AsyncExitStack() as stack:
        servers = await _connected(targets, config, stack)
        known = {block["id"] for block in files.blocks}
        plans = list(_plans(servers, loads, config))
        missing = [plan for plan in plans if plan.identity not in known]
        bare = {plan.identity for plan in plans} & known - files.with_requests
        if config.keep_requests and bare:
            raise InputError(
                f"--keep-requests: {len(bare)} of {len(plans)} blocks are in {files.folder} already, without their "
                "requests; measure into another folder"
            )
        if len(missing) < len(plans):
            there = f"{len(plans) - len(missing)} of {len(plans)} blocks are in {files.folder} already"
            console.print(Text(printable(there)), soft_wrap=True)
        measured = []
        with progress_bar(console, len(missing), _describe, first="starting") as advance:
            for plan in missing:
                block, requests = await _measure(plan, config)
                files.append(block, requests if config.keep_requests else None)
                measured.append(block)
                advance(block)
        return measured


async def _connected(targets: Sequence[Target], config: BenchConfig, stack: AsyncExitStack) -> list[Server]:
    return [
        await Server.connect(target, await stack.enter_async_context(_http(target, config)), config.protocol)
        for target in targets
    ]


def _http(target: Target, config: BenchConfig) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=target.url,
        headers={"authorization": f"Bearer {config.api_key}"} if config.api_key else {},
        timeout=httpx.Timeout(config.timeout_s, connect=_CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_SECONDS),
        # A proxy's time is not the server's.
        trust_env=False,
    )


def _plans(servers: Sequence[Server], loads: Sequence[Load], config: BenchConfig) -> Iterator[BlockPlan]:
    caches = [server.cache_at_start(keep=config.keep_cache) for server in servers]
    pairs = list(zip(servers, caches, strict=True))
    for load in loads:
        for pace in config.paces:
            settings = {
                "protocol": config.protocol.value,
                "max_tokens": config.max_tokens,
                "think_time": str(config.think_time),
                "warm_up": config.warm_up,
                "seed": config.seed,
                "pace": str(pace),
                "load": load.fingerprint,
            }
            for repeat in range(config.repeats):
                for server, cache in reversed(pairs) if repeat % 2 else pairs:
                    yield BlockPlan(server, load, pace, repeat, cache, settings)


async def _measure(plan: BlockPlan, config: BenchConfig) -> tuple[Block, list[Measured]]:
    """Measure a block: warm up, empty the cache, replay."""
    server = plan.server
    if config.warm_up:
        form = _form(plan, config, await server.empty_cache(plan.cache))
        warm_up = Load(plan.load.name, plan.load.calls[: config.warm_up], 0)
        pace = plan.pace if isinstance(plan.pace, AtOnce) else AtOnce(1)
        await _replay(server, warm_up, pace, ThinkTime(0), config, form)
    form = _form(plan, config, await server.empty_cache(plan.cache))
    before = await server.pool()
    started = datetime.now(tz=UTC)
    began, began_cpu = time.perf_counter(), time.process_time()
    measured = await _replay(server, plan.load, plan.pace, config.think_time, config, form)
    client_cpu_share = (time.process_time() - began_cpu) / (time.perf_counter() - began)
    after = await server.pool()
    await _refuse_if_failed(plan, measured)
    seconds = max(one.started_s + one.end_to_end_s for one in measured) - min(one.started_s for one in measured)
    pool = pool_change(before, after, flushed=plan.cache is CacheAtStart.FLUSHED)
    first_error = next((f"{one.error}: {one.message}" for one in measured if one.error is not None), None)
    block = {
        "format": FORMAT,
        "id": plan.identity,
        "comparison": digest(plan.settings),
        "server": plan.server_facts | {"url": server.target.url},
        "load": plan.load.describe(),
        "settings": plan.settings,
        "repeat": plan.repeat,
        "started": started.isoformat(timespec="seconds"),
        **summarise(measured, seconds),
        **({} if pool is None else {"pool": pool}),
        **({} if first_error is None else {"first_error": first_error}),
        "client": _client(),
        "client_cpu_share": client_cpu_share,
        "command": encodable(shlex.join(["irminsul", *sys.argv[1:]])),
    }
    return block, measured


def _form(plan: BlockPlan, config: BenchConfig, salt: str | None) -> RequestForm:
    server = plan.server
    return request_form(config.protocol, server.model, config.max_tokens, ignore_eos=server.knows_ignore_eos, salt=salt)


async def _replay(
    server: Server, load: Load, pace: Pace, think_time: ThinkTime, config: BenchConfig, form: RequestForm
) -> list[Measured]:
    measured: list[Measured] = []
    began = time.perf_counter()

    async def send_call(index: int) -> None:
        one = await send(server.http, form, load.calls[index], began)
        measured.append(one)
        # Whoever is told to wait waits, with its place among those in flight: a server that refuses is not stormed.
        await asyncio.sleep(min(one.retry_after_s, config.timeout_s))

    await replay(load, pace, think_time, config.seed, send_call)
    return measured


async def _refuse_if_failed(plan: BlockPlan, measured: Sequence[Measured]) -> None:
    """Raise BenchError if a block says nothing of a server that works."""
    errors = [one for one in measured if one.error is not None]
    if len(errors) == len(measured):
        first = f"{errors[0].error}: {errors[0].message}"
        raise BenchError(f"{plan.server} answered none of {len(measured)} requests ({plan}); the first: {first}")
    if errors and not await plan.server.answers():
        raise BenchError(
            f"{plan.server} went away ({plan}); this block is not kept, the same command measures it again"
        )


def _describe(block: Block) -> str:
    ttft, settings = block["ttft_s"], block["settings"]
    errors = sum(block["errors"].values())
    return printable(
        f"{block['load']['name']}, {settings['pace']}, {block['server']['name']}, repeat {block['repeat'] + 1}: "
        f"TTFT {1000 * ttft['p50']:,.0f} ms, {block['requests_per_s']:.3g} requests/s"
        + (f", {errors} errors" if errors else "")
    )


def _client() -> dict[str, Any]:
    """Say what ran this, and beside which GPUs."""
    return {
        "irminsul": __version__,
        "python": platform.python_version(),
        "processor": cpu_name(),
        "cores": usable_cores(),
        **_gpus(),
    }


def _gpus() -> dict[str, Any]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=False)  # noqa: S603
    return {"gpus": told.stdout.splitlines()} if told.returncode == 0 else {}
