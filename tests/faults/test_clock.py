"""The clock of the machine goes backwards, and forwards, while a server and a client work.

Durations come from clocks that cannot be set (time.perf_counter, time.monotonic). time.time and datetime.now are
replaced here; what else reads them: ``created`` of answers, the Date header, the date of a block of a benchmark, and
Retry-After where it is a date.
"""

import datetime as dt
import json
import time
from email.utils import format_datetime

import httpx
import pytest
from fake_engine import FakeEngine
from fuzzing import irminsul
from scripted_server import ScriptedServer, chat_events
from server_fakes import byte_level_tokenizer, running

from irminsul.bench import client
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner

YEAR = 365 * 86400


@pytest.fixture
def unsteady(monkeypatch):
    """Let every look at the clock be a year before the one before it, and then a year behind."""
    began, looks = time.time(), [0]

    def unsteady_time():
        looks[0] += 1
        return began + (YEAR if looks[0] % 2 else -YEAR) - looks[0] * 60

    monkeypatch.setattr(time, "time", unsteady_time)
    return looks


def metric(text, name):
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[-1])


def test_a_server_answers_and_measures_as_ever(fault, unsteady):
    tokenizer = byte_level_tokenizer()
    engine = FakeEngine(lambda request: [65], eos=0)
    engine.step_seconds = 0.01
    looked = unsteady[0]
    with (
        running(create_app(EngineRunner(engine), tokenizer, model_name="tiny")) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        body = {"model": "tiny", "prompt": [72, 73], "max_tokens": 8}
        for _ in range(5):
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["created"] > 0
        engine.max_waiting = 0
        refused = http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        metrics = http.get("/metrics").text
    assert unsteady[0] > looked + 5
    for name, count in (("time_to_first_token", 5), ("inter_token_latency", 5 * 7), ("queue", 5), ("match", 5)):
        assert metric(metrics, f"irminsul_{name}_seconds_count") == count
        assert 0 <= metric(metrics, f"irminsul_{name}_seconds_sum") < 20
    fault(
        "the clock jumps by years, both ways, between any two looks at it, under `serve`",
        "answers, Retry-After and all histograms are as ever; `created` of an answer is what the clock said",
    )


def test_a_benchmark_measures_as_ever(fault, unsteady, tmp_path, monkeypatch):
    class Unsteady(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(time.time(), tz)

    monkeypatch.setattr("irminsul.bench.run.datetime", Unsteady)
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    log.write_text('{"model": "m", "messages": [{"role": "user", "content": "hello"}]}\n' * 4)
    with ScriptedServer(lambda body, number: [0.05, *chat_events()]) as server:
        arguments = ["bench", "serve", "--server", f"a={server.url}", "--load", log, "--out", out, "--repeats", "2"]
        assert irminsul(*arguments, seconds=100).status == 0
    blocks = [json.loads(line) for line in (out / "blocks.jsonl").read_text().splitlines()]
    starts = [dt.datetime.fromisoformat(block["started"]) for block in blocks]
    assert len(starts) == 2
    assert abs((starts[1] - starts[0]).total_seconds()) > YEAR
    for block in blocks:
        assert 0.05 <= block["ttft_s"]["p50"] < 5
        assert 0.2 <= block["seconds"] < 20
        assert 0 <= block["client_cpu_share"] < 2
    fault(
        "the clock jumps by years, both ways, under `irminsul bench serve`",
        "durations, rates and blocks are as ever; the date of a block is what the clock said",
    )


@pytest.mark.parametrize(("years", "least", "most"), [(-1, 0, 0), (1, YEAR - 5, YEAR + 5)])
def test_a_wait_until_a_date_is_never_negative_and_never_for_ever(fault, years, least, most):
    date = format_datetime(dt.datetime.now(tz=dt.UTC) + dt.timedelta(days=365 * years), usegmt=True)
    response = httpx.Response(429, headers={"retry-after": date})
    assert least <= client._retry_after(response) <= most
    fault(
        f"Retry-After with a date {'a year ago' if years < 0 else 'in a year'} (a clock is wrong)",
        "`irminsul bench serve` waits " + ("not at all" if years < 0 else "as long as --timeout at most"),
    )
