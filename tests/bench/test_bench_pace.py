"""When calls start: order inside sessions, how many at once, arrivals and pauses. With a clock of its own."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.bench.load import Call, Load
from irminsul.bench.pace import AtOnce, PerSecond, ThinkTime, arrivals, parse_paces, parse_think_time, replay
from irminsul.errors import InputError


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def load_of(sessions):
    return Load("test", tuple(Call(str(n), session, b"", None) for n, session in enumerate(sessions)), 0)


NO_PAUSE = ThinkTime(0)


def replayed(sessions, pace, think_time=NO_PAUSE, seed=0, takes=lambda index: 1.0):
    """Return (start, end) of each call."""
    spans, order = {}, []

    async def send(index):
        now = asyncio.get_running_loop().time()
        order.append(index)
        await asyncio.sleep(takes(index))
        spans[index] = (now, asyncio.get_running_loop().time())

    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(replay(load_of(sessions), pace, think_time, seed, send))
    assert sorted(order) == list(range(len(sessions)))
    return [spans[index] for index in range(len(sessions))], order


paces = st.one_of(st.integers(1, 6).map(AtOnce), st.floats(0.1, 10).map(PerSecond))
think_times = st.sampled_from([ThinkTime(0), ThinkTime(1.5), ThinkTime(1.5, exponential=True)])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), paces, think_times, st.integers(0, 3))
@settings(max_examples=60)
def test_a_call_starts_when_its_predecessor_has_ended_and_the_session_has_paused(sessions, pace, think_time, seed):
    spans, _ = replayed(sessions, pace, think_time, seed, takes=lambda index: 0.1 + index % 3)
    pauses = think_time.draw(len(sessions), seed)
    for index, before in enumerate(load_of(sessions).predecessors):
        if before is not None:
            assert spans[index][0] >= spans[before][1] + pauses[index] - 1e-9
    if isinstance(pace, AtOnce):
        for start, _ in spans:
            assert sum(begin <= start < end for begin, end in spans) <= pace.requests


def test_one_at_once_is_the_order_of_the_load():
    _, order = replayed([0, 1, 0, 1, 2, 0], AtOnce(1))
    assert order == [0, 1, 2, 3, 4, 5]


def test_of_the_calls_that_may_start_the_first_starts():
    # Two at once: when the calls 0 (takes 1) and 1 (takes 5) run, 2 waits for 0 and comes before 3, of another session.
    spans, order = replayed([0, 1, 0, 2], AtOnce(2), takes=lambda index: 5 if index == 1 else 1)
    assert order == [0, 1, 2, 3]
    assert spans[2] == (1, 2)
    _, order = replayed([0, 0, 1], AtOnce(1), ThinkTime(10))
    assert order == [0, 2, 1], "a session that pauses keeps nobody else waiting"


def test_no_more_tasks_than_calls():
    alive = []

    async def send(index):
        alive.append(len(asyncio.all_tasks()))

    with asyncio.Runner() as runner:
        runner.run(replay(load_of(range(3)), AtOnce(10**9), NO_PAUSE, 0, send))
    assert len(alive) == 3
    assert max(alive) <= 3 + 1, "the calls' and that of the replay"


def test_open_arrivals_do_not_wait_for_answers():
    spans, _ = replayed(range(50), PerSecond(2), takes=lambda index: 1000)
    assert np.allclose([start for start, _ in spans], arrivals(50, 2, seed=0))


def test_arrivals_are_a_poisson_process_and_seeded():
    gaps = np.diff(arrivals(20_000, 4, seed=1))
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03)
    assert arrivals(9, 4, seed=1) == arrivals(9, 4, seed=1) != arrivals(9, 4, seed=2)


def test_think_times():
    assert parse_think_time("1.5").draw(3, 0) == [1.5] * 3
    drawn = parse_think_time("exponential:2").draw(20_000, 0)
    assert np.mean(drawn) == pytest.approx(2, rel=0.03)
    assert drawn == ThinkTime(2, exponential=True).draw(20_000, 0)
    assert str(parse_think_time("exponential:2")) == "exponential:2"
    for text in ("", "x", "-1", "nan", "exponential:0", "uniform:2"):
        with pytest.raises(InputError, match=r"written like 0, 1.5 or exponential:1.5"):
            parse_think_time(text)


def test_paces():
    assert parse_paces(None, None) == (AtOnce(1),)
    assert parse_paces("1, 4,4", None) == (AtOnce(1), AtOnce(4))
    assert parse_paces(None, "0.5,2") == (PerSecond(0.5), PerSecond(2))
    assert [str(pace) for pace in (AtOnce(4), PerSecond(0.5))] == ["4 at once", "0.5 a second"]
    with pytest.raises(InputError, match="not both"):
        parse_paces("1", "1")
    for text in ("0", "1,x", "1.5", "", "9" * 5000):
        with pytest.raises(InputError, match="whole numbers of at least 1"):
            parse_paces(text, None)
    for text in ("0", "1,inf", "", "0.0009"):
        with pytest.raises(InputError, match=r"numbers of at least 0\.001"):
            parse_paces(None, text)


def test_a_failure_of_ours_ends_the_replay():
    async def send(index):
        raise ZeroDivisionError

    for pace in (AtOnce(2), PerSecond(10)):
        with pytest.raises(ExceptionGroup):
            asyncio.run(replay(load_of([0, 1, 2, 3]), pace, ThinkTime(0), 0, send))
