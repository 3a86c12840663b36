"""One request: sent, its stream read, its times taken. What goes wrong is part of the result, never an exception.

Times are seconds of ``time.perf_counter``, taken when the bytes of an event have arrived here. The first token is the
first event that brings output: with the OpenAI protocol text, reasoning or a tool call (a server may hold back what is
not yet a whole character), with SGLang's own a new token.
"""

import json
import reprlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Any, Protocol

import httpx

from irminsul.bench import load
from irminsul.bench.load import Call
from irminsul.safe_text import encodable
from irminsul.sglang.usage import reuse_usage
from irminsul.trace.lines import kind_of

TOKEN_CLASSES = ("prefix", "approximate_prefix", "shifted", "computed")
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError)
_LONGEST_MESSAGE = 300
_LONGEST_WAIT_S = 1e9
"""Of what is believed; whoever waits has bounds of its own. Hundreds of digits are infinity, which no file can hold."""
LARGEST = 10**15
"""A number this large, or larger, is no measurement; results hold none."""


@dataclass(frozen=True)
class Measured:
    """What became of one request."""

    place: str
    """Of its call."""
    session: int
    started_s: float
    """When it was sent, from the beginning of its block."""
    end_to_end_s: float
    """From sending to the end of the stream, or to what went wrong."""
    ttft_s: float | None
    """From sending to the first event with output; None if there was none."""
    itl_s: tuple[float, ...]
    """Between events with output. An event is mostly one token; tokens that a server sends together share a gap."""
    prompt_tokens: int | None
    completion_tokens: int | None
    token_classes: dict[str, int] | None
    """Prompt tokens by where they came from, as far as the server tells classes apart; None if it does not."""
    status: int | None
    """Of the HTTP response; None if there was none."""
    error: str | None
    """Short and the same for equal errors; None if all went well."""
    message: str
    """What the server, or the client, said about the error."""
    retry_after_s: float
    """How long the server asked to wait."""

    def as_json(self) -> dict[str, Any]:
        """Return it as an object."""
        return asdict(self)


@dataclass(frozen=True)
class RequestForm:
    """How requests to one server look."""

    protocol: load.Protocol
    options: dict[str, Any]
    """Members of every request's object beside the prompt."""

    @property
    def path(self) -> str:
        """Where requests are sent."""
        return "/v1/chat/completions" if self.protocol is load.Protocol.OPENAI else "/generate"

    def body(self, call: Call) -> bytes:
        """Return the body of a request."""
        return json.dumps(self.options)[:-1].encode() + b", " + call.prompt + b"}"


def request_form(
    protocol: load.Protocol, model: str, max_tokens: int, *, ignore_eos: bool, salt: str | None
) -> RequestForm:
    """Ask for a greedy stream with usage, of exactly ``max_tokens`` tokens where ``ignore_eos`` can be asked for.

    Args:
        protocol: of the server.
        model: its name for the model.
        max_tokens: at most, or exactly.
        ignore_eos: go on behind the end of the answer.
        salt: the scope in which requests share rows; None for the common one.
    """
    if protocol is load.Protocol.SGLANG_IDS:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos}
        return RequestForm(protocol, {"stream": True, "sampling_params": sampling})
    options = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": max_tokens,
        **({"ignore_eos": True} if ignore_eos else {}),
        **({"cache_salt": salt} if salt else {}),
    }
    return RequestForm(protocol, options)


class _FailedError(Exception):
    """The request failed: a kind and a message."""


async def send(http: httpx.AsyncClient, form: RequestForm, call: Call, began: float) -> Measured:
    """Send a request and read its stream.

    Args:
        http: with the server's URL.
        form: what the request looks like.
        call: what is asked.
        began: ``time.perf_counter()`` at the beginning of the block.
    """
    request = http.build_request(
        "POST", form.path, content=form.body(call), headers={"content-type": "application/json"}
    )
    stream = _Stream(_ANSWERS[form.protocol]())
    status, kind, message, retry_after = None, None, "", 0.0
    started = time.perf_counter()
    try:
        response = await http.send(request, stream=True)
        try:
            status = response.status_code
            if status == httpx.codes.OK:
                await stream.read(response)
            else:
                kind, message = f"HTTP {status}", error_message(await response.aread())
                retry_after = _retry_after(response)
        finally:
            await response.aclose()
    except _FailedError as error:
        kind, message = error.args
    except httpx.TimeoutException as error:
        kind, message = "timeout", type(error).__name__
    except httpx.HTTPError as error:
        kind, message = "connection" if status is None else "dropped stream", str(error) or type(error).__name__
    ended = time.perf_counter()
    times = stream.times
    return Measured(
        place=call.place,
        session=call.session,
        started_s=started - began,
        end_to_end_s=ended - started,
        ttft_s=times[0] - started if times else None,
        itl_s=tuple(later - earlier for earlier, later in pairwise(times)),
        prompt_tokens=stream.answer.prompt_tokens,
        completion_tokens=stream.answer.completion_tokens,
        token_classes=stream.answer.token_classes,
        status=status,
        error=kind,
        message=encodable(message[:_LONGEST_MESSAGE]),
        retry_after_s=retry_after,
    )


def json_object(data: bytes) -> dict[str, Any]:
    """Read what a server sends as a JSON object; ValueError if it is none."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"an object was expected, got {kind_of(value)}")  # noqa: TRY004
    return value


def error_message(body: bytes) -> str:
    """Return what a server says about an error: OpenAI's form, or the beginning of the body as text."""
    try:
        error = json_object(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except _MALFORMED:
        return body[:_LONGEST_MESSAGE].decode(errors="replace")


class _Answer(Protocol):
    """What the events of one stream have told."""

    prompt_tokens: int | None
    completion_tokens: int | None
    token_classes: dict[str, int] | None

    def take(self, event: dict[str, Any]) -> bool:
        """Take an event; say whether it brought output."""


class _ChatAnswer:
    """Of /v1/chat/completions."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.token_classes: dict[str, int] | None = None
        self._has_output = False

    def take(self, event: dict[str, Any]) -> bool:
        usage = event.get("usage")
        if usage:
            self.prompt_tokens = _count("prompt_tokens", usage["prompt_tokens"])
            self.completion_tokens = _count("completion_tokens", usage["completion_tokens"])
            self.token_classes = _classes(
                self.prompt_tokens,
                usage.get("irminsul"),
                (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            )
        brought = any(self._brings_output(choice) for choice in event["choices"])
        self._has_output |= brought
        return brought

    def _brings_output(self, choice: dict[str, Any]) -> bool:
        delta = choice["delta"]
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
        # An answer may have tokens and no text; its end is then the first that is heard of them.
        return bool(text) or (choice.get("finish_reason") is not None and not self._has_output)


class _IdsAnswer:
    """Of SGLang's /generate. Each event counts all tokens so far."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.token_classes: dict[str, int] | None = None

    def take(self, event: dict[str, Any]) -> bool:
        info = event["meta_info"]
        reason = info.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise _FailedError("aborted", str(reason.get("message", "")))
        known = self.completion_tokens or 0
        self.prompt_tokens = _count("prompt_tokens", info["prompt_tokens"])
        self.completion_tokens = _count("completion_tokens", info["completion_tokens"])
        counters = info.get("irminsul")
        self.token_classes = _classes(
            self.prompt_tokens, reuse_usage(counters[-1]) if counters else None, info.get("cached_tokens")
        )
        return self.completion_tokens > known


_ANSWERS: dict[load.Protocol, Callable[[], _Answer]] = {
    load.Protocol.OPENAI: _ChatAnswer,
    load.Protocol.SGLANG_IDS: _IdsAnswer,
}


class _Stream:
    """Reads one stream of events."""

    def __init__(self, answer: _Answer) -> None:
        self.answer = answer
        self.times: list[float] = []
        """When events with output arrived."""

    async def read(self, response: httpx.Response) -> None:
        """Read to the end; _FailedError if an event says so or the stream is not whole."""
        is_whole = False
        async with aclosing(_event_data(response)) as events:
            # Read beyond [DONE], to the end: only then can the connection be used again.
            async for data in events:
                if data == b"[DONE]":
                    is_whole = True
                else:
                    self._take(data)
        if not is_whole:
            raise _FailedError("dropped stream", "the stream ended without [DONE]")
        if not self.times:
            raise _FailedError("no output", "the stream had no token")

    def _take(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            event = json_object(data)
            if event.get("error"):
                raise _FailedError("error event", error_message(data))
            brought = self.answer.take(event)
        except _MALFORMED as error:
            raise _FailedError("malformed event", f"{error!r} in {data[:100].decode(errors='replace')}") from error
        if brought:
            self.times.append(now)


async def _event_data(response: httpx.Response) -> AsyncGenerator[bytes]:
    r"""Yield the data of events, one line each.

    httpx's own lines end at every character that Unicode calls a line end, and text in an event may hold those.
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _classes(prompt_tokens: int, counted: dict[str, Any] | None, cached_tokens: object) -> dict[str, int] | None:
    """Return the classes a server tells apart: all four, what its prefix cache had and the rest, or nothing.

    The four need not add up to the prompt: the plugin counts nothing more of a request that SGLang retracts in the
    middle of its prompt.
    """
    if counted is not None:
        return {name: _count(name, counted[name], most=prompt_tokens) for name in TOKEN_CLASSES}
    if cached_tokens is not None:
        cached = _count("cached_tokens", cached_tokens, most=prompt_tokens)
        return {"prefix": cached, "computed": prompt_tokens - cached}
    return None


def _count(name: str, value: object, most: int = LARGEST - 1) -> int:
    """Return a number of tokens that a server told; ValueError if it can be none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}, got {reprlib.repr(value)}")
    return value


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of a Retry-After header, which may be a date; 0 if there is none that can be read."""
    text = response.headers.get("retry-after", "")
    if text.isdecimal():
        return min(float(text), _LONGEST_WAIT_S)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(tz=UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0
