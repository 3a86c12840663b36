"""``irminsul fidelity``: choose tasks and paths, measure, report."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from irminsul.engine.config import ModelConfig
from irminsul.engine.loading import load_tokenizer
from irminsul.errors import InputError
from irminsul.fidelity.measure import CaseResult
from irminsul.fidelity.paths import PATHS, QUICK_PATHS, shipped_path
from irminsul.fidelity.report import NOISE_LIMIT, RunRecord, case_progress, print_report, report_of, write_json
from irminsul.fidelity.tasks import QUICK_TASKS, TASKS, Draft, Task
from irminsul.fidelity.workers import Setup, Work, measure_in_workers, threads_of_each
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
    jobs: int = 1,
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
        jobs: processes that measure, each with its own model; no more than there are cases are started.
        json_path: where to write the report.
        console: where to print it; standard output by default.
        progress: where to show progress; standard error by default.

    Raises:
        InputError: an unknown name, no job, a model, device or file that cannot be used, or no task that fits the
            model.
        IrminsulError: a process of several failed.
    """
    started = time.perf_counter()
    chosen_tasks = choose("task", TASKS, tasks, QUICK_TASKS if quick else tuple(TASKS))
    chosen_paths = choose("path", PATHS, paths, QUICK_PATHS if quick else tuple(PATHS), always=(shipped_path(),))
    if matcher not in MATCHERS:
        raise InputError(f"unknown matcher {matcher!r}; valid matchers: {', '.join(MATCHERS)}")
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {jobs}")
    if json_path is not None:
        require_writable(json_path)
    tokenizer = load_tokenizer(checkpoint)
    context = ModelConfig.from_checkpoint(checkpoint).max_position_embeddings
    fitting, left_out = _fitting(chosen_tasks, context, quick=quick, named=tasks is not None)
    draft = Draft(tokenizer)
    setup = Setup(checkpoint, device, dtype, matcher, tuple(chosen_paths))
    count = n or (QUICK_CASES if quick else CASES)
    total = count * len(fitting)
    jobs = min(jobs, total)
    results: list[CaseResult] = []
    try:
        with (
            case_progress(progress or Console(stderr=True), total) as report_case,
            closing(_measured(setup, draft, fitting, count, seed, quick=quick, jobs=jobs)) as measured,
        ):
            for result in measured:
                results.append(result)
                report_case(result)
    finally:
        if results:
            tables = [task.name for task in fitting]
            results.sort(key=lambda result: (tables.index(result.task), result.number))
            record = RunRecord(
                model=checkpoint.name,
                machine=str(replace(describe_machine(device, dtype), threads=threads_of_each(jobs))),
                noise_limit=NOISE_LIMIT[dtype],
                prompt_form=draft.form,
                matcher=matcher,
                seed=seed,
                quick=quick,
                n=count,
                complete=len(results) == total,
                default_path=shipped_path(),
                left_out=left_out,
                paths={path.name: path.about for path in chosen_paths},
                path_matchers={path.name: path.matcher for path in chosen_paths if path.matcher is not None},
                task_descriptions={task.name: task.about for task in fitting},
                seconds=time.perf_counter() - started,
                jobs=jobs,
            )
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


def _measured(
    setup: Setup, draft: Draft, tasks: Sequence[Task], n: int, seed: int, *, quick: bool, jobs: int
) -> Generator[CaseResult]:
    """Measure ``n`` cases of each task; several processes begin with the longest, so that they end together."""
    if jobs > 1:
        longest_first = sorted(tasks, key=lambda task: -task.sized(quick=quick))
        yield from measure_in_workers(setup, _work(draft, longest_first, n, seed, quick=quick), jobs)
    else:
        harness = setup.harness()
        for work in _work(draft, tasks, n, seed, quick=quick):
            yield work.measure(harness, setup)


def _work(draft: Draft, tasks: Sequence[Task], n: int, seed: int, *, quick: bool) -> Iterator[Work]:
    """Draw the cases, a task at a time."""
    for task in tasks:
        for number, case in enumerate(task.cases(draft, n, seed, quick=quick)):
            yield Work(task.name, number, case, task.max_tokens)
