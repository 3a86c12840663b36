"""What a run of the harness says: JSON, a table a task on the terminal, and the same tables in Markdown."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from irminsul.errors import InputError
from irminsul.fidelity.estimates import against, summary, worst_cases
from irminsul.fidelity.measure import CaseResult
from irminsul.fidelity.paths import FULL
from irminsul.progress import progress_bar

ALL_TASKS = "all tasks"
_WORST = 8
_ANY_WIDTH = 1000
_COLUMNS = (
    "path",
    "KL, nats (95 % CI)",
    "largest",
    "argmax match",
    "first divergence",
    "score",
    "computed",
    "shifted",
    "recomputed",
)
_NOTES = (
    (
        "KL(full || path) a token under teacher forcing of the full computation's greedy text: mean over the tokens of "
        "a case, then over cases; the interval is a bootstrap over cases (too narrow for fewer than about ten), "
        "`largest` the worst case."
    ),
    (
        "First divergence: tokens of greedy text that agree with the full computation's; a text that agrees to its end "
        "counts with its length (`of` is the mean length)."
    ),
    (
        "Score: share of cases whose own greedy text holds the right answer. Computed, shifted: tokens of a prompt, "
        "mean. Recomputed: computed beyond what `shifted` computes; negative where more is reused."
    ),
)


def report_of(cases: Sequence[CaseResult], run: Mapping[str, Any]) -> dict[str, Any]:
    """Build the report as it is written to JSON.

    Args:
        cases: of all tasks, at least one; tasks in the order of the tables.
        run: what describes the run: model, machine, seed and the like.
    """
    by_task: dict[str, list[CaseResult]] = {}
    for case in cases:
        by_task.setdefault(case.task, []).append(case)
    return {
        "run": dict(run),
        "tasks": {name: summary(of_task) for name, of_task in by_task.items()},
        "all_tasks": summary(cases),
        "against_naive": {name: against(of_task, "naive") for name, of_task in by_task.items()},
        "against_shifted": {
            name: against(of_task, "shifted") for name, of_task in {**by_task, ALL_TASKS: list(cases)}.items()
        },
        "worst": {"path": "shifted", "cases": worst_cases(cases, "shifted", _WORST)},
    }


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write a report; InputError if the file cannot be written."""
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a report back; InputError if the file holds none."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"run", "tasks", "all_tasks", "against_naive", "worst"} - report.keys()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, AttributeError):
        raise InputError(f"{path} is not a report of irminsul fidelity: it is not a JSON object") from None
    if missing:
        raise InputError(f"{path} is not a report of irminsul fidelity: it lacks {', '.join(sorted(missing))}")
    return report


def case_progress(console: Console, total: int) -> AbstractContextManager[Callable[[CaseResult], None]]:
    """Show progress over ``total`` cases; see ``irminsul.progress``."""
    return progress_bar(console, total, _latest, first="starting")


def _latest(case: CaseResult) -> str:
    others = [f"{name} {result.kl:.4f}" for name, result in case.paths.items() if name in ("naive", "shifted")]
    return f"{case.task} {case.number + 1}" + (f": KL {', '.join(others)}" if others else "")


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print a table a task, what one must know to read it, and the exceptions and worst cases."""
    for name, rows in _tables(report):
        table = Table(title=name, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "path" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        # A number that is cut off is worse than a line that the terminal folds.
        needed = console.measure(table, options=console.options.update(max_width=_ANY_WIDTH)).maximum
        console.width = max(console.width, needed)
        console.print(table, highlight=False)
    for line in (*_NOTES, *findings(report), *_worst_lines(report), _run_line(report)):
        console.print(line, highlight=False, markup=False)


def markdown(report: Mapping[str, Any]) -> str:
    """Return the tables, notes, exceptions and worst cases in Markdown."""
    lines: list[str] = []
    for name, rows in _tables(report):
        lines += [f"**{name}**", "", _markdown_row(_COLUMNS), "|---|" + "---:|" * (len(_COLUMNS) - 1)]
        lines += [*map(_markdown_row, rows), ""]
    lines += [*_NOTES, ""]
    lines += [f"* {line}" for line in (*findings(report), *_worst_lines(report))]
    return "\n".join([*lines, "", _run_line(report), ""])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    tables = {**report["tasks"], ALL_TASKS: report["all_tasks"]}
    for name, paths in tables.items():
        full = paths[FULL]
        title = f"{name} (n = {full['n']}, prompts of {full['prompt_tokens']:,.0f} tokens)"
        yield title, [_cells(path, row) for path, row in paths.items()]


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    interval = "" if row["kl_ci95"] is None else " ({:.4f}, {:.4f})".format(*row["kl_ci95"])
    return (
        name,
        f"{row['kl_mean']:.4f}{interval}",
        f"{row['kl_max']:.3f}",
        f"{row['argmax_match']:.1%}",
        f"{row['first_divergence']:.1f} of {row['tokens']:.1f}",
        "-" if row["score"] is None else f"{row['score']:.0%}",
        f"{row['computed']:,.0f}",
        f"{row['shifted']:,.0f}",
        "-" if row["recomputed"] is None or name == FULL else f"{row['recomputed']:+,.0f}",
    )


def findings(report: Mapping[str, Any]) -> list[str]:
    """Say where shifted reuse beats the naive copy and where not, and whether the control is as bad as it must be."""
    lines = []
    verdicts = {
        name: found["shifted"] for name, found in report["against_naive"].items() if found and "shifted" in found
    }
    if verdicts:
        beaten = [name for name, found in verdicts.items() if found["better"]]
        lines.append(f"`shifted` has a lower KL than `naive`, by the interval of the difference, on: {_list(beaten)}.")
        exceptions = [f"{name} ({_difference(found)})" for name, found in verdicts.items() if not found["better"]]
        lines.append(f"Exceptions (difference to naive and its interval): {_list(exceptions)}.")
    knobs = (report.get("against_shifted", {}).get(ALL_TASKS) or {}).items()
    lines += [f"`{name}` against `shifted`, all tasks: {_difference(found)}." for name, found in knobs if "-" in name]
    overall = report["all_tasks"]
    if "control" in overall and "shifted" in overall:
        seen = overall["control"]["kl_mean"] > overall["shifted"]["kl_mean"]
        lines.append(
            "The control is worse than `shifted`, so the harness sees a wrong rotation."
            if seen
            else "The control is NOT worse than `shifted`: do not trust this run."
        )
    return lines


def _difference(found: Mapping[str, Any]) -> str:
    if found["ci95"] is None:
        return f"{found['difference']:+.4f}, one case, no interval"
    return "{:+.4f}, {:+.4f} to {:+.4f}".format(found["difference"], *found["ci95"])


def _worst_lines(report: Mapping[str, Any]) -> list[str]:
    return [
        f"Worst of `{report['worst']['path']}`: {case['task']} {case['case'] + 1}, KL {case['kl']:.3f}, agrees for "
        f"{case['first_divergence']} of {case['tokens']} tokens{_scored(case['score'])}; {case['note']}; "
        f"{case['computed']:,} of {case['prompt_tokens']:,} tokens computed; runs {_runs(case['runs'])}."
        for case in report["worst"]["cases"]
    ]


def _scored(score: bool | None) -> str:  # noqa: FBT001
    return "" if score is None else ", answer right" if score else ", answer wrong"


def _runs(runs: Sequence[Sequence[int]]) -> str:
    shown = [f"{length} tokens moved by {delta:+}" for length, delta in runs[:4]]
    more = [f"{len(runs) - 4} more"] if len(runs) > 4 else []
    return _list([*shown, *more])


def _list(items: Sequence[str]) -> str:
    return ", ".join(items) if items else "none"


def _run_line(report: Mapping[str, Any]) -> str:
    run = report["run"]
    default = run["default_path"] or "none of these paths"
    left_out = f" Left out because they need a longer context: {_list(run['left_out'])}." if run["left_out"] else ""
    return (
        f"Model {run['model']}, {run['machine']}; conversations as {run['prompt_form']}; matcher {run['matcher']}, "
        f"seed {run['seed']}{', quick' if run['quick'] else ''}, {run['seconds']:,.0f} s. "
        f"The engine's default plans like: {default}.{left_out}"
    )
