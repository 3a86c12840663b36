import contextlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from scripted_server import ScriptedServer


@pytest.fixture
def scripted():
    """Make servers that answer as they are told; give a function of the request's body and its number."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(ScriptedServer(**options))


@pytest.fixture
def log(tmp_path):
    """Write a request log in the OpenAI form: (session, agent, text) for each call."""

    def write(calls, name="log.jsonl"):
        path = tmp_path / name
        with path.open("w") as file:
            for session, agent, text in calls:
                metadata = {"session": session, "agent": agent} if session else {}
                body = {"model": "any", "metadata": metadata, "messages": [{"role": "user", "content": text}]}
                file.write(json.dumps(body) + "\n")
        return path

    return write
