"""Verdicts over cases: prompts or chunks that were drawn independently and measured in several ways.

A verdict is True, False, or None where the cases do not decide. Ways are compared case by case, by the interval of the
mean difference (see ``irminsul.fidelity.estimates``).
"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

from irminsul.fidelity.estimates import estimate

Measured = TypeVar("Measured", bound=NamedTuple)
"""Of floats."""


def mean_case(cases: Sequence[Measured]) -> Measured:
    """Return the mean over cases, field by field."""
    first = cases[0]
    return first._replace(**{name: fmean(getattr(case, name) for case in cases) for name in first._fields})


def is_lower(values: Sequence[float], others: Sequence[float]) -> bool | None:
    """Say whether the mean of one is below that of the other; both have one value a case, in the same order."""
    return estimate([value - other for value, other in zip(values, others, strict=True)]).is_negative


def is_within(values: Sequence[float], bound: float) -> bool | None:
    """Say whether the mean of one value a case lies in [-bound, bound]: None if its interval holds an end of that."""
    interval = estimate(values).interval
    if interval is None:
        return None
    low, high = interval
    if -bound <= low and high <= bound:
        return True
    return False if bound < low or high < -bound else None


def all_hold(verdicts: Iterable[bool | None]) -> bool | None:
    """Say whether all are True: False if any is False, None if one is not decided."""
    found = set(verdicts)
    if False in found:
        return False
    return None if None in found else True
