"""What a format's reader is given, and how it tells what it cannot use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from irminsul.trace.lines import Line, LineError, Notes, OnBad, parse_object
from irminsul.trace.records import BadLine, LoggedCall


@dataclass
class LogFile:
    """A log that is being read."""

    name: str
    lines: Iterator[Line]
    on_bad: OnBad
    notes: Notes

    def bad(self, line: int, reason: str) -> None:
        """Report a line that cannot be used."""
        self.on_bad(BadLine(self.name, line, reason))


class Format(Protocol):
    """One form of log. An instance serves all files of one run, one after another."""

    name: str

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """Say whether a line is of this form; ``record`` is the line as JSON, if it is a JSON object."""

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """Yield the calls of a file; bad lines are reported, not raised."""


def each_record(file: LogFile, parse: Callable[[dict[str, Any], int], Iterable[LoggedCall]]) -> Iterator[LoggedCall]:
    """Yield the calls that ``parse`` (record, line number) makes of each line, which must be a JSON object."""
    for line in file.lines:
        try:
            # All calls of a line or none: a line that fails in its middle is bad as a whole.
            calls: Sequence[LoggedCall] = list(parse(parse_object(line.text), line.number))
        except LineError as reason:
            file.bad(line.number, str(reason))
            continue
        except RecursionError:
            file.bad(line.number, "JSON nested too deeply")
            continue
        yield from calls
