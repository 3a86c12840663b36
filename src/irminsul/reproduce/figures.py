"""Line charts, the same bytes for the same numbers. No window, no pyplot, no global state."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DOTS_PER_INCH = 90
_PANEL_INCHES = (5.2, 3.8)
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float] | Sequence[str]
    """Names give separate points, which are not joined."""
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """One chart; labels name the units."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: int | None = None
    """Base of a logarithmic axis."""
    log_y: bool = False
    level: float | None = None
    """A horizontal line for reference, such as chance."""


def write_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels side by side."""
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel, ax in zip(panels, axes[0], strict=True):
        _draw(panel, ax)
    # Without this the file would name the version of matplotlib.
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw(panel: Panel, ax: Axes) -> None:
    for at, line in enumerate(panel.lines):
        named = any(isinstance(value, str) for value in line.x)
        style, marker = "" if named else _STYLES[at % len(_STYLES)], _MARKERS[at % len(_MARKERS)]
        ax.plot(line.x, line.y, linestyle=style, marker=marker, markersize=3.5, linewidth=1.3, label=line.label)
    if panel.level is not None:
        ax.axhline(panel.level, color="0.6", linewidth=0.8)
    if panel.log_x is not None:
        ax.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        ax.set_yscale("log")
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    ax.grid(visible=True, alpha=0.3)
    ax.legend(fontsize=7.5)
