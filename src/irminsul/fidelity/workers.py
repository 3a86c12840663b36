"""Cases measured in several processes at once, for machines with several cores; one GPU is soon the limit.

Each worker loads the model itself. It says that it is ready, gets a case, answers with the result, gets the next case,
and so on; the parent ends all workers when there is nothing left, or when anything goes wrong.
"""

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from irminsul.engine.loading import load_model, load_tokenizer
from irminsul.errors import IrminsulError
from irminsul.fidelity import paths
from irminsul.fidelity.measure import CaseResult, Harness
from irminsul.fidelity.tasks import Case


@dataclass(frozen=True)
class Setup:
    """What a process needs to measure cases as any other would."""

    checkpoint: Path
    device: str
    dtype: str
    matcher: str
    paths: tuple[paths.Path, ...]

    def harness(self) -> Harness:
        """Load tokenizer and model; errors as in load_tokenizer and load_model."""
        tokenizer = load_tokenizer(self.checkpoint)
        return Harness(
            load_model(self.checkpoint, device=self.device, dtype=self.dtype),
            lambda token_ids: str(tokenizer.decode(token_ids)),
            matcher=self.matcher,
            special_tokens=tuple(tokenizer.all_special_ids),
        )


@dataclass(frozen=True)
class Work:
    """One case to measure."""

    task: str
    number: int
    case: Case
    max_tokens: int

    def measure(self, harness: Harness, setup: Setup) -> CaseResult:
        """Measure it; errors as in Harness.measure."""
        return harness.measure(self.task, self.number, self.case, setup.paths, self.max_tokens)


def threads_of_each(jobs: int) -> int:
    """Return how many threads torch uses in each process: those of one, shared out unless they were set."""
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // jobs)


def measure_in_workers(setup: Setup, work: Iterator[Work], jobs: int) -> Generator[CaseResult]:
    """Measure in ``jobs`` processes; give results in the order in which they are ready.

    Work is taken from its iterator when a worker is free. Closing the generator ends the workers.

    Raises:
        IrminsulError: what a worker raised, or a sentence about how it failed.
    """
    with _started(setup, jobs) as workers:
        waiting = set(workers)
        while waiting:
            for ready in wait(waiting):
                assert isinstance(ready, Connection)
                with _alive(workers[ready]):
                    message: CaseResult | IrminsulError | None = ready.recv()
                if isinstance(message, IrminsulError):
                    raise message
                if message is not None:
                    yield message
                following = next(work, None)
                if following is None:
                    waiting.remove(ready)
                    continue
                with _alive(workers[ready]):
                    ready.send(following)


@contextmanager
def _started(setup: Setup, jobs: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Start workers, each at the other end of a connection, and end them."""
    context = get_context("spawn")
    threads = threads_of_each(jobs)
    workers: dict[Connection, BaseProcess] = {}
    try:
        # Ctrl-C reaches every process of the terminal. Workers inherit that they ignore it; the parent ends them.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(jobs):
                own, other = context.Pipe()
                process = context.Process(target=_worker, args=(other, setup, threads), daemon=True)
                process.start()
                other.close()
                workers[own] = process
        finally:
            signal.signal(signal.SIGINT, handler)
        yield workers
    finally:
        for connection, worker in workers.items():
            worker.terminate()
            worker.join()
            connection.close()


def _worker(parent: Connection, setup: Setup, threads: int) -> None:
    """Send None when ready, then a result for each work that comes; an error instead of either is the last message."""
    torch.set_num_threads(threads)
    try:
        harness = setup.harness()
        parent.send(None)
        while True:
            work: Work = parent.recv()
            parent.send(work.measure(harness, setup))
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except IrminsulError as error:
        parent.send(error)
    except Exception as error:  # noqa: BLE001  the process ends here; its parent says why
        first_line = str(error).partition("\n")[0]
        parent.send(
            IrminsulError(
                f"a worker process failed with {type(error).__name__}: {first_line}; try fewer --jobs if memory ran "
                "out, and --jobs 1 to see where it failed"
            )
        )


@contextmanager
def _alive(process: BaseProcess) -> Iterator[None]:
    """Raise IrminsulError if the other end of a connection turns out to be dead."""
    try:
        yield
    except (EOFError, OSError):
        process.join()
        raise IrminsulError(
            f"a worker process died with exit status {process.exitcode}; try fewer --jobs if memory ran out"
        ) from None
