"""Wrong rows are impossible: random operations on the core and on the engine, everything checked after each.

Each operation runs two ways: drawn by hypothesis, which shrinks what fails to a few operations, and by seeded random
numbers, which is fast. IRMINSUL_TEST_OPERATIONS asks for more of the latter; tests/operations/drive.py does as many as
one likes and says what occurred.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from planted_bugs import all_tenants_have_one_tree
from world import HOSTS, WEIGHTS, World, drive

OPERATIONS = int(os.environ.get("IRMINSUL_TEST_OPERATIONS", "3000"))
RANDOM = st.randoms(use_true_random=False)
CASES = (
    "plans: prefix only",
    "plans: shifted only",
    "plans: both",
    "plans: neither",
    "plans: approximate prefix",
    "plans: several runs",
    "plans: a donor row twice",
    "plans: a donor in the request's own prefix",
    "plans: a donor that another request copies from",
    "plans: source and target positions overlap",
    "plans: a run moved backwards",
    "plans: a run that stays where it was",
    "evictions with an open plan",
    "hang-ups in a prefill",
    "hang-ups in a decode",
    "locks held",
    "splits of a locked node",
    "prompts built on another namespace's text",
)
"""What must have occurred, or a run proves nothing about it."""


class Operations(RuleBasedStateMachine):
    """Operations on one host."""

    host: str

    @initialize(rng=RANDOM)
    def start(self, rng):
        self.world = World(self.host, rng)

    @rule(operation=st.sampled_from(sorted(set(WEIGHTS) - {"submit", "advance"})), rng=RANDOM)
    def operate(self, operation, rng):
        self.world.operate(operation, rng)

    @rule(rng=RANDOM)
    def submit(self, rng):
        self.world.operate("submit", rng)

    @rule(steps=st.integers(1, 6), rng=RANDOM)
    def advance(self, steps, rng):
        for _ in range(steps):
            self.world.operate("advance", rng)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()


QUICK = settings(max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("host", HOSTS)
def test_operations_that_can_be_shrunk(host):
    run_state_machine_as_test(type(host, (Operations,), {"host": host}), settings=QUICK)


@pytest.mark.parametrize("host", HOSTS)
def test_many_operations(host):
    counts, _ = drive(host, 3, operations=OPERATIONS, life=500)  # many short lives: more settings are met
    assert all(counts[f"operations: {name}"] for name in WEIGHTS)
    assert [case for case in CASES if not counts[case]] == []


def test_what_fails_is_shrunk_to_a_few_operations(monkeypatch):
    all_tenants_have_one_tree(monkeypatch)
    machine = type("Shrunk", (Operations,), {"host": "core"})
    search = settings(
        QUICK,
        max_examples=200,
        stateful_step_count=6,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        database=None,
        derandomize=True,
    )
    with pytest.raises(AssertionError, match="another namespace") as caught:
        run_state_machine_as_test(machine, settings=search)
    steps = [note for note in caught.value.__notes__ if note.startswith("state.")]
    assert 0 < len(steps) < 8
