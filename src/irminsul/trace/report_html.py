"""The analysis as one HTML file, see ``html_page``; bars are drawn here (SVG), the strips by the script (a canvas)."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from irminsul.html_page import render_page, write_page
from irminsul.plan import SegmentKind
from irminsul.trace import report_text as text
from irminsul.trace.analysis import SHIPPED_MATCHER, Analysis, Bucket, Strip

_SHOWN_CAUSES = 12
_KIND_CODES = {SegmentKind.PREFIX: 0, SegmentKind.SHIFTED: 1, SegmentKind.GAP: 2, SegmentKind.APPROXIMATE_PREFIX: 3}
_BAR_WIDTH, _BAR_HEIGHT, _BAR_GAP, _BAR_LEFT = 190, 14, 6, 92


class PlotBar(NamedTuple):
    """A bar with its label and value; places are in the units of the plot's view box."""

    label: str
    value: str
    y: int
    width: float
    text_x: float


class Plot(NamedTuple):
    """A bar chart."""

    title: str
    height: int
    bars: tuple[PlotBar, ...]


def write_html(path: Path, analysis: Analysis) -> None:
    """Write the report.

    Raises:
        InputError: the file cannot be written, or jinja2 is missing.
    """
    write_page(path, to_html(analysis))


def to_html(analysis: Analysis) -> str:
    """Return the page."""
    return render_page(
        _resource("report.html"),
        title="irminsul analyze",
        script=_resource("report.js"),
        style=_resource("report.css"),
        strips=_script_json([_strip(strip) for strip in analysis.strips]),
        analysis=analysis,
        worth=analysis.worth.name.lower(),
        tiles=_tiles(analysis),
        overview=text.overview(analysis),
        savings=text.savings(analysis),
        notes=[text.visible(note) for note in text.notes(analysis)],
        matcher_columns=text.MATCHER_COLUMNS,
        matchers=[(matcher.name, text.matcher_cells(matcher, analysis)) for matcher in analysis.matchers],
        ceilings=[(f"ceiling {n}", text.ceiling_cells(tokens, analysis)) for n, tokens in analysis.oracle.items()],
        shipped=(text.shipped_name(analysis), text.matcher_cells(analysis.shipped, analysis)),
        cause_columns=text.CAUSE_COLUMNS,
        causes=[_cause(cause, analysis) for cause in analysis.causes.causes[:_SHOWN_CAUSES]],
        hidden_causes=max(0, len(analysis.causes.causes) - _SHOWN_CAUSES),
        namespaces=[(text.visible(row.name), row) for row in analysis.namespaces],
        plots=_plots(analysis),
    )


def _resource(name: str) -> str:
    return (files("irminsul.trace") / "page" / name).read_text(encoding="utf-8")


def _script_json(value: object) -> str:
    """Write JSON that may stand inside a script element: no ``<`` and nothing beyond ASCII in it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _strip(strip: Strip) -> dict[str, Any]:
    return {
        "place": text.visible(strip.place),
        "namespace": text.visible(strip.namespace),
        "tokens": strip.plan.n_tokens,
        "segments": [
            [_KIND_CODES[segment.kind], segment.start, segment.end, segment.run.delta if segment.run else 0]
            for segment in strip.plan.segments
        ],
    }


def _tiles(analysis: Analysis) -> list[tuple[str, str]]:
    return [
        ("calls", f"{analysis.totals.calls:,}"),
        ("prompt tokens", _short(analysis.totals.prompt_tokens)),
        ("exact prefix", f"{analysis.prefix_share:.1%}"),
        ("irminsul saves", f"{analysis.saved_share:.1%}"),
        ("to compute now", _short(analysis.compute.tokens_now)),
        ("with irminsul", _short(analysis.compute.tokens_then)),
    ]


def _short(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _cause(cause: Any, analysis: Analysis) -> dict[str, Any]:  # noqa: ANN401
    return {
        "name": text.cause_name(cause),
        "cells": text.cause_cells(cause, analysis),
        "old": text.shorten(cause.example_old),
        "new": text.shorten(cause.example_new),
        "place": text.visible(cause.example_place),
        "fix": cause.fix,
    }


def _plots(analysis: Analysis) -> list[Plot]:
    shown = next((m for m in analysis.matchers if m.name == SHIPPED_MATCHER), analysis.shipped)
    plots = [
        _plot(f"Tokens by run length ({shown.name})", shown.run_lengths, [b.tokens for b in shown.run_lengths]),
        _plot(f"Tokens by distance moved ({shown.name})", shown.deltas, [b.tokens for b in shown.deltas]),
    ]
    variations = analysis.first_variation_histogram
    if analysis.first_variation:
        plots.append(
            _plot("Calls by first variation (prefix / prompt)", variations, [b.count for b in variations], shares=True)
        )
    return plots


def _plot(title: str, buckets: Sequence[Bucket], values: Sequence[int], *, shares: bool = False) -> Plot:
    most = max(values, default=0) or 1
    bars = []
    for i, (bucket, value) in enumerate(zip(buckets, values, strict=True)):
        width = round(_BAR_WIDTH * value / most, 1)
        bars.append(
            PlotBar(
                _label(bucket, shares=shares), _short(value), i * (_BAR_HEIGHT + _BAR_GAP), width, _BAR_LEFT + width + 5
            )
        )
    return Plot(title, len(bars) * (_BAR_HEIGHT + _BAR_GAP), tuple(bars))


def _label(bucket: Bucket, *, shares: bool) -> str:
    if shares:
        return f"{bucket.low:.0%} \u2013 {1.0 if bucket.high is None else bucket.high:.0%}"
    if bucket.high is None:
        return f"{bucket.low:,.0f} or more"
    last = bucket.high - 1
    return f"{bucket.low:,.0f}" if last == bucket.low else f"{bucket.low:,.0f} \u2013 {last:,.0f}"
