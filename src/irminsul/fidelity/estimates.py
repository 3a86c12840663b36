"""Means over cases with their uncertainty, and the results of a run as one tree of numbers.

A case is the unit: its KL is the mean over its tokens, a table shows the mean over cases. Cases are drawn
independently; tokens of one case are not, and are never resampled.

Intervals are bootstrap-t (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 12.5): cases are resampled
with replacement, and the quantiles of ``(mean* - mean) / error*`` say how far the mean may be off, in standard errors.
KL is skewed, and there the plain percentiles of the mean are far too narrow. Seeded, so that a report is the same each
time it is made from the same results. tests/fidelity measures how often an interval holds the mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from irminsul.fidelity.measure import CaseResult, PathResult
from irminsul.fidelity.paths import FULL

FEWEST = 5
"""Cases below which no interval is given."""
_RESAMPLES = 10_000
_BLOCK_VALUES = 2**20
"""Values drawn at a time, which bounds memory."""
_SMALLEST_ERROR = 0.2
"""Of the sample's standard error: a resample's is not taken for smaller. Where most cases are equal, some resamples
hold none that differs, and their error of nearly zero would make the interval endless."""
_SEED = 20260507


@dataclass(frozen=True)
class Estimate:
    """A mean and the interval that should hold it in 95 of 100 runs; no interval for fewer than FEWEST cases."""

    mean: float
    interval: tuple[float, float] | None

    @property
    def is_negative(self) -> bool | None:
        """True if the whole interval is below zero, False if it is above; None if it holds zero or there is none."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return None
        return self.interval[1] < 0


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one finite value, one a case, with its interval."""
    sample = np.asarray(values, dtype=np.float64)
    return Estimate(float(sample.mean()), _interval(sample) if len(sample) >= FEWEST else None)


def _interval(sample: NDArray[np.float64]) -> tuple[float, float]:
    mean, error = float(sample.mean()), float(sample.std()) / math.sqrt(len(sample))
    if np.all(sample == sample[0]) or error == 0.0:
        return mean, mean
    generator = np.random.default_rng(_SEED)
    off = np.empty(_RESAMPLES)
    step = max(1, _BLOCK_VALUES // len(sample))
    for start in range(0, _RESAMPLES, step):
        block = off[start : start + step]
        drawn = sample[generator.integers(len(sample), size=(len(block), len(sample)))]
        errors = np.maximum(drawn.std(axis=1) / math.sqrt(len(sample)), _SMALLEST_ERROR * error)
        block[:] = (drawn.mean(axis=1) - mean) / errors
    low, high = np.quantile(off, [0.025, 0.975])
    return mean - float(high) * error, mean - float(low) * error


def summary(cases: Sequence[CaseResult]) -> dict[str, dict[str, Any]]:
    """Sum up cases, path by path, with the keys that docs/measured.md explains.

    Args:
        cases: at least one, all measured on the same paths.

    Returns:
        For each path ``n``, ``score`` (of the cases with a right answer; None without any), ``scored`` (their number),
        ``right_to_wrong`` and ``wrong_to_right`` (cases whose answer is right in full computation and wrong here, and
        the other way), ``kl_mean``, ``kl_ci95`` ([low, high] or None), ``kl_max``, ``argmax_match``,
        ``first_divergence`` (tokens; a case that never diverges counts its whole length), ``tokens`` (compared in a
        case), ``never_diverged`` (share of cases), ``prompt_tokens``, ``computed``, ``shifted`` (tokens of a prompt)
        and ``recomputed`` (tokens computed beyond what the path ``shifted`` computes, None if that was not measured).
        All but the counts and ``kl_max`` are means over cases.
    """
    return {name: _row(cases, name) for name in cases[0].paths}


def _row(cases: Sequence[CaseResult], name: str) -> dict[str, Any]:
    results = [case.paths[name] for case in cases]
    kl = estimate([result.kl for result in results])
    scores = [(case.paths[FULL].score, case.paths[name].score) for case in cases if case.paths[name].score is not None]
    return {
        "n": len(results),
        "score": fmean(bool(own) for _, own in scores) if scores else None,
        "scored": len(scores),
        "right_to_wrong": sum(bool(full) and not own for full, own in scores),
        "wrong_to_right": sum(bool(own) and not full for full, own in scores),
        "kl_mean": kl.mean,
        # KL is never below zero, so its mean is not either.
        "kl_ci95": None if kl.interval is None else [max(0.0, kl.interval[0]), kl.interval[1]],
        "kl_max": max(result.kl for result in results),
        "argmax_match": _mean(results, "argmax_match"),
        "first_divergence": _mean(results, "first_divergence"),
        "tokens": _mean(results, "tokens"),
        "never_diverged": fmean(result.first_divergence == result.tokens for result in results),
        "prompt_tokens": _mean(results, "prompt_tokens"),
        "computed": _mean(results, "computed"),
        "shifted": _mean(results, "shifted"),
        "recomputed": _recomputed(cases, name),
    }


def _mean(results: Sequence[PathResult], field: str) -> float:
    return fmean(getattr(result, field) for result in results)


def _recomputed(cases: Sequence[CaseResult], name: str) -> float | None:
    if "shifted" not in cases[0].paths:
        return None
    return fmean(case.paths[name].computed - case.paths["shifted"].computed for case in cases)


def against(cases: Sequence[CaseResult], baseline: str) -> dict[str, dict[str, Any]] | None:
    """Compare each path's KL with that of another, case by case; None if the other was not measured.

    Returns:
        For each path but those two and the reference: ``difference`` (path minus baseline, nats, mean over cases),
        ``ci95``, and ``better``: true if the whole interval is below zero, false if it is above, None if it holds zero
        or there is no interval.
    """
    if baseline not in cases[0].paths:
        return None
    return {name: _difference(cases, name, baseline) for name in cases[0].paths if name not in (FULL, baseline)}


def _difference(cases: Sequence[CaseResult], name: str, baseline: str) -> dict[str, Any]:
    found = estimate([case.paths[name].kl - case.paths[baseline].kl for case in cases])
    return {
        "difference": found.mean,
        "ci95": None if found.interval is None else list(found.interval),
        "better": found.is_negative,
    }


def worst_cases(cases: Sequence[CaseResult], path: str, count: int, *, per_task: int) -> list[dict[str, Any]]:
    """Return the cases of the largest KL on a path, worst first, at most ``per_task`` of a task, with what they are."""
    found: list[CaseResult] = []
    for case in sorted(cases, key=lambda case: -case.paths[path].kl if path in case.paths else 0.0):
        if path in case.paths and sum(other.task == case.task for other in found) < per_task:
            found.append(case)
    return [_described(case, case.paths[path]) for case in found[:count]]


def _described(case: CaseResult, result: PathResult) -> dict[str, Any]:
    return {
        "task": case.task,
        "case": case.number,
        "kl": result.kl,
        "argmax_match": result.argmax_match,
        "first_divergence": result.first_divergence,
        "tokens": result.tokens,
        "score": result.score,
        "prompt_tokens": result.prompt_tokens,
        "computed": result.computed,
        "runs": [list(run) for run in result.runs],
        "note": case.note,
    }
