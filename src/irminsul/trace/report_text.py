"""The analysis on a terminal: a progress bar with the time left while it runs, tables when it is done."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from irminsul.trace.analysis import Analysis, MatcherSummary
from irminsul.trace.causes import Cause
from irminsul.trace.replay import Progress

_ANY_WIDTH = 1000
_SHOWN_CAUSES = 12
_SHOWN_NAMESPACES = 20
_MAX_VALUE = 60
# Marks that turn the direction of text around them: harmless in their place, a disguise in a report.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

APPROXIMATE = (
    "Prefix hits are lossless. Shifted reuse is approximate: its rows were computed behind other text, and what is "
    "computed behind such rows is approximate, too. These figures "
    "count tokens and promise nothing about the quality of answers."
)
CEILING = (
    "Ceiling: tokens behind the exact prefix in any run of at least 32, 64 or 128 tokens that the cache holds. The "
    "matchers are compared at runs of 32 or more, whatever a gap costs, so they can pass the ceilings for 64 and 128; "
    "the last row is the shipped setting, where rows behind a copied one are not copied again, as in the engines: it "
    "copies more than it saves where a session's approximate rows are computed again."
)


@contextmanager
def analysis_stages(console: Console, prompt_tokens: int, passes: int) -> Iterator["BarStages"]:
    """Show one bar for all passes over a log; nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield BarStages(bar, prompt_tokens * passes)


class BarStages:
    """See analysis.Stages."""

    def __init__(self, bar: Bar, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("replaying", total=total)

    @contextmanager
    def __call__(self, name: str) -> Iterator[Progress]:
        """Show a pass by its name."""
        self._bar.update(self._task, description=name)
        yield lambda tokens: self._bar.advance(self._task, tokens)


@contextmanager
def reading_bar(console: Console, total_bytes: int | None) -> Iterator[Progress]:
    """Show how much of the files is read; nothing where there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading and tokenising", total=total_bytes)
        yield lambda count: bar.advance(task, count)


def visible(text: str) -> str:
    """Write control and direction characters as ``<U+XXXX>`` and line ends as ``⏎``: log text must not act."""
    return "".join("\u23ce" if char == "\n" else f"<U+{ord(char):04X}>" if _acts(char) else char for char in text)


def _acts(char: str) -> bool:
    return char in _BIDI or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")


def print_report(console: Console, analysis: Analysis) -> None:
    """Print the tables, the verdict, and what one must know to read them."""
    for line in overview(analysis):
        console.print(Text(line))
    _print_whole(console, _matcher_table(analysis))
    if analysis.namespaces:
        _print_whole(console, _namespace_table(analysis))
    if analysis.causes.causes:
        console.print(Text("Why calls miss the prefix cache", style="bold"))
        _print_whole(console, _cause_table(analysis))
        for line in cause_sentences(analysis):
            console.print(Text(line))
        console.print()
    for line in savings(analysis):
        console.print(Text(line))
    console.print(Text(analysis.verdict, style="bold"))
    for note in notes(analysis):
        console.print(Text(visible(note), style="dim"))


def overview(analysis: Analysis) -> list[str]:
    """Return the log in a few lines."""
    totals = analysis.totals
    bound = "no bound" if analysis.cache_tokens is None else f"{analysis.cache_tokens:,} tokens"
    replies = (
        f"replies cached where known ({analysis.calls_with_replies:,} calls)" if analysis.replies else "no replies"
    )
    lines = [
        (
            f"{totals.calls:,} calls in {totals.threads:,} threads, {totals.prompt_tokens:,} prompt tokens; cache: "
            f"{bound}, {replies}"
        ),
        (
            f"exact prefix {totals.prefix_tokens:,} ({analysis.prefix_share:.1%}), to compute {totals.tail_tokens:,}; "
            f"repeats inside one tail, which nothing here counts: {analysis.repeat_tokens:,}"
        ),
    ]
    if analysis.first_variation:
        p5, p25, p50, *_ = analysis.first_variation
        lines.append(
            f"first variation (prefix / prompt, later calls of a thread): p5 {p5:.2f}, p25 {p25:.2f}, p50 {p50:.2f}"
        )
    if analysis.cardinality:
        lines.append(
            f"variation points: {len(analysis.causes.causes):,}; distinct values at one: median "
            f"{analysis.cardinality[2]:,.0f}, p95 {analysis.cardinality[4]:,.0f}"
        )
    return [*lines, grown(analysis)]


def savings(analysis: Analysis) -> list[str]:
    """Return what turning irminsul on would save."""
    compute, ttft = analysis.compute, analysis.ttft
    lines = [
        f"tokens to compute: {compute.tokens_now:,} now, {compute.tokens_then:,} with irminsul",
        (
            f"{analysis.approximate_calls:,} of {analysis.totals.calls:,} calls would be answered on approximate rows, "
            f"{_percent(analysis.approximate_tokens, analysis.totals.prompt_tokens)} of prompt tokens: copied ones, "
            "and what a session computes behind them"
        ),
    ]
    if compute.flops_now is not None and compute.flops_then is not None:
        lines.append(
            f"prefill FLOPs ({compute.model}): {compute.flops_now:.3g} now, {compute.flops_then:.3g} with irminsul"
        )
    lines.append(
        f"TTFT estimate ({ttft.model}): median {ttft.now_median_ms:,.0f} -> {ttft.then_median_ms:,.0f} ms, p95 "
        f"{ttft.now_p95_ms:,.0f} -> {ttft.then_p95_ms:,.0f} ms, sum {ttft.now_total_s:,.1f} -> "
        f"{ttft.then_total_s:,.1f} s"
    )
    if ttft.calls_outside:
        lines.append(
            f"  {ttft.calls_outside:,} of {analysis.totals.calls:,} calls lie outside the measured points and got the "
            "nearest edge"
        )
    return lines


def notes(analysis: Analysis) -> list[str]:
    """Return the sentences that belong under the tables."""
    return [APPROXIMATE, CEILING, f"TTFT points: {analysis.ttft.source}.", *analysis.notes]


def matcher_cells(matcher: MatcherSummary, analysis: Analysis) -> tuple[str, ...]:
    """Return the cells of a matcher's row behind its name."""
    p50, p90, p99 = matcher.run_length_percentiles
    return (
        f"{matcher.recovered_tokens:,}",
        _percent(matcher.recovered_tokens, analysis.totals.tail_tokens),
        *(_percent(matcher.recovered_tokens, tokens) for tokens in analysis.oracle.values()),
        f"{matcher.calls_with_hits:,}",
        f"{matcher.gaps_median:.0f} / {matcher.gaps_p95:.0f}",
        f"{p50:,.0f} / {p90:,.0f} / {p99:,.0f}",
    )


MATCHER_COLUMNS = (
    "recovered\ntokens",
    "of\ntail",
    "of\nceiling 32",
    "of\n64",
    "of\n128",
    "calls\nwith hits",
    "gaps\np50 / p95",
    "run length\np50 / p90 / p99",
)
CAUSE_COLUMNS = (
    "calls",
    "of\ncalls",
    "of tokens\nto compute",
    "distinct\nvalues",
    "fix\nrecovers",
    "irminsul\nrecovers",
)


def ceiling_cells(tokens: int, analysis: Analysis) -> tuple[str, str]:
    """Return a ceiling's first two cells; it has no others."""
    return f"{tokens:,}", _percent(tokens, analysis.totals.tail_tokens)


def shipped_name(analysis: Analysis) -> str:
    """Return the name of the shipped setting's row."""
    return f"as shipped ({analysis.shipped.name})"


def _matcher_table(analysis: Analysis) -> Table:
    table = _table("matcher", *MATCHER_COLUMNS)
    for matcher in analysis.matchers:
        table.add_row(matcher.name, *matcher_cells(matcher, analysis))
    table.add_section()
    for length, tokens in analysis.oracle.items():
        table.add_row(f"ceiling {length}", *ceiling_cells(tokens, analysis))
    table.add_section()
    table.add_row(shipped_name(analysis), *matcher_cells(analysis.shipped, analysis), style="bold")
    return table


def _namespace_table(analysis: Analysis) -> Table:
    table = _table("namespace", "calls", "prompt\ntokens", "prefix", "recovered\nas shipped")
    for row in analysis.namespaces[:_SHOWN_NAMESPACES]:
        counts = (row.calls, row.prompt_tokens, row.prefix_tokens, row.recovered_tokens)
        table.add_row(Text(visible(row.name)), *(f"{count:,}" for count in counts))
    hidden = len(analysis.namespaces) - _SHOWN_NAMESPACES
    if hidden > 0:
        table.add_row(f"{hidden:,} more, see --json")
    return table


def _cause_table(analysis: Analysis) -> Table:
    table = _table("what changes", *CAUSE_COLUMNS)
    for cause in analysis.causes.causes[:_SHOWN_CAUSES]:
        table.add_row(Text(cause_name(cause)), *cause_cells(cause, analysis))
    hidden = len(analysis.causes.causes) - _SHOWN_CAUSES
    if hidden > 0:
        table.add_row(f"{hidden:,} more, see --json")
    return table


def cause_cells(cause: Cause, analysis: Analysis) -> tuple[str, ...]:
    """Return the figures of a cause."""
    return (
        f"{cause.calls:,}",
        _percent(cause.calls, analysis.totals.calls),
        _percent(cause.tokens_behind, analysis.totals.tail_tokens),
        f"{cause.distinct_values:,}",
        f"{cause.fix_recovers:,}",
        f"{cause.irminsul_recovers:,}",
    )


def cause_name(cause: Cause) -> str:
    """Say what changes and where, in one line."""
    place = f", line {cause.line}" if cause.line and cause.before else ""
    before = f" behind \u201c{visible(cause.before)}\u201d" if cause.before else ""
    return f"{cause.kind.value} in {cause.where.value}{place}{before}"


def cause_sentences(analysis: Analysis) -> list[str]:
    """Return, for the first few causes, an example and the fix."""
    return [
        f"{cause_name(cause)}: {shorten(cause.example_old)} -> {shorten(cause.example_new)} "
        f"({visible(cause.example_place)}). {cause.fix}"
        for cause in analysis.causes.causes[:3]
    ]


def grown(analysis: Analysis) -> str:
    """Say how many calls only grew."""
    causes = analysis.causes
    share = _percent(causes.grown_tokens, analysis.totals.tail_tokens)
    return (
        f"{causes.grown_calls:,} of {causes.compared_calls:,} calls that can be compared with an earlier one only "
        f"append to it; {share} of the tokens to compute are what they append"
    )


def shorten(text: str) -> str:
    """Quote a value, safe to show and not too long."""
    shown = visible(text)
    ellipsis = "\u2026" if len(shown) > _MAX_VALUE else ""
    return f"\u201c{shown[:_MAX_VALUE]}{ellipsis}\u201d"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _print_whole(console: Console, table: Table) -> None:
    """Print a table; a number that is cut off is worse than a line that the terminal folds."""
    needed = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
    width = console.width
    console.width = max(width, needed)
    console.print(table)
    console.print()
    console.width = width
