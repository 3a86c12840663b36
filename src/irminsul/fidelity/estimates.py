"""Means over cases with their uncertainty, and the results of a run as one tree of numbers.

A case is the unit: its KL is the mean over its tokens, a table shows the mean over cases. Intervals are percentile
bootstraps over cases (resampled with replacement, 2.5 % to 97.5 %), seeded, so that a report is the same each time it
is made from the same results. Cases are drawn independently; tokens of one case are not, and are never resampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from irminsul.fidelity.measure import CaseResult, PathResult
from irminsul.fidelity.paths import FULL

_RESAMPLES = 10_000
_SEED = 20260507


@dataclass(frozen=True)
class Estimate:
    """A mean and the interval that holds it with 95 % confidence; no interval for fewer than two cases."""

    mean: float
    interval: tuple[float, float] | None


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value, one a case, with its bootstrap interval."""
    sample = np.asarray(values, dtype=np.float64)
    return Estimate(float(sample.mean()), _interval(sample) if len(sample) > 1 else None)


def _interval(sample: NDArray[np.float64]) -> tuple[float, float]:
    drawn = np.random.default_rng(_SEED).integers(len(sample), size=(_RESAMPLES, len(sample)))
    low, high = np.quantile(sample[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def summary(cases: Sequence[CaseResult]) -> dict[str, dict[str, Any]]:
    """Sum up cases, path by path, with the keys that docs/measured.md explains.

    Args:
        cases: at least one, all measured on the same paths.

    Returns:
        For each path ``n``, ``score`` (None without right answers), ``kl_mean``, ``kl_ci95`` ([low, high] or None),
        ``kl_max``, ``argmax_match``, ``first_divergence`` (tokens; a case that never diverges counts its whole length),
        ``tokens`` (compared in a case), ``never_diverged`` (share of cases), ``prompt_tokens``, ``computed``,
        ``shifted`` (tokens of a prompt) and ``recomputed`` (tokens computed beyond what the path ``shifted`` computes,
        None if that was not measured). All but ``n`` and ``kl_max`` are means over cases.
    """
    return {name: _row([case.paths[name] for case in cases], _plain(cases)) for name in cases[0].paths}


def _plain(cases: Sequence[CaseResult]) -> float | None:
    if "shifted" not in cases[0].paths:
        return None
    return fmean(case.paths["shifted"].computed for case in cases)


def _row(results: Sequence[PathResult], plain_computed: float | None) -> dict[str, Any]:
    kl = estimate([result.kl for result in results])
    scores = [float(result.score) for result in results if result.score is not None]
    computed = fmean(result.computed for result in results)
    return {
        "n": len(results),
        "score": fmean(scores) if scores else None,
        "kl_mean": kl.mean,
        "kl_ci95": None if kl.interval is None else list(kl.interval),
        "kl_max": max(result.kl for result in results),
        "argmax_match": fmean(result.argmax_match for result in results),
        "first_divergence": fmean(result.first_divergence for result in results),
        "tokens": fmean(result.tokens for result in results),
        "never_diverged": fmean(result.first_divergence == result.tokens for result in results),
        "prompt_tokens": fmean(result.prompt_tokens for result in results),
        "computed": computed,
        "shifted": fmean(result.shifted for result in results),
        "recomputed": None if plain_computed is None else computed - plain_computed,
    }


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
    better = None
    if found.interval is not None and not found.interval[0] <= 0 <= found.interval[1]:
        better = found.interval[1] < 0
    return {
        "difference": found.mean,
        "ci95": None if found.interval is None else list(found.interval),
        "better": better,
    }


def worst_cases(cases: Sequence[CaseResult], path: str, count: int) -> list[dict[str, Any]]:
    """Return the cases of the largest KL on a path, worst first, with what they are."""
    measured = [case for case in cases if path in case.paths]
    worst = sorted(measured, key=lambda case: -case.paths[path].kl)[:count]
    return [_described(case, case.paths[path]) for case in worst]


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
