"""The live replay against the engine that it stands for: the same plan for every call of a log."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from test_replay import ListLog, logs, nothing

from irminsul import registry
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.engine.types import Request, SamplingParams
from irminsul.plan import Mode, ReusePolicy, SegmentKind
from irminsul.testing.tiny import write_tiny_checkpoint
from irminsul.trace.replay import MatcherReplay, ReplayConfig, replay_live, replay_matcher, replay_prefix

CLASSES = (SegmentKind.PREFIX, SegmentKind.APPROXIMATE_PREFIX, SegmentKind.SHIFTED, SegmentKind.GAP)
POLICY = ReusePolicy(carve_out=8, min_run=64, gap_cost=4, min_known=0.3)
PROMPTS = ReplayConfig(replies=False)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def live(log: ListLog, policy: ReusePolicy = POLICY, config: ReplayConfig = PROMPTS) -> MatcherReplay:
    prefix = replay_prefix(log, config, nothing)
    return replay_live(log, "winnow64", prefix, config, nothing, policy=policy, keep_plans=frozenset(range(len(log))))


def prompts(*tokens: list[int]) -> ListLog:
    return ListLog([(one, None, "") for one in tokens])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MlaModel:
    return MlaModel.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", family="v2", moe=False))


def served(model: MlaModel, log: ListLog, slots: int, policy: ReusePolicy) -> list[tuple[int, ...]]:
    """Serve a log one call after the other; return the token classes of each."""
    with patch.object(registry.secrets, "randbits", lambda _: PROMPTS.seed):
        # Which of several copies of a text that repeats itself is found depends on the seed.
        engine = Engine(model, EngineConfig(pool_slots=slots, page_size=1, mode=Mode.LIVE, policy=policy))
    found = []
    for call in log:
        engine.submit(Request("r", tuple(call.tokens.tolist()), ONE_TOKEN, tenant=call.info.namespace.tenant))
        while engine.has_work:
            for output in engine.step():
                usage = output.usage
        found.append((usage.prefix, usage.approximate_prefix, usage.shifted, usage.computed))
    return found


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=logs())
def test_the_replay_plans_what_the_engine_does(model: MlaModel, log: ListLog) -> None:
    for slots in (800, 8192):
        replay = live(log, config=ReplayConfig(cache_tokens=slots, replies=False))
        planned = [tuple(replay.plans[i].tokens(kind) for kind in CLASSES) for i in range(len(log))]
        assert planned == served(model, log, slots, POLICY)


def test_rows_behind_a_copied_one_are_not_copied_again() -> None:
    known, new = text(1, 200), text(2, 150)
    log = prompts(known, text(3, 20) + known + new, text(4, 30) + new)
    prefix = replay_prefix(log, PROMPTS, nothing)
    compared = replay_matcher(log, "winnow64", prefix, PROMPTS, nothing, policy=POLICY)
    assert compared.recovered.tolist() == [0, 200, 149]
    found = live(log)
    assert found.recovered.tolist() == [0, 200, 0]
    assert found.computed.tolist() == [200, 170, 180]
    assert found.approximate.tolist() == [0, 350, 0]


def test_a_session_goes_on_from_its_approximate_rows() -> None:
    known = text(1, 200)
    turn = text(3, 20) + known + text(2, 50)
    found = live(prompts(known, turn, turn + text(5, 40)))
    assert [found.plans[2].tokens(kind) for kind in CLASSES] == [20, 250, 0, 40]
    assert found.approximate.tolist() == [0, 250, 290]


def test_a_reply_behind_approximate_rows_is_approximate_and_behind_exact_ones_exact() -> None:
    known, reply = text(1, 200), text(2, 100)
    log = ListLog([(known, reply, ""), (text(3, 20) + known, text(4, 100), "")])
    log.calls += prompts(text(5, 20) + reply, text(6, 20) + text(4, 100)).calls
    found = live(log, config=ReplayConfig())
    assert found.recovered.tolist() == [0, 199, 99, 0]


def test_a_bounded_cache_holds_derived_rows_too() -> None:
    known = text(1, 200)
    calls = [known, *(text(10 + at, 20) + known for at in range(6)), [*known, 1]]
    bounded = ReplayConfig(cache_tokens=520, replies=False)
    found = live(prompts(*calls), config=bounded)
    assert found.recovered[1:-1].tolist() == [199] * 6
    assert found.plans[7].tokens(SegmentKind.PREFIX) == 200, "a donor is used, so it is not what is evicted"


def test_half_or_nothing_makes_donors_of_a_text_that_shares_a_little() -> None:
    known, new = text(1, 100), text(2, 300)
    calls = [known, *(text(10 + at, 20) + known + new for at in range(5))]
    greedy = live(prompts(*calls), policy=ReusePolicy(carve_out=8, min_known=0))
    patient = live(prompts(*calls), policy=ReusePolicy(carve_out=8))
    assert greedy.recovered.tolist() == [0, 100, 100, 100, 100, 100]
    assert patient.recovered.tolist() == [0, 0, 399, 399, 399, 399]
