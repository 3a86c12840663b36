"""benchmarks/energy.py without a GPU: the counter, what is taken off, the cases, and a run against a made-up engine."""

import argparse
import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import energy
from energy import Case, EnergyMeter, Mark, Prompts, Reading, ReadingError, cases_of, check_reused, measure

IDLE_W, BUSY_W = 80.0, 400.0
N_TOKENS = 8192


class Clock:
    """Time that passes only when somebody sleeps or reads the counter, and a GPU that draws power in it."""

    def __init__(self, watts=IDLE_W, step_s=0.1):
        self.now = 0.0
        self.drawn = 0.0
        self.watts = watts
        self.step_s = step_s
        self.edges = [(0.0, 0.0)]

    def sleep(self, seconds):
        while seconds > 1e-12:
            part = min(seconds, self.edges[-1][0] + self.step_s - self.now)
            self.now += part
            self.drawn += part * self.watts
            seconds -= part
            if self.now >= self.edges[-1][0] + self.step_s - 1e-9:
                self.edges.append((self.now, self.drawn))

    def work(self, seconds):
        self.watts = BUSY_W
        self.sleep(seconds)
        self.watts = IDLE_W

    def read(self):
        self.sleep(0.0005)
        return round(1000 * self.edges[-1][1])

    def meter(self):
        return EnergyMeter(self.read, lambda: self.now, self.sleep)


class Engine:
    """Answers like SGLang: each token that is computed takes a while."""

    def __init__(self, clock, *, shifts, forgets=False):
        self.clock = clock
        self.shifts = shifts
        self.forgets = forgets
        self.served = []

    def flush(self):
        self.served.clear()

    def generate(self, prompt):
        prefix = max((common(prompt, other) for other in self.served), default=0)
        shifted = 0
        if self.shifts and self.served and prefix == 0:
            donor = set(self.served[0])
            shifted = sum(token in donor for token in prompt)
        if self.forgets and len(self.served) > 6:
            prefix = shifted = 0
        self.served.append(prompt)
        seconds = 0.01 + (len(prompt) - prefix - shifted) / 50_000
        self.clock.sleep(0.003)
        self.clock.work(seconds)
        info = {"prompt_tokens": len(prompt), "cached_tokens": prefix, "irminsul": [{"shifted_tokens": shifted}]}
        return {"seconds": seconds, "outputs": [{"meta_info": info}]}


def common(a, b):
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def distinct(monkeypatch):
    """Token ids that occur once, so that the made-up engine can tell what is shared."""
    counter = iter(range(10**9))
    monkeypatch.setattr(energy, "draw", lambda rng, n_tokens: [next(counter) for _ in range(n_tokens)])


def test_a_mark_stands_where_the_counter_moves():
    clock = Clock()
    clock.sleep(0.234)
    mark = clock.meter().mark()
    assert mark.seconds == pytest.approx(0.3, abs=0.002)
    assert mark.joules == pytest.approx(0.3 * IDLE_W)


def test_a_counter_that_stands_still_is_named():
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    with pytest.raises(ReadingError, match="has not moved for 5 s"):
        EnergyMeter(lambda: 1234, lambda: now[0], sleep).mark()


def test_idle_power_is_that_between_marks_after_a_rest():
    clock = Clock()
    clock.work(1.0)
    assert clock.meter().idle_watts(3.0) == pytest.approx(IDLE_W, rel=1e-3)
    assert clock.now > 1.0 + energy.SETTLE_S + 3.0


def test_net_energy_is_that_of_the_work_however_long_the_pauses():
    clock = Clock()

    def request():
        clock.sleep(0.01)
        clock.work(0.25)
        return 0.25, 7

    reading = clock.meter().read(request, 3.0)
    assert reading.seconds >= 3.0
    assert len(reading.request_seconds) == 12
    found = reading.per_request(IDLE_W)
    assert found["net_j"] == pytest.approx(0.25 * (BUSY_W - IDLE_W), rel=0.01)
    assert found["gross_j"] == pytest.approx(0.25 * BUSY_W, rel=0.01)
    assert found["watts"] == pytest.approx(BUSY_W, rel=0.01)


def test_slow_requests_are_read_at_least_five_times():
    clock = Clock()

    def request():
        clock.work(2.0)
        return 2.0, 0

    assert len(clock.meter().read(request, 3.0).request_seconds) == energy.LEAST_REQUESTS


def test_a_reading_by_hand():
    reading = Reading(joules=1000.0, seconds=4.0, request_seconds=(0.5,) * 6, reused=0)
    assert reading.per_request(100.0) == pytest.approx(
        {"net_j": 100.0, "gross_j": 150.0, "seconds": 0.5, "watts": 300.0}
    )
    assert Mark(1.0, 2.0) == Mark(1.0, 2.0)


@pytest.mark.parametrize("case", cases_of(N_TOKENS, shifts=True), ids=lambda case: case.name)
def test_prompts_share_what_their_case_says_and_nothing_else(case):
    prompts = Prompts(random.Random(0), case, N_TOKENS)
    prompts.prepare(3)
    first, second = prompts.next(), prompts.next()
    assert len(first) == len(second) == N_TOKENS
    start = energy.HEAD if case.shifted else 0
    assert first[start : start + case.reused] == second[start : start + case.reused]
    if case.reused:
        at = start - energy.INSERTED if case.shifted else 0
        assert prompts.donor[at:] == first[start : start + case.reused]
        assert first[start + case.reused] != second[start + case.reused]
    else:
        assert not prompts.donor
    if case.shifted:
        assert common(first, second) < energy.CHANCE
        assert common(first, prompts.donor) < energy.CHANCE


def test_the_cases_of_a_length():
    reused = {case.name: case.reused for case in cases_of(N_TOKENS, shifts=True)}
    assert reused["miss"] == 0
    assert reused["exact hit"] == N_TOKENS - 512
    assert reused["shifted hit"] == N_TOKENS - 712
    assert reused["25 % as prefix"] == reused["25 % shifted"] == 2048
    assert not any(case.shifted for case in cases_of(N_TOKENS, shifts=False))


@pytest.mark.parametrize(
    ("shifted", "cached", "found", "right"),
    [
        (False, 1000, 0, True),
        (False, 998, 0, True),
        (False, 900, 0, False),
        (True, 0, 1000, True),
        (True, 1000, 0, False),
        (True, 0, 0, False),
    ],
)
def test_an_answer_that_is_no_such_case_is_refused(*, shifted, cached, found, right):
    case = Case("a case", "hit", shifted=shifted, reused=1000)
    info = {"prompt_tokens": 2000, "cached_tokens": cached, "irminsul": [{"shifted_tokens": found}]}
    if right:
        assert check_reused(case, info, 0) == max(cached, found)
    else:
        with pytest.raises(ReadingError, match="1,000 of 2,000 tokens should be reused"):
            check_reused(case, info, 0)


def test_states_kept_at_some_positions_may_end_a_hit_earlier():
    case = Case("a case", "hit", shifted=False, reused=1000)
    assert check_reused(case, {"prompt_tokens": 2000, "cached_tokens": 768}, 255) == 768


def test_all_cases_are_read_and_idle_power_taken_off(distinct):
    clock = Clock()
    engines = {shifts: Engine(clock, shifts=shifts) for shifts in (False, True)}
    steps = list(measure(energy.MODELS["mla"], engines, clock.meter(), [N_TOKENS], 2, 3.0))
    assert len(steps) == 2 * 9 + 1, "all there is, after each reading"
    found = steps[-1]
    assert found["idle_w"] == pytest.approx({"before": IDLE_W, "after": IDLE_W}, rel=1e-3)
    rows = {row["case"]: row for row in found["rows"]}
    assert len(rows) == 9
    for row in rows.values():
        computed = N_TOKENS - row["reused"]
        assert row["net_j"] == pytest.approx((0.01 + computed / 50_000) * (BUSY_W - IDLE_W), rel=0.01)
        assert row["readings"] == len(row["raw"]) == 2
        assert row["net_j_range"][0] <= row["net_j"] <= row["net_j_range"][1]
        assert all(raw["requests"] >= 5 and raw["seconds"] >= 3 for raw in row["raw"])


def test_a_lost_donor_fails_its_case_and_no_other(distinct):
    clock = Clock()
    engines = {False: Engine(clock, shifts=False, forgets=True)}
    found = list(measure(energy.MODELS["gqa"], engines, clock.meter(), [N_TOKENS], 1, 3.0))[-1]
    rows = {row["case"]: row for row in found["rows"]}
    assert "should be reused, but 0 were found" in rows["exact hit"]["failed"]
    assert "failed" not in rows["miss"]


def row(column, net, *, shifted=False, n_tokens=8192):
    return {"prompt_tokens": n_tokens, "column": column, "shifted": shifted, "net_j": net, "gross_j": net + 10}


def test_the_table():
    models = {
        "mla": {
            "kv_bytes_per_token": 31_104,
            "rows": [row("miss", 40.0), row("25 %", 30.0), row("hit", 10.0), row("hit", 12.0, shifted=True)],
        },
        "mha": {"rows": [], "failed": "RuntimeError: out of | memory"},
    }
    lines = energy.table(models).splitlines()
    assert lines[4:] == [
        "| mla | 31,104 | 8,192 | prefix | 40.0 (50.0) | 30.0 (40.0) | - | - | 10.0 (20.0) | 75 % |",
        "| mla | 31,104 | 8,192 | shifted | 40.0 (50.0) | - | - | - | 12.0 (22.0) | 70 % |",
        "| mha | failed: RuntimeError: out of / memory | | | | | | | | |",
    ]
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_kv_bytes_follow_from_the_configurations():
    for name, model in energy.MODELS.items():
        config = model.config
        layers = config["num_hidden_layers"]
        if name == "mla":
            width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            layers //= config.get("full_attention_interval", 1)
            width = 2 * config["num_key_value_heads"] * config["head_dim"]
        assert model.kv_bytes_per_token == 2 * layers * width, name


def test_a_model_that_does_not_start_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def run_model(name, flags, meter, arguments):
        if name == "mla":
            sys.exit("mla-stock does not answer; the end of its log:\nRuntimeError: no such GPU\nbye")
        yield {"kv_bytes_per_token": 1, "rows": [{**row("miss", 1.0), "case": "miss"}]}

    monkeypatch.setattr(energy, "run_model", run_model)
    arguments = argparse.Namespace(models=["mla", "gqa"], out=tmp_path / "out.json", graphs=False)
    with pytest.raises(SystemExit, match=r"failed: mla$"):
        energy.run_models(arguments, None, {"models": {}})
    written = json.loads(arguments.out.read_text())
    assert written["models"]["mla"]["failed"] == "RuntimeError: no such GPU"
    assert written["models"]["gqa"]["rows"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--models", "mla", "rwkv"], "invalid choice: 'rwkv'"),
        (["--tokens", "512"], "--tokens are at least 2848"),
        (["--repeats", "0"], "--repeats at least 1"),
    ],
)
def test_what_is_given_wrongly_is_refused(given, why, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["energy.py", "--out", "nowhere.json", *given])
    with pytest.raises(SystemExit) as end:
        energy.main()
    assert end.value.code == 2
    assert why in capsys.readouterr().err


def test_without_a_counter_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["energy.py", "--out", "nowhere.json"])

    def in_child(function):
        raise RuntimeError("no CUDA GPUs are available")

    monkeypatch.setattr(energy, "in_child", in_child)
    with pytest.raises(SystemExit, match="no energy counter: RuntimeError: no CUDA GPUs are available"):
        energy.main()
