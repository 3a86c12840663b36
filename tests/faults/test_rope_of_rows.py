"""A configuration whose rotary frequencies are others than those of the rows that are there."""

import json
import math
import shutil

import numpy as np
import pytest
import torch

from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.engine.types import Request, SamplingParams
from irminsul.namespace import Namespace
from irminsul.registry import Registry
from irminsul.rope import Pairing, RopeSpec
from irminsul.testing.tiny import write_tiny_checkpoint

PASSAGE = [(7 * number) % 480 + 3 for number in range(200)]
PROMPTS = [[5] * 40 + PASSAGE, [6] * 70 + PASSAGE, [5] * 40 + PASSAGE + [9] * 20]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("rope") / "m", "v2", moe=False, yarn=True)


def with_rope(checkpoint, folder, change):
    """The same weights with other rotary parameters."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    return MlaModel.load(folder)


def ask(engine, prompt):
    """Serve one prompt; return its usage and its first logits."""
    seen = []
    engine.on_first_logits = lambda _, logits: seen.append(logits.clone())
    engine.submit(Request("r", tuple(prompt), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_ownership()
    return outputs[0].usage, seen[0]


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("rope_theta 10,000 and 20,000", {"rope_theta": 20000.0}),
        ("YaRN's factor 8 and 4", {"factor": 4.0}),
        ("YaRN's mscale 1 and 0.5", {"mscale": 0.5}),
        ("YaRN's beta_fast 32 and 4", {"beta_fast": 4.0}),
    ],
)
def test_rows_of_another_rope_are_never_read(fault, checkpoint, tmp_path, what, change):
    config = EngineConfig(pool_slots=2048)
    first, second = MlaModel.load(checkpoint), with_rope(checkpoint, tmp_path / "m", change)
    engine = Engine(first, config, identity="one name for both")
    usages = [ask(engine, prompt)[0] for prompt in PROMPTS]
    assert usages[1].shifted > 100
    assert usages[2].prefix >= 240
    # The same pool, tree and registry, and the configuration that was read again.
    engine._model = second
    alone = Engine(second, config, identity="one name for both")
    for prompt in PROMPTS:
        (usage, logits), (expected_usage, expected) = ask(engine, prompt), ask(alone, prompt)
        assert (usage.prefix, usage.shifted) == (expected_usage.prefix, expected_usage.shifted)
        assert torch.equal(logits, expected)
    engine._model = first
    assert ask(engine, PROMPTS[0])[0].prefix == len(PROMPTS[0]) - 1
    fault(
        f"a configuration with another rope over the rows of an engine: {what}",
        "no row of the other rope was read, by prefix or shifted; all logits to the bit as of an engine of its own",
    )


SPEC = RopeSpec((1.0, 0.1), Pairing.INTERLEAVED)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("one frequency by its last bit", RopeSpec((1.0, math.nextafter(0.1, 1)), Pairing.INTERLEAVED)),
        ("the pairing", RopeSpec((1.0, 0.1), Pairing.HALF_SPLIT)),
    ],
)
def test_specs_that_differ_at_all_share_nothing(fault, what, other):
    registry = Registry(1024, seed=1)
    tokens = np.array(PASSAGE, dtype=np.int32)
    mine, others = (Namespace(model="m", row_format="f", rope=spec.fingerprint) for spec in (SPEC, other))
    registry.add(mine, tokens, np.arange(len(tokens), dtype=np.int32), 0)
    assert [run.length for run in registry.find(mine, tokens, 0)] == [len(tokens)]
    assert registry.find(others, tokens, 0) == []
    fault(f"rows of a rope that differs in {what} (the plugin's and the engine's fingerprint)", "no row crosses")
