"""What a stranger learns of another tenant's text (SpliceLeak, arXiv 2606.21842; CVE-2025-46570).

Times are made of what is computed, so the tests count that: the tokens of every forward, and the usage block. Nothing
here looks at a clock. Two worlds that differ only in what the victim sent must look the same to a stranger.
"""

import dataclasses
import re

import httpx
import openai
import pytest
import torch
from server_fakes import byte_level_tokenizer, running

from irminsul.engine.model import MlaModel
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner

VICTIM, STRANGER = {"tenant": "victim"}, {"tenant": "stranger"}


@pytest.fixture
def forwards(monkeypatch):
    """The number of tokens of every forward, in a list."""
    counted = []
    plain = MlaModel.forward

    def counting(self, batch, *args, **kwargs):
        counted.append(len(batch.token_ids_T))
        return plain(self, batch, *args, **kwargs)

    monkeypatch.setattr(MlaModel, "forward", counting)
    return counted


def seen_by(clients, forwards, probes, **scope):
    """Return all that the answers to these probes tell: logits, tokens, usage without times, tokens of each forward."""
    transcript = []
    for probe in probes:
        forwards.clear()
        logits, tokens, usage = clients.ask(probe, **scope)
        counts = {name: value for name, value in dataclasses.asdict(usage).items() if not name.endswith("_seconds")}
        transcript.append((logits, tokens, counts, list(forwards)))
    return transcript


def same(one, other):
    return all(torch.equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(one, other, strict=True))


@pytest.fixture
def probes(words):
    """Guesses at the victim's prompt: all of it, its beginning, its middle behind other text, its pieces reordered."""
    secret = words(1, 400)
    return [
        secret,
        secret[:100],
        words(2, 70) + secret[100:300],
        words(3, 70) + secret[200:400] + secret[:200],
        [*secret, 5],
        words(4, 150),
    ]


def test_a_strangers_requests_cost_what_they_cost_if_the_victim_had_sent_something_else(
    clients, forwards, probes, words
):
    worlds = []
    for secret in (probes[0], words(9, 400)):
        world = clients()
        world.ask(secret, **VICTIM)
        world.ask(words(8, 70) + secret[:300], **VICTIM)
        worlds.append(seen_by(world, forwards, probes, **STRANGER))
    assert same(*worlds)


def test_inside_the_tenant_the_same_probes_tell_everything(clients, forwards, probes, words):
    """Control: whoever shares rows can test guesses by what they cost. Side channels inside a tenant are not closed."""
    for probe, kind, found in ((probes[0], "prefix", 396), (probes[2], "shifted", 199)):
        worlds = []
        for secret in (probes[0], words(9, 400)):
            world = clients()
            world.ask(secret, **VICTIM)
            worlds.append(seen_by(world, forwards, [probe], **VICTIM))
        assert not same(*worlds)
        assert [world[0][2][kind] for world in worlds] == [found, 0]
        assert worlds[0][0][3][0] == len(probe) - found, "tokens of the first forward"


def surviving(clients, words, secret):
    """Fill the pool with rows of the stranger, let the victim send something, and count the rows that are left."""
    world = clients(pool_slots=1024)
    own = words(20, 900)
    world.ask(own, **STRANGER)
    world.ask(secret, **VICTIM)
    return world.ask(own, **STRANGER)[2].prefix


def test_memory_that_tenants_compete_for_tells_how_much_was_written_but_not_what(clients, words):
    """A pool is shared: rows of one tenant are evicted for another's. The second line is what is not promised."""
    assert surviving(clients, words, words(1, 400)) == surviving(clients, words, words(2, 400))
    assert surviving(clients, words, words(1, 200)) > surviving(clients, words, words(1, 400))


# -- over HTTP --


@pytest.fixture
def served(clients):
    """A server's address, in front of a new engine."""
    runner = EngineRunner(clients().engine)
    with running(create_app(runner, byte_level_tokenizer(), model_name="tiny", api_key="key")) as url:
        yield url


def usage_of(url, prompt, tenant):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60) as client:
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=2,
            temperature=0,
            extra_headers={"X-Irminsul-Tenant": tenant},
            extra_body={"ignore_eos": True},
        )
    usage = answer.usage.model_dump()
    del usage["irminsul"]["match_ms"]
    return usage


def counts(url):
    """All samples of /metrics that are not times."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples.items() if "_seconds" not in name and "_created" not in name}


def test_the_usage_block_tells_a_stranger_nothing(served, probes):
    for prompt in (probes[0], probes[2]):
        usage_of(served, prompt, "victim")
    for probe in probes[:3]:
        usage = usage_of(served, probe, f"stranger-{len(probe)}")
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert usage["irminsul"] == {
            "prefix": 0,
            "approximate_prefix": 0,
            "shifted": 0,
            "computed": len(probe),
            "gaps": 1,
            "planned_shifted": 0,
        }


def test_metrics_are_sums_over_all_tenants_and_name_none(served, probes):
    """A reader learns how long others' prompts are and how much of each they had sent before; never which text."""
    usage_of(served, probes[0], "victim")
    before = counts(served)
    usage_of(served, probes[0] + [5] * 20, "victim")
    after = counts(served)
    grown = {name: after[name] - value for name, value in before.items() if after[name] != value}
    assert grown['irminsul_prompt_tokens_total{source="prefix"}'] == 400
    assert grown['irminsul_prompt_tokens_total{source="computed"}'] == 20
    exposition = httpx.get(f"{served}/metrics").text
    labels = set(re.findall(r'(\w+)="', exposition))
    assert labels == {"source", "shifted", "finish_reason", "state", "status", "le"}
    assert "victim" not in exposition


def test_metrics_and_health_need_no_key(served):
    """Stated in docs/security.md: whoever may connect may read the sums; keep the port from those who may not."""
    assert httpx.get(f"{served}/metrics").status_code == 200
    assert httpx.get(f"{served}/health").status_code == 200
    assert httpx.get(f"{served}/v1/models").status_code == 401
