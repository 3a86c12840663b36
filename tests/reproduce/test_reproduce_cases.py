"""Verdicts over cases."""

from typing import NamedTuple

import pytest

from irminsul.reproduce.cases import all_hold, is_lower, is_within, mean_case


class Pair(NamedTuple):
    a: float
    b: float


def test_a_mean_is_taken_field_by_field():
    assert mean_case([Pair(1.0, 5.0), Pair(3.0, 6.0)]) == Pair(2.0, 5.5)


def test_ways_are_compared_case_by_case():
    easy_to_hard = [0.1, 2.0, 9.0, 0.5, 4.0]
    lower = [value - 0.05 for value in easy_to_hard]
    assert is_lower(lower, easy_to_hard) is True
    assert is_lower(easy_to_hard, lower) is False
    assert is_lower(easy_to_hard, [9.0, 0.5, 4.0, 0.1, 2.0]) is None
    assert is_lower(lower[:4], easy_to_hard[:4]) is None


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.001, -0.001, 0.002, 0.0, 0.001], True),
        ([0.01, 0.011, 0.012, 0.01, 0.011], False),
        ([-0.01, -0.011, -0.012, -0.01, -0.011], False),
        ([0.001, 0.002, 0.003, 0.004, 0.005], None),
        ([0.001, 0.001], None),
    ],
)
def test_a_mean_is_within_a_bound_by_its_interval(values, verdict):
    assert is_within(values, 0.003) is verdict


def test_one_false_decides_and_one_open_leaves_open():
    assert all_hold([True, True]) is True
    assert all_hold([True, None]) is None
    assert all_hold([False, None]) is False
