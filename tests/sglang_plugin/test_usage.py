"""Counters on their way into a usage block."""

import asyncio
from types import SimpleNamespace

import pytest

from irminsul.plan import Mode
from irminsul.server.protocol import ReuseUsage
from irminsul.sglang.requests import INFO_KEY
from irminsul.sglang.usage import carry_counters, response_usage, reuse_usage, streaming_usage


def counters(mode=Mode.LIVE):
    return {
        "mode": mode.value,
        "prefix_tokens": 10,
        "approximate_prefix_tokens": 5,
        "shifted_tokens": 70,
        "computed_tokens": 15,
        "gaps": 3,
    }


def test_the_names_are_those_of_the_embedded_server():
    assert set(reuse_usage(counters())) == set(ReuseUsage.model_fields) - {"match_ms"}


def test_what_is_only_observed_was_computed():
    found = reuse_usage(counters(Mode.OBSERVE))
    assert (found["shifted"], found["planned_shifted"]) == (0, 70)
    assert (found["computed"], found["gaps"]) == (85, 1)


def streamed(info):
    """The last output of a stream whose first output reported ``info``."""

    async def outputs():
        yield {"meta_info": {"cached_tokens": 15, "finish_reason": None}}
        yield {"meta_info": {"cached_tokens": 15, "finish_reason": {"type": "stop"}}}

    async def collect():
        state = SimpleNamespace(customized_info_accumulated=info)
        return [output["meta_info"]["cached_tokens"] async for output in carry_counters(outputs(), state)]

    return asyncio.run(collect())[-1]


@pytest.mark.parametrize("known", [True, False])
def test_a_block_is_shown_only_if_every_prompt_has_counters(monkeypatch, known):
    monkeypatch.setattr("irminsul.sglang.usage._let_usage_hold_more", lambda: None)
    # Two prompts of two choices each; only the first choice of a prompt counts.
    reported = [{INFO_KEY: [counters()]}, {}, {INFO_KEY: [counters()]} if known else {}, {}]
    cached = {choice: streamed(info) for choice, info in enumerate(reported)}
    assert set(cached.values()) == {15}
    usages = [
        response_usage(lambda *_: SimpleNamespace(), [{"meta_info": info} for info in reported], 2),
        streaming_usage(lambda *_: SimpleNamespace(), {}, {}, {}, cached, 2),
    ]
    expected = {"irminsul": {name: 2 * tokens for name, tokens in reuse_usage(counters()).items()}} if known else {}
    assert [vars(usage) for usage in usages] == [expected, expected]
