"""What the demo measured: one result a request, one row a scenario, and the JSON of both."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from irminsul.engine.types import Usage
from irminsul.machine import Machine
from irminsul.output_files import replace_files

TOTALS = "totals"


@dataclass(frozen=True)
class RequestResult:
    """One prompt, played on both engines."""

    scenario: str
    number: int
    """Place in the scenario, from 1."""
    prefix_caching: Usage
    """Of the engine with prefix caching alone."""
    live: Usage
    oracle: int
    """Tokens beyond the exact prefix that reuse could save at most."""
    ttft_prefix: float
    """Seconds from submission to the first token, prefix caching alone."""
    ttft_live: float
    first_token_agrees: bool
    kl_first: float
    """KL(prefix caching || live) of the first token's distribution, in nats."""

    @property
    def recovered(self) -> int:
        """Tokens that prefix caching computes and irminsul does not."""
        return self.prefix_caching.computed - self.live.computed


@dataclass(frozen=True)
class Row:
    """A scenario, or all of them. Tokens are sums over all requests.

    Times, agreement and KL are over all requests but the first of each scenario, which is cold in both engines and
    would flatter the comparison; they are None where there is no other.
    """

    name: str
    requests: int
    prompt_tokens: int
    prefix: int
    approximate_prefix: int
    shifted: int
    computed: int
    """The four add up to ``prompt_tokens``."""
    prefix_only: int
    """Prefix hits of the engine with prefix caching alone."""
    oracle: int
    recovered: int
    ttft_prefix_ms: float | None
    """Median."""
    ttft_live_ms: float | None
    """Median."""
    first_token_agreement: float | None
    """Share of requests whose first token is the same."""
    kl_first_mean: float | None
    """Nats."""

    @property
    def share_of_oracle(self) -> float | None:
        """Recovered tokens for each token that could be; None where nothing could."""
        return self.recovered / self.oracle if self.oracle else None

    @property
    def speedup(self) -> float | None:
        """TTFT with prefix caching divided by TTFT with irminsul."""
        if self.ttft_prefix_ms is None or self.ttft_live_ms is None:
            return None
        return self.ttft_prefix_ms / self.ttft_live_ms


@dataclass(frozen=True)
class DemoReport:
    """Everything there is to say about one run."""

    results: tuple[RequestResult, ...]
    skipped: int
    """Calls of a log that were left out because their prompts are longer than the engine takes."""
    machine: Machine

    @property
    def scenarios(self) -> list[Row]:
        """One row a scenario, in the order they were played."""
        names = dict.fromkeys(result.scenario for result in self.results)
        return [make_row(name, [result for result in self.results if result.scenario == name]) for name in names]

    @property
    def totals(self) -> Row:
        """All requests in one row."""
        return make_row(TOTALS, self.results)


def make_row(name: str, results: Sequence[RequestResult]) -> Row:
    """Sum up requests."""
    warm = [result for result in results if result.number > 1]
    return Row(
        name=name,
        requests=len(results),
        prompt_tokens=sum(result.live.prompt_tokens for result in results),
        prefix=sum(result.live.prefix for result in results),
        approximate_prefix=sum(result.live.approximate_prefix for result in results),
        shifted=sum(result.live.shifted for result in results),
        computed=sum(result.live.computed for result in results),
        prefix_only=sum(result.prefix_caching.prefix for result in results),
        oracle=sum(result.oracle for result in results),
        recovered=sum(result.recovered for result in results),
        ttft_prefix_ms=_median_ms(result.ttft_prefix for result in warm),
        ttft_live_ms=_median_ms(result.ttft_live for result in warm),
        first_token_agreement=fmean(result.first_token_agrees for result in warm) if warm else None,
        kl_first_mean=fmean(result.kl_first for result in warm) if warm else None,
    )


def _median_ms(seconds: Iterable[float]) -> float | None:
    times = [1000 * time for time in seconds]
    return median(times) if times else None


def to_json(report: DemoReport) -> dict[str, Any]:
    """Return the report as JSON types; what could not be measured is null, never NaN."""
    return {
        "scenarios": [_row_json(row) for row in report.scenarios],
        "totals": _row_json(report.totals),
        "requests_detail": [_request_json(result) for result in report.results],
        "skipped": report.skipped,
        "machine": asdict(report.machine),
    }


def write_json(report: DemoReport, path: Path) -> None:
    """Write the report; InputError if the file cannot be written."""
    text = json.dumps(to_json(report), indent=2, allow_nan=False)
    replace_files({path: f"{text}\n".encode()})


def _row_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"share_of_oracle": row.share_of_oracle, "speedup": row.speedup}


def _request_json(result: RequestResult) -> dict[str, Any]:
    assert math.isfinite(result.kl_first), result
    return asdict(result) | {"recovered": result.recovered}
