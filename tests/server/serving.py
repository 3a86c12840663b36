"""A server as a process of its own, on a stand-in engine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

_PROGRAM = """
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
{change}
serve(engine, Letters(), model_name="tiny", port={port}, drain_seconds={drain_seconds})
print("served; aborted", len(engine.aborted), flush=True)
"""


@contextmanager
def serving(
    *, drain_seconds: int = 20, port: int = 0, change: str = "", stderr: int | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield the process and the URL of its API. ``change`` is Python that may change ``engine``.

    Each request gets a token every 20 ms. When the server has ended it says how many requests it aborted.
    """
    program = _PROGRAM.format(drain_seconds=drain_seconds, port=port, change=change)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("irminsul serves tiny at http://127.0.0.1:"), line
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def stream(url: str, max_tokens: int):
    """Ask for a stream of tokens; a context manager as httpx's."""
    body = {"model": "tiny", "prompt": [72, 73], "max_tokens": max_tokens, "stream": True}
    return httpx.stream("POST", f"{url}/completions", json=body, timeout=20)
