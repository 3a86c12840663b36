"""``serve`` as a process: the ready line, the address, and signals."""

import signal
import socket
import time

import httpx
import pytest
from fake_engine import FakeEngine
from serving import serving, stream

from irminsul.errors import InputError
from irminsul.server.app import serve


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number):
    with serving() as (process, url):
        with stream(url, max_tokens=50) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert len(events) == 50
        rest, _ = process.communicate(timeout=20)
    told, end = rest.splitlines()
    assert told.startswith("irminsul ends: 1 requests may go on for ")
    assert (end, process.returncode) == ("served; aborted 0", 0)


def test_what_takes_longer_than_the_drain_time_is_aborted():
    with serving(drain_seconds=1) as (process, url):
        with stream(url, max_tokens=1500) as response:
            lines = response.iter_lines()
            next(lines)
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        rest, _ = process.communicate(timeout=20)
    assert (rest.splitlines()[-1], process.returncode) == ("served; aborted 1", 0)
    assert time.monotonic() - began < 10


def test_an_address_that_is_taken_is_named(tokenizer):
    engine = FakeEngine(lambda request: [5], eos=tokenizer.eos_token_id)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen at 127.0.0.1:{port}"):
            serve(engine, tokenizer, model_name="tiny", port=port)
    with pytest.raises(InputError, match=r"cannot listen at no\.such"):
        serve(engine, tokenizer, model_name="tiny", host="no.such.host.invalid")
    with pytest.raises(InputError, match="got 70000"):
        serve(engine, tokenizer, model_name="tiny", port=70000)
