"""The replay against programs that share no code with it: sets of token tuples and slow loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from word_log import CallList

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.registry import MATCHERS
from irminsul.trace.records import CallInfo, Span, SpanKind, TokenisedCall, Tokens
from irminsul.trace.replay import (
    COMPARED,
    NO_DONOR,
    LengthOracle,
    ReplayConfig,
    repeated,
    replay_matcher,
    replay_oracle,
    replay_prefix,
)


class ListLog(CallList):
    """A token log that is a list."""

    notes = ()
    special_ids = np.array([0], dtype=np.int32)

    def __init__(self, calls: list[tuple[list[int], list[int] | None, str]]) -> None:
        self.calls = [
            TokenisedCall(
                CallInfo("log", line + 1, namespace=Namespace(tenant=tenant)),
                np.array(tokens, dtype=np.int32),
                (Span(SpanKind.TEXT, 0, len(tokens)),),
                0,
                None if reply is None else np.array(reply, dtype=np.int32),
            )
            for line, (tokens, reply, tenant) in enumerate(calls)
        ]

    def decode(self, tokens: Tokens) -> str:
        return " ".join(map(str, tokens.tolist()))


def nothing(_: int) -> None:
    pass


@st.composite
def logs(draw: st.DrawFn) -> ListLog:
    """Prompts put together from a few pieces, so that prefixes, moved pieces and repeats all occur."""
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    pieces = [random.integers(0, draw(st.sampled_from([2, 50])), random.integers(1, 120)).tolist() for _ in range(5)]
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        chosen = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        reply = draw(st.none() | st.just(pieces[0][:7]))
        calls.append(([token for at in chosen for token in pieces[at]], reply, draw(st.sampled_from(["a", "a", "b"]))))
    return ListLog(calls)


def histories(log: ListLog, replies: bool) -> list[list[list[int]]]:
    """For each call, what earlier calls of its namespace cached."""
    cached: dict[str, list[list[int]]] = {}
    result = []
    for call in log.calls:
        own = cached.setdefault(call.info.namespace.tenant, [])
        result.append(list(own))
        tail = [] if call.reply is None or not replies else call.reply.tolist()
        own.append(call.tokens.tolist() + tail)
    return result


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@settings(max_examples=60, deadline=None)
@given(logs(), st.booleans())
def test_prefixes_are_the_longest_there_are(log: ListLog, replies: bool) -> None:
    replay = replay_prefix(log, ReplayConfig(replies=replies), nothing)
    for i, (call, cached) in enumerate(zip(log.calls, histories(log, replies), strict=True)):
        expected = max((common(call.tokens[:-1].tolist(), one) for one in cached), default=0)
        assert replay.prefix[i] == expected
        assert replay.prompt[i] == len(call.tokens)


@settings(max_examples=60, deadline=None)
@given(logs(), st.booleans())
def test_the_ceilings_are_those_of_brute_force(log: ListLog, replies: bool) -> None:
    config = ReplayConfig(replies=replies)
    prefix = replay_prefix(log, config, nothing)
    oracle = replay_oracle(log, prefix, config, nothing, lengths=(8, 32))
    for length in (8, 32):
        for i, (call, cached) in enumerate(zip(log.calls, histories(log, replies), strict=True)):
            known = {tuple(one[j : j + length]) for one in cached for j in range(len(one) - length + 1)}
            start = max(int(prefix.prefix[i]), COMPARED.carve_out)
            tokens = call.tokens[:-1].tolist()
            covered: set[int] = set()
            for j in range(start, len(tokens) - length + 1):
                if tuple(tokens[j : j + length]) in known:
                    covered |= set(range(j, j + length))
            assert oracle.covered[length][i] == len(covered)


@settings(max_examples=25, deadline=None)
@given(logs(), st.sampled_from(MATCHERS))
def test_no_matcher_beats_the_ceiling(log: ListLog, name: str) -> None:
    config = ReplayConfig()
    prefix = replay_prefix(log, config, nothing)
    oracle = replay_oracle(log, prefix, config, nothing)
    matcher = replay_matcher(log, name, prefix, config, nothing, keep_plans=frozenset(range(len(log))))
    assert (matcher.recovered <= oracle.covered[32]).all()
    assert len(matcher.plans) == len(log)
    assert matcher.run_lengths.sum() == matcher.recovered.sum()


@settings(max_examples=40, deadline=None)
@given(logs(), st.integers(1, 300))
def test_a_bounded_cache_holds_no_more_than_its_bound(log: ListLog, bound: int) -> None:
    config = ReplayConfig(cache_tokens=bound)
    prefix = replay_prefix(log, config, nothing)
    assert prefix.inserted_tokens - prefix.evicted_tokens <= bound
    free = replay_prefix(log, ReplayConfig(), nothing)
    assert prefix.prefix.sum() <= free.prefix.sum()
    replay_matcher(log, "winnow32", prefix, config, nothing)
    replay_oracle(log, prefix, config, nothing)


def test_two_replays_of_one_log_are_equal() -> None:
    random = np.random.default_rng(3)
    pieces = [random.integers(0, 500, 200).tolist() for _ in range(6)]
    order = [random.permutation(6).tolist() for _ in range(20)]
    log = ListLog([([token for at in one for token in pieces[at]], None, "") for one in order])
    config = ReplayConfig()
    prefix = replay_prefix(log, config, nothing)
    first, second = (replay_matcher(log, "winnow64", prefix, config, nothing) for _ in range(2))
    assert (first.recovered == second.recovered).all()
    assert (first.deltas == second.deltas).all()
    assert first.recovered.sum() > 0


def test_progress_counts_every_prompt_token() -> None:
    log = ListLog([(list(range(50)), None, ""), (list(range(70)), None, "")])
    seen: list[int] = []
    replay_prefix(log, ReplayConfig(), seen.append)
    assert seen == [50, 70]


def test_repeats_are_earlier_disjoint_copies() -> None:
    piece = list(range(100, 140))
    tokens = np.array([*piece, 1, 2, *piece, 3], dtype=np.int32)
    mask = repeated(tokens, 0, 16)
    assert mask.tolist() == [False] * 42 + [True] * 40 + [False]
    assert not repeated(np.zeros(20, dtype=np.int32), 0, 16).any(), "an overlapping copy is no copy"


def test_an_oracle_forgets_dropped_rows() -> None:
    oracle = LengthOracle(100, 8)
    tokens = np.arange(40, dtype=np.int32)
    oracle.add(Namespace(), tokens, tokens, 0)
    assert oracle.covered(Namespace(), tokens[10:30], 0).all()
    assert not oracle.covered(Namespace(tenant="x"), tokens[10:30], 0).any()
    oracle.drop(tokens[20:])
    assert oracle.covered(Namespace(), tokens[10:30], 0).tolist() == [True] * 10 + [False] * 10


@pytest.mark.parametrize("bound", [0, -5])
def test_a_bound_without_room_is_refused(bound: int) -> None:
    with pytest.raises(InputError, match="cache_tokens"):
        ReplayConfig(cache_tokens=bound)


@settings(max_examples=40, deadline=None)
@given(logs())
def test_the_donor_shares_the_whole_prefix(log: ListLog) -> None:
    prefix = replay_prefix(log, ReplayConfig(), nothing)
    for i, call in enumerate(log.calls):
        held, donor = int(prefix.prefix[i]), int(prefix.donor[i])
        assert (donor == NO_DONOR) == (held == 0)
        if held:
            other = log.calls[donor]
            cached = other.tokens if other.reply is None else np.concatenate([other.tokens, other.reply])
            assert donor < i
            assert cached[:held].tolist() == call.tokens[:held].tolist()


@settings(max_examples=25, deadline=None)
@given(logs())
def test_pairs_are_counted_token_by_token(log: ListLog) -> None:
    config = ReplayConfig()
    prefix = replay_prefix(log, config, nothing)
    matcher = replay_matcher(log, "winnow32", prefix, config, nothing, keep_plans=frozenset(range(len(log))))
    for i, plan in matcher.plans.items():
        assert matcher.computed_pairs[i] == (plan.computed_positions() + 1).sum()


def test_a_chunk_ends_where_the_prompt_ends() -> None:
    random = np.random.default_rng(5)
    result, reply = random.integers(0, 500, 60).tolist(), random.integers(0, 500, 60).tolist()
    other = [1, *[2] * 40]
    prompts = [([1, 3], None, ""), ([1, *result], reply, ""), ([*other, 3], None, ""), ([*other, *result], None, "")]
    log = ListLog(prompts)
    config = ReplayConfig()
    prefix = replay_prefix(log, config, nothing)
    # The last prompt's tail is the second one's, word for word; cut together with the reply it would not be found.
    assert replay_matcher(log, "cdc", prefix, config, nothing).recovered[3] > 0
