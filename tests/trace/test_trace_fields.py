"""Fields beside the prompt, and request bodies inside what loggers put around them."""

import json

import pytest

from irminsul.namespace import Namespace
from irminsul.trace.fields import call_info, seconds, unwrap
from irminsul.trace.lines import LineError

BODY = {"messages": [{"role": "user", "content": "Which berth is free?"}]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1_760_000_000, 1_760_000_000.0),
        (1_760_000_000.25, 1_760_000_000.25),
        (1_760_000_000_250, 1_760_000_000.25),
        (1_760_000_000_250_000, 1_760_000_000.25),
        (1_760_000_000_250_000_000, 1_760_000_000.25),
        ("2025-10-09T08:53:20Z", 1_760_000_000.0),
        ("2025-10-09 10:53:20+02:00", 1_760_000_000.0),
        ("2025-10-09T08:53:20.250", 1_760_000_000.25),
        (0, 0.0),
    ],
)
def test_times_in_any_unit(value, expected):
    assert seconds(value) == pytest.approx(expected, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    "value", [True, [], "noon", "", -1, 1e30, float("inf"), float("nan"), 10**400], ids=lambda value: repr(value)[:9]
)
def test_what_is_no_time_is_refused(value):
    with pytest.raises(LineError):
        seconds(value)


def test_fields_are_found_under_their_usual_names_outermost_first():
    around = {"timestamp": "2025-10-09T08:53:20Z", "metadata": {"session_id": 7}, "agent_name": "critic"}
    body = {"model": "m", "session_id": "inner", "cache_salt": "s", "extra_key": "k", "lora_path": "l", "tenant": "t"}
    info = call_info("f", 3, [around, body])
    assert (info.place, info.session, info.thread, info.ts) == ("f:3", "7", "critic", 1_760_000_000.0)
    assert info.namespace == Namespace(tenant="t", cache_salt="s", extra_key="k", lora="l", model="m")


def test_a_call_without_fields_has_none():
    info = call_info("f", 1, [{"session": None, "metadata": None}])
    assert (info.session, info.thread, info.ts, info.namespace) == (None, "", None, Namespace())


def test_the_session_that_anthropics_clients_write_into_the_user_id():
    session = "0b5a2f0e-33aa-4c1c-9d5e-0123456789ab"
    info = call_info("f", 1, [{"metadata": {"user_id": f"user_ab12_account__session_{session}"}}])
    assert info.session == session


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"tenant": ["a"]}, "'tenant' must be a string or a number, got list"),
        ({"session": True}, "'session' must be a string or a number, got bool"),
        ({"metadata": {"cache_salt": {}}}, "'cache_salt' must be a string or a number, got dict"),
        ({"created_at": "yesterday"}, "'created_at': 'yesterday' is no time in ISO 8601"),
    ],
)
def test_a_field_that_is_not_understood_is_refused(record, reason):
    with pytest.raises(LineError, match=reason):
        call_info("f", 1, [record])


@pytest.mark.parametrize(
    "record",
    [
        BODY,
        {"body": BODY},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"request": json.dumps(BODY)},
        {"request": {"method": "POST", "headers": {}, "body": BODY}},
        {"request": "POST /v1/chat/completions", "payload": BODY},
        {"input": BODY},
        {"log": 1, "request": {"body": {"payload": BODY}}},
    ],
)
def test_a_body_is_found_in_what_stands_around_it(record):
    assert unwrap(record).body == BODY


@pytest.mark.parametrize(
    ("record", "response"),
    [
        ({"request": BODY, "response": {"id": 1}}, {"id": 1}),
        ({"request": BODY, "response": {"status_code": 200, "body": {"id": 1}}}, {"id": 1}),
        ({"request": BODY, "response": {"status_code": 200, "body": '{"id": 1}'}}, {"id": 1}),
        ({"body": BODY, "response_body": '{"id": 1}'}, {"id": 1}),
        ({"request": BODY, "response": "text"}, "text"),
        ({**BODY, "response": {"id": 1}}, {"id": 1}),
        ({"request": BODY}, None),
    ],
)
def test_the_response_is_found(record, response):
    assert unwrap(record).response == response


@pytest.mark.parametrize(
    "record",
    [{}, {"request": 5}, {"request": "[1]"}, {"body": {"body": {"body": {"body": {"body": BODY}}}}}, {"response": {}}],
)
def test_a_record_without_a_body_is_refused(record):
    with pytest.raises(LineError, match="no request body"):
        unwrap(record)
