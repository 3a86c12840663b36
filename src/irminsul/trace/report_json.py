"""The analysis as JSON, schema 1 (docs/analyze.md): the same input gives the same bytes.

Keys are sorted, shares are rounded to six decimals, and nothing depends on the clock or the machine.
"""

import json
import math
from pathlib import Path
from typing import Any

from irminsul.output_files import replace_files
from irminsul.trace.analysis import (
    PERCENTILES,
    RUN_PERCENTILES,
    Analysis,
    Bucket,
    ComputeSavings,
    MatcherSummary,
    TtftEstimate,
)
from irminsul.trace.causes import Cause

SCHEMA = 1
_DECIMALS = 6


def write_json(path: Path, analysis: Analysis) -> None:
    """Write the analysis to a file.

    Raises:
        InputError: the file cannot be written.
    """
    replace_files({path: to_json(analysis).encode()})


def to_json(analysis: Analysis) -> str:
    """Return the analysis as JSON text; log text in it is ASCII-escaped."""
    return json.dumps(_rounded(as_dict(analysis)), indent=1, sort_keys=True, allow_nan=False) + "\n"


def as_dict(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as plain lists and dicts."""
    totals, causes = analysis.totals, analysis.causes
    return {
        "schema": SCHEMA,
        "settings": {"replies": analysis.replies, "cache_tokens": analysis.cache_tokens},
        "totals": {
            "calls": totals.calls,
            "threads": totals.threads,
            "calls_with_replies": analysis.calls_with_replies,
            "prompt_tokens": totals.prompt_tokens,
            "prefix_tokens": totals.prefix_tokens,
            "tail_tokens": totals.tail_tokens,
            "prefix_share": analysis.prefix_share,
            "inserted_tokens": totals.inserted_tokens,
            "evicted_tokens": totals.evicted_tokens,
            "repeat_tokens": analysis.repeat_tokens,
            "prompt_length": _percentiles(analysis.prompt_lengths),
            "tail_length": _percentiles(analysis.tail_lengths),
        },
        "first_variation": {
            "percentiles": _percentiles(analysis.first_variation),
            "histogram": _buckets(analysis.first_variation_histogram),
        },
        "variation_set_cardinality": _percentiles(analysis.cardinality),
        "oracle": {str(length): tokens for length, tokens in analysis.oracle.items()},
        "matchers": {matcher.name: _matcher(matcher, analysis) for matcher in analysis.matchers},
        "shipped": {
            "matcher": analysis.shipped.name,
            **_matcher(analysis.shipped, analysis),
            "approximate_calls": analysis.approximate_calls,
            "approximate_tokens": analysis.approximate_tokens,
        },
        "namespaces": [vars(row) for row in analysis.namespaces],
        "causes": {
            "compared_calls": causes.compared_calls,
            "grown_calls": causes.grown_calls,
            "grown_tokens": causes.grown_tokens,
            "groups": [_cause(cause, analysis) for cause in causes.causes],
        },
        "compute": _compute(analysis.compute),
        "ttft_estimate": _ttft(analysis.ttft),
        "verdict": {"worth": analysis.worth.value, "sentence": analysis.verdict},
        "notes": list(analysis.notes),
    }


def _matcher(matcher: MatcherSummary, analysis: Analysis) -> dict[str, Any]:
    return {
        "recovered_tokens": matcher.recovered_tokens,
        "share_of_tail": _share(matcher.recovered_tokens, analysis.totals.tail_tokens),
        "share_of_oracle": {
            str(length): _share(matcher.recovered_tokens, tokens) for length, tokens in analysis.oracle.items()
        },
        "calls_with_hits": matcher.calls_with_hits,
        "gaps_per_request": {"median": matcher.gaps_median, "p95": matcher.gaps_p95},
        "runs": matcher.runs,
        "run_length": {
            f"p{n}": value for n, value in zip(RUN_PERCENTILES, matcher.run_length_percentiles, strict=True)
        },
        "run_length_histogram": _buckets(matcher.run_lengths),
        "delta_histogram": _buckets(matcher.deltas),
    }


def _cause(cause: Cause, analysis: Analysis) -> dict[str, Any]:
    return {
        "class": cause.kind.value,
        "where": cause.where.value,
        "line": cause.line,
        "message": cause.message,
        "before": cause.before,
        "calls": cause.calls,
        "share_of_calls": _share(cause.calls, analysis.totals.calls),
        "tokens_behind": cause.tokens_behind,
        "share_of_tail": _share(cause.tokens_behind, analysis.totals.tail_tokens),
        "share_of_prompt": _share(cause.tokens_behind, analysis.totals.prompt_tokens),
        "distinct_values": cause.distinct_values,
        "example": {"old": cause.example_old, "new": cause.example_new, "place": cause.example_place},
        "fix": cause.fix,
        "fix_recovers_tokens": cause.fix_recovers,
        "irminsul_recovers_tokens": cause.irminsul_recovers,
    }


def _compute(compute: ComputeSavings) -> dict[str, Any]:
    return {
        "tokens": {"now": compute.tokens_now, "irminsul": compute.tokens_then},
        "flops": None
        if compute.model is None
        else {"model": compute.model, "now": compute.flops_now, "irminsul": compute.flops_then},
    }


def _ttft(ttft: TtftEstimate) -> dict[str, Any]:
    return {
        "cost_model": ttft.model,
        "source": ttft.source,
        "median_ms": {"now": ttft.now_median_ms, "irminsul": ttft.then_median_ms},
        "p95_ms": {"now": ttft.now_p95_ms, "irminsul": ttft.then_p95_ms},
        "total_s": {"now": ttft.now_total_s, "irminsul": ttft.then_total_s},
        "calls_outside_measured_points": ttft.calls_outside,
    }


def _percentiles(values: tuple[float, ...]) -> dict[str, float]:
    return {f"p{n}": value for n, value in zip(PERCENTILES, values, strict=False)}


def _buckets(buckets: tuple[Bucket, ...]) -> list[dict[str, Any]]:
    return [vars(bucket) for bucket in buckets]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        assert math.isfinite(value), value
        return round(value, _DECIMALS)
    return value
