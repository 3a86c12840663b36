"""What a run tells: a line of JSON on the terminal, and the same in a file."""

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


def tell(line: str) -> None:
    """Write a line to the terminal at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Log:
    """A file of one JSON object a line, appended to; used in a ``with``."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, **values: object) -> None:
        """Add a line; floats are rounded to six digits behind the point."""
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
        line = json.dumps(rounded)
        self._file.write(line + "\n")
        tell(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
