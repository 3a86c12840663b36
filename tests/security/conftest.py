"""Shared by the re-enacted attacks: a tiny model and an engine that two tenants use."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.engine.types import Request, SamplingParams
from irminsul.plan import ReusePolicy
from irminsul.testing.tiny import write_tiny_checkpoint

# The servers of the server's tests, and the plain model of what a cache holds of the matchers'.
sys.path += [str(Path(__file__).parents[1] / area) for area in ("server", "matching")]


class Clients:
    """An engine and whoever sends it prompts; ``ask`` gives the first logits, the tokens and the usage."""

    def __init__(self, model, **config):
        config = {
            "pool_slots": 4096,
            "page_size": 4,
            "prefill_chunk": 256,
            "policy": ReusePolicy(carve_out=32),
        } | config
        self.engine = Engine(model, EngineConfig(**config))

    def ask(self, prompt, *, max_tokens=4, **fields):
        """Serve one greedy request to its end."""
        seen = []
        self.engine.on_first_logits = lambda _, logits: seen.append(logits.clone())
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.submit(Request("request", tuple(prompt), sampling, **fields))
        outputs = []
        while self.engine.has_work:
            outputs += self.engine.step()
            self.engine.check_ownership()
        return seen[0], [output.token_id for output in outputs], outputs[0].usage


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return MlaModel.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", family="v2", moe=False))


@pytest.fixture
def clients(model):
    """Return a function that builds an engine; keywords are fields of EngineConfig."""
    return lambda **config: Clients(model, **config)


@pytest.fixture(scope="session")
def words():
    """Return a function (seed, length) -> token ids, the same for the same arguments."""
    return lambda seed, length: np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.fixture(scope="session")
def divergence():
    """Return a function (logits, logits) -> KL in nats."""

    def kl(full, other):
        full, other = (torch.log_softmax(logits.double(), dim=-1) for logits in (full, other))
        return float((full.exp() * (full - other)).sum())

    return kl
