"""A server to be hostile to, and what must hold of everything it answers."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
from server_fakes import byte_level_tokenizer, running, wait_until

from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.plan import ReusePolicy
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner

BODY_SECONDS = 0.5
CLIENT_SECONDS = 30.0
"""A client that waits so long has met a hang; the work of an input is bounded in processor time."""


@dataclass
class Target:
    """A running server, on a tiny model that has room for short answers only."""

    url: str
    schema: dict
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port)

    def connect(self) -> socket.socket:
        """Open a connection."""
        return socket.create_connection(self.address, timeout=CLIENT_SECONDS)

    def is_well(self) -> None:
        """Raise AssertionError unless the server answers others."""
        assert self.http.get("/health").json()["status"] == "ok"


@contextlib.contextmanager
def target_server(model: MlaModel) -> Iterator[Target]:
    """Run a server; at its end nothing may be left running, and every slot must be accounted for."""
    config = EngineConfig(pool_slots=96, page_size=4, prefill_chunk=64, policy=ReusePolicy(carve_out=8, min_run=8))
    engine = Engine(model, config)
    runner = EngineRunner(engine)
    app = create_app(runner, byte_level_tokenizer(), model_name="tiny", body_seconds=BODY_SECONDS)
    with running(app) as url, httpx.Client(base_url=url, timeout=CLIENT_SECONDS) as http:
        target = Target(url, app.openapi(), http)
        yield target
        target.is_well()
        wait_until(lambda: runner.stats.running == 0)
    engine.check_ownership()


def judge(status: int, content: bytes, content_type: str | None) -> None:
    """Raise AssertionError unless an answer is none of ours that failed, and every refusal says what is wrong."""
    assert 200 <= status < 500, (status, content[:500])
    if status < 400:
        return
    assert content_type == "application/json", (status, content_type, content[:200])
    error = json.loads(content)["error"]
    message, param = error["message"], error["param"]
    assert 10 < len(message) <= 400, error
    if status == 400:
        place = "messages" if param is None else re.split(r"[.\[]", param)[0]
        places = (place, repr(place)[1:-1], "body", "JSON object", "field's name", "prompt")
        assert any(name in message for name in places) or "the chat template" in message, error
