"""Counters of a server, beside SGLang's own metrics."""

from dataclasses import asdict
from typing import Any

from irminsul.sglang.requests import TOKEN_CLASSES, ReuseState, StepTokens


class Accounting:
    """Prometheus counters of one scheduler; SGLang's ``/metrics`` gathers them from all processes.

    Args:
        cache: the tree (IrminsulRadixCache), whose index is measured.
        counters: by name; empty where SGLang runs without ``--enable-metrics``.
    """

    def __init__(self, cache: Any, counters: dict[str, Any]) -> None:
        self._cache = cache
        self._counters = counters

    @classmethod
    def make(cls, cache: Any, *, enabled: bool) -> "Accounting":  # IrminsulRadixCache
        """Register the metrics, if the server has any."""
        if not enabled:
            return cls(cache, {})
        # SGLang names the folder of multi-process metrics before it starts a scheduler; this import reads it.
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415

        gauges = {
            "index_entries": Gauge("irminsul_index_entries", "Fingerprints held", multiprocess_mode="livesum"),
            "index_bytes": Gauge("irminsul_index_bytes", "Memory of the index", multiprocess_mode="livesum"),
            "histories": Gauge("irminsul_histories", "Anchors of derived rows", multiprocess_mode="livesum"),
        }
        counters = {
            "tokens": Counter("irminsul_prompt_tokens", "Prompt tokens by class", ["token_class", "mode"]),
            "steps": Counter("irminsul_prefill_steps", "Prefill steps", ["mode"]),
            "refusals": Counter("irminsul_refusals", "Requests for which nothing is shifted", ["reason"]),
            "gaps": Histogram("irminsul_gaps", "Gaps of a prefill step", buckets=(1, 2, 3, 5, 9, 17)),
        }
        return cls(cache, counters | gauges)

    def count(self, state: ReuseState, step: StepTokens) -> None:
        """Count a step of a request's prefill."""
        if not self._counters:
            return
        for name, tokens in asdict(step).items():
            if name in TOKEN_CLASSES:
                self._counters["tokens"].labels(name, state.mode.value).inc(tokens)
        self._counters["steps"].labels(state.mode.value).inc()
        self._counters["gaps"].observe(step.gaps)
        if state.refusal is not None and len(state.steps) == 1:
            self._counters["refusals"].labels(state.refusal.partition(":")[0]).inc()
        donors = self._cache.donors
        self._counters["index_entries"].set(len(donors.registry))
        self._counters["index_bytes"].set(donors.registry.nbytes)
        self._counters["histories"].set(len(self._cache.histories))
