"""The pure parts of benchmarks/server_load.py: what is sent, and whether each rule notices that it is broken."""

import asyncio
import json
import random
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import server_load
from server_load import HangUp, Log, Outcome, Probe, Settings, broken_rules, growth, latencies, percentile, summarise
from server_traffic import KEPT, Client, Drawn, working_set

SETTINGS = Settings("checkpoint", 60.0, 4, 30.0, 300.0, seed=0, leak_kib=0, pool_tokens=1000, max_waiting=4)
LOOK = {"running": 0.0, "waiting": 0.0, "active": 0.0, "locked": 0.0, "threads": 5.0, "descriptors": 8.0}
MINUTES = [number * 0.15 for number in range(400)]


def good_run():
    """Return a log of an hour in which nothing went wrong, and what was judged from outside."""
    rng = random.Random(0)
    samples = [
        {"minute": minute, "resident_mib": 2000 + rng.uniform(-8, 8), "registry": 900.0, **LOOK, "cached": 1000.0}
        | {"free": 0.0, **latencies([])}
        for minute in MINUTES
    ]
    outcomes = [Outcome("short", 200, number / 100, expected=True) for number in range(100)]
    outcomes.append(Outcome("short", 429, 0.1, expected=True, retry_after="1"))
    log = Log(outcomes=outcomes, samples=samples, calm_outcomes=50)
    log.burst = [Outcome("burst", 429, 0.1, expected=True, retry_after="1")]
    log.probes = [Probe(0.0, 1.0, "answer", cold=True), Probe(61.0, 1.0, "answer", cold=True)]
    judged = {"before": dict(LOOK), "end": dict(LOOK), "prompt_tokens": {}, "exit_code": 0, "server_log": ""}
    return log, judged


def broken(log, judged):
    return broken_rules(summarise(log, judged, SETTINGS))


def any_matches(sentences, pattern):
    return any(re.search(pattern, sentence) for sentence in sentences)


def leaking(log, mib_a_minute):
    log.samples = [
        sample | {"resident_mib": sample["resident_mib"] + mib_a_minute * sample["minute"]} for sample in log.samples
    ]


def test_a_good_run_breaks_no_rule():
    assert broken(*good_run()) == []


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (Outcome("short", "stuck", 300.0, expected=False), "1 requests were stuck"),
        (Outcome("short", "broken", 1.0, expected=False, detail="ReadError"), "must not come back.*broken ReadError"),
        (Outcome("no tenant", 200, 1.0, expected=False), "must not come back.*no tenant: 200"),
        (Outcome("short", 500, 1.0, expected=False), "1 answers were 5xx"),
        (Outcome("short", 429, 1.0, expected=True), "had no Retry-After"),
    ],
)
def test_a_request_that_ends_wrongly_is_noticed(outcome, sentence):
    log, judged = good_run()
    log.outcomes.append(outcome)
    assert any_matches(broken(log, judged), sentence)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("running", 1, "1 requests run"),
        ("waiting", 2, "2 wait"),
        ("active", 3, "3 slots are neither free nor cached"),
        ("locked", 4, "4 slots are locked"),
        ("threads", 6, "5 threads before and 6 after"),
        ("descriptors", 9, "8 file descriptors before and 9 after"),
    ],
)
def test_what_is_left_behind_is_noticed(name, value, sentence):
    log, judged = good_run()
    judged["end"][name] = value
    [found] = broken(log, judged)
    assert any_matches([found], sentence)


def test_a_probe_with_another_answer_or_a_warm_one_is_noticed():
    log, judged = good_run()
    log.probes.insert(1, Probe(30.0, 1.0, "another", cold=False))
    assert [sentence.split(" probes ")[1] for sentence in broken(log, judged)] == [
        "had another answer",
        "were not cold",
    ]


def test_a_server_that_does_not_recover_or_fails_at_its_end_is_noticed():
    log, judged = good_run()
    log.probes.append(Probe(61.0, 60.0, "answer", cold=True))
    log.burst = [Outcome("burst", 200, 1.0, expected=True)]
    log.samples[7]["registry"] = 1001.0
    sentences = broken(log, judged | {"exit_code": -9, "server_log": "Traceback"})
    for expected in ("1001 entries for 1000 slots", "burst was not refused", "took 60.0 s", "with -9", "Traceback"):
        assert any_matches(sentences, expected)
    assert len(sentences) == 5


def test_a_slow_leak_of_memory_is_noticed_and_noise_is_not():
    # 15 KiB of each of 60 requests a minute.
    log, judged = good_run()
    leaking(log, 60 * 15 / 1024)
    [sentence] = broken(log, judged)
    assert sentence.startswith("memory grew by 3")
    log, judged = good_run()
    log.samples[350]["resident_mib"] = 9000.0
    # What is allocated once, early in the run, is no leak.
    for sample in log.samples[:100]:
        sample["resident_mib"] -= 200
    assert broken(log, judged) == []


def test_growth_is_that_of_the_last_two_thirds():
    assert growth([0, 1, 2, 3, 4, 5], [50, 90, 0, 2, 4, 6]) == 6
    assert growth([0.0], [5.0]) == 0.0
    assert growth([], []) == 0.0


def test_percentiles_are_values_that_were_seen():
    assert [percentile(range(1, 101), percent) for percent in (50, 95, 99)] == [50, 95, 99]
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


def test_latencies_are_of_served_requests_read_at_full_speed():
    outcomes = [
        Outcome("short", 200, 1.0, expected=True, ttft_s=0.5),
        Outcome("short", 200, 9.0, expected=True, slow=True),
        Outcome("short", 429, 9.0, expected=True),
        Outcome("short", "hung up", 9.0, expected=True),
    ]
    found = latencies(outcomes)
    assert (found["whole_p99_s"], found["first_byte_p50_s"]) == (1.0, 0.5)


def test_metrics_are_read_with_their_labels():
    text = '# HELP a x\n# TYPE a gauge\na 3.0\nslots{state="free"} 4\nb{x="a b"} 1e3\n'
    assert server_load.parse_metrics(text) == {"a": 3.0, 'slots{state="free"}': 4.0, 'b{x="a b"}': 1000.0}


def test_the_same_seed_draws_the_same_requests_of_all_kinds():
    def drawn():
        clients = [Client(number, 0, "model", "key") for number in range(8)]
        found = []
        for _ in range(40):
            for client in clients:
                found.append(client.draw())
                client.learn(found[-1], "an answer")
        assert all(len(client.conversations) <= KEPT for client in clients)
        return found

    first = drawn()
    assert first == drawn()
    kinds = {request.kind for request in first}
    assert {"next turn", "edited history", "passages in another order", "the same prompt twice", "wrong key"} <= kinds
    assert {request.expected for request in first} == {200, 400, 401, 404, 405, 413}
    assert any(request.slow for request in first)


def test_an_answer_continues_its_conversation_and_no_answer_leaves_it():
    client = Client(0, 0, "model", "key")
    while not client.conversations:
        drawn = client.draw()
        client.learn(drawn, "")
        assert client.conversations == []
        client.learn(drawn, "hello")
    assert client.conversations[0][-1] == {"role": "assistant", "content": "hello"}


def test_the_working_set_counts_a_shared_prefix_once_in_each_namespace():
    def encode(prompt):
        return [1, 2, 3] if isinstance(prompt, str) else [1, 2, 3, 4]

    def rows(*numbers):
        return working_set([Client(number, 0, "model", "key") for number in numbers], encode)

    assert rows(0) == 4
    assert rows(0, 8) == 4  # of the same tenant
    assert rows(0, 1) == 8
    assert rows(3, 11) == 8  # of the same tenant, each with a salt


def events(*objects):
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in objects)


def test_streams_must_end_as_they_should():
    token = {"choices": [{"text": "a", "finish_reason": None}]}
    end = {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {}}
    done = b"data: [DONE]\n\n"
    assert server_load.read_stream(events(token, end, usage) + done) == "ab"
    assert server_load.read_stream(events(token, end)) is None
    assert server_load.read_stream(events(token) + done) is None
    assert server_load.read_stream(events(token, {"error": {}}) + done) is None
    assert server_load.read_stream(b"") is None


class Stream(httpx.AsyncByteStream):
    """Sends pieces, and then nothing for ever."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        self.closed = True


def outcome_of(response, drawn=None, limit_s=0.05, hang_up=None):
    async def ask():
        transport = httpx.MockTransport(lambda request: response)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
            return await server_load.send(http, drawn or Drawn("short", b"{}", {}), limit_s, hang_up)

    return asyncio.run(ask())


def test_a_request_without_an_end_is_stuck_unless_its_client_hangs_up():
    assert outcome_of(httpx.Response(200, stream=Stream([b"a"]))).status == "stuck"
    stream = Stream([b"a", b"b", b"c"])
    outcome = outcome_of(httpx.Response(200, stream=stream), limit_s=60, hang_up=HangUp(60, pieces=2))
    assert (outcome.status, outcome.expected, stream.closed) == ("hung up", True, True)
    outcome = outcome_of(httpx.Response(200, stream=Stream([])), limit_s=60, hang_up=HangUp(0.01, pieces=9))
    assert (outcome.status, outcome.expected) == ("hung up", True)
    # A client that would hang up only after the limit finds a stuck request all the same.
    assert outcome_of(httpx.Response(200, stream=Stream([])), hang_up=HangUp(0.05, pieces=9)).status == "stuck"


def test_only_what_must_come_back_is_expected():
    answer = {"choices": [{"text": "a", "finish_reason": "length"}]}
    assert outcome_of(httpx.Response(200, json=answer)).text == "a"
    overloaded = outcome_of(httpx.Response(429, headers={"retry-after": "1"}))
    assert (overloaded.expected, overloaded.retry_after) == (True, "1")
    must_be_refused = Drawn("no tenant", b"{}", {}, expected=400)
    assert outcome_of(httpx.Response(400), must_be_refused).expected
    for status in (200, 429, 500):
        assert not outcome_of(httpx.Response(status), must_be_refused).expected
    assert not outcome_of(httpx.Response(200, json={"choices": [{"text": "a", "finish_reason": None}]})).expected


def test_the_picture_is_small():
    log, _ = good_run()
    drawn = server_load.picture(log.samples, SETTINGS)
    assert drawn.startswith(b"\x89PNG")
    assert len(drawn) < 200_000
