"""A bar for work that takes minutes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

_Step = TypeVar("_Step")


@contextmanager
def progress_bar(
    console: Console, total: int, describe: Callable[[_Step], str], *, first: str
) -> Iterator[Callable[[_Step], None]]:
    """Show a bar, or a line for each step where there is no terminal; call what is given with each step's result.

    Args:
        console: where to show it.
        total: number of steps.
        describe: a line about a result.
        first: what the bar says before there is one.
    """
    if not console.is_terminal:
        # Names in it are not ours: as Text, brackets and colons in them are no markup.
        yield lambda step: console.print(Text(describe(step)))
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(first, total=total)
        yield lambda step: progress.update(task, advance=1, description=describe(step))
