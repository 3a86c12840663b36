"""What an experiment leaves behind: ``<name>.json``, ``<name>.md`` and ``<name>.png``."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import transformers

from irminsul import __version__
from irminsul.machine import Machine
from irminsul.markdown import markdown_table
from irminsul.output_files import replace_files
from irminsul.reproduce.figures import Panel, draw_png


@dataclass(frozen=True)
class Table:
    """A table of text."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: bool = True
    """Whether all columns but the first hold numbers, which are set to the right."""

    def markdown(self) -> str:
        """Render it: the caption, then the table."""
        assert all(len(row) == len(self.header) for row in self.rows), self.caption
        return f"{self.caption}\n\n{markdown_table(self.header, self.rows, numbers=self.numbers)}"


@dataclass(frozen=True)
class Comparison:
    """One claim of the paper beside what we measured."""

    claim: str
    """A direction, such as "shifted is closer than naive"."""
    paper: str
    """The paper's figures."""
    ours: str
    agrees: bool | None
    """Whether our numbers point the same way, decided from them; None if they do not decide."""


@dataclass(frozen=True, eq=False)
class Report:
    """The outcome of one experiment."""

    name: str
    title: str
    method: str
    """What was measured, in a paragraph."""
    sizes: object
    """A dataclass: how much was measured."""
    results: dict[str, Any]
    """JSON values."""
    tables: tuple[Table, ...]
    comparisons: tuple[Comparison, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know to read the numbers."""

    @property
    def verdict(self) -> str:
        """One sentence: whether our directions are the paper's."""
        return verdict(self.comparisons)


@dataclass(frozen=True)
class Origin:
    """How the numbers can be made again."""

    command: str
    checkpoint: str
    quick: bool
    seed: int
    machine: Machine
    seconds: float
    """Wall time of the experiment."""


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Say in a sentence or two which directions are not the paper's, and how many are not decided."""
    different = [comparison.claim for comparison in comparisons if comparison.agrees is False]
    undecided = sum(comparison.agrees is None for comparison in comparisons)
    total = len(comparisons)
    if not different and not undecided:
        return f"In all {total} comparisons our result has the paper's direction."
    sentences = []
    if different:
        sentences.append(
            f"**Our result differs from the paper's direction** in {len(different)} of {total} comparisons: "
            f"{'; '.join(different)}."
        )
    if undecided:
        sentences.append(f"Our cases do not decide {undecided} of {total} comparisons.")
    return " ".join(sentences)


def file_names(name: str) -> tuple[str, str, str]:
    """Return the names of an experiment's files: data, text, picture."""
    return f"{name}.json", f"{name}.md", f"{name}.png"


def write_report(report: Report, origin: Origin, folder: Path) -> list[Path]:
    """Write the three files of an experiment to a directory and return their paths.

    Raises InputError, and leaves those that were there before, if one cannot be written.
    """
    data, text, picture = (folder / name for name in file_names(report.name))
    title = f"{report.title}: {Path(origin.checkpoint).name}{' (quick)' if origin.quick else ''}"
    contents = {
        data: (json.dumps(_as_json(report, origin), indent=1, allow_nan=False) + "\n").encode(),
        text: _as_markdown(report, origin, picture.name).encode(),
        picture: draw_png(report.panels, title),
    }
    replace_files(contents)
    return list(contents)


def number(value: float, digits: int = 3) -> str:
    """Three digits behind the point, or three significant ones where that would hide them."""
    return f"{value:.{digits}f}" if value == 0 or abs(value) >= 10.0 ** (1 - digits) else f"{value:.2e}"


def versions() -> dict[str, str]:
    """Name the software that takes part in the numbers."""
    return {
        "irminsul": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matplotlib": mpl.__version__,
    }


def _as_json(report: Report, origin: Origin) -> dict[str, Any]:
    return {
        "experiment": report.name,
        **asdict(origin),
        "sizes": asdict(report.sizes),  # type: ignore[call-overload]
        "versions": versions(),
        "results": report.results,
        "comparisons": [asdict(comparison) for comparison in report.comparisons],
    }


_ANSWERS = {True: "yes", False: "**no**", None: "not decided"}


def _as_markdown(report: Report, origin: Origin, picture: str) -> str:
    sizes = "reduced sizes" if origin.quick else "full sizes"
    rows = tuple((c.claim, c.paper, c.ours, _ANSWERS[c.agrees]) for c in report.comparisons)
    compared = Table("Beside the paper:", ("claim", "paper", "ours", "same direction"), rows, numbers=False)
    parts = [
        f"# {report.title}",
        report.method,
        *[table.markdown() for table in report.tables],
        compared.markdown(),
        report.verdict,
        *report.notes,
        f"![{report.title}]({picture})",
        f"Made by `{origin.command}` ({sizes}) in {origin.seconds:.0f} s on {origin.machine}.",
    ]
    return "\n\n".join(parts) + "\n"
