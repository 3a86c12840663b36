"""The demo on a terminal: a progress bar while it runs, one table when it is done."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from rich import box
from rich.console import Console
from rich.table import Table

from irminsul.demo.results import DemoReport, RequestResult, Row
from irminsul.plan import ReusePolicy
from irminsul.progress import progress_bar

_NOT_MEASURED = "-"
_ANY_WIDTH = 1000

_APPROXIMATE = (
    "Prefix hits are lossless. Shifted reuse is approximate, and so is what follows from it (approx. prefix): "
    "the rows were computed behind other text."
)
_WARM = (
    "Tokens are of all requests; TTFT (median), agreement and KL of all but the first of each scenario, which is cold in "
    "both. KL is KL(prefix caching || irminsul) of the first token's distribution, in nats."
)
_ORACLE = (
    f"Oracle: tokens beyond the exact prefix, from position {ReusePolicy().carve_out} on, in runs of "
    f"{ReusePolicy().min_run} or more that an earlier request of the scenario held. Not recovered are runs that begin "
    "behind shifted rows, which are never copied again, and shorter pieces that are left of a run."
)

_COLUMNS = (
    "requests",
    "prompt\ntokens",
    "prefix",
    "approx.\nprefix",
    "shifted",
    "computed",
    "of\noracle",
    "TTFT ms\nprefix\ncaching",
    "TTFT ms\nirminsul",
    "ratio",
    "first\ntoken\nagrees",
    "KL",
)


def live_progress(console: Console, total: int) -> AbstractContextManager[Callable[[RequestResult], None]]:
    """Show progress over ``total`` requests; see ``irminsul.progress``."""
    return progress_bar(console, total, _latest, first="warming up")


def _latest(result: RequestResult) -> str:
    return (
        f"{result.scenario} {result.number}: prefix caching {1000 * result.ttft_prefix:,.0f} ms, "
        f"irminsul {1000 * result.ttft_live:,.0f} ms{' (cold)' if result.number == 1 else ''}"
    )


def print_report(console: Console, report: DemoReport) -> None:
    """Print the table and what one must know to read it."""
    table = _table(report)
    # A number that is cut off is worse than a line that the terminal folds.
    console.width = max(
        console.width, console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
    )
    console.print(table)
    for note in notes(report):
        console.print(note, highlight=False)


def _table(report: DemoReport) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("scenario", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.scenarios:
        table.add_row(*cells(row))
    table.add_section()
    table.add_row(*cells(report.totals), style="bold")
    return table


def cells(row: Row) -> tuple[str, ...]:
    """Return the text of a row's cells, left to right."""
    tokens = (row.prompt_tokens, row.prefix, row.approximate_prefix, row.shifted, row.computed)
    return (
        row.name,
        str(row.requests),
        *(f"{count:,}" for count in tokens),
        _format(row.share_of_oracle, "{:.1%}"),
        _format(row.ttft_prefix_ms, "{:,.0f}"),
        _format(row.ttft_live_ms, "{:,.0f}"),
        _format(row.speedup, "{:.1f}x"),
        _format(row.first_token_agreement, "{:.0%}"),
        _format(row.kl_first_mean, "{:.4f}"),
    )


def _format(value: float | None, form: str) -> str:
    return _NOT_MEASURED if value is None else form.format(value)


def notes(report: DemoReport) -> list[str]:
    """Return the sentences that belong under the table."""
    lines = [_APPROXIMATE, _prefix_note(report.totals), _WARM, _ORACLE]
    if report.skipped:
        lines.append(f"Calls left out because their prompts are longer than this model takes: {report.skipped}.")
    return [*lines, f"Machine: {report.machine}."]


def _prefix_note(totals: Row) -> str:
    return (
        f"Prefix caching alone had {totals.prefix_only:,} tokens of prefix, all lossless; irminsul {totals.prefix:,} "
        f"lossless and {totals.approximate_prefix:,} approximate."
    )
