"""What a run of the harness says: JSON, a table a task on the terminal, and the same tables in Markdown.

The JSON holds every case, so that all other numbers in it can be computed again; that is what reading it does.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from rich import box
from rich.console import Console
from rich.table import Table

from irminsul.errors import InputError
from irminsul.fidelity.estimates import FEWEST, against, summary, worst_cases
from irminsul.fidelity.measure import CaseResult
from irminsul.fidelity.paths import FULL, shipped_path
from irminsul.markdown import markdown_row
from irminsul.output_files import replace_files
from irminsul.progress import progress_bar

SCHEMA = 2
"""Of the JSON; another number is refused. 1, which was not written, held no cases."""
ALL_TASKS = "all tasks"
_WORST = 8
_WORST_OF_A_TASK = 3
NOISE_LIMIT = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""KL of a case, in nats, that another order of sums stays below, by dtype; a mistake in the harness is far above."""
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
        f"a case, then over cases; `largest` is the worst case. The interval is a bootstrap-t over cases, none below "
        f"{FEWEST}. It is still too narrow where a few cases hold most of the KL: on strongly skewed numbers it held "
        "the mean 85 times of 100 for 10 cases and 89 for 30, instead of 95."
    ),
    (
        "First divergence: tokens of greedy text that agree with the full computation's; a text that agrees to its end "
        "counts with its length (`of` is the mean length)."
    ),
    (
        "Score: share of cases whose own greedy text holds the right answer, of those that have one; `-2 +1`: two are "
        "right in full computation and wrong here, one the other way. Computed, shifted: tokens of a prompt, mean. "
        "Recomputed: computed beyond what `shifted` computes; negative where more is reused."
    ),
)


@dataclass(frozen=True)
class RunRecord:
    """How a report came about."""

    model: str
    machine: str
    noise_limit: float
    """KL of a case, in nats, that the path ``prefix`` must stay below."""
    prompt_form: str
    matcher: str
    """Of the paths that name none."""
    seed: int
    quick: bool
    n: int
    """Cases of each task that were asked for."""
    complete: bool
    """False if the run ended before all cases were measured."""
    default_path: str
    """The path that planned as the engine did by default when this was measured."""
    left_out: list[str]
    """Tasks that the model's context does not hold."""
    paths: dict[str, str]
    """By name, what they are."""
    path_matchers: dict[str, str]
    """Matchers of the paths that name one."""
    task_descriptions: dict[str, str]
    seconds: float
    jobs: int = 1
    """Processes that measured; a file that does not say comes from one."""


@dataclass(frozen=True)
class _Written:
    """What is read back of a file."""

    run: RunRecord
    cases: list[CaseResult]


def report_of(cases: Sequence[CaseResult], run: RunRecord) -> dict[str, Any]:
    """Build the report as it is written to JSON.

    Args:
        cases: of all tasks, at least one; tasks in the order of the tables, all on the same paths.
        run: how they were measured.
    """
    by_task: dict[str, list[CaseResult]] = {}
    for case in cases:
        by_task.setdefault(case.task, []).append(case)
    groups = {**by_task, ALL_TASKS: list(cases)}
    worst = worst_cases(cases, run.default_path, _WORST, per_task=_WORST_OF_A_TASK)
    return {
        "schema": SCHEMA,
        "run": asdict(run),
        "tasks": {name: summary(of_task) for name, of_task in by_task.items()},
        "all_tasks": summary(cases),
        "against_prefix": {ALL_TASKS: against(cases, "prefix")},
        "against_naive": {name: against(group, "naive") for name, group in groups.items()},
        "against_shifted": {name: against(group, "shifted") for name, group in groups.items()},
        "worst": {"path": run.default_path, "cases": worst},
        "cases": [asdict(case) for case in cases],
    }


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write a report, one case a line; InputError, and what was there before stays, if the file cannot be written."""
    others = {name: value for name, value in report.items() if name != "cases"}
    head = json.dumps(others, indent=1, allow_nan=False).removesuffix("\n}")
    cases = ",\n  ".join(json.dumps(case, allow_nan=False) for case in report["cases"])
    replace_files({path: f'{head},\n "cases": [\n  {cases}\n ]\n}}\n'.encode()})


def read_json(path: Path) -> dict[str, Any]:
    """Read a report back, from its cases; InputError if the file holds none, or one in another form."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    refusal = f"{path} is not a report of irminsul fidelity"
    try:
        data = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InputError(f"{refusal}: {error}") from None
    if not isinstance(data, dict) or "run" not in data:
        raise InputError(f"{refusal}: it is not a JSON object with the key run")
    if data.get("schema") != SCHEMA:
        raise InputError(f"{path} has schema {data.get('schema', 1)}, but this version reads {SCHEMA}: measure again")
    try:
        written = TypeAdapter(_Written).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{refusal}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if not written.cases or any({FULL, *case.paths} != set(written.cases[0].paths) for case in written.cases):
        raise InputError(f"{refusal}: it needs at least one case, and all on the same paths, one of them {FULL}")
    return report_of(written.cases, written.run)


def case_progress(console: Console, total: int) -> AbstractContextManager[Callable[[CaseResult], None]]:
    """Show progress over ``total`` cases; see ``irminsul.progress``."""
    return progress_bar(console, total, _latest, first="starting")


def _latest(case: CaseResult) -> str:
    named = ("naive", "shifted", shipped_path())
    others = [f"{name} {result.kl:.4f}" for name, result in case.paths.items() if name in named]
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
    for line in (*_legend(report), *_NOTES, *findings(report), *_worst_lines(report), _run_line(report)):
        console.print(line, highlight=False, markup=False)


def markdown(report: Mapping[str, Any]) -> str:
    """Return the tables, notes, exceptions and worst cases in Markdown."""
    lines: list[str] = []
    for name, rows in _tables(report):
        lines += [f"**{name}**", "", markdown_row(_COLUMNS), "|---|" + "---:|" * (len(_COLUMNS) - 1)]
        lines += [*map(markdown_row, rows), ""]
    lines += [*(f"* {line}" for line in _legend(report)), ""]
    lines += [*_NOTES, ""]
    lines += [f"* {line}" for line in (*findings(report), *_worst_lines(report))]
    return "\n".join([*lines, "", _run_line(report), ""])


def _legend(report: Mapping[str, Any]) -> list[str]:
    """Say what each task and path is, a line each."""
    run = report["run"]
    tasks = [f"Task `{name}`: {about}." for name, about in run["task_descriptions"].items()]
    paths = [f"Path `{name}`: {about}." for name, about in run["paths"].items()]
    return [*tasks, f"Path `{FULL}`: everything computed, in one forward; the reference.", *paths]


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    tables = {**report["tasks"], ALL_TASKS: report["all_tasks"]}
    matchers = report["run"]["path_matchers"]
    for name, paths in tables.items():
        full = paths[FULL]
        title = f"{name} (n = {full['n']}, prompts of {full['prompt_tokens']:,.0f} tokens)"
        yield title, [_cells(path, row, matchers.get(path)) for path, row in paths.items()]


def _cells(name: str, row: Mapping[str, Any], matcher: str | None) -> tuple[str, ...]:
    interval = " ({:.4f}, {:.4f})".format(*row["kl_ci95"]) if row["kl_ci95"] else f" ({_cases(row['n'])})"
    return (
        name if matcher is None else f"{name} ({matcher})",
        f"{row['kl_mean']:.4f}{interval}",
        f"{row['kl_max']:.3f}",
        f"{row['argmax_match']:.1%}",
        f"{row['first_divergence']:.1f} of {row['tokens']:.1f}",
        _score(row),
        f"{row['computed']:,.0f}",
        f"{row['shifted']:,.0f}",
        "-" if row["recomputed"] is None or name == FULL else f"{row['recomputed']:+,.0f}",
    )


def _score(row: Mapping[str, Any]) -> str:
    if row["score"] is None:
        return "-"
    lost, won = row["right_to_wrong"], row["wrong_to_right"]
    return f"{row['score']:.0%}" + (f" -{lost}" if lost else "") + (f" +{won}" if won else "")


def _cases(n: int) -> str:
    return "1 case" if n == 1 else f"{n} cases"


def findings(report: Mapping[str, Any]) -> list[str]:
    """Say where shifted reuse beats the naive copy and where not, and whether the run can be trusted."""
    default = report["run"]["default_path"]
    overall = report["all_tasks"]
    measured = [name for name in dict.fromkeys((default, "shifted")) if name in overall]
    lines = [line for name in measured for line in _naive_lines(report, name, is_default=name == default)]
    knobs = (report["against_shifted"][ALL_TASKS] or {}).items()
    lines += [f"`{name}` against `shifted`, all tasks: {_difference(found)}." for name, found in knobs if "-" in name]
    return [*lines, *_noise_lines(report), *_control_lines(report)]


def _naive_lines(report: Mapping[str, Any], path: str, *, is_default: bool) -> list[str]:
    """Compare a path with ``naive``, task by task."""
    found = {task: paths[path] for task, paths in report["against_naive"].items() if paths}
    if not found:
        return []
    rows = {**report["tasks"], ALL_TASKS: report["all_tasks"]}
    unused = [task for task in found if rows[task][path]["shifted"] == 0]
    undecided = {task: each for task, each in found.items() if task not in unused}
    few = [task for task, each in undecided.items() if each["ci95"] is None]
    better = [task for task, each in undecided.items() if each["better"] is True]
    others = [f"{task} ({_difference(each)})" for task, each in undecided.items() if task not in (*few, *better)]
    name = f"`{path}`{' (what the engine did by default)' if is_default else ''}"
    lines = [f"{name} has a lower KL than `naive`, by the interval of the difference, on: {_list(better)}."]
    lines += [f"Exceptions of `{path}` (difference to naive and its interval): {_list(others)}."] if others else []
    lines += [f"Too few cases to say for `{path}`: {_list(few)}."] if few else []
    lines += [f"Nothing was reused by `{path}` on: {_list(unused)}."] if unused else []
    return lines


def _noise_lines(report: Mapping[str, Any]) -> list[str]:
    """Say whether the lossless path is near zero, and what cannot be told from it."""
    overall, run = report["all_tasks"], report["run"]
    if "prefix" not in overall:
        return []
    largest = overall["prefix"]["kl_max"]
    if largest > run["noise_limit"]:
        return [f"The noise floor, `prefix`, is NOT near zero (KL {largest:.2g} in a case): do not trust this run."]
    lines = [f"The noise floor, `prefix`, has a KL of at most {largest:.2g} in a case."]
    found = report["against_prefix"][ALL_TASKS].get(run["default_path"])
    if found and found["ci95"] and found["better"] is not False:
        lines.append(f"`{run['default_path']}` cannot be told from the noise floor ({_difference(found)}).")
    return lines


def _control_lines(report: Mapping[str, Any]) -> list[str]:
    """Say whether the wrong rotation is as bad as it must be."""
    found = (report["against_shifted"][ALL_TASKS] or {}).get("control")
    if found is None:
        return []
    if report["all_tasks"]["control"]["shifted"] == 0:
        return ["Nothing was reused by the control, so it says nothing about this run."]
    if found["ci95"] is None:
        return ["Too few cases to say whether the control is worse than `shifted`."]
    if found["better"] is False:
        return [f"The control is worse than `shifted` ({_difference(found)}): the harness sees a wrong rotation."]
    return [f"The control is NOT clearly worse than `shifted` ({_difference(found)}): do not trust this run."]


def _difference(found: Mapping[str, Any]) -> str:
    difference = _signed(found["difference"])
    if found["ci95"] is None:
        return f"{difference}, too few cases to say"
    return f"{difference}, {' to '.join(map(_signed, found['ci95']))}"


def _signed(value: float) -> str:
    """Four digits behind the point, or two significant ones where that would hide them."""
    return f"{value:+.4f}" if value == 0 or abs(value) >= 5e-4 else f"{value:+.1e}"


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
    left_out = f" Left out because they need a longer context: {_list(run['left_out'])}." if run["left_out"] else ""
    processes = f" in {run['jobs']} processes" if run["jobs"] > 1 else ""
    return (
        f"{'' if run['complete'] else 'INCOMPLETE: the run ended before all cases were measured. '}"
        f"Model {run['model']}, {run['machine']}; conversations as {run['prompt_form']}; matcher {run['matcher']}, "
        f"seed {run['seed']}{', quick' if run['quick'] else ''}, {run['seconds']:,.0f} s{processes}. "
        f"At the time of measurement the engine's default planned like {run['default_path']}.{left_out}"
    )
