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
from typing import Any

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
    return _SECTION.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text)


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


def ttft_short() -> str:
    """What a reader of the README wants to know."""
    rows = [row for row in read("ttft_graphs")["rows"] if row["gaps"] in (2, 17)]
    return markdown_table(
        ("prompt tokens", "new, in so many places", "stock", "irminsul", "faster"),
        (
            [
                f"{row['prompt_tokens']:,}",
                f"{row['computed']:,} in {row['gaps']}",
                f"{row['stock_ms']:,.0f} ms",
                f"{row['live_ms']:.0f} ms",
                f"{row['stock_ms'] / row['live_ms']:.1f} times",
            ]
            for row in rows
        ),
        numbers=True,
    )


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
    "graphs": "CUDA graphs (SGLang's default)",
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


def patterns() -> str:
    """What becomes of the tokens of each pattern, and of TTFT."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in read("serve_patterns")["rows"]:
        rows.setdefault(row["load"], {}).setdefault(row["server"], []).append(row)

    def share(row: dict[str, Any], *names: str) -> str:
        return f"{100 * sum(row['tokens'].get(name, 0) for name in names) / row['tokens']['prompt']:.0f} %"

    def ttft_of(of_server: list[dict[str, Any]], quantile: str) -> float:
        return statistics.median(row["ttft_ms"][quantile] for row in of_server)

    def cells(load: str, servers: dict[str, list[dict[str, Any]]]) -> list[str]:
        stock, live = servers["stock"], servers["live"]
        p50 = [ttft_of(of_server, "p50") for of_server in (stock, live)]
        return [
            load.replace("-", " ", 1).replace("-", ", "),
            share(stock[0], "prefix"),
            share(live[0], "prefix"),
            share(live[0], "approximate_prefix"),
            share(live[0], "shifted"),
            share(live[0], "computed"),
            *(f"{value:,.0f}" for value in p50),
            f"{p50[1] / p50[0]:.2f}",
            *(f"{ttft_of(of_server, 'p95'):,.0f}" for of_server in (stock, live)),
        ]

    header = (
        "pattern",
        *("prefix, stock", "prefix, live", "approximate prefix", "shifted", "computed, live"),
        *("TTFT stock", "TTFT live", "live / stock", "p95 stock", "p95 live"),
    )
    both = {load: servers for load, servers in rows.items() if len(servers) == 2}
    return markdown_table(header, (cells(*item) for item in both.items()), numbers=True)


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


TABLES: dict[str, Callable[[], str]] = {
    "ttft": lambda: ttft("ttft_graphs"),
    "ttft-eager": lambda: ttft("ttft_eager"),
    "ttft-short": ttft_short,
    "nothing-to-recover": nothing_to_recover,
    "equality": equality,
    "patterns": patterns,
    "rows-kernel": rows_kernel,
}

if __name__ == "__main__":
    sys.exit(main())
