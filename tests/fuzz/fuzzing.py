"""What the fuzzers share: how many inputs they try, a clock that no input may outrun, and the command line in-process.

``IRMINSUL_TEST_EXAMPLES`` is how many inputs each fuzzer tries; the default keeps the suite short, 100 take about a
minute. From 1,000 on the named cases have their full size, too.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings

from irminsul import cli

SOAK = "IRMINSUL_TEST_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("IRMINSUL_TEST_EXAMPLES", "10"))
FULL = EXAMPLES >= 1000
"""Whether named cases have their full size; in a shorter soak they have a tenth of it."""
SECONDS = 1.0
"""Processor time that one small input may take: wall time would measure the machine's other work, too."""

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@dataclass
class Figures:
    """What has been tried in this run."""

    inputs: int = 0
    refused: int = 0
    slowest: float = 0.0
    """Seconds of processor time, of the inputs that may take ``SECONDS``."""
    named: list[str] = field(default_factory=list)
    """What named cases took."""

    def __str__(self) -> str:
        return "; ".join(
            [
                f"fuzz: {self.inputs} inputs, {self.refused} refused by a sentence",
                f"slowest {self.slowest:.2f} s of CPU (limit {SECONDS:g} s)",
                *self.named,
            ]
        )


figures = Figures()


class HangError(BaseException):
    """An input took too long. No ``except Exception`` on the way may take it for a fault of the input."""


@contextlib.contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    """Raise AssertionError if the block uses more processor time than this."""

    def stop(*_: object) -> None:
        raise HangError

    earlier = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except HangError:
        raise AssertionError(f"more than {seconds:g} s of CPU") from None
    finally:
        left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
        signal.signal(signal.SIGPROF, earlier)
        figures.inputs += 1
        if seconds == SECONDS:
            figures.slowest = max(figures.slowest, seconds - left)


@dataclass
class Outcome:
    """How a command ended."""

    status: int
    stdout: str = ""
    stderr: str = ""
    sentence: str = field(init=False, default="")
    """What it was refused with; empty if it was not."""

    def __post_init__(self) -> None:
        if self.status:
            last = self.stderr.splitlines()[-1]
            assert last.startswith("irminsul: "), self.stderr
            assert last.isprintable(), last
            assert len(last) < 3000, len(last)
            self.sentence = last.removeprefix("irminsul: ")
            figures.refused += 1


def irminsul(*arguments: object, seconds: float = SECONDS) -> Outcome:
    """Run a command in this process. Whatever it raises is a crash; what it refuses must be said in one sentence."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=kind) for kind in ("strict", "replace"))
    earlier, sys.argv = sys.argv, ["irminsul", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), in_time(seconds):
            cli.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = earlier
    texts = []
    for stream in (stdout, stderr):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))
    return Outcome(status, *texts)


def write(path: Path, content: bytes) -> Path:
    """Write a file and return its path."""
    path.write_bytes(content)
    return path


def refused(call: Callable[[], object]) -> str:
    """Run something that may raise InputError, in time; return its sentence, or nothing."""
    from irminsul.errors import InputError

    with in_time():
        try:
            call()
        except InputError as error:
            sentence = str(error)
            assert sentence, "no sentence"
            assert "\n" not in sentence, sentence
            figures.refused += 1
            return sentence
    return ""
