"""Blocks as tables and as a page: medians over repeats with the smallest and the largest, and servers in pairs."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from irminsul.bench.results import Block
from irminsul.html_page import render_page, write_page
from irminsul.markdown import markdown_table
from irminsul.safe_text import printable

ABSENT = "-"
_BUSY_CLIENT = 0.8


class Spread(NamedTuple):
    """A figure over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Return the spread of what is there; None of nothing."""
        found = [value for value in values if value is not None]
        return cls(statistics.median(found), min(found), max(found)) if found else None


class Figure(NamedTuple):
    """A column."""

    title: str
    value: Callable[[Block], float | None]
    shown: Callable[[float], str]


def _at(*path: str) -> Callable[[Block], float | None]:
    def find(block: Block) -> float | None:
        value: Any = block
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return None if value is None else float(value)

    return find


def _share(name: str) -> Callable[[Block], float | None]:
    """Find a class of tokens as a share of all prompt tokens."""
    part, whole = _at("tokens", name), _at("tokens", "prompt")

    def find(block: Block) -> float | None:
        tokens, of = part(block), whole(block)
        return None if tokens is None or not of else tokens / of

    return find


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


TTFT = Figure("TTFT p50", _at("ttft_s", "p50"), _milliseconds)
RATE = Figure("requests/s", _at("requests_per_s"), _rate)
IN_FLIGHT = Figure("in flight", _at("in_flight"), _rate)
TIMES = (
    TTFT,
    Figure("TTFT p95", _at("ttft_s", "p95"), _milliseconds),
    Figure("TTFT p99", _at("ttft_s", "p99"), _milliseconds),
    Figure("ITL p50", _at("itl_s", "p50"), _milliseconds),
    Figure("ITL p95", _at("itl_s", "p95"), _milliseconds),
    Figure("ITL p99", _at("itl_s", "p99"), _milliseconds),
    Figure("end to end p50", _at("end_to_end_s", "p50"), _milliseconds),
    Figure("end to end p95", _at("end_to_end_s", "p95"), _milliseconds),
    Figure("end to end p99", _at("end_to_end_s", "p99"), _milliseconds),
    RATE,
    Figure("output tokens/s", _at("output_tokens_per_s"), _rate),
    IN_FLIGHT,
)
TOKENS = (
    Figure("prompt tokens p50", _at("prompt_tokens", "p50"), _count),
    Figure("prefix", _share("prefix"), _percent),
    Figure("approximate prefix", _share("approximate_prefix"), _percent),
    Figure("shifted", _share("shifted"), _percent),
    Figure("computed", _share("computed"), _percent),
    Figure("pool before", _at("pool", "occupied_before"), _percent),
    Figure("pool after", _at("pool", "occupied_after"), _percent),
    Figure("evicted tokens", _at("pool", "evicted_tokens"), _count),
)
RATIOS = tuple(figure for figure in TIMES if "p95" not in figure.title and figure is not IN_FLIGHT)


@dataclass(frozen=True)
class Group:
    """Blocks that may be compared: one load at one pace under equal settings."""

    blocks: tuple[Block, ...]

    @property
    def load(self) -> str:
        """The load's name."""
        return str(self.blocks[0]["load"]["name"])

    @property
    def pace(self) -> str:
        """The pace."""
        return str(self.blocks[0]["settings"]["pace"])

    @property
    def servers(self) -> list[str]:
        """Names, in the order they were first measured."""
        return list(dict.fromkeys(block["server"]["name"] for block in sorted(self.blocks, key=lambda b: b["repeat"])))

    def of(self, server: str) -> list[Block]:
        """Return a server's blocks by repeat."""
        found = [block for block in self.blocks if block["server"]["name"] == server]
        return sorted(found, key=lambda block: int(block["repeat"]))

    def spread(self, server: str, figure: Figure) -> Spread | None:
        """Return a figure of a server over its repeats."""
        return Spread.of(figure.value(block) for block in self.of(server))

    def ratio(self, server: str, base: str, figure: Figure) -> Spread | None:
        """Return a figure of a server by that of another one in the same repeat, over repeats."""
        bases = {block["repeat"]: figure.value(block) for block in self.of(base)}
        pairs = [(figure.value(block), bases.get(block["repeat"])) for block in self.of(server)]
        return Spread.of(value / of if value is not None and of else None for value, of in pairs)


class Table(NamedTuple):
    """A table as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """What is shown of a folder's blocks."""

    groups: tuple[Group, ...]
    facts: tuple[str, ...]
    """Sentences about servers, settings and what to beware of."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """Times, ratios (if there is more than one server) and tokens."""
        tables = [
            Table("Times (ms) and rates", *_by_server(self.groups, TIMES)),
            Table("Ratios of the same repeat", *_by_pair(self.groups)),
            Table("Prompt tokens and pool", *_by_server(self.groups, TOKENS)),
        ]
        return tuple(table for table in tables if table.rows)


def make_report(blocks: Sequence[Block]) -> Report:
    """Group blocks. Of a server that was measured under one name with other settings of its own, the newest count."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block["comparison"], []).append(block)
    kept = tuple(Group(tuple(_newest(found))) for found in groups.values())
    shown = [block for group in kept for block in group.blocks]
    older = len(blocks) - len(shown)
    notes = [f"{older} older blocks of servers that have changed since are left out."] if older else []
    return Report(kept, (*_facts(shown), *notes))


def markdown(blocks: Sequence[Block]) -> str:
    """Return the tables as Markdown."""
    report = make_report(blocks)
    # What servers say of themselves, and names of files, may hold what a terminal obeys.
    facts = "\n".join(f"- {printable(fact)}" for fact in report.facts)
    parts = [facts or "No block has been measured."]
    for table in report.tables:
        rows = [[printable(cell).replace("|", "/") for cell in row] for row in table.rows]
        parts.append(f"## {table.title}\n\n{markdown_table(table.columns, rows)}")
    return "\n\n".join(parts) + "\n"


def _newest(blocks: Sequence[Block]) -> list[Block]:
    def state(block: Block) -> tuple[str, str]:
        return block["server"]["name"], repr(sorted((key, value) for key, value in block["server"].items()))

    newest = dict(state(block) for block in blocks)
    return [block for block in blocks if newest[block["server"]["name"]] == state(block)[1]]


def _facts(blocks: Sequence[Block]) -> list[str]:
    facts = _server_facts([block["server"] for block in blocks])
    for block in blocks:
        settings, load, client = block["settings"], block["load"], block["client"]
        facts.append(
            f"Load {load['name']}: {load['calls']} calls in {load['sessions']} sessions"
            + (f", {load['left_out']} longer calls left out" if load["left_out"] else "")
            + "".join(f"; {note}" for note in load.get("notes", ()))
            + "."
        )
        facts.append(
            f"Protocol {settings['protocol']}, {settings['max_tokens']} output tokens, think time "
            f"{settings['think_time']} s, {settings['warm_up']} warm-up requests, seed {settings['seed']}."
        )
        facts.append(
            f"Client: irminsul {client['irminsul']}, {client['processor']}, {client['cores']} cores"
            + (f"; GPUs there: {', '.join(client['gpus'])}" if "gpus" in client else "")
            + f". {block['started'][:10]}."
        )
    busiest = max((block["client_cpu_share"] for block in blocks), default=0.0)
    if busiest > _BUSY_CLIENT:
        facts.append(
            f"Beware: the load generator itself was busy for up to {busiest:.0%} of a block's time; its own delays are "
            "in the figures."
        )
    return list(dict.fromkeys(facts))


def _server_facts(servers: Sequence[dict[str, Any]]) -> list[str]:
    """Say what is the same for all servers, and then what is not."""
    told = {server["name"]: server["facts"] for server in servers}
    common = [
        (name, value)
        for name, value in next(iter(told.values()), {}).items()
        if len(told) > 1 and all(facts.get(name) == value for facts in told.values())
    ]
    facts = [f"All servers: {_listed(common)}."] if common else []
    for server in servers:
        own = _listed(item for item in server["facts"].items() if item not in common)
        length = "fixed" if server["ignore_eos"] else "up to the model"
        facts.append(
            f"Server {server['name']}: {server['kind']}, model {server['model']}{own and f', {own}'}. "
            f"Cache at the start of a block: {server['cache_at_start']}. Output length {length}."
        )
    return facts


def _listed(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in items)


def _by_server(
    groups: Sequence[Group], figures: Sequence[Figure]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    rows = []
    for group in groups:
        for server in group.servers:
            cells = [_cell(group.spread(server, figure), figure.shown) for figure in figures]
            blocks = group.of(server)
            failed = sum(block["requests"] - block["succeeded"] for block in blocks)
            errors = f"{failed} of {sum(block['requests'] for block in blocks)}"
            rows.append((group.load, group.pace, server, str(len(blocks)), *cells, errors))
    columns = ("load", "pace", "server", "repeats", *(figure.title for figure in figures), "errors")
    return columns, tuple(rows)


def _by_pair(groups: Sequence[Group]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    rows = []
    for group in groups:
        base, *others = group.servers
        for server in others:
            cells = [_cell(group.ratio(server, base, figure), lambda value: f"{value:.2f}") for figure in RATIOS]
            rows.append((group.load, group.pace, f"{server} / {base}", *cells))
    return ("load", "pace", "servers", *(figure.title for figure in RATIOS)), tuple(rows)


def _cell(spread: Spread | None, shown: Callable[[float], str]) -> str:
    if spread is None:
        return ABSENT
    median, low, high = map(shown, spread)
    return median if low == high else f"{median} [{low}, {high}]"


# -- the page --

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 220, 56, 14, 34
_SERIES = ("prefix", "shifted", "good", "maybe")


class Point(NamedTuple):
    """A median with its range; places are in the units of the plot's view box."""

    x: float
    y: float
    low: float
    high: float
    label: str


class Line(NamedTuple):
    """One server's points."""

    server: str
    colour: str
    points: tuple[Point, ...]


class Plot(NamedTuple):
    """A figure over paces."""

    title: str
    lines: tuple[Line, ...]
    paces: tuple[tuple[float, str], ...]
    """Places on the horizontal axis, and what stands there."""
    top: str
    """The value of the upper end of the vertical axis, whose lower end is 0."""


def write_html(path: Path, blocks: Sequence[Block]) -> None:
    """Write the report as one page.

    Raises:
        InputError: the file cannot be written, or jinja2 is missing.
    """
    write_page(path, to_html(blocks))


def to_html(blocks: Sequence[Block]) -> str:
    """Return the page."""
    report = make_report(blocks)
    style = (files("irminsul.trace") / "page" / "report.css").read_text(encoding="utf-8")
    own_style = (files("irminsul.bench") / "page" / "bench.css").read_text(encoding="utf-8")
    body = (files("irminsul.bench") / "page" / "bench.html").read_text(encoding="utf-8")
    return render_page(
        body,
        title="irminsul bench",
        style=style + own_style,
        facts=report.facts,
        tables=report.tables,
        plots=_plots(report.groups),
    )


def _plots(groups: Sequence[Group]) -> list[Plot]:
    by_load: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        others = {key: value for key, value in group.blocks[0]["settings"].items() if key != "pace"}
        by_load.setdefault((group.load, repr(others)), []).append(group)
    return [
        _plot(f"{load}: {title}", found, figure)
        for (load, _), found in by_load.items()
        for title, figure in (("TTFT p50, ms", TTFT), ("requests a second", RATE))
    ]


def _plot(title: str, groups: Sequence[Group], figure: Figure) -> Plot:
    servers = list(dict.fromkeys(server for group in groups for server in group.servers))
    spreads = {(server, i): group.spread(server, figure) for server in servers for i, group in enumerate(groups)}
    most = max((spread.high for spread in spreads.values() if spread is not None), default=0.0) or 1.0
    step = (_WIDTH - _LEFT) / len(groups)
    places = [round(_LEFT + step * (i + 0.5), 1) for i in range(len(groups))]

    def height(value: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / most), 1)

    lines = []
    for number, server in enumerate(servers):
        points = [
            Point(
                places[i],
                height(spread.median),
                height(spread.low),
                height(spread.high),
                f"{server}, {group.pace}: {_cell(spread, figure.shown)}",
            )
            for i, group in enumerate(groups)
            if (spread := spreads[server, i]) is not None
        ]
        lines.append(Line(server, _SERIES[number % len(_SERIES)], tuple(points)))
    paces = tuple(zip(places, (group.pace for group in groups), strict=True))
    return Plot(title, tuple(lines), paces, figure.shown(most))
