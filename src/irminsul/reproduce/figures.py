"""Line charts, the same bytes for the same numbers. No window, no pyplot, no global state."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_DOTS_PER_INCH = 90
_PANEL_INCHES = (5.2, 4.8)
_SIDE_STEP = 0.12
"""Between points of the same name, in steps from one name to the next."""
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    x: Sequence[float] | Sequence[str]
    """Names give separate points, which are not joined."""
    y: Sequence[float]
    intervals: Sequence[tuple[float, float] | None] = ()
    """Drawn as bars: [low, high] of each point, None where there is none; empty: no bars."""


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
    level_label: str = ""
    from_zero: bool = False
    """Whether the y axis starts at zero."""


def draw_png(panels: Sequence[Panel], title: str) -> bytes:
    """Draw the panels side by side under a title."""
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(panels), height), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(panels), squeeze=False)
    for panel, ax in zip(panels, axes[0], strict=True):
        _draw(panel, ax)
    drawn = io.BytesIO()
    # Without this the file would name the version of matplotlib.
    figure.savefig(drawn, format="png", metadata={"Software": None})
    return drawn.getvalue()


def _draw(panel: Panel, ax: Axes) -> None:
    for at, line in enumerate(panel.lines):
        named = any(isinstance(value, str) for value in line.x)
        style, marker = "" if named else _STYLES[at % len(_STYLES)], _MARKERS[at % len(_MARKERS)]
        x: Sequence[float] = line.x  # type: ignore[assignment]
        if named:
            # Side by side, so that no point covers that of another line.
            x = [place + _SIDE_STEP * (at - (len(panel.lines) - 1) / 2) for place in range(len(line.x))]
            ax.set_xticks(range(len(line.x)), [str(name) for name in line.x])
        (drawn,) = ax.plot(x, line.y, linestyle=style, marker=marker, markersize=3.5, linewidth=1.3, label=line.label)
        for point, interval in enumerate(line.intervals):
            if interval is not None:
                ax.vlines(x[point], *interval, color=drawn.get_color(), linewidth=0.9)
    if panel.level is not None:
        ax.axhline(panel.level, color="0.6", linewidth=0.8, label=panel.level_label or None)
    if panel.log_x is not None:
        ax.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        ax.set_yscale("log")
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    ax.grid(visible=True, alpha=0.3)
    if panel.from_zero:
        ax.set_ylim(bottom=0.0)
    # Below the axes, where it covers no point.
    ax.legend(fontsize=7.5, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
