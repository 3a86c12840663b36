"""Donor poisoning (HijackKV, arXiv 2607.19957): rows of a harmless passage, computed behind an attacker's prefix.

Prefix, passage and question are random text here; the last test does it with words on the reference model.
"""

import os

import pytest
import torch

from irminsul.plan import Mode

ATTACKER = {"tenant": "attacker"}


@pytest.fixture
def texts(words):
    passage = words(1, 200)
    return {"attack": words(2, 80) + passage, "victim": words(3, 70) + passage + words(4, 20), "passage": passage}


@pytest.fixture
def cold(clients, texts):
    """What the victim gets of an engine that has seen nothing."""
    return clients().ask(texts["victim"])


def test_inside_one_tenant_the_attack_succeeds(clients, texts, cold, divergence):
    """Control: the attack is real, and approximate reuse promises nothing against those one shares rows with."""
    shared = clients()
    shared.ask(texts["attack"])
    logits, _, usage = shared.ask(texts["victim"])
    assert usage.shifted == 200
    assert divergence(cold[0], logits) > 0.01


@pytest.mark.parametrize(
    "victim",
    [
        {"tenant": "victim"},
        {"tenant": ""},
        {"tenant": "attacker", "cache_salt": "victim"},
        {"tenant": "attacker", "mode": Mode.OFF},
        {"tenant": "attacker", "mode": Mode.OBSERVE},
    ],
    ids=["tenant", "no tenant", "salt", "off", "observe"],
)
def test_behind_any_boundary_it_changes_no_bit(clients, texts, cold, victim):
    engine = clients()
    for _ in range(3):
        engine.ask(texts["attack"], **ATTACKER)
    logits, tokens, usage = engine.ask(texts["victim"], **victim)
    assert (usage.prefix, usage.approximate_prefix, usage.shifted) == (0, 0, 0)
    assert torch.equal(logits, cold[0])
    assert tokens == cold[1]


def test_a_victims_rows_come_from_its_own_tenant_although_the_attackers_are_newer_and_longer(clients, texts, words):
    """The victim has a donor of its own; what it gets is what it would get if the attacker did not exist."""
    own = words(5, 60) + texts["passage"]
    alone, attacked = clients(), clients()
    alone.ask(own, tenant="victim")
    attacked.ask(own, tenant="victim")
    # The victim's whole prompt, behind a prefix: a longer run than the victim's own.
    attacked.ask(words(2, 80) + texts["victim"], **ATTACKER)
    expected, found = (engine.ask(texts["victim"], tenant="victim") for engine in (alone, attacked))
    assert found[2].shifted == expected[2].shifted == 200
    assert torch.equal(found[0], expected[0])


def test_poison_dies_with_the_attackers_rows(clients, texts, cold, words):
    """Inside a tenant: a victim's copies, and what it computes behind them, are donors of nobody."""
    engine = clients()
    engine.ask(texts["attack"])
    poisoned = texts["victim"]
    assert engine.ask(poisoned)[2].shifted == 200
    before = engine.engine.stats()
    # The least recently used rows are the attacker's: the victim's were published after it copied them.
    cache, pool = engine.engine._cache, engine.engine._pool
    pool.free(cache.evict(len(texts["attack"])))
    assert engine.engine.stats().derived_slots == before.derived_slots > 200
    other = words(6, 90) + texts["passage"] + words(7, 20)
    logits, _, usage = engine.ask(other)
    assert (usage.approximate_prefix, usage.shifted) == (0, 0)
    assert torch.equal(logits, clients().ask(other)[0])
    # Whoever sends the poisoned prompt itself meets its derived rows, and is told so; "off" does not.
    assert engine.ask(poisoned)[2].approximate_prefix > 200
    logits, _, usage = engine.ask(poisoned, mode=Mode.OFF)
    assert (usage.prefix, usage.approximate_prefix, usage.shifted) == (68, 0, 0)
    assert torch.allclose(logits, cold[0], atol=1e-4), "68 rows of a lossless prefix: equal up to rounding"


def test_poison_does_not_travel_from_prompt_to_prompt(clients, texts, words):
    """Prompts in a chain, each with text that the one before it added: only what was computed exactly is a donor."""
    engine = clients()
    engine.ask(texts["attack"])
    added = words(8, 120)
    first = engine.ask(words(9, 40) + texts["passage"] + added)[2]
    second = engine.ask(words(10, 50) + added + words(11, 5))[2]
    assert first.shifted == 200
    assert second.shifted == 0, "the added text was computed behind a shifted hit"


@pytest.mark.skipif(
    "IRMINSUL_TEST_POISONING" not in os.environ, reason="takes half a minute; `make soak` sets IRMINSUL_TEST_POISONING"
)
@pytest.mark.checkpoint
@pytest.mark.slow
def test_with_words_on_the_reference_model():
    from benchmarks.poisoning import ATTACKS, SITUATIONS, carry_out
    from irminsul.checkpoints.smollm2 import BuiltIn, build, find_gguf
    from irminsul.engine.loading import load_model, load_tokenizer
    from irminsul.errors import InputError

    try:
        path = build(BuiltIn.MLA, gguf=find_gguf())
    except InputError as error:
        pytest.skip(str(error))
    attack = ATTACKS[0]
    situations = [situation for situation in SITUATIONS if "recompute" not in situation.name]
    rows = carry_out(attack, load_model(path), load_tokenizer(path), situations)
    harmless, poisoned, *defended = rows
    assert poisoned["shifted"] == harmless["shifted"] > 64
    assert poisoned["kl"] > 3 * harmless["kl"] > 0
    assert poisoned["wanted_logprob"] > max(harmless["wanted_logprob"], poisoned["wanted_logprob_cold"]) + 1
    assert len(defended) == 3
    for row in defended:
        assert (row["shifted"], row["kl"], row["changed"]) == (0, 0.0, 0)
        assert row["text"] == row["text_cold"]
