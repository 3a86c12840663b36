"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown_row(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table; a ``|`` in a cell is the caller's to avoid.

    Args:
        header: names of the columns.
        rows: cells, as many as there are columns.
        numbers: whether all columns but the first hold numbers, which are set to the right.
    """
    rule = ("---", *["---:" if numbers else "---"] * (len(header) - 1))
    return "\n".join(map(markdown_row, (header, rule, *rows)))
