"""Tables of the documents, from the files of results.

    python benchmarks/tables.py [--check]

A document holds a table between ``<!-- table NAME -->`` and ``<!-- end -->``; this program puts in what the results
say. ``--check`` changes nothing: exit status 1 if a document says something else.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from irminsul.markdown import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = ("README.md", "docs/sglang.md", "docs/measured.md")
_SECTION = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TTFT_HEADER = ("prompt", "gaps", "computed", "stock", "prefix hit, as many computed", "live", "live / prefix hit")


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    different = []
    for name in DOCUMENTS:
        path = ROOT / name
        before = path.read_text()
        after = with_tables(before)
        if after != before:
            different.append(name)
            if not arguments.check:
                path.write_text(after)
    if different:
        print(f"{'differs from the results' if arguments.check else 'written'}: {', '.join(different)}")
    return int(arguments.check and bool(different))


def with_tables(text: str) -> str:
    """Return a document with the tables that it names."""

    def made(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            sys.exit(f"no table {found[2]!r}; there are {', '.join(TABLES)}")
        return f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}"

    return _SECTION.sub(made, text)


def read(name: str) -> Any:  # noqa: ANN401
    """Read a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# -- time to first token --


def ttft(name: str) -> str:
    """All rows of a run: medians, and the spread of what live reuse took."""
    return markdown_table(TTFT_HEADER, (ttft_cells(row) for row in read(name)["rows"]), numbers=True)


def ttft_cells(row: dict[str, Any]) -> list[str]:
    """One prompt."""
    low, high = row["live_ms_range"]
    return [
        f"{row['prompt_tokens']:,}",
        str(row["gaps"]),
        f"{row['computed']:,}",
        f"{row['stock_ms']:,.0f}",
        f"{row['prefix_hit_ms']:.0f} ({' to '.join(f'{end:.0f}' for end in row['prefix_hit_ms_range'])})",
        f"{row['live_ms']:.0f} ({low:.0f} to {high:.0f})",
        f"{row['live_over_prefix_hit']:.2f}",
    ]


def nothing_to_recover() -> str:
    """What a server pays where nothing is reused, with and without CUDA graphs."""

    def rows() -> Iterator[list[str]]:
        for graphs, name in (("yes", "ttft_graphs"), ("no", "ttft_eager")):
            for row in read(name)["nothing_to_recover"]:
                ratios = ("live_over_stock", "observe_over_stock", "observe_over_stock_moved")
                yield [f"{row['prompt_tokens']:,}", graphs, *(f"{100 * (row[key] - 1):+.1f} %" for key in ratios)]

    header = ("prompt", "CUDA graphs", "live, unseen prompt", "observing, unseen prompt", "observing, a moved passage")
    return markdown_table(header, rows(), numbers=True)


# -- equality --

CONFIGURATIONS = {
    "graphs": "CUDA graphs, prefills up to 2,048",
    "eager": "no graphs",
    "page64": "pages of 64",
    "page64-graphs": "pages of 64, graphs",
    "no-overlap": "no overlap scheduling",
    "mixed": "mixed batches",
    "absorbed": "absorbed only",
    "one-shot": "up-projected at once",
    "chunked-kv": "up-projected in chunks",
}
NOTHING_TO_SHIFT = ("live, nothing to shift", "always-miss, cold")


def equality() -> str:
    """Largest difference of a log probability by configuration."""
    rows = read("equality_smollm2")["rows"]
    header = (
        "configuration",
        "nothing to shift",
        "copied, against stock's hit",
        "stock's hits, against cold",
        "1 to 16 gaps, against cold",
        "batch, against cold",
        "stock's batch, against cold",
        "turned by 1, by 37 too much",
    )
    return markdown_table(
        header,
        (
            [CONFIGURATIONS[name], *equality_cells([row for row in rows if row["configuration"] == name])]
            for name in CONFIGURATIONS
        ),
        numbers=True,
    )


def equality_cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One configuration."""
    against_cold = [row for row in rows if row["against"] == "cold"]
    hits = {(row["prompt_tokens"], row["case"]): forms(row) for row in against_cold}

    def largest(which: Callable[[dict[str, Any]], bool], among: Sequence[dict[str, Any]] = against_cold) -> str:
        found = [row["largest_logprob_difference"] for row in among if which(row)]
        return short(max(found))

    def is_copied_pair(row: dict[str, Any]) -> bool:
        return (
            row["case"] in ("shifted, last 64 computed", "shifted, last 512 computed")
            and row["against"] != "cold"
            and forms(row) == hits[row["prompt_tokens"], row["against"]]
        )

    turned = [
        min(row["largest_logprob_difference"] for row in rows if f"turned by {by} " in row["case"]) for by in (1, 37)
    ]
    return [
        largest(lambda row: row["case"] in NOTHING_TO_SHIFT),
        largest(is_copied_pair, rows),
        largest(lambda row: row["case"] == "hit" or row["case"].startswith("stock's hit")),
        largest(lambda row: row["case"].startswith("shifted") and "turned" not in row["case"]),
        largest(lambda row: row["case"].startswith(("in a batch: shifted", "in a batch: new"))),
        largest(lambda row: row["case"] == "in a batch: stock, cold"),
        ", ".join(map(short, turned)),
    ]


def forms(row: dict[str, Any]) -> set[str]:
    """Forms of attention of a row's prefills."""
    return {name.replace(", planned", "") for name in row["forwards"]}


def short(value: float) -> str:
    """Write a difference; exactly none is 0."""
    return f"{value:.2f}".lstrip("0") if value else "0"


# -- load over HTTP --


def patterns(name: str) -> str:
    """What becomes of the tokens of each pattern, and of TTFT."""
    return of_loads(name, ("pattern",), lambda load, _: [load.removesuffix("-markers").replace("-", " ")])


def served(name: str) -> str:
    """What becomes of the tokens of a load at each pace, and of TTFT."""
    return of_loads(name, ("load", "at once"), lambda load, pace: [load, pace.removesuffix(" at once")])


def of_loads(name: str, header: tuple[str, ...], cells: Callable[[str, str], list[str]]) -> str:
    """Both servers side by side; ``cells`` are the first of a load and pace, below ``header``."""
    header = (*header, *SHARES_HEADER, "TTFT stock", "TTFT live", "live / stock", "p95 stock", "p95 live")
    return markdown_table(
        (*header, "requests/s, live / stock"),
        (
            [
                *cells(load, pace),
                *shares(stock, live),
                *ttft_of_load(stock, live),
                f"{rate_ratio(stock, live):.2f}",
            ]
            for (load, pace), (stock, live) in pairs(name)
        ),
        numbers=True,
    )


SHARES_HEADER = ("prefix, stock", "prefix, live", "approximate prefix", "shifted", "computed, live")

OfServer: TypeAlias = list[dict[str, Any]]
"""Rows of one server: a row each repeat."""


def pairs(name: str) -> Iterator[tuple[tuple[str, str], tuple[OfServer, OfServer]]]:
    """Yield loads and paces that both servers have served, with the rows of stock and of live."""
    rows: dict[tuple[str, str], dict[str, OfServer]] = {}
    for row in read(name)["rows"]:
        rows.setdefault((row["load"], row["pace"]), {}).setdefault(row["server"], []).append(row)
    return ((key, (servers["stock"], servers["live"])) for key, servers in rows.items() if len(servers) == 2)


def shares(stock: OfServer, live: OfServer) -> list[str]:
    """Cells of SHARES_HEADER."""
    asked = (
        (stock, "prefix"),
        *((live, token_class) for token_class in ("prefix", "approximate_prefix", "shifted", "computed")),
    )
    return [
        f"{100 * statistics.median(row['tokens'].get(name, 0) / row['tokens']['prompt'] for row in rows):.0f} %"
        for rows, name in asked
    ]


def ttft_of_load(stock: OfServer, live: OfServer) -> list[str]:
    """Median TTFT of both and their ratio, and p95 of both; medians over repeats, and the spread of the ratio."""
    p50 = [middle_ttft(rows, "p50") for rows in (stock, live)]
    of_repeat = {row["repeat"]: row["ttft_ms"]["p50"] for row in stock}
    ratios = [row["ttft_ms"]["p50"] / of_repeat[row["repeat"]] for row in live if row["repeat"] in of_repeat]
    return [
        *(f"{value:,.0f}" for value in p50),
        f"{p50[1] / p50[0]:.2f}" + (f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""),
        *(f"{middle_ttft(rows, 'p95'):,.0f}" for rows in (stock, live)),
    ]


LATENCIES = (
    *(("TTFT", "ttft_ms", quantile) for quantile in ("mean", "p95", "p99")),
    *(("between tokens", "itl_ms", quantile) for quantile in ("p50", "p95", "p99")),
    *(("whole request", "end_to_end_ms", quantile) for quantile in ("p50", "p95", "p99")),
)
"""Heading, name in a row and quantile."""


def latencies(*names: str) -> str:
    """Times of live over stock's, each of medians over repeats."""

    def rows() -> Iterator[list[str]]:
        for name in names:
            for (load, pace), (stock, live) in pairs(name):
                ratios = (middle_ms(live, time, q) / middle_ms(stock, time, q) for _, time, q in LATENCIES)
                yield [load, pace.removesuffix(" at once"), *(f"{ratio:.2f}" for ratio in ratios)]

    header = ("load", "at once", *(f"{heading}, {quantile}" for heading, _, quantile in LATENCIES))
    return markdown_table(header, rows(), numbers=True)


def middle(rows: OfServer, name: str) -> float:
    """Median over repeats."""
    return float(statistics.median(row[name] for row in rows))


def middle_ms(rows: OfServer, time: str, quantile: str) -> float:
    """Median over repeats, in ms."""
    return float(statistics.median(row[time][quantile] for row in rows))


def middle_ttft(rows: OfServer, quantile: str) -> float:
    """Median over repeats, in ms."""
    return middle_ms(rows, "ttft_ms", quantile)


def rate_ratio(stock: OfServer, live: OfServer) -> float:
    """Requests a second, live over stock."""
    return middle(live, "requests_per_s") / middle(stock, "requests_per_s")


SHORT = (
    ("serve_patterns", "agent_meta-17K", "1", "changed metadata in front (agent_meta)"),
    ("serve_patterns", "rerank-64K", "1", "re-ranked documents (rerank)"),
    ("serve_sessions", "edited-20", "8", "agents that edit their history (edited-20)"),
    ("serve_logs", "moatless", "16", "agents that repeat search results (moatless)"),
    ("serve_logs", "lmcache-miniswe", "16", "coding agents (lmcache-miniswe)"),
    ("serve_logs", "mini-swe-agent", "16", "agents that only append (mini-swe-agent)"),
)
"""File, load and pace of what a reader of the README wants to know, and what it is."""


def served_short() -> str:
    """Median TTFT and requests a second of some loads, beside stock."""

    def rows() -> Iterator[list[str]]:
        for file, load, at_once, what in SHORT:
            stock, live = dict(pairs(file))[load, f"{at_once} at once"]
            times = [f"{middle_ttft(of_server, 'p50'):,.0f} ms" for of_server in (stock, live)]
            tokens = f"{middle(stock, 'prompt_tokens') / 1000:.0f}K"
            yield [what, tokens, at_once, *times, f"{rate_ratio(stock, live):.2f} times"]

    header = ("load", "prompt tokens", "at once", "TTFT, stock", "irminsul", "requests/s")
    return markdown_table(header, rows(), numbers=True)


def pressure_counted() -> str:
    """Prefix hits and computed tokens in small pools, on SGLang's own tree; means over orders, and their spread."""
    rows = json.loads((ROOT / "results" / "sglang_pressure.json").read_text())["rows"]
    pools: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        of_pool = pools.setdefault((row["load"], row["slots"]), {"observe": [], "live": []})
        of_pool[row["mode"]].append(row)

    def points(of_mode: list[dict[str, Any]], *names: str) -> list[float]:
        return [100 * sum(row[name] for name in names) / row["prompt"] for row in of_mode]

    def cells(of_pool: dict[str, list[dict[str, Any]]], *names: str) -> list[str]:
        stock, live = (points(of_pool[mode], *names) for mode in ("observe", "live"))
        more = [b - a for a, b in zip(stock, live, strict=True)]
        means = [f"{statistics.mean(of_mode):.1f} %" for of_mode in (stock, live)]
        return [*means, f"{statistics.mean(more):+.1f} ({min(more):+.1f} to {max(more):+.1f})"]

    header = ("load", "slots", "prefix, stock", "prefix, live", "points more", "computed, stock", "computed, live")
    return markdown_table(
        (*header, "points more"),
        (
            [load, f"{slots:,}", *cells(of_pool, "prefix", "history"), *cells(of_pool, "computed")]
            for (load, slots), of_pool in pools.items()
        ),
        numbers=True,
    )


# -- energy and cost --


def energy() -> str:
    """Joules a request, as a share of a miss, too: the form of the paper's Table 1."""
    columns = ("miss", "25 %", "50 %", "75 %", "hit")

    def rows() -> Iterator[list[str]]:
        for name, kv_bytes, of_length in energy_runs():
            for shifted in dict.fromkeys(row["shifted"] for row in of_length):
                # A miss is a miss, whatever might have been reused.
                net = {row["column"]: row for row in of_length if row["shifted"] == shifted or not row["reused"]}
                cells = [energy_cell(net[column], net["miss"]) for column in columns]
                tokens = f"{of_length[0]['prompt_tokens']:,}"
                yield [name, f"{kv_bytes:,}", tokens, "shifted" if shifted else "prefix", *cells]

    return markdown_table(("model", "KV bytes a token", "tokens", "reused as", *columns), rows(), numbers=True)


def energy_runs() -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Yield model, KV bytes a token and rows of each length; a newer file comes before what it replaces."""
    seen = set()
    for file in ("energy_mla_8k", "energy", "energy_others"):
        for name, model in read(file)["models"].items():
            for n_tokens in dict.fromkeys(row["prompt_tokens"] for row in model["rows"]):
                if (name, n_tokens) not in seen:
                    rows = [row for row in model["rows"] if row["prompt_tokens"] == n_tokens]
                    yield name, model["kv_bytes_per_token"], rows
                seen.add((name, n_tokens))


def energy_cell(row: dict[str, Any], miss: dict[str, Any]) -> str:
    """Net joules, their spread, and their share of a miss."""
    low, high = row["net_j_range"]
    share = "" if row is miss else f", {100 * row['net_j'] / miss['net_j']:.0f} %"
    return f"{row['net_j']:.1f} ({low:.1f} to {high:.1f}){share}"


def overhead() -> str:
    """What the plugin takes of a scheduler's time, by load and mode."""
    result = read("overhead")
    wall = {(row["requests"], row["in_common"], row["of"]): row["seconds"] for row in result["ratios"]}
    header = ("at once", "in common", "mode", "plugin, ms a request", "of it index upkeep", "of it search and plan")
    return markdown_table(
        (*header, "of the scheduler's time", "ms a decode step", "wall time, of stock"),
        (
            [
                str(row["requests"]),
                row["in_common"],
                row["mode"],
                f"{row['plugin_ms_per_request']:.1f}",
                f"{parts.get('index upkeep', 0):.1f}",
                f"{parts.get('search', 0) + parts.get('plan', 0):.2f}",
                f"{100 * row['plugin_share']:.1f} %",
                f"{row['plugin_ms_per_decode_step']:.2f}",
                f"{wall[row['requests'], row['in_common'], row['mode'] + ' over stock']:.2f}",
            ]
            for row in result["rows"]
            if row["mode"] != "stock" and (parts := row["parts_ms_per_request"]) is not None
        ),
        numbers=True,
    )


def turns() -> str:
    """How sessions that edit their history go, turn by turn, one request at a time."""
    rows: dict[int, dict[str, dict[str, Any]]] = {}
    for row in read("serve_sessions")["turns"]:
        if row["pace"] == "1 at once":
            rows.setdefault(row["turn"], {})[row["server"]] = row
    shown = [turn for turn in rows if turn in (0, 1, 4, 9, 14, 19)]
    return markdown_table(
        ("turn", "prompt tokens", "computed, stock", "computed, live", "TTFT stock", "TTFT live"),
        (
            [
                str(turn + 1),
                f"{stock['prompt_tokens'] // stock['calls']:,}",
                *(f"{row['computed'] // row['calls']:,}" for row in (stock, live)),
                *(f"{row['ttft_ms']:.0f}" for row in (stock, live)),
            ]
            for turn in shown
            for stock, live in [(rows[turn]["stock"], rows[turn]["live"])]
        ),
        numbers=True,
    )


# -- the copy --


def rows_kernel() -> str:
    """Time and bandwidth of the kernel beside two ways without it."""
    return markdown_table(
        (
            "rows",
            "layers",
            "moved",
            "kernel",
            "share of a plain copy's bandwidth",
            "torch, all layers",
            "torch, by layer",
        ),
        (
            [
                f"{case['rows']:,}",
                str(case["layers"]),
                f"{case['bytes'] / 1e6:,.0f} MB",
                f"{case['ms']['kernel']['p50']:.3f} ms",
                f"{100 * case['share']:.0f} %",
                f"{case['ms']['reference']['p50']:.1f} ms",
                f"{case['ms']['by layer']['p50']:.1f} ms",
            ]
            for case in read("rows_kernel")["cases"]
        ),
        numbers=True,
    )


# -- plans --


def half_or_nothing() -> str:
    """What ``min_known`` and ``min_recovered`` do to logs: tokens saved, and how much becomes approximate."""
    logs = json.loads((ROOT / "results" / "policies.json").read_text())["logs"]
    names = list(next(iter(logs.values()))["live"])
    return markdown_table(
        ("log", "not cached", "all rows donors", *names),
        (
            [
                log,
                f"{100 * row['tail'] / row['prompt']:.1f} %",
                f"{100 * row['plain'] / row['tail']:.1f} %",
                *(saved_cell(row, one) for one in row["live"].values()),
            ]
            for log, row in logs.items()
        ),
        numbers=True,
    )


def saved_cell(log: dict[str, int], live: dict[str, int]) -> str:
    """Tokens that need not be computed, and those whose rows are approximate."""
    saved, approximate = 1 - live["computed"] / log["tail"], live["approximate"] / log["prompt"]
    return f"{100 * saved:.1f} % ({100 * approximate:.0f} %)"


TABLES: dict[str, Callable[[], str]] = {
    "ttft": lambda: ttft("ttft_graphs"),
    "ttft-eager": lambda: ttft("ttft_eager"),
    "ttft-tp2": lambda: ttft("ttft_tp2"),
    "ttft-default": lambda: ttft("ttft_default"),
    "nothing-to-recover": nothing_to_recover,
    "equality": equality,
    "patterns": lambda: patterns("serve_patterns"),
    "patterns-default": lambda: patterns("serve_patterns_default"),
    "markers": lambda: patterns("serve_markers"),
    "served-short": served_short,
    "sessions": lambda: served("serve_sessions"),
    "sessions-default": lambda: served("serve_sessions_default"),
    "turns": turns,
    "logs": lambda: served("serve_logs"),
    "latencies": lambda: latencies("serve_sessions", "serve_logs", "serve_pressure"),
    "pressure": lambda: served("serve_pressure"),
    "pressure-counted": pressure_counted,
    "half-or-nothing": half_or_nothing,
    "energy": energy,
    "overhead": overhead,
    "rows-kernel": rows_kernel,
}

if __name__ == "__main__":
    sys.exit(main())
