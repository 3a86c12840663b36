"""``irminsul fidelity``: choose tasks and paths, measure, report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from irminsul.engine.loading import load_model, load_tokenizer
from irminsul.errors import InputError
from irminsul.fidelity.measure import CaseResult, Harness
from irminsul.fidelity.paths import PATHS, QUICK_PATHS, shipped_path
from irminsul.fidelity.report import NOISE_LIMIT, RunRecord, case_progress, print_report, report_of, write_json
from irminsul.fidelity.tasks import QUICK_TASKS, TASKS, Draft, Task
from irminsul.machine import describe_machine
from irminsul.output_files import require_writable
from irminsul.registry import MATCHERS

CASES = 30
QUICK_CASES = 2

_Named = TypeVar("_Named")


def fidelity_command(
    *,
    checkpoint: Path,
    quick: bool = False,
    tasks: str | None = None,
    paths: str | None = None,
    n: int | None = None,
    seed: int = 0,
    matcher: str = "winnow64",
    device: str = "cpu",
    dtype: str = "float32",
    json_path: Path | None = None,
    console: Console | None = None,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Measure and print; return the report.

    If the run ends early, with Ctrl-C or an error, the finished cases are printed and written beside ``json_path``, as
    ``NAME.incomplete.json``.

    Args:
        checkpoint: directory of the model and its tokenizer.
        quick: fewer and shorter cases, fewer paths.
        tasks: names separated by commas; all (or the quick ones) if None.
        paths: likewise; the engine's default is measured whatever is named.
        n: cases of each task; CASES or QUICK_CASES if None.
        seed: of the cases.
        matcher: which matcher finds the runs.
        device: cpu or cuda.
        dtype: of weights and rows.
        json_path: where to write the report.
        console: where to print it; standard output by default.
        progress: where to show progress; standard error by default.

    Raises:
        InputError: an unknown name, a model, device or file that cannot be used, or no task that fits the model.
    """
    started = time.perf_counter()
    chosen_tasks = choose("task", TASKS, tasks, QUICK_TASKS if quick else tuple(TASKS))
    chosen_paths = choose("path", PATHS, paths, QUICK_PATHS if quick else tuple(PATHS), always=(shipped_path(),))
    if matcher not in MATCHERS:
        raise InputError(f"unknown matcher {matcher!r}; valid matchers: {', '.join(MATCHERS)}")
    if json_path is not None:
        require_writable(json_path)
    tokenizer = load_tokenizer(checkpoint)
    model = load_model(checkpoint, device=device, dtype=dtype)
    context = model.config.max_position_embeddings
    fitting, left_out = _fitting(chosen_tasks, context, quick=quick, named=tasks is not None)
    draft = Draft(tokenizer)
    harness = Harness(
        model,
        lambda token_ids: str(tokenizer.decode(token_ids)),
        matcher=matcher,
        special_tokens=tuple(tokenizer.all_special_ids),
    )
    count = n or (QUICK_CASES if quick else CASES)

    total = count * len(fitting)
    record = RunRecord(
        model=checkpoint.name,
        machine=str(describe_machine(device, dtype)),
        noise_limit=NOISE_LIMIT[dtype],
        prompt_form=draft.form,
        matcher=matcher,
        seed=seed,
        quick=quick,
        n=count,
        complete=False,
        default_path=shipped_path(),
        left_out=left_out,
        paths={path.name: path.about for path in chosen_paths},
        path_matchers={path.name: path.matcher for path in chosen_paths if path.matcher is not None},
        task_descriptions={task.name: task.about for task in fitting},
        seconds=0.0,
    )
    results: list[CaseResult] = []
    try:
        with case_progress(progress or Console(stderr=True), total) as report_case:
            for task in fitting:
                for number, case in enumerate(task.cases(draft, count, seed, quick=quick)):
                    results.append(harness.measure(task.name, number, case, chosen_paths, task.max_tokens))
                    report_case(results[-1])
    finally:
        if results:
            record = replace(record, complete=len(results) == total, seconds=time.perf_counter() - started)
            report = report_of(results, record)
            print_report(console or Console(), report)
            if json_path is not None:
                write_json(report, json_path if record.complete else json_path.with_suffix(".incomplete.json"))
    return report


def choose(
    kind: str, known: Mapping[str, _Named], text: str | None, default: Sequence[str], *, always: Sequence[str] = ()
) -> list[_Named]:
    """Return what comma-separated names name, or the default, and what is always chosen, in the order they are known.

    Raises:
        InputError: a name is unknown; the message lists the valid ones.
    """
    names = list(default) if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"unknown {kind} {name!r}; valid {kind}s: {', '.join(known)}")
    return [value for name, value in known.items() if name in (*names, *always)]


def _fitting(tasks: Sequence[Task], context: int, *, quick: bool, named: bool) -> tuple[list[Task], list[str]]:
    """Split tasks by whether the model's context holds them; a task that was named must fit."""
    fitting = [task for task in tasks if task.sized(quick=quick) <= context]
    left_out = [task.name for task in tasks if task.sized(quick=quick) > context]
    if left_out and (named or not fitting):
        raise InputError(
            f"this model's context is {context} tokens, too short for {', '.join(left_out)}; choose with --tasks"
        )
    return fitting, left_out
