"""What a log says of a call besides its prompt: when, whose, which conversation.

Loggers and proxies have no common form, so a field is looked for under its usual names (the tuples below, first match
wins), in the line itself, in the request body and in the ``metadata`` of either. A value of another type than a
string or a number is refused, because a field that is there and not understood would silently merge two tenants.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from irminsul.namespace import Namespace
from irminsul.trace.lines import LineError, kind_of, parse_json
from irminsul.trace.records import CallInfo

TS_NAMES = (
    "ts",
    "timestamp",
    "@timestamp",
    "request_time",
    "start_time",
    "startTime",
    "received_at",
    "arrival_time",
    "created_at",
    "created",
)
SESSION_NAMES = ("session", "session_id", "sessionId", "conversation_id", "conversationId", "thread_id", "chat_id")
THREAD_NAMES = ("agent", "agent_id", "agentId", "agent_name")
TENANT_NAMES = ("tenant", "tenant_id", "tenantId", "organization_id", "org_id")
SALT_NAMES = ("cache_salt",)
EXTRA_KEY_NAMES = ("extra_key",)
LORA_NAMES = ("lora", "lora_name", "lora_path")
MODEL_NAMES = ("model",)

BODY_NAMES = ("body", "request", "request_body", "requestBody", "payload", "input")
RESPONSE_NAMES = ("response", "response_body", "responseBody", "output", "completion")
PROMPT_NAMES = ("messages", "input", "prompt", "text", "input_ids", "prompt_token_ids", "prompt_ids", "token_ids")
"""A record with one of these, and not an object there, is a request body itself."""

_MAX_WRAPPERS = 4
# Anthropic's clients write the session into the one field that the API has for it.
_SESSION_IN_USER_ID = re.compile(r"session_([0-9a-fA-F-]{36})\b")
# Above these a number of seconds would be in the year 5138 or later, so it counts a smaller unit.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
_LAST = datetime(9999, 12, 31, tzinfo=UTC)


class Unwrapped(NamedTuple):
    """A request body taken out of what a logger put around it."""

    body: dict[str, Any]
    response: Any
    """The response body; None if there is none."""
    around: tuple[Mapping[str, Any], ...]
    """The records around the body, outermost first."""


def unwrap(record: dict[str, Any]) -> Unwrapped:
    """Find the request body and the response in a logged record.

    The body is the record itself if it holds a prompt, or stands under one of BODY_NAMES, as an object or as JSON text,
    up to four records deep: ``{"request": body}``, ``{"request": {"body": body}}``, OpenAI's batch lines, ...

    Raises:
        LineError: there is no body.
    """
    around: list[Mapping[str, Any]] = []
    body: Any = record
    for _ in range(_MAX_WRAPPERS):
        if any(body.get(name) is not None and not isinstance(body[name], dict) for name in PROMPT_NAMES):
            return Unwrapped(body, _response([*around, body]), tuple(around))
        around.append(body)
        inner = next((found for name in BODY_NAMES if (found := _as_object(body.get(name))) is not None), None)
        if inner is None:
            break
        body = inner
    raise LineError(
        f"no request body: none of {', '.join(PROMPT_NAMES)} is there, nor in an object under {', '.join(BODY_NAMES)}"
    )


def call_info(file: str, line: int, records: Sequence[Mapping[str, Any]]) -> CallInfo:
    """Collect what the records say of a call, the first record that has a field deciding.

    Raises:
        LineError: a field is there and no time, or no string or number.
    """
    places = [place for record in records for place in (record, record.get("metadata")) if isinstance(place, Mapping)]
    return CallInfo(
        file=file,
        line=line,
        session=_text(places, SESSION_NAMES) or _session_in_user_id(places),
        thread=_text(places, THREAD_NAMES) or "",
        ts=_ts(places),
        namespace=Namespace(
            tenant=_text(places, TENANT_NAMES) or "",
            cache_salt=_text(places, SALT_NAMES) or "",
            extra_key=_text(places, EXTRA_KEY_NAMES) or "",
            lora=_text(places, LORA_NAMES) or "",
            model=_text(places, MODEL_NAMES) or "",
        ),
    )


def seconds(value: object) -> float:
    """Read a time: s, ms, us or ns since the epoch, told by its size, or ISO 8601 (UTC if it names no zone).

    Raises:
        LineError: it is none of these.
    """
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
            moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except ValueError:
            raise LineError(f"{value[:64]!r} is no time in ISO 8601") from None
        except OverflowError:
            raise LineError("a time is out of range") from None
        # The last moments of the last year could be rounded up to one that has no date.
        return min(moment, _LAST).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LineError(f"a time must be a number or ISO 8601 text, got {kind_of(value)}")
    if not 0 <= value < 2**63:
        raise LineError("a time is out of range")
    return float(value) / next((unit for least, unit in _UNITS if value >= least), 1.0)


def _ts(places: Sequence[Mapping[str, Any]]) -> float | None:
    for place in places:
        for name in TS_NAMES:
            if place.get(name) is not None:
                try:
                    return seconds(place[name])
                except LineError as reason:
                    raise LineError(f"{name!r}: {reason}") from None
    return None


def _text(places: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, bool) or not isinstance(value, str | int | float | None):
                raise LineError(f"{name!r} must be a string or a number, got {kind_of(value)}")
            if value is not None:
                return str(value)
    return None


def _session_in_user_id(places: Sequence[Mapping[str, Any]]) -> str | None:
    for place in places:
        found = _SESSION_IN_USER_ID.search(str(place.get("user_id", "")))
        if found:
            return found[1]
    return None


def _response(around: Sequence[Mapping[str, Any]]) -> Any:  # noqa: ANN401
    for record in around:
        response = _first(record, RESPONSE_NAMES)
        if response is not None:
            found = _as_object(response)
            if found is None:
                return response
            # A response with status and headers holds its body; OpenAI's own bodies have no such key.
            return found if found.get("body") is None else _as_object(found["body"]) or found["body"]
    return None


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:  # noqa: ANN401
    return next((record[name] for name in names if record.get(name) is not None), None)


def _as_object(value: object) -> dict[str, Any] | None:
    """Return an object that stands there as such or as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value)
    return value if isinstance(value, dict) else None
