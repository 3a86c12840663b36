import contextlib

import httpx
import openai
import pytest
from fake_engine import FakeEngine
from server_fakes import ANSWER, LiveServer, byte_level_tokenizer, running

from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner


@pytest.fixture(scope="session")
def tokenizer():
    return byte_level_tokenizer()


def answering_engine(tokenizer):
    answer = [*tokenizer(ANSWER)["input_ids"], tokenizer.eos_token_id]
    return FakeEngine(lambda request: answer, eos=tokenizer.eos_token_id)


@contextlib.contextmanager
def live_server(engine, tokenizer):
    with (
        running(create_app(EngineRunner(engine), tokenizer, model_name="tiny")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield LiveServer(url, engine, client, http)
        # A test that held the engine must not hold up the server's end.
        engine.release()


@pytest.fixture
def engine(tokenizer):
    return answering_engine(tokenizer)


@pytest.fixture
def live(engine, tokenizer):
    """A server on a socket, with OpenAI's own client and a plain one."""
    with live_server(engine, tokenizer) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tokenizer):
    """The same, for tests that neither change its engine nor look at what it has done."""
    with live_server(answering_engine(tokenizer), tokenizer) as server:
        yield server
