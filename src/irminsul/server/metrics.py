"""Prometheus metrics of one server, in a registry of their own. Times are in seconds."""

import time
from collections.abc import Callable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from irminsul.engine.types import StepOutput, Usage
from irminsul.server.runner import EngineStats

_MATCH_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Outcome(StrEnum):
    """How an accepted request ended, as a label."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The client went away, or the server was shut down."""
    ERROR = "error"
    """The engine failed."""


class ServerMetrics:
    """Counters and histograms of requests, and the engine's own gauges as they are at the time of a scrape.

    Args:
        engine_stats: returns the engine's latest numbers; must not wait for the engine.
    """

    def __init__(self, engine_stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine_stats))
        self._prompt_tokens = Counter(
            "irminsul_prompt_tokens",
            "Prompt tokens by where their rows came from (prefix is lossless; approximate_prefix and shifted are not)",
            ["source"],
            registry=self.registry,
        )
        self._planned_shifted = Counter(
            "irminsul_planned_shifted_tokens",
            "Prompt tokens in the shifted runs of plans, whether they were carried out (mode live) or only counted",
            registry=self.registry,
        )
        self._gaps = Counter("irminsul_gaps", "Stretches of prompts that were computed", registry=self.registry)
        self._plans = Counter(
            "irminsul_plans",
            "Prompts by what their plan held: shifted runs that were reused, that were only planned, or none",
            ["shifted"],
            registry=self.registry,
        )
        self._match_seconds = Histogram(
            "irminsul_match_seconds", "Time to find and plan reuse", buckets=_MATCH_BUCKETS, registry=self.registry
        )
        self._queue_seconds = Histogram(
            "irminsul_queue_seconds",
            "From submission until first scheduled",
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self._ttft_seconds = Histogram(
            "irminsul_time_to_first_token_seconds",
            "From the arrival of a request until its first token",
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self._itl_seconds = Histogram(
            "irminsul_inter_token_latency_seconds",
            "Between two tokens of a request",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._generated = Counter("irminsul_generated_tokens", "Tokens drawn", registry=self.registry)
        self._requests = Counter(
            "irminsul_requests", "Accepted requests by how they ended", ["finish_reason"], registry=self.registry
        )
        self._answers = Counter(
            "irminsul_http_answers", "Answers by HTTP status; 429 is a full queue", ["status"], registry=self.registry
        )
        # A label that was never seen is absent, and an absent counter breaks rates: name all of them at once.
        for source in ("prefix", "approximate_prefix", "shifted", "computed"):
            self._prompt_tokens.labels(source)
        for shifted in ("reused", "planned", "none"):
            self._plans.labels(shifted)
        for outcome in Outcome:
            self._requests.labels(outcome)
        for status in (200, 400, 401, 429, 503):
            self._answers.labels(str(status))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, status: int) -> None:
        """Count an answer that begins."""
        self._answers.labels(str(status)).inc()

    def planned(self, usage: Usage) -> None:
        """Count what one prompt reused."""
        for source in ("prefix", "approximate_prefix", "shifted", "computed"):
            self._prompt_tokens.labels(source).inc(getattr(usage, source))
        self._planned_shifted.inc(usage.planned_shifted)
        self._gaps.inc(usage.gaps)
        self._plans.labels("reused" if usage.shifted else "planned" if usage.planned_shifted else "none").inc()
        self._match_seconds.observe(usage.match_seconds)
        self._queue_seconds.observe(usage.queue_seconds)

    def first_token(self, seconds: float) -> None:
        """Observe a time to first token."""
        self._ttft_seconds.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Observe an inter-token latency."""
        self._itl_seconds.observe(seconds)

    def drawn(self) -> None:
        """Count a token."""
        self._generated.inc()

    def ended(self, outcome: Outcome) -> None:
        """Count a request."""
        self._requests.labels(outcome).inc()


class RequestTimer:
    """Observes one request.

    Args:
        metrics: where to.
        arrived: ``time.perf_counter()`` when the request came in.
    """

    def __init__(self, metrics: ServerMetrics, arrived: float) -> None:
        self._metrics = metrics
        self._last = arrived
        self._first_is_due = True
        self._ended = False

    def output(self, output: StepOutput) -> None:
        """Observe one output of the engine."""
        if output.usage is not None:
            self._metrics.planned(output.usage)
        now = time.perf_counter()
        observe = self._metrics.first_token if self._first_is_due else self._metrics.next_token
        observe(now - self._last)
        self._metrics.drawn()
        self._last, self._first_is_due = now, False

    def end(self, outcome: Outcome) -> None:
        """Observe the end; only the first call counts."""
        if not self._ended:
            self._ended = True
            self._metrics.ended(outcome)


class _EngineCollector(Collector):
    def __init__(self, engine_stats: Callable[[], EngineStats]) -> None:
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._engine_stats()
        yield GaugeMetricFamily("irminsul_requests_running", "Requests that hold slots", stats.running)
        yield GaugeMetricFamily("irminsul_requests_waiting", "Requests in the queue", stats.waiting)
        slots = GaugeMetricFamily("irminsul_pool_slots", "Rows of the pool by state", labels=["state"])
        slots.add_metric(["free"], stats.free_slots)
        slots.add_metric(["cached"], stats.cached_slots)
        slots.add_metric(["active"], stats.pool_slots - stats.free_slots - stats.cached_slots)
        yield slots
        yield GaugeMetricFamily(
            "irminsul_pool_locked_slots", "Cached rows that running requests read, and that stay", stats.locked_slots
        )
        yield GaugeMetricFamily("irminsul_registry_entries", "Fingerprints of donors", stats.registry_entries)
        yield CounterMetricFamily("irminsul_evicted_slots", "Slots taken from the cache", stats.evicted_slots)
