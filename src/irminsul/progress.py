"""A bar for work that takes minutes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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
        yield lambda step: console.print(describe(step), highlight=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(first, total=total)
        yield lambda step: progress.update(task, advance=1, description=describe(step))
