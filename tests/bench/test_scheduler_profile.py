"""benchmarks/scheduler_profile.py and what benchmarks/sglang_overhead.py makes of it, with a clock of our own."""

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sglang_overhead
from scheduler_profile import DECODE, HOST, INDEX, PREFILL, SEARCH, WAITING, Profile
from sglang_overhead import MODES, NOTHING, PASSAGE, Prompts, costs, measure, ratios, row_of


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds, then=None):
        def function():
            self.now += seconds
            return then() if then else None

        return function


@pytest.fixture
def clock():
    return Clock()


def test_times_of_parts_are_exclusive_and_add_up(clock):
    profile = Profile(clock)
    inner = profile.timed(INDEX, clock.takes(2.0))
    outer = profile.timed(SEARCH, clock.takes(1.0, inner))
    profile.begin_iteration()
    profile.launched(prefill=True)
    clock.takes(4.0, outer)()
    clock.now += 0.5
    profile.begin_iteration()
    found = profile.report()
    assert found["seconds"] == {PREFILL: {HOST: 4.5, SEARCH: 1.0, INDEX: 2.0}, DECODE: {}}
    assert found["iterations"] == {PREFILL: 1, DECODE: 0}
    assert found["calls"] == 3


def test_a_hook_does_not_own_what_it_is_wrapped_around(clock):
    profile = Profile(clock)
    original = clock.takes(8.0)

    def hook(wrapped, extra):
        clock.now += extra
        wrapped()
        clock.now += extra

    call = profile.hook(SEARCH, hook)
    profile.begin_iteration()
    profile.launched(prefill=False)
    call(original, 1.0)
    profile.begin_iteration()
    assert profile.report()["seconds"][DECODE] == {HOST: 8.0, SEARCH: 2.0}


def test_an_exception_leaves_the_part(clock):
    profile = Profile(clock)

    def fails():
        clock.now += 1.0
        raise KeyError

    profile.begin_iteration()
    profile.launched(prefill=True)
    with pytest.raises(KeyError):
        profile.timed(SEARCH, fails)()
    clock.now += 3.0
    profile.begin_iteration()
    assert profile.report()["seconds"][PREFILL] == {HOST: 3.0, SEARCH: 1.0}


def test_idle_iterations_do_not_count_and_a_report_begins_anew(clock):
    profile = Profile(clock)
    for work in (False, True, False):
        profile.begin_iteration()
        clock.now += 1.0
        if work:
            profile.launched(prefill=False)
    profile.begin_iteration()
    assert profile.report()["seconds"] == {PREFILL: {}, DECODE: {HOST: 1.0}}
    assert profile.report()["iterations"] == {PREFILL: 0, DECODE: 0}


def test_an_iteration_that_only_processes_a_batch_is_of_its_kind(clock):
    profile = Profile(clock)
    profile.begin_iteration()
    profile.launched(prefill=True)
    clock.now += 1.0
    profile.begin_iteration()
    clock.now += 2.0
    profile.processed(prefill=True)
    clock.now += 0.25
    profile.begin_iteration()
    found = profile.report()
    assert found["iterations"] == {PREFILL: 2, DECODE: 0}
    assert found["first_tokens_s"] == 3.0


def test_waiting_is_told_apart_and_other_threads_pass_by(clock):
    profile = Profile(clock)
    wait = profile.waiting(clock.takes(1.0))
    profile.begin_iteration()
    profile.launched(prefill=True)
    wait()
    profile.timed(INDEX, wait)()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    profile.begin_iteration()
    expected = {HOST: 1.0, WAITING: 1.0, INDEX: 0.0, f"{INDEX}, {WAITING}": 1.0}
    assert profile.report()["seconds"][PREFILL] == expected


def test_the_cost_of_measuring_is_measured():
    profile = Profile()
    profile.calibrate(2000)
    assert 0 < profile.cost_of_a_call_s < 1e-4
    assert profile.report()["calls"] == 0


def profile_of(search=0.02, waiting=5.0):
    return {
        "iterations": {PREFILL: 4, DECODE: 100},
        "seconds": {
            PREFILL: {HOST: 1.0, WAITING: waiting, SEARCH: search, f"{INDEX}, {WAITING}": 0.5},
            DECODE: {HOST: 2.0, INDEX: 0.01},
        },
        "calls": 1000,
        "cost_of_a_call_s": 1e-6,
        "first_tokens_s": 3.0,
    }


def test_costs_by_hand():
    found = costs(profile_of(), 10)
    assert found["scheduler_s"] == pytest.approx(8.53)
    assert found["scheduler_without_waiting_s"] == pytest.approx(3.03)
    assert found["plugin_ms_per_request"] == pytest.approx(53.0)
    assert found["parts_ms_per_request"] == pytest.approx({SEARCH: 2.0, INDEX: 1.0, f"{INDEX}, {WAITING}": 50.0})
    assert found["plugin_share"] == pytest.approx(0.53 / 8.53)
    assert found["plugin_share_without_waiting"] == pytest.approx(0.03 / 3.03)
    assert found["decode_step_ms"] == pytest.approx(20.1)
    assert found["plugin_ms_per_decode_step"] == pytest.approx(0.1)
    assert found["measuring_share"] == pytest.approx(1e-3 / 8.53)
    assert found["first_tokens_ms"] == 3000.0


def test_rows_hold_medians_and_ratios_compare_them():
    repeats = [{"seconds": at, "first_tokens_ms": 10 * at, "parts_ms_per_request": {SEARCH: at}} for at in (3, 1, 2)]
    row = row_of((16, PASSAGE, "off"), repeats)
    assert row["seconds"] == 2
    assert row["seconds_range"] == [1, 3]
    assert row["parts_ms_per_request"] == {SEARCH: 2}
    stock = {**row, "mode": "stock", "seconds": 4.0, "first_tokens_ms": 10.0}
    assert ratios([row]) == []
    assert ratios([row, stock]) == [
        {"requests": 16, "in_common": PASSAGE, "of": "off over stock", "seconds": 0.5, "first_tokens": 2.0}
    ]


def test_prompts_share_a_passage_that_stood_elsewhere():
    prompts = Prompts(2048)
    donors = prompts.donors()
    load = prompts.load(PASSAGE, 10)
    middle = slice(sglang_overhead.HEAD, 2048 - sglang_overhead.TAIL)
    for at, prompt in enumerate(load):
        assert len(prompt) == 2048
        donor = donors[at % len(donors)]
        assert prompt[middle] == donor[sglang_overhead.HEAD - sglang_overhead.INSERTED :]
    assert load[0][:100] != load[8][:100]
    assert load[0][-100:] != load[8][-100:]
    assert prompts.load(NOTHING, 1)[0][middle] != load[0][middle]


def test_each_mode_is_asked_for_and_takes_its_turn(clock):
    asked = []

    class Engine:
        def __init__(self, name):
            self.name = name

        def profile(self):
            return profile_of()

        def generate(self, prompts, **arguments):
            if "max_new_tokens" in arguments:
                mode = arguments.get("custom_params", {}).get("irminsul", {}).get("mode", "stock")
                assert (mode == "stock") == (self.name == "stock")
                asked.append((len(prompts), mode))
            counters = [{"shifted_tokens": 7, "declined_plans": 0}]
            info = {} if self.name == "stock" else {"irminsul": counters}
            return {"seconds": 2.0, "outputs": [{"meta_info": info} for _ in prompts]}

    class Arguments:
        loads, repeats, new_tokens = [1, 3], 2, 8

    engines = {mode: Engine("stock" if mode == "stock" else "plugin") for mode in MODES}
    results = list(measure(engines, Prompts(2048), Arguments))
    assert len(results) == 2 * 2 * 2 * len(MODES)
    rows = results[-1]["rows"]
    assert len(rows) == 2 * 2 * len(MODES)
    assert all(row["repeats"] == 2 for row in rows)
    assert {row["shifted_tokens_per_request"] for row in rows if row["mode"] == "live"} == {7}
    assert next(row for row in rows if row["requests"] == 3)["tokens_per_s"] == 12
    timed = asked[4:]
    assert [mode for _, mode in timed[:4]] == list(MODES)
    assert [mode for _, mode in timed[16:20]] == ["off", "observe", "live", "stock"]


@pytest.mark.parametrize("given", [["--loads", "0"], ["--tokens", "100"], ["--repeats", "0"]])
def test_what_is_given_wrongly_is_refused(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sglang_overhead.py", "--out", "nowhere.json", *given])
    with pytest.raises(SystemExit) as end:
        sglang_overhead.main()
    assert end.value.code == 2
    assert "at least" in capsys.readouterr().err
