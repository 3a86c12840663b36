"""Progress on a terminal and without one."""

import io

import pytest
from rich.console import Console

from irminsul.progress import progress_bar


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_shown_as_they_are(terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=200, color_system=None)
    with progress_bar(console, 1, str, first="starting") as advance:
        advance("[red]a[/blue]:cat:")
    assert "[red]a[/blue]:cat:" in shown.getvalue()
