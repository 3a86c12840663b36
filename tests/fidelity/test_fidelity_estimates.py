import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.fidelity import estimates
from irminsul.fidelity.estimates import against, estimate, summary, worst_cases
from irminsul.fidelity.measure import CaseResult, PathResult


def result(kl: float, *, match: float = 1.0, diverged: int = 8, score: bool | None = True, computed: int = 20):
    return PathResult(
        kl=kl,
        argmax_match=match,
        first_divergence=diverged,
        tokens=8,
        score=score,
        prompt_tokens=100,
        computed=computed,
        shifted=100 - computed,
        runs=((100 - computed, 5),),
    )


def case(number: int, **paths: PathResult) -> CaseResult:
    return CaseResult("qa", number, f"note {number}", {"full": result(0.0, computed=100), **paths})


def test_an_estimate_of_equal_values_is_certain():
    assert estimate([0.25] * 5).interval == (0.25, 0.25)
    assert estimate([0.1] * 7).interval == pytest.approx((0.1, 0.1))


def test_fewer_than_five_cases_have_no_interval():
    assert estimate([3.0]).mean == 3.0
    assert estimate([0.0, 1.0, 2.0, 3.0]).interval is None
    assert estimate([0.0, 1.0, 2.0, 3.0, 4.0]).interval is not None


def test_the_interval_of_a_large_sample_is_that_of_the_normal_distribution():
    sample = np.random.default_rng(5).normal(10.0, 2.0, 400)
    low, high = estimate(sample.tolist()).interval
    half = 1.96 * sample.std() / 20
    assert low == pytest.approx(sample.mean() - half, abs=0.03)
    assert high == pytest.approx(sample.mean() + half, abs=0.03)


@pytest.mark.parametrize(("n", "sigma", "least"), [(10, 1.5, 0.80), (30, 1.5, 0.85), (10, 1.0, 0.84), (30, 0.3, 0.91)])
def test_intervals_hold_the_mean_of_skewed_values(monkeypatch, n, sigma, least):
    """Log-normal, as KL is; percentiles of the mean hold it 70 times of 100 in the first case and 79 in the second."""
    monkeypatch.setattr(estimates, "_RESAMPLES", 1000)
    generator = np.random.default_rng(7)
    true_mean = math.exp(sigma**2 / 2)
    found = [estimate(generator.lognormal(0.0, sigma, n).tolist()).interval for _ in range(400)]
    assert least <= np.mean([low <= true_mean <= high for low, high in found]) <= 0.99


def test_a_difference_in_few_of_many_cases_has_a_finite_interval():
    """Most resamples of the others differ by rounding alone, so their errors are nearly zero."""
    values = [*(1e-9 * at for at in range(-14, 15)), 0.3]
    low, high = estimate(values).interval
    assert -0.01 < low < 0.02
    assert 0.01 < high < 0.1


def test_memory_is_bounded_and_blocks_change_nothing(monkeypatch):
    values = np.random.default_rng(3).lognormal(0.0, 1.0, 8000).tolist()
    tracemalloc.start()
    whole = estimate(values[:50])
    estimate(values)
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()
    monkeypatch.setattr(estimates, "_BLOCK_VALUES", 50 * 64)
    assert estimate(values[:50]) == whole


@given(st.lists(st.floats(0, 100), min_size=5, max_size=40))
def test_an_interval_holds_its_mean_and_repeats(values):
    found = estimate(values)
    low, high = found.interval
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low - 1e-9 <= found.mean <= high + 1e-9
    assert estimate(values) == found


def test_a_summary_is_the_mean_over_cases():
    cases = [
        case(0, shifted=result(0.1, match=0.5, diverged=4, score=False), naive=result(0.3, computed=30)),
        case(1, shifted=result(0.3, match=1.0, diverged=8, score=True), naive=result(0.5, computed=50)),
    ]
    rows = summary(cases)
    row = rows["shifted"]
    assert (row["n"], row["score"], row["argmax_match"], row["first_divergence"]) == (2, 0.5, 0.75, 6.0)
    assert row["kl_mean"] == pytest.approx(0.2)
    assert row["kl_ci95"] is None
    assert (row["scored"], row["right_to_wrong"], row["wrong_to_right"]) == (2, 1, 0)
    assert (row["kl_max"], row["never_diverged"], row["computed"], row["shifted"]) == (0.3, 0.5, 20.0, 80.0)
    assert (row["recomputed"], rows["naive"]["recomputed"], rows["full"]["recomputed"]) == (0.0, 20.0, 80.0)


def test_a_task_without_right_answers_has_no_score_and_a_run_without_shifted_no_price():
    row = summary([case(0, naive=result(0.1, score=None))])["naive"]
    assert row["score"] is None
    assert row["recomputed"] is None


def test_paths_are_compared_with_naive_case_by_case():
    # The cases differ more than the paths do; only the paired difference sees that shifted is lower in each.
    kls = [0.1, 2.0, 9.0, 0.5, 4.0]
    cases = [case(at, shifted=result(kl - 0.05), naive=result(kl), control=result(kl)) for at, kl in enumerate(kls)]
    found = against(cases, "naive")
    assert set(found) == {"shifted", "control"}
    assert found["shifted"]["difference"] == pytest.approx(-0.05)
    assert found["shifted"]["better"] is True
    assert found["control"]["better"] is None


def test_an_interval_of_kl_does_not_go_below_zero():
    low, high = summary([case(at, naive=result(0.01 if at else 9.0)) for at in range(6)])["naive"]["kl_ci95"]
    assert 0.0 <= low < 1.5 < high


def test_a_score_is_of_the_cases_that_have_an_answer():
    cases = [
        case(0, naive=result(0.1, score=None)),
        case(1, naive=result(0.1)),
        case(2, naive=result(0.1, score=False)),
    ]
    row = summary(cases)["naive"]
    assert (row["n"], row["scored"], row["score"], row["right_to_wrong"]) == (3, 2, 0.5, 1)


def test_a_path_worse_than_naive_is_called_so():
    cases = [case(at, shifted=result(0.2 + at), naive=result(0.1 + at)) for at in range(5)]
    assert against(cases, "naive")["shifted"]["better"] is False


def test_four_cases_decide_nothing_and_no_naive_compares_nothing():
    cases = [case(at, shifted=result(0.1), naive=result(9.0)) for at in range(4)]
    assert against(cases, "naive")["shifted"]["better"] is None
    assert against(cases, "naive")["shifted"]["ci95"] is None
    assert against([case(0, shifted=result(0.1))], "naive") is None


def test_the_worst_cases_come_first_with_what_they_are():
    cases = [case(at, shifted=result(kl)) for at, kl in enumerate((0.1, 0.9, 0.5))]
    worst = worst_cases(cases, "shifted", 2, per_task=2)
    assert [(found["case"], found["kl"]) for found in worst] == [(1, 0.9), (2, 0.5)]
    assert worst[0]["note"] == "note 1"
    assert worst[0]["runs"] == [[80, 5]]
    assert [found["case"] for found in worst_cases(cases, "shifted", 3, per_task=1)] == [1]
    assert worst_cases(cases, "naive", 2, per_task=2) == []


def test_knobs_are_compared_with_plain_shifted_reuse_case_by_case():
    cases = [case(at, shifted=result(0.2 + at), **{"shifted-w8": result(0.1 + at)}) for at in range(5)]
    found = against(cases, "shifted")["shifted-w8"]
    assert found["difference"] == pytest.approx(-0.1)
    assert found["ci95"] == pytest.approx([-0.1, -0.1])
    assert found["better"] is True
