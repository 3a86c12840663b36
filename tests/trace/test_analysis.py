from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_log import WordLog, prose

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.trace.analysis import Analysis, AnalysisConfig, Worth, analyse, histogram, namespace_name
from irminsul.trace.cost import MEASURED_H200, ModelCost
from irminsul.trace.records import SpanKind
from irminsul.trace.replay import Progress, ReplayConfig


class Seen:
    """Stages that remember what they were told."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        self.tokens[name] = 0

        def advance(tokens: int) -> None:
            self.tokens[name] += tokens

        yield advance


def rag_log(calls: int = 8) -> WordLog:
    """The same documents in another order each time."""
    log = WordLog()
    documents = [prose(i, 60) for i in range(5)]
    random = np.random.default_rng(0)
    for i in range(calls):
        order = "\n".join(documents[at] for at in random.permutation(5))
        log.add((SpanKind.SYSTEM, prose(50, 30)), (SpanKind.USER, order), thread=i)
    return log


def analysed(log: WordLog, config: AnalysisConfig | None = None, model: ModelCost | None = None) -> Analysis:
    return analyse(log, config or AnalysisConfig(matchers=("cdc", "winnow64")), MEASURED_H200, model, Seen())


def test_every_pass_serves_every_token() -> None:
    log, seen, config = rag_log(), Seen(), AnalysisConfig(matchers=("winnow32",))
    analyse(log, config, MEASURED_H200, None, seen)
    assert len(seen.tokens) == config.passes
    assert set(seen.tokens.values()) == {log.prompt_tokens()}


def test_moved_documents_are_worth_it() -> None:
    log = rag_log()
    analysis = analysed(log)
    totals = analysis.totals
    assert (totals.calls, totals.threads, totals.prompt_tokens) == (8, 8, log.prompt_tokens())
    assert totals.tail_tokens == totals.prompt_tokens - totals.prefix_tokens
    assert analysis.oracle[32] >= analysis.oracle[64] >= analysis.oracle[128] > 0
    assert analysis.shipped.recovered_tokens <= analysis.oracle[32]
    assert analysis.compute.tokens_then == totals.tail_tokens - analysis.shipped.recovered_tokens
    assert analysis.worth is Worth.YES
    assert "worth turning on" in analysis.verdict
    assert analysis.first_variation == (), "no thread has a second call"
    assert sum(bucket.tokens for bucket in analysis.shipped.run_lengths) == analysis.shipped.recovered_tokens
    assert sum(bucket.count for bucket in analysis.shipped.deltas) == analysis.shipped.runs
    assert len(analysis.strips) == 8


def test_traffic_that_only_appends_is_not_worth_it() -> None:
    log, text = WordLog(), prose(0, 400)
    for i in range(10):
        text += prose(100 + i, 10)
        log.add((SpanKind.USER, text))
    analysis = analysed(log)
    assert analysis.worth is Worth.NO
    assert "not worth turning on for prefill alone" in analysis.verdict
    assert analysis.causes.grown_calls == 9


@pytest.mark.parametrize(
    ("prompt", "prefix", "recovered", "worth"),
    [(1000, 500, 100, Worth.YES), (1000, 500, 99, Worth.MAYBE), (1000, 950, 10, Worth.MAYBE), (1000, 950, 9, Worth.NO),
     (1000, 0, 60, Worth.NO), (1000, 0, 200, Worth.YES), (1000, 1000, 0, Worth.NO)],
)  # fmt: skip
def test_the_verdict_keeps_its_thresholds(prompt: int, prefix: int, recovered: int, worth: Worth) -> None:
    analysis = analysed(rag_log(2))
    changed = replace(
        analysis,
        totals=replace(analysis.totals, prompt_tokens=prompt, prefix_tokens=prefix),
        compute=replace(analysis.compute, tokens_now=prompt - prefix, tokens_then=prompt - prefix - recovered),
    )
    assert changed.worth is worth


@pytest.mark.parametrize(("recovered", "then", "said"), [(500, 99.0, True), (500, 90.0, False), (0, 99.0, False)])
def test_a_saving_that_no_single_request_would_notice_is_said(recovered: int, then: float, said: bool) -> None:
    analysis = analysed(rag_log(2))
    changed = replace(
        analysis,
        totals=replace(analysis.totals, prompt_tokens=1000, prefix_tokens=0),
        compute=replace(analysis.compute, tokens_now=1000, tokens_then=1000 - recovered),
        ttft=replace(analysis.ttft, now_total_s=100.0, then_total_s=then),
    )
    assert ("TTFT would hardly change" in changed.verdict) is said


def test_a_model_gives_flops() -> None:
    analysis = analysed(rag_log(), model=ModelCost("m", 100, 10))
    now, then = analysis.compute.flops_now, analysis.compute.flops_then
    assert now is not None
    assert then is not None
    assert now > 200 * analysis.compute.tokens_now
    assert now > then > 200 * analysis.compute.tokens_then
    assert analysed(rag_log()).compute.flops_now is None


def test_namespaces_are_summed_apart() -> None:
    log = WordLog()
    for i in range(6):
        log.add((SpanKind.USER, prose(i % 2, 80)), tenant="ab"[i % 2])
    rows = analysed(log).namespaces
    assert {row.name for row in rows} == {"tenant=a", "tenant=b"}
    assert sum(row.prompt_tokens for row in rows) == log.prompt_tokens()
    assert all(row.calls == 3 for row in rows)
    assert analysed(rag_log(2)).namespaces == ()
    assert namespace_name(Namespace()) == "default"


def test_replies_count_only_if_wanted() -> None:
    answer = prose(5, 100)
    log = WordLog().add((SpanKind.USER, prose(1, 50)), reply=answer).add((SpanKind.USER, "See: " + answer), thread=1)
    matchers = ("winnow32",)
    assert analysed(log, AnalysisConfig(matchers=matchers)).shipped.recovered_tokens > 0
    without = AnalysisConfig(ReplayConfig(replies=False), matchers)
    assert analysed(log, without).shipped.recovered_tokens == 0


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(InputError, match="no calls"):
        analysed(WordLog())


@pytest.mark.parametrize("matchers", [("winnow65",), ("cdc", "cdc")])
def test_matchers_are_named_once_and_right(matchers: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="matcher"):
        AnalysisConfig(matchers=matchers)


@given(st.lists(st.integers(0, 200), max_size=40), st.lists(st.integers(0, 100), min_size=1, max_size=6, unique=True))
def test_histograms_lose_nothing(values: list[int], edges: list[int]) -> None:
    array = np.array(values, dtype=np.int64)
    buckets = histogram(array, array, sorted(edges))
    assert sum(bucket.count for bucket in buckets) == len(values)
    assert sum(bucket.tokens for bucket in buckets) == sum(values)
    for bucket in buckets[1:]:
        inside = [v for v in values if bucket.low <= v and (bucket.high is None or v < bucket.high)]
        assert bucket.count == len(inside)
