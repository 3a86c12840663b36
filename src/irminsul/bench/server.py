"""A running server: its name, what it says of itself, how its cache is emptied, and its pool as Prometheus shows it."""

import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any

import httpx

from irminsul.bench.client import LARGEST, error_message
from irminsul.bench.load import Protocol
from irminsul.errors import InputError, IrminsulError
from irminsul.trace.lines import LineError, json_text, parse_object

_TARGET = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)")
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})?\s+(\S+)")
_FLUSH_SECONDS = 30
_LAST_PORT = 65_535
# What of SGLang's many settings makes a difference to these figures; absent ones are left out.
_SGLANG_FACTS = (
    *("version", "load_format", "dtype", "kv_cache_dtype", "quantization", "tp_size", "dp_size", "pp_size"),
    *("page_size", "attention_backend", "radix_cache_backend", "disable_radix_cache", "chunked_prefill_size"),
    *("max_running_requests", "max_total_tokens", "mem_fraction_static", "schedule_policy", "disable_overlap_schedule"),
    *("disable_cuda_graph", "enable_mixed_chunk", "skip_tokenizer_init", "stream_interval", "enable_cache_report"),
)


class BenchError(IrminsulError):
    """A server failed; what was measured before is kept."""


class Kind(StrEnum):
    """What a server is, as it says itself."""

    SGLANG = "sglang"
    IRMINSUL = "irminsul"
    """The embedded server."""
    VLLM = "vllm"
    OTHER = "other"


class CacheAtStart(StrEnum):
    """What a block finds in the server's cache."""

    FLUSHED = "flushed"
    """Nothing: SGLang was told to flush."""
    OWN_SALT = "own salt"
    """Nothing it may use: its requests have a cache salt of their own, and the pool still holds what was there."""
    KEPT = "kept"
    """What the blocks before it and its own warm-up left."""


@dataclass(frozen=True)
class Target:
    """A server as the command line names it."""

    name: str
    url: str


@dataclass(frozen=True)
class PoolReading:
    """A server's pool at one moment, as far as it tells."""

    slots: float | None
    free_slots: float | None
    """Neither in use nor cached."""
    evicted_tokens: float | None
    """Since the server started. SGLang shows none before the first."""


def parse_targets(texts: Sequence[str]) -> tuple[Target, ...]:
    """Read ``NAME=URL``; InputError if one is none, or a name is given twice."""
    targets = tuple(map(_target, texts))
    if not targets:
        raise InputError("name a server: --server NAME=URL")
    if len({target.name for target in targets}) < len(targets):
        raise InputError(f"servers must have different names, got {', '.join(target.name for target in targets)}")
    return targets


def _target(text: str) -> Target:
    match = _TARGET.fullmatch(text)
    url = _url(match[2].rstrip("/")) if match else None
    if not match or url is None:
        raise InputError(f"a server is written NAME=URL, like stock=http://127.0.0.1:30000, got {text!r}")
    return Target(match[1], str(url))


def _url(text: str) -> httpx.URL | None:
    """Read a server's URL; None if it is none."""
    try:
        url = httpx.URL(text)
        is_http = url.scheme in ("http", "https") and bool(url.host)
    except (httpx.InvalidURL, ValueError):
        # ValueError: what is no text, and hosts that are no domain names.
        return None
    has_port = url.port is None or 1 <= url.port <= _LAST_PORT
    return url if is_http and has_port and not url.userinfo and not url.query else None


class Server:
    """A server that has answered. Use ``Server.connect``."""

    def __init__(self, target: Target, http: httpx.AsyncClient, kind: Kind, model: str, facts: dict[str, Any]) -> None:
        self.target = target
        self.http = http
        self.kind = kind
        self.model = model
        self.facts = facts
        """Versions and settings that it tells of; a change of any makes another server of it."""

    @classmethod
    async def connect(cls, target: Target, http: httpx.AsyncClient, protocol: Protocol) -> "Server":
        """Ask a server what it is.

        Raises:
            InputError: nobody answers, or not as the protocol needs it.
        """
        models = await _json(target, http, "/v1/models")
        try:
            card = models["data"][0]
            model, owner = str(card["id"]), str(card.get("owned_by"))
        except (LookupError, TypeError, AttributeError):
            raise InputError(f"server {target.name} at {target.url} lists no model under /v1/models") from None
        kind = Kind(owner) if owner in set(Kind) else Kind.OTHER
        if protocol is Protocol.SGLANG_IDS and kind is not Kind.SGLANG:
            raise InputError(f"--protocol {protocol} needs SGLang, and server {target.name} says it is {owner}")
        return cls(target, http, kind, model, await _facts(target, http, kind))

    @property
    def knows_ignore_eos(self) -> bool:
        """Whether an answer can be told to have a given length."""
        return self.kind is not Kind.OTHER

    def cache_at_start(self, *, keep: bool) -> CacheAtStart:
        """Say what each block will find.

        Raises:
            InputError: the server's cache cannot be emptied, and it was not asked to be kept.
        """
        if keep:
            return CacheAtStart.KEPT
        if self.kind is Kind.SGLANG:
            return CacheAtStart.FLUSHED
        if self.kind is Kind.IRMINSUL:
            return CacheAtStart.OWN_SALT
        raise InputError(
            f"server {self.target.name} offers no way to empty its cache that is known here; measure it as it is with "
            "--keep-cache"
        )

    async def empty_cache(self, how: CacheAtStart) -> str | None:
        """Empty the cache; return the salt of what comes next, if it needs one.

        Raises:
            BenchError: the server did not.
        """
        if how is CacheAtStart.OWN_SALT:
            return f"bench-{secrets.token_hex(8)}"
        if how is CacheAtStart.FLUSHED:
            # SGLang flushes only when nothing runs; it waits for that as long as it is told to.
            try:
                response = await self.http.post("/flush_cache", params={"timeout": _FLUSH_SECONDS})
            except httpx.HTTPError as error:
                raise BenchError(f"{self} does not flush its cache: {_reason(error)}") from error
            if response.status_code != httpx.codes.OK:
                raise BenchError(f"{self} does not flush its cache: {error_message(response.content).strip()}")
        return None

    async def answers(self) -> bool:
        """Say whether it still answers."""
        try:
            return (await self.http.get("/v1/models")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def pool(self) -> PoolReading | None:
        """Read its pool; None if it has no metrics that are known here."""
        try:
            response = await self.http.get("/metrics", follow_redirects=True)
        except httpx.HTTPError:
            return None
        return read_pool(response.text) if response.status_code == httpx.codes.OK else None

    def __str__(self) -> str:
        return f"server {self.target.name} at {self.target.url}"


def read_pool(exposition: str) -> PoolReading | None:
    """Read a pool from Prometheus' text format: SGLang's or the embedded server's; None if it is neither's.

    Values of several ranks are added up. None, too, if one of them cannot be a number of tokens.
    """
    reading = _pool_reading(_sums(exposition))
    if reading is None or not all(value is None or abs(value) < LARGEST for value in astuple(reading)):
        return None
    return reading


def _sums(exposition: str) -> dict[str, float]:
    """Add up the values of each name; lines whose value is no number are left out."""
    sums: dict[str, float] = {}
    for line in exposition.splitlines():
        match = _SAMPLE.match(line)
        if match:
            name = f"{match[1]} free" if 'state="free"' in (match[2] or "") else match[1]
            with suppress(ValueError):
                sums[name] = sums.get(name, 0.0) + float(match[3])
    return sums


def _pool_reading(sums: dict[str, float]) -> PoolReading | None:
    if "sglang:max_total_num_tokens" in sums:
        return PoolReading(
            sums["sglang:max_total_num_tokens"],
            sums.get("sglang:kv_available_tokens"),
            sums.get("sglang:evicted_tokens_total"),
        )
    if "irminsul_pool_slots free" in sums:
        free = sums["irminsul_pool_slots free"]
        return PoolReading(free + sums["irminsul_pool_slots"], free, sums.get("irminsul_evicted_slots_total"))
    return None


async def _facts(target: Target, http: httpx.AsyncClient, kind: Kind) -> dict[str, Any]:
    if kind is Kind.SGLANG:
        told = await _json(target, http, "/server_info")
        return _plain(told, _SGLANG_FACTS) | _graphs(told)
    if kind is Kind.IRMINSUL:
        told = await _json(target, http, "/health")
        return _plain(told, ("mode",))
    return {}


def _plain(told: dict[str, Any], names: Iterable[str]) -> dict[str, str | int | float]:
    """Return the values of these names that are text, numbers or truth values."""
    return {name: value for name in names if isinstance(value := told.get(name), str | int | float)}


def _graphs(told: dict[str, Any]) -> dict[str, str]:
    """Say which CUDA graphs SGLang captured: of its settings, those of graphs stand in one tree, a phase a branch."""
    phases = told.get("cuda_graph_config")
    if not isinstance(phases, dict):
        return {}
    return {
        f"cuda_graphs_{phase}": f"{config.get('backend')}, up to {config.get('max_bs')}"
        for phase, config in phases.items()
        if isinstance(config, dict)
    }


async def _json(target: Target, http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    who = f"server {target.name} at {target.url}"
    try:
        response = await http.get(path)
    except httpx.HTTPError as error:
        raise InputError(f"{who} does not answer: {_reason(error)}") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise InputError(f"{who} wants an API key; put it into IRMINSUL_API_KEY")
    if response.status_code != httpx.codes.OK:
        raise InputError(f"{who} answers {path} with HTTP {response.status_code}")
    try:
        told = parse_object(response.content.decode())
        # 1e999 is read as infinity, which no result can hold.
        json_text(told)
    except (LineError, UnicodeDecodeError) as reason:
        raise InputError(f"{who} answers {path} with what is no JSON object: {reason}") from None
    return told


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
