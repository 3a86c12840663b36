"""The server on the embedded engine with a tiny random model: what clients see of reuse, and that no slot is lost."""

import concurrent.futures

import numpy as np
import openai
import pytest
from server_fakes import running, wait_until

from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.plan import Mode, ReusePolicy
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner
from irminsul.testing.tiny import write_tiny_checkpoint

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


CONFIG = EngineConfig(pool_slots=4096, page_size=4, prefill_chunk=128, mode=Mode.LIVE, policy=ReusePolicy(carve_out=32))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return MlaModel.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", family="v2", moe=False))


@pytest.fixture
def engine(model):
    engine = Engine(
        model,
        CONFIG,
    )
    yield engine
    # The server has ended: its thread no longer uses the engine.
    engine.check_ownership()
    assert not engine.has_work


@pytest.fixture
def client(engine, tokenizer):
    with (
        running(create_app(EngineRunner(engine), tokenizer, model_name="tiny")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def tokens(seed, length):
    return np.random.default_rng(seed).integers(3, 319, length).tolist()


def reuse(answer):
    found = answer.usage.model_extra["irminsul"]
    assert found["prefix"] == answer.usage.prompt_tokens_details.cached_tokens
    parts = tuple(found[name] for name in ("prefix", "approximate_prefix", "shifted", "computed"))
    assert sum(parts) == answer.usage.prompt_tokens
    return parts


def test_a_repeated_prompt_is_a_lossless_hit_with_the_same_answer(client):
    prompt = tokens(1, 300)
    first = client.completions.create(prompt=prompt, **GREEDY)
    again = client.completions.create(prompt=prompt, **GREEDY)
    assert reuse(first) == (0, 0, 0, 300)
    assert reuse(again) == (296, 0, 0, 4)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.completion_tokens == 8


def test_moved_text_is_shifted_and_not_cached(client):
    body = tokens(2, 300)
    client.completions.create(prompt=tokens(3, 50) + body, **GREEDY)
    moved = client.completions.create(prompt=tokens(4, 77) + body, **GREEDY)
    prefix, approximate, shifted, computed = reuse(moved)
    assert (prefix, approximate) == (0, 0)
    assert shifted == 299, "the last token is always computed"
    assert computed == 78
    off = client.completions.create(prompt=tokens(5, 60) + body, extra_headers={"X-Irminsul-Mode": "off"}, **GREEDY)
    assert reuse(off) == (0, 0, 0, 360)
    salted = GREEDY | {"extra_body": {"irminsul": "observe", "cache_salt": "pepper"}}
    client.completions.create(prompt=tokens(6, 60) + body, **salted)
    observed = client.completions.create(prompt=tokens(7, 60) + body, **salted)
    assert reuse(observed) == (0, 0, 0, 360)
    assert observed.usage.model_extra["irminsul"]["planned_shifted"] == 299


@pytest.mark.parametrize("other", [{"extra_headers": {"X-Irminsul-Tenant": "b"}}, {"extra_body": {"cache_salt": "b"}}])
def test_tenants_and_salts_share_nothing(client, other):
    prompt = tokens(8, 300)
    client.completions.create(prompt=prompt, **GREEDY)
    assert reuse(client.completions.create(prompt=prompt, **GREEDY | other)) == (0, 0, 0, 300)


def test_a_chat_turn_finds_its_history_after_a_stop_string(client):
    messages = [{"role": "user", "content": "tell me about the weather. " * 5}]
    first = client.chat.completions.create(messages=messages, **GREEDY | {"max_tokens": 30})
    stop = first.choices[0].message.content[5:8]
    cut = client.chat.completions.create(messages=messages, stop=stop, **GREEDY | {"max_tokens": 30})
    assert cut.choices[0].finish_reason == "stop"
    assert stop not in cut.choices[0].message.content
    assert first.choices[0].message.content.startswith(cut.choices[0].message.content)
    prefix, *_ = reuse(cut)
    assert prefix >= first.usage.prompt_tokens - 4


def test_hang_ups_lose_no_slot(client, engine):
    def leave_early(seed):
        with client.completions.create(prompt=tokens(seed, 200), stream=True, **GREEDY | {"max_tokens": 400}) as stream:
            for _ in zip(range(seed % 5), stream, strict=False):
                pass

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(leave_early, range(12)))
    wait_until(lambda: not engine.has_work)
    stats = engine.stats()
    assert stats.free_slots + stats.cached_slots == stats.pool_slots


def test_answers_do_not_depend_on_who_else_is_served(client):
    sampled = GREEDY | {"temperature": 1}

    def ask(seed):
        answer = client.completions.create(prompt=tokens(seed, 100), seed=seed, logprobs=1, **sampled)
        return answer.choices[0].text, answer.choices[0].logprobs.tokens

    alone = [ask(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


@pytest.mark.parametrize("token", [512, -1, 2**40])
def test_token_ids_that_do_not_exist_are_400(client, token):
    with pytest.raises(openai.BadRequestError, match="outside"):
        client.completions.create(prompt=[1, 2, token], **GREEDY)
