"""The plan is a pure function; its promises hold for every input."""

from dataclasses import asdict, replace
from functools import partial
from inspect import signature

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.cli import serve
from irminsul.errors import InputError
from irminsul.plan import ReusePolicy, Run, SegmentKind, make_plan


def run(start: int, length: int, source: int = 1000) -> Run:
    return Run(start, source, np.arange(source, source + length, dtype=np.int32))


PLAIN = ReusePolicy(carve_out=0, min_run=1, max_runs=1000, gap_cost=0, min_known=0)
DEFAULT = ReusePolicy(min_known=0)


@st.composite
def problems(draw: st.DrawFn) -> dict:
    n_tokens = draw(st.integers(1, 400))
    prefix = draw(st.integers(0, n_tokens))
    approximate = draw(st.integers(0, n_tokens - prefix))
    cuts = sorted(draw(st.lists(st.integers(prefix + approximate, n_tokens), max_size=12, unique=True)))
    runs = [run(a, b - a, draw(st.integers(0, 5000))) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    policy = ReusePolicy(
        carve_out=draw(st.integers(0, 64)),
        min_run=draw(st.integers(1, 80)),
        max_runs=draw(st.integers(0, 6)),
        gap_cost=draw(st.floats(0, 60)),
        recompute=draw(st.integers(0, 40)),
        min_recovered=draw(st.integers(0, 150)),
        min_known=draw(st.floats(0, 1)),
    )
    limit = draw(st.none() | st.integers(0, n_tokens + 5))
    return {
        "n_tokens": n_tokens,
        "prefix": prefix,
        "approximate_prefix": approximate,
        "runs": runs,
        "policy": policy,
        "reuse_limit": limit,
        "max_gaps": draw(st.none() | st.integers(1, 6)),
    }


@given(problems())
def test_segments_tile_the_prompt_and_the_last_token_is_computed(problem: dict) -> None:
    plan = make_plan(**problem)
    assert [s.start for s in plan.segments] == [0, *(s.end for s in plan.segments[:-1])]
    assert plan.segments[-1].end == problem["n_tokens"]
    assert plan.segments[-1].kind is SegmentKind.GAP
    assert all(s.length > 0 for s in plan.segments)
    assert sum(plan.tokens(kind) for kind in SegmentKind) == problem["n_tokens"]
    positions = plan.computed_positions()
    assert len(positions) == plan.tokens(SegmentKind.GAP)
    assert (np.diff(positions) > 0).all()
    assert positions[-1] == problem["n_tokens"] - 1


@given(problems())
def test_policy_is_kept(problem: dict) -> None:
    plan, policy = make_plan(**problem), problem["policy"]
    limit = problem["n_tokens"] - 1 if problem["reuse_limit"] is None else problem["reuse_limit"]
    reused = [s for s in plan.segments if s.kind is not SegmentKind.GAP]
    assert all(s.end <= limit for s in reused)
    shifted = [s for s in plan.segments if s.kind is SegmentKind.SHIFTED]
    assert len(shifted) <= policy.max_runs
    assert all(s.start >= policy.carve_out for s in shifted)
    assert all(s.length + policy.recompute >= policy.min_run for s in shifted)
    assert not shifted or sum(s.length for s in shifted) >= policy.min_recovered
    behind_approximate_rows = plan.tokens(SegmentKind.APPROXIMATE_PREFIX) > 0
    not_cached = plan.tokens(SegmentKind.SHIFTED) + plan.tokens(SegmentKind.GAP)
    known = sum(r.length for r in problem["runs"] if r.length >= policy.min_run)
    assert not shifted or behind_approximate_rows or known >= policy.min_known * not_cached
    assert plan.tokens(SegmentKind.PREFIX) <= problem["prefix"]


@given(problems())
def test_a_plan_has_no_more_gaps_than_there_is_room_for_and_is_cut_only_then(problem: dict) -> None:
    whole, plan = make_plan(**problem | {"max_gaps": None}), make_plan(**problem)
    if problem["max_gaps"] is None or len(whole.gaps) <= problem["max_gaps"]:
        assert [(s.kind, s.start, s.end) for s in plan.segments] == [(s.kind, s.start, s.end) for s in whole.segments]
        return
    assert len(plan.gaps) <= problem["max_gaps"]
    assert {r.start for r in plan.runs} < {r.start for r in whole.runs}
    policy, shifted = problem["policy"], plan.tokens(SegmentKind.SHIFTED)
    if shifted and not plan.tokens(SegmentKind.APPROXIMATE_PREFIX):
        assert shifted >= policy.min_known * (shifted + plan.tokens(SegmentKind.GAP))


def test_fewer_than_half_of_many_runs_are_not_copied() -> None:
    runs = [run(100 * at, 80) for at in range(1, 11)]
    plan = partial(make_plan, 1200, prefix=100, runs=runs)
    assert len(plan(policy=replace(PLAIN, min_known=0.5)).runs) == 10
    assert len(plan(policy=replace(PLAIN, min_known=0.5, max_runs=7)).runs) == 7
    assert plan(policy=replace(PLAIN, min_known=0.5, max_runs=6)).runs == []
    assert len(plan(policy=replace(PLAIN, max_runs=6)).runs) == 6


def test_the_longest_stretches_of_adjoining_runs_are_kept() -> None:
    runs = [run(100, 60), run(200, 40, 3000), run(240, 40, 5000), run(340, 70), run(450, 30)]
    plan = partial(make_plan, 500, prefix=100, runs=runs, policy=replace(PLAIN, gap_cost=0))
    assert [r.start for r in plan().runs] == [100, 200, 240, 340, 450]
    assert [r.start for r in plan(max_gaps=3).runs] == [100, 200, 240, 340]
    assert [r.start for r in plan(max_gaps=2).runs] == [100, 200, 240]
    assert [r.start for r in plan(max_gaps=1).runs] == [100]
    policy = replace(PLAIN, min_known=0.5)
    assert len(plan(policy=policy, max_gaps=3).runs) == 4
    assert plan(policy=policy, max_gaps=2).runs == [], "less than half is left"


@given(problems())
def test_a_shifted_segment_is_a_part_of_a_given_run(problem: dict) -> None:
    for segment in make_plan(**problem).segments:
        if segment.kind is not SegmentKind.SHIFTED:
            assert segment.run is None
            continue
        assert segment.run is not None
        assert (segment.run.start, segment.run.end) == (segment.start, segment.end)
        (origin,) = [r for r in problem["runs"] if r.start <= segment.start and segment.end <= r.end]
        assert segment.run.delta == origin.delta
        offset = segment.start - origin.start
        assert (segment.run.slots == origin.slots[offset : offset + segment.length]).all()


@given(problems())
def test_exact_rows_end_where_the_first_approximate_row_stands(problem: dict) -> None:
    plan = make_plan(**problem)
    approximate = [s for s in plan.segments if s.kind in (SegmentKind.SHIFTED, SegmentKind.APPROXIMATE_PREFIX)]
    assert plan.exact_end == (approximate[0].start if approximate else problem["n_tokens"])


def test_positions_below_the_carve_out_are_computed() -> None:
    plan = make_plan(200, prefix=0, runs=[run(10, 120)], policy=DEFAULT)
    assert [(s.kind, s.start, s.end) for s in plan.segments] == [
        (SegmentKind.GAP, 0, 64),
        (SegmentKind.SHIFTED, 64, 130),
        (SegmentKind.GAP, 130, 200),
    ]


def test_a_prefix_hit_may_lie_in_the_carve_out() -> None:
    assert make_plan(100, prefix=20, policy=DEFAULT).tokens(SegmentKind.PREFIX) == 20


def test_a_run_cut_below_the_minimum_is_dropped() -> None:
    assert make_plan(200, prefix=0, runs=[run(0, 127)], policy=DEFAULT).runs == []
    assert len(make_plan(200, prefix=0, runs=[run(0, 128)], policy=DEFAULT).runs) == 1


def test_the_longest_runs_are_kept() -> None:
    runs = [run(i * 100, 20 + i) for i in range(5)]
    policy = ReusePolicy(carve_out=0, min_run=1, max_runs=2, gap_cost=0, min_known=0)
    assert [r.start for r in make_plan(600, prefix=0, runs=runs, policy=policy).runs] == [300, 400]


def test_a_run_that_costs_a_gap_must_be_worth_it() -> None:
    policy = ReusePolicy(carve_out=0, min_run=1, gap_cost=50, min_known=0)
    between_gaps = [run(100, 40), run(200, 60)]
    assert [r.start for r in make_plan(400, prefix=0, runs=between_gaps, policy=policy).runs] == [200]
    behind_the_prefix = [run(100, 40)]
    assert len(make_plan(400, prefix=100, runs=behind_the_prefix, policy=policy).runs) == 1, "it makes no further gap"
    touching = [run(100, 40), run(140, 60, source=9000)]
    assert len(make_plan(400, prefix=0, runs=touching, policy=policy).runs) == 2, "together they make one gap"


def test_heads_of_runs_are_recomputed_unless_they_continue_the_run_before() -> None:
    policy = ReusePolicy(carve_out=0, min_run=1, gap_cost=0, recompute=8, min_known=0)
    first, continuing, other = run(10, 50, 100), run(60, 40, 150), run(100, 40, 7)
    plan = make_plan(300, prefix=0, runs=[first, continuing, other], policy=policy)
    assert [(r.start, r.end) for r in plan.runs] == [(18, 60), (60, 100), (108, 140)]


def test_too_little_in_all_is_nothing() -> None:
    policy = ReusePolicy(min_recovered=256, min_known=0)
    assert make_plan(1000, prefix=0, runs=[run(100, 200)], policy=policy).runs == []
    assert len(make_plan(1000, prefix=0, runs=[run(100, 200), run(400, 56 + 8)], policy=policy).runs) == 2


def test_half_or_nothing_while_a_session_is_exact() -> None:
    known = [run(100 * at, 60, source=7000 + at) for at in range(1, 4)]
    assert len(make_plan(360, prefix=100, runs=known, policy=ReusePolicy(min_run=1, recompute=30)).runs) == 3, (
        "what is known counts, not what is copied of each run"
    )
    assert make_plan(360, prefix=100, runs=known, policy=ReusePolicy(min_run=1, max_runs=2)).runs == []
    assert len(make_plan(400, prefix=100, runs=[run(150, 150)], policy=ReusePolicy()).runs) == 1
    assert make_plan(400, prefix=100, runs=[run(150, 149)], policy=ReusePolicy()).runs == []
    # What follows an approximate row is derived whatever is done: nothing is given up by copying a little.
    plan = make_plan(400, prefix=60, approximate_prefix=40, runs=[run(150, 64)], policy=ReusePolicy())
    assert len(plan.runs) == 1


def test_a_session_gives_up_derived_rows_in_front_of_much_new_text() -> None:
    policy, nothing = ReusePolicy(), list[Run]
    assert policy.keeps_history(400, 100, 150, nothing)
    assert not policy.keeps_history(400, 100, 149, nothing)
    assert policy.keeps_history(400, 100, 80, lambda: [run(200, 70)])
    assert not policy.keeps_history(400, 100, 80, lambda: [run(200, 60)]), "too short to be copied"
    assert policy.keeps_history(400, 100, 0, lambda: pytest.fail("nothing is derived")), "an exact prefix is kept"
    assert ReusePolicy(min_known=0).keeps_history(4000, 0, 1, nothing)


def test_a_reuse_limit_caps_prefix_and_runs() -> None:
    plan = make_plan(300, prefix=50, runs=[run(100, 150)], policy=PLAIN, reuse_limit=120)
    assert [(s.start, s.end) for s in plan.segments] == [(0, 50), (50, 100), (100, 120), (120, 300)]
    assert make_plan(300, prefix=50, runs=[run(100, 150)], policy=PLAIN, reuse_limit=0).tokens(SegmentKind.GAP) == 300


def test_delta_is_target_minus_source() -> None:
    assert run(10, 5, source=260).delta == -250
    part = run(10, 5, source=260).slice(12, 14)
    assert (part.start, part.source_start, part.delta, part.slots.tolist()) == (12, 262, -250, [262, 263])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("carve_out", -1),
        ("min_run", 0),
        ("max_runs", -1),
        ("gap_cost", float("nan")),
        ("gap_cost", float("inf")),
        ("recompute", -3),
        ("min_known", -0.1),
        ("min_known", 1.1),
        ("min_known", float("nan")),
    ],
)
def test_a_policy_out_of_range_is_refused(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        ReusePolicy(**{field: value})


def test_the_server_plans_by_default_as_the_policy_says() -> None:
    options = {name: option.default for name, option in signature(serve).parameters.items()}
    knobs = {name: value for name, value in asdict(ReusePolicy()).items() if name in options}
    assert knobs == {name: options[name] for name in knobs}
    assert set(knobs) == {"min_run", "max_runs", "min_known", "recompute"}
