import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert estimate([0.25, 0.25, 0.25]).interval == (0.25, 0.25)


def test_one_case_has_no_interval():
    assert estimate([3.0]).mean == 3.0
    assert estimate([3.0]).interval is None


def test_two_values_resample_to_both_ends():
    # A quarter of the resamples holds the first value twice, a quarter the second: the quantiles are the values.
    assert estimate([0.0, 1.0]).interval == (0.0, 1.0)


def test_the_interval_of_a_large_sample_is_that_of_the_normal_distribution():
    sample = np.random.default_rng(5).normal(10.0, 2.0, 400)
    low, high = estimate(sample.tolist()).interval
    half = 1.96 * sample.std() / 20
    assert low == pytest.approx(sample.mean() - half, abs=0.03)
    assert high == pytest.approx(sample.mean() + half, abs=0.03)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=40))
def test_an_interval_lies_between_the_extremes_and_repeats(values):
    found = estimate(values)
    low, high = found.interval
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
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
    assert row["kl_ci95"] == [pytest.approx(0.1), pytest.approx(0.3)]
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


def test_a_path_worse_than_naive_is_called_so():
    cases = [case(at, shifted=result(0.2 + at), naive=result(0.1 + at)) for at in range(4)]
    assert against(cases, "naive")["shifted"]["better"] is False


def test_one_case_decides_nothing_and_no_naive_compares_nothing():
    assert against([case(0, shifted=result(0.1), naive=result(9.0))], "naive")["shifted"]["better"] is None
    assert against([case(0, shifted=result(0.1))], "naive") is None


def test_the_worst_cases_come_first_with_what_they_are():
    cases = [case(at, shifted=result(kl)) for at, kl in enumerate((0.1, 0.9, 0.5))]
    worst = worst_cases(cases, "shifted", 2)
    assert [(found["case"], found["kl"]) for found in worst] == [(1, 0.9), (2, 0.5)]
    assert worst[0]["note"] == "note 1"
    assert worst[0]["runs"] == [[80, 5]]
    assert worst_cases(cases, "naive", 2) == []


def test_knobs_are_compared_with_plain_shifted_reuse_case_by_case():
    cases = [case(at, shifted=result(0.2 + at), **{"shifted-w8": result(0.1 + at)}) for at in range(4)]
    found = against(cases, "shifted")["shifted-w8"]
    assert found["difference"] == pytest.approx(-0.1)
    assert found["ci95"] == pytest.approx([-0.1, -0.1])
    assert found["better"] is True
