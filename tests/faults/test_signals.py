"""A server that is told to end, or is killed, while it answers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from disk import contents
from fake_engine import FakeEngine
from server_fakes import byte_level_tokenizer, running
from serving import serving, stream

from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner

STREAMS = 16
DONE = "data: [DONE]"


class Readers:
    """Clients that read streams at the same time; ``events`` and ``errors`` of each."""

    def __init__(self, url, count, max_tokens):
        self.events = [[] for _ in range(count)]
        self.errors = [None] * count
        self._threads = [threading.Thread(target=self._read, args=(url, at, max_tokens)) for at in range(count)]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 20
        while not all(self.events):
            assert time.monotonic() < deadline, "a stream did not begin"
            time.sleep(0.01)

    def join(self):
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _read(self, url, at, max_tokens):
        try:
            with stream(url, max_tokens) as response:
                self.events[at].extend(line for line in response.iter_lines() if line)
        except httpx.TransportError as error:
            self.errors[at] = error


def goes_on(drain_seconds):
    """What the server says when it is told to end."""
    return f"irminsul ends: {STREAMS} requests may go on for {drain_seconds} s; a second signal ends at once\n"


def refused(url):
    """Say whether nobody listens any more."""
    try:
        httpx.get(f"{url}/models", timeout=5)
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_streams_go_on_to_their_end(fault, number):
    with serving(drain_seconds=20) as (process, url):
        readers = Readers(url, STREAMS, max_tokens=60)
        began = time.monotonic()
        process.send_signal(number)
        time.sleep(0.5)
        assert refused(url)
        readers.join()
        rest, _ = process.communicate(timeout=20)
        seconds = time.monotonic() - began
    assert readers.errors == [None] * STREAMS
    assert all(events[-1] == DONE and len(events) == 61 for events in readers.events)
    assert (rest, process.returncode) == (f"{goes_on(20)}served; aborted 0\n", 0)
    assert seconds < 20
    fault(
        f"{number.name} to `serve` with {STREAMS} running streams",
        "closed the port, sent all streams to their end, exit status 0, within --drain-seconds",
    )


@pytest.mark.slow
def test_what_outlasts_the_drain_time_breaks_off(fault):
    with serving(drain_seconds=1) as (process, url):
        readers = Readers(url, STREAMS, max_tokens=1500)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        readers.join()
        rest, _ = process.communicate(timeout=20)
        seconds = time.monotonic() - began
    assert all(isinstance(error, httpx.RemoteProtocolError) for error in readers.errors)
    assert not any(DONE in events for events in readers.events)
    assert (rest, process.returncode) == (f"{goes_on(1)}served; aborted {STREAMS}\n", 0)
    assert seconds < 6
    fault(
        f"SIGTERM to `serve` with {STREAMS} streams that take longer than --drain-seconds",
        "broke them off after the stated time, none with a false end, exit status 0",
        "the rest of these answers",
    )


def test_who_comes_while_the_engine_ends_is_told_when_to_come_again(fault):
    runner = EngineRunner(FakeEngine(lambda request: [65], eos=0))
    with running(create_app(runner, byte_level_tokenizer(), model_name="tiny")) as url:
        runner.close()
        body = {"model": "tiny", "prompt": [72], "max_tokens": 3}
        answers = [httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}) for stream in (False, True)]
    for answer in answers:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "shutting_down"
    fault("a request that was let in, but meets an engine that ends", "503 with Retry-After: 1")


@pytest.mark.parametrize(
    "second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_a_second_signal_ends_at_once(fault, second):
    with serving(drain_seconds=60) as (process, url):
        readers = Readers(url, STREAMS, max_tokens=1500)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(second)
        rest, _ = process.communicate(timeout=20)
        seconds = time.monotonic() - began
        readers.join()
    assert all(isinstance(error, httpx.TransportError) for error in readers.errors)
    assert not any(DONE in events for events in readers.events)
    assert rest == f"{goes_on(60)}served; aborted {STREAMS}\n"
    assert process.returncode == 0
    assert seconds < 5
    fault(
        f"SIGTERM, then {second.name} to `serve` with {STREAMS} running streams",
        "broke them off at once (after the step it was in), none with a false end, exit status 0",
        "the rest of these answers",
    )


def test_a_kill_in_the_middle_of_a_stream_is_no_end_and_frees_the_port(fault):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(port=port) as (process, url):
        readers = Readers(url, 4, max_tokens=1500)
        process.kill()
        readers.join()
        assert all(isinstance(error, httpx.TransportError) for error in readers.errors)
        assert not any(DONE in events for events in readers.events)
        assert refused(url)
    with serving(port=port) as (_, again), stream(again, max_tokens=5) as response:
        events = [line for line in response.iter_lines() if line]
    assert (again, len(events), events[-1]) == (url, 6, DONE)
    fault(
        "kill -9 of `serve` in the middle of 4 streams",
        "every client got a broken stream, none a false end; the same command serves at the same port at once",
        "the rest of these answers; the cache, which is in memory only",
    )


@pytest.mark.slow
def test_the_command_itself_writes_nothing_and_serves_again(fault, tiny, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folders = [shutil.copytree(tiny, tmp_path / "m"), tmp_path / "home", tmp_path / "tmp", tmp_path / "here"]
    for folder in folders[1:]:
        folder.mkdir()
    before = contents(tmp_path)
    command = [sys.executable, "-m", "irminsul", "serve", "../m", "--port", str(port), "--pool-tokens", "2048"]
    places = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)}
    body = {"model": "m", "prompt": list(range(3, 200)), "temperature": 0, "ignore_eos": True}
    texts = []
    for _ in range(2):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=tmp_path / "here", env=os.environ | places
        ) as process:
            try:
                url = process.stdout.readline().split()[-1]
                whole = httpx.post(f"{url}/completions", json=body | {"max_tokens": 20}, timeout=60)
                texts.append(whole.json()["choices"][0]["text"])
                streaming = body | {"max_tokens": 800, "stream": True}
                with httpx.stream("POST", f"{url}/completions", json=streaming, timeout=60) as response:
                    lines = response.iter_lines()
                    next(lines)
                    process.kill()
                    with pytest.raises(httpx.TransportError):
                        list(lines)
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
        assert contents(tmp_path) == before
    assert texts[0] == texts[1]
    fault(
        "kill -9 of `irminsul serve CHECKPOINT` in the middle of a stream, and the same command again, twice",
        "no file was made or changed in its home, its folder for temporary files, its checkpoint or where it ran; "
        "it serves at once, with the same text for the same prompt",
        "the rest of these answers; the cache, which is in memory only",
    )


@pytest.mark.slow
def test_a_log_that_cannot_be_written_harms_no_answer(fault):
    change = "engine.answer = None"  # the engine fails, and the server logs a traceback
    with Path("/dev/full").open("w") as full, serving(change=change, stderr=full.fileno()) as (process, url):
        body = {"model": "tiny", "prompt": [72], "max_tokens": 3}
        for _ in range(3):
            answer = httpx.post(f"{url}/completions", json=body, timeout=20)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert httpx.get(f"{url.removesuffix('/v1')}/health", timeout=20).status_code == 503
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0
    fault(
        "`serve` with its log on a full disk, and an engine that fails and must be logged",
        "500 with the reason to every request, /health 503, drained on SIGTERM with exit status 0",
        "the log",
    )
