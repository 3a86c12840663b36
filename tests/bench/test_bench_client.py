"""One request against a scripted server: what is measured, and how each failure is told."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import accumulate

import httpx
import pytest
from scripted_server import chat_events, ids_events

from irminsul.bench.client import request_form, send
from irminsul.bench.load import Call, Protocol

CHAT = request_form(Protocol.OPENAI, "m", 3, ignore_eos=True, salt="s")
IDS = request_form(Protocol.SGLANG_IDS, "m", 3, ignore_eos=True, salt=None)
HELLO = Call("log:1", 0, b'"messages": [{"role": "user", "content": "hello"}]', None)
NUMBERS = Call("log:1", 0, b'"input_ids": [1, 2, 3]', 3)


def measure(server, call=HELLO, form=CHAT, timeout=5.0, times=1):
    async def measured():
        async with httpx.AsyncClient(base_url=server.url, timeout=timeout) as http:
            return [await send(http, form, call, time.perf_counter()) for _ in range(times)][-1]

    return asyncio.run(measured())


def check_times(found, *delays):
    """Output came when it was sent: never sooner than that, and not much later even on a busy machine."""
    assert len(found.itl_s) == len(delays) - 1
    for came, sent in zip(accumulate((found.ttft_s, *found.itl_s)), accumulate(delays), strict=True):
        assert sent <= came < sent + 0.5
    assert found.end_to_end_s >= sum((found.ttft_s, *found.itl_s))


def test_a_slow_first_token_is_the_ttft_and_gaps_are_the_itl(scripted):
    role, first, second, third, *rest = chat_events()
    server = scripted(answer=lambda *_: [role, 0.6, first, 0.05, second, 0.6, third, *rest])
    found = measure(server)
    assert found.error is None
    check_times(found, 0.6, 0.05, 0.6)
    assert (found.prompt_tokens, found.completion_tokens, found.status) == (10, 3, 200)
    assert found.token_classes == {"prefix": 4, "computed": 6}


def test_what_is_asked_for(scripted):
    server = scripted()
    measure(server)
    assert server.bodies == [
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": 3,
            "ignore_eos": True,
            "cache_salt": "s",
            "messages": [{"role": "user", "content": "hello"}],
        }
    ]
    server = scripted(answer=lambda *_: ids_events())
    measure(server, NUMBERS, IDS)
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    assert server.bodies == [{"stream": True, "sampling_params": sampling, "input_ids": [1, 2, 3]}]
    assert server.paths == ["/generate"]


def test_token_ids_come_with_sglangs_own_counts(scripted):
    first, _, third, done = ids_events()
    found = measure(scripted(answer=lambda *_: [0.1, first, first, 0.05, third, done]), NUMBERS, IDS)
    assert found.error is None
    # Two tokens in one event share a gap; an event that repeats what is known has none.
    check_times(found, 0.1, 0.05)
    assert found.completion_tokens == 3
    assert found.token_classes == {"prefix": 4, "computed": 6}


def test_the_plugins_counters_are_the_classes(scripted):
    counters = {"prefix_tokens": 1, "approximate_prefix_tokens": 2, "shifted_tokens": 3, "computed_tokens": 4}
    live = scripted(answer=lambda *_: ids_events(irminsul=counters | {"gaps": 2, "mode": "live"}))
    assert measure(live, NUMBERS, IDS).token_classes == {
        "prefix": 1,
        "approximate_prefix": 2,
        "shifted": 3,
        "computed": 4,
    }
    watching = scripted(answer=lambda *_: ids_events(irminsul=counters | {"gaps": 2, "mode": "observe"}))
    assert measure(watching, NUMBERS, IDS).token_classes["shifted"] == 0


def test_what_a_server_does_not_tell_is_absent(scripted):
    assert measure(scripted(answer=lambda *_: chat_events(cached=None))).token_classes is None
    silent = measure(scripted(answer=lambda *_: chat_events(usage=False)))
    assert (silent.error, silent.prompt_tokens, silent.completion_tokens) == (None, None, None)


def test_an_answer_without_text_has_its_first_token_at_its_end(scripted):
    role, *_, end, usage, done = chat_events()
    found = measure(scripted(answer=lambda *_: [role, 0.6, end, usage, done]))
    assert found.error is None
    check_times(found, 0.6)


def test_connections_are_used_again(scripted):
    server = scripted()
    ports = set()
    process_request = server._server.process_request
    server._server.process_request = lambda request, address: (ports.add(address), process_request(request, address))
    assert measure(server, times=5).error is None
    assert len(ports) == 1


def refused(code, *headers, body=b'{"error": {"message": "too many"}}'):
    return lambda *_: [("status", code, headers, body)]


def in_a_minute(*_):
    """Refuse until a date, counted from when it is asked."""
    date = format_datetime(datetime.now(tz=UTC) + timedelta(seconds=60))
    return refused(429, ("retry-after", date))()


FIRST, SECOND, *_ = chat_events()
DEEP = "[" * 100_000
ABORTED = {"meta_info": {"finish_reason": {"type": "abort", "message": "no room"}}}


@pytest.mark.parametrize(
    ("answer", "kind", "message", "wait"),
    [
        (refused(429, ("retry-after", "3")), "HTTP 429", "too many", 3),
        (in_a_minute, "HTTP 429", "too many", pytest.approx(60, abs=10)),
        (refused(503, ("retry-after", "soon"), body=b"<html>"), "HTTP 503", "<html>", 0),
        (refused(500, body=b'{"error": "broken"}'), "HTTP 500", "broken", 0),
        (lambda *_: ["drop"], "connection", "Server disconnected", 0),
        (lambda *_: [FIRST, SECOND, "drop"], "dropped stream", "", 0),
        (lambda *_: [FIRST, SECOND], "dropped stream", "the stream ended without [DONE]", 0),
        (lambda *_: [FIRST, SECOND, {"error": {"message": "engine failed"}}, "[DONE]"], "error event", "engine", 0),
        (lambda *_: [FIRST, SECOND, "{half", "[DONE]"], "malformed event", "JSONDecodeError", 0),
        (lambda *_: [FIRST, {"choices": [{}]}, "[DONE]"], "malformed event", "KeyError('delta')", 0),
        (lambda *_: [FIRST, "[]", "[DONE]"], "malformed event", "an object was expected, got list", 0),
        (lambda *_: [FIRST, DEEP, "[DONE]"], "malformed event", "JSON nested too deeply", 0),
        (refused(500, body=DEEP.encode()), "HTTP 500", "[[[", 0),
        (refused(500, body=b'{"error": "half \\ud800"}'), "HTTP 500", "half ?", 0),
        (refused(429, ("retry-after", "9" * 400)), "HTTP 429", "too many", 1e9),
        (refused(429, ("retry-after", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT")), "HTTP 429", "too many", 0),
        (lambda *_: [FIRST, "[DONE]"], "no output", "the stream had no token", 0),
        (lambda *_: [FIRST, 3, SECOND], "timeout", "ReadTimeout", 0),
    ],
)
def test_every_failure_has_a_name(scripted, answer, kind, message, wait):
    found = measure(scripted(answer=answer), timeout=1.5)
    assert (found.error, found.retry_after_s) == (kind, wait)
    assert message in found.message


BAD_COUNTS = [True, "10", 1.0, -1, 10**15, None, [], {}]
CLASSES = {"prefix": 1, "approximate_prefix": 2, "shifted": 3, "computed": 4}
COUNTERS = {"prefix_tokens": 1, "approximate_prefix_tokens": 2, "shifted_tokens": 3, "computed_tokens": 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prompt_tokens", value) for value in BAD_COUNTS),
        *(("completion_tokens", value) for value in BAD_COUNTS),
        # None is how a server says that it does not tell.
        *(("cached_tokens", value) for value in [*BAD_COUNTS, 11] if value is not None),
        *((name, value) for name in CLASSES for value in [*BAD_COUNTS, 11]),
    ],
)
def test_counts_that_can_be_none_are_an_error_of_the_request(scripted, name, value):
    *stream, end, done = chat_events()
    usage = end["usage"]
    if name in CLASSES:
        usage["irminsul"] = CLASSES | {name: value}
    elif name == "cached_tokens":
        usage["prompt_tokens_details"] = {name: value}
    else:
        usage[name] = value
    found = measure(scripted(answer=lambda *_: [*stream, end, done]))
    assert found.error == "malformed event"
    assert found.message[len("ValueError(?") :].startswith(f"{name} must be a whole number from 0 to ")
    assert found.token_classes is None


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"prompt_tokens": True}, "prompt_tokens"),
        ({"completion_tokens": float("nan")}, "completion_tokens"),
        ({"cached_tokens": 11}, "cached_tokens"),
        ({"irminsul": [COUNTERS | {"gaps": 1, "mode": "live", "shifted_tokens": 11}]}, "shifted"),
        ({"irminsul": [COUNTERS | {"gaps": 1, "mode": "live", "computed_tokens": "4"}]}, "computed"),
    ],
)
def test_counts_of_generate_are_looked_at_too(scripted, info, name):
    event, *_ = ids_events()
    event["meta_info"] |= info
    found = measure(scripted(answer=lambda *_: [event, "[DONE]"]), NUMBERS, IDS)
    assert found.error == "malformed event"
    assert f"{name} must be a whole number from 0 to " in found.message


def test_classes_of_a_prompt_that_was_retracted_need_not_add_up(scripted):
    retracted = scripted(
        answer=lambda *_: ids_events(irminsul=COUNTERS | {"gaps": 1, "mode": "live"}, prompt_tokens=99)
    )
    found = measure(retracted, NUMBERS, IDS)
    assert (found.error, sum(found.token_classes.values()), found.prompt_tokens) == (None, 10, 99)


def test_an_aborted_request_and_a_server_that_is_not_there(scripted):
    found = measure(scripted(answer=lambda *_: [ABORTED, "[DONE]"]), NUMBERS, IDS)
    assert (found.error, found.message) == ("aborted", "no room")
    server = scripted()
    server.stop()
    found = measure(server)
    assert (found.error, found.status, found.ttft_s) == ("connection", None, None)
