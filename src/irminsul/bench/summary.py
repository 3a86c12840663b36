"""Many measured requests in a few numbers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from irminsul.bench.client import TOKEN_CLASSES, Measured
from irminsul.bench.server import PoolReading

PERCENTILES = (50, 95, 99)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95 and p99 (linear interpolation, numpy's default) and the mean; None of no values."""
    if not values:
        return None
    cuts = np.percentile(values, PERCENTILES)
    return {f"p{percent}": float(cut) for percent, cut in zip(PERCENTILES, cuts, strict=True)} | {
        "mean": float(np.mean(values))
    }


def summarise(measured: Sequence[Measured], seconds: float) -> dict[str, Any]:
    """Summarise the requests of a block. Times are of requests that ended well, errors are counted.

    Args:
        measured: all of them.
        seconds: from the first request's start to the last one's end.

    Returns:
        ``ttft_s``, ``itl_s`` (over all gaps of all requests), ``tpot_s`` (the mean gap of each request, by tokens),
        ``end_to_end_s``, rates a second, ``in_flight`` (the mean number of requests), ``tokens`` by class and
        ``errors`` by kind. What the server does not tell is
        left out: a class of tokens is summed only if every request that ended well has it.
    """
    well = [one for one in measured if one.error is None]
    return {
        "seconds": seconds,
        "requests": len(measured),
        "succeeded": len(well),
        "errors": dict(Counter(one.error for one in measured if one.error is not None)),
        "ttft_s": distribution([one.ttft_s for one in well if one.ttft_s is not None]),
        "itl_s": distribution([gap for one in well for gap in one.itl_s]),
        "tpot_s": distribution(
            [sum(one.itl_s) / (n - 1) for one in well if (n := one.completion_tokens) is not None and n > 1]
        ),
        "end_to_end_s": distribution([one.end_to_end_s for one in well]),
        "requests_per_s": len(well) / seconds,
        "in_flight": sum(one.end_to_end_s for one in measured) / seconds,
        **_tokens(well, seconds),
    }


def _tokens(well: Sequence[Measured], seconds: float) -> dict[str, Any]:
    prompt = [one.prompt_tokens for one in well if one.prompt_tokens is not None]
    completion = [one.completion_tokens for one in well if one.completion_tokens is not None]
    if not well or len(prompt) < len(well) or len(completion) < len(well):
        return {}
    tokens = {"prompt": sum(prompt), "completion": sum(completion)}
    for name in TOKEN_CLASSES:
        found = [one.token_classes[name] for one in well if one.token_classes and name in one.token_classes]
        if len(found) == len(well):
            tokens[name] = sum(found)
    return {
        "prompt_tokens": distribution(prompt),
        "output_tokens_per_s": sum(completion) / seconds,
        "tokens": tokens,
    }


def pool_change(before: PoolReading | None, after: PoolReading | None, *, flushed: bool) -> dict[str, float] | None:
    """Return the occupied share of the pool before and after a block and the tokens evicted in it, as far as known.

    Args:
        before: just before the first request.
        after: just after the last one.
        flushed: SGLang was flushed before the block; its gauges do not hear of that, and tell of what was there.
    """
    if before is None or after is None:
        return None
    found: dict[str, float] = {}
    for name, reading in (("after", after),) if flushed else (("before", before), ("after", after)):
        if reading.slots is not None and reading.slots >= 1 and reading.free_slots is not None:
            found[f"occupied_{name}"] = 1 - reading.free_slots / reading.slots
    if after.slots is not None:
        found["slots"] = after.slots
    if after.evicted_tokens is not None:
        # A counter that was not there before stood at 0.
        found["evicted_tokens"] = after.evicted_tokens - (before.evicted_tokens or 0.0)
    return found
