"""Programs that run one after another, each with a limit, a log and a word on how it ended."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, current_thread, main_thread
from typing import TypeAlias

ROOT = Path(__file__).parent.parent
PATIENCE_S = 90
"""For what a step does when it is told to end."""

_RUNNING: set[subprocess.Popen[bytes]] = set()

Told: TypeAlias = dict[str, object]
"""What became of a step, for people and for steps.json."""


@dataclass(frozen=True)
class Step:
    """One program.

    In ``command``, {out} stands for the JSON file and {folder} for the directory that it may write, and further names
    for what ``run_steps`` was given.
    """

    name: str
    command: str
    limit_s: int
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a step runs: on these GPUs and cores; None for all."""

    gpus: Sequence[int] | None = None
    cores: Sequence[int] | None = None


def run_steps(
    steps: Sequence[Step], out: Path, given: Mapping[str, Path], limit_s: float, places: Sequence[Place]
) -> int:
    """Run steps, and say of each how it ended, in ``out``/steps.json too.

    Steps that need several GPUs run first, alone; the others so many at a time as there are places, in their order.

    Args:
        steps: what to run.
        out: directory of logs and results.
        given: what stands in commands, by name; a step that names something else is not run.
        limit_s: for all steps together; those that run then are cut short, the rest is not run.
        places: where steps of one GPU or none may run beside each other.

    Returns:
        Exit status: 1 if a step did not end well.
    """
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + limit_s
    told: list[Told] = []
    if current_thread() is main_thread():
        # As Ctrl-C: what runs is ended, too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    free: SimpleQueue[Place] = SimpleQueue()
    for place in places:
        free.put(place)
    telling = Lock()

    def run(step: Step, *, alone: bool) -> None:
        place = Place() if alone else free.get()
        print(f"{step.name} ...", file=sys.stderr, flush=True)
        try:
            became = run_step(step, out, given, ends - time.monotonic(), place)
        finally:
            if not alone:
                free.put(place)
        with telling:
            told.append(became)
            print(json.dumps(became), flush=True)
            (out / "steps.json").write_text(json.dumps(told, indent=1) + "\n")

    for step in steps:
        if step.gpus > 1:
            run(step, alone=True)
    with ThreadPoolExecutor(len(places)) as threads:
        running = [threads.submit(run, step, alone=False) for step in steps if step.gpus <= 1]
        try:
            for one in running:
                one.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):
                end(process)
            raise
    return int(any(one["ended"] != "well" for one in told))


def run_step(step: Step, out: Path, given: Mapping[str, Path], left_s: float, place: Place) -> Told:
    """Run a step; say what became of it."""
    missing = [name for name in ("checkpoint", "texts", "loads") if f"{{{name}}}" in step.command and name not in given]
    if step.gpus > visible_gpus():
        return {"step": step.name, "ended": f"not run: needs {step.gpus} GPUs"}
    if missing:
        return {"step": step.name, "ended": f"not run: needs --{missing[0]}"}
    if left_s <= 0:
        return {"step": step.name, "ended": "not run: no time was left"}
    environment = {**os.environ, **step.environment}
    if place.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.gpus))
    started = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(  # noqa: S602  # the commands are this project's own
            f"exec {command_of(step, out, given, place)}",
            shell=True,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _RUNNING.add(process)
        try:
            ended = "well" if process.wait(min(step.limit_s, left_s)) == 0 else f"with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = "at its time limit"
        finally:
            end(process)
            _RUNNING.discard(process)
    return {"step": step.name, "ended": ended, "seconds": round(time.monotonic() - started, 1)}


def end(process: subprocess.Popen[bytes], patience_s: float = PATIENCE_S) -> None:
    """End a process that leads a session, and whatever it has started and left there."""
    # First as Ctrl-C would: a step's servers may be in sessions of their own, and only the step can end those.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command_of(step: Step, out: Path, given: Mapping[str, Path], place: Place) -> str:
    """Return a step's command line."""
    pinned = "" if place.cores is None else f"taskset --cpu-list {','.join(map(str, place.cores))} "
    command = f"{pinned}{shlex.quote(sys.executable)} {step.command}"
    for name, path in {**given, "out": out / f"{step.name}.json", "folder": out / step.name}.items():
        # Not str.format: flags that are JSON have braces, too.
        command = command.replace(f"{{{name}}}", shlex.quote(str(path.resolve())))
    return command


def places_of_gpus() -> list[Place]:
    """Return a place for each GPU, with a share of the cores of its own; one for everything if there is one GPU."""
    gpus, cores = visible_gpus(), sorted(os.sched_getaffinity(0))
    share = len(cores) // max(1, gpus)
    if gpus <= 1:
        return [Place()]
    return [Place((gpu,), cores[gpu * share : (gpu + 1) * share]) for gpu in range(gpus)]


def visible_gpus() -> int:
    """Count the GPUs that programs may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device])
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)  # noqa: S607
    except FileNotFoundError:
        return 0
    return len(found.stdout.splitlines())
