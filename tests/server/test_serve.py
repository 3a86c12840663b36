"""``serve`` as a process: the ready line, the address, and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine

from irminsul.errors import InputError
from irminsul.server.app import serve

PROGRAM = """
from fake_engine import FakeEngine
from irminsul.server.app import serve
class Letters:
    chat_template = None
    def __len__(self):
        return 128
    def get_vocab(self):
        return {{chr(code): code for code in range(128)}}
    def decode(self, token_ids, **options):
        return "".join(map(chr, token_ids))
engine = FakeEngine(lambda request: [65], eos=0)
engine.step_seconds = 0.02
serve(engine, Letters(), model_name="tiny", port=0, drain_seconds={drain_seconds})
print("served; aborted", len(engine.aborted), flush=True)
"""


@pytest.fixture
def start():
    processes = []

    def start(drain_seconds=20):
        program = PROGRAM.format(drain_seconds=drain_seconds)
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        processes.append(process)
        line = process.stdout.readline()
        assert line.startswith("irminsul serves tiny at http://127.0.0.1:")
        return process, line.split()[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def stream(url, max_tokens):
    body = {"model": "tiny", "prompt": [72, 73], "max_tokens": max_tokens, "stream": True}
    return httpx.stream("POST", f"{url}/completions", json=body, timeout=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(start, number):
    process, url = start()
    with stream(url, max_tokens=50) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(number)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) == 50
    rest, _ = process.communicate(timeout=20)
    assert (rest, process.returncode) == ("served; aborted 0\n", 0)


def test_what_takes_longer_than_the_drain_time_is_aborted(start):
    process, url = start(drain_seconds=1)
    with stream(url, max_tokens=1500) as response:
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    rest, _ = process.communicate(timeout=20)
    assert (rest, process.returncode) == ("served; aborted 1\n", 0)
    assert time.monotonic() - began < 10


def test_an_address_that_is_taken_is_named(start, tokenizer):
    _, url = start()
    port = httpx.URL(url).port
    engine = FakeEngine(lambda request: [5], eos=tokenizer.eos_token_id)
    with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1:{port}"):
        serve(engine, tokenizer, model_name="tiny", port=port)
    with pytest.raises(InputError, match=r"cannot listen at no\.such"):
        serve(engine, tokenizer, model_name="tiny", host="no.such.host.invalid")
    with pytest.raises(InputError, match="got 70000"):
        serve(engine, tokenizer, model_name="tiny", port=70000)
