"""How much of the paper's five patterns does each matcher recover, and does a marker decide it?

    python benchmarks/patterns.py [--seed N] [--quick] [--json FILE] [--markdown FILE]

Prediction (written before the first full run; the levels are an earlier, independent measurement's, on other text and
with its own definitions of the patterns):

* recovered share of the tail, CDC / winnow32: agent_meta 96 / 97 %, sysvar 95 / 97 %, tool_variants 91 / 95 %,
  rerank 70 / 96 %, compact 24 / 46 %. So compact is lowest by far, rerank is where chunks lose most, and
  fixed128 <= cdc <= cdc_s1 <= winnow64 <= winnow32 <= oracle everywhere but where few distinct shifts flatter fixed128.
* a marker gains CDC at most a few points, most of them in rerank, and the winnowing matchers none: text alone
  re-synchronises the cuts. The paper reports about 1 % without and 77 % with a marker.
* control: the paper's chunker with a hash that never forgets (h = odd * h + gear) recovers about nothing in the second
  call of each body, marker or not, if its state survives a cut; that is the size of the collapse the paper reports.
  Later calls hide it, because several headers have one length. So read the second call of each body, not the mean.

Protocol: nothing here depends on the clock. Prompts only (replies are not cached), unbounded cache, each call served
in time order; runs of at least 32 tokens, any number of them, and all rows are donors; once more as the engines do it,
with the shipped policy and no copies of rows that stand behind copied ones. The controls are cut and looked up by the
few lines below and share no code with the replay; chunks of 32 to 512 tokens, equal token for token. Last line: one
JSON object.
"""

import argparse
import json
import os
import platform
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from numba import njit
from numpy.typing import NDArray

from irminsul.matching.cdc import MASK, MAX_CHUNK, MIN_CHUNK, cut_points, gear
from irminsul.registry import MATCHERS
from irminsul.trace.analysis import SHIPPED_MATCHER
from irminsul.trace.pattern_text.library import LIBRARY_VERSION
from irminsul.trace.patterns import PATTERNS, PatternCall, generate, marker_line
from irminsul.trace.records import CallInfo, Chat, LoggedCall, TokenLog
from irminsul.trace.replay import (
    COMPARED,
    ORACLE_LENGTHS,
    SHIPPED,
    PrefixReplay,
    ReplayConfig,
    replay_live,
    replay_matcher,
    replay_oracle,
    replay_prefix,
)
from irminsul.trace.token_log_builder import build_token_log
from irminsul.trace.tokenise import Tokeniser, load_tokeniser

# Replies are not cached: what is compared is the prompts.
CONFIG = ReplayConfig(replies=False)
QUICK_CALLS = 16
ODD = np.uint64(0x5851F42D4C957F2D)
CONTROLS = ("gear", "never forgets, reset at cuts", "never forgets")
Tokens = NDArray[np.int32]
Table = dict[str, dict[str, float]]


class Row(NamedTuple):
    """One pattern, with or without markers."""

    facts: dict[str, float]
    """Sizes and the exact prefix."""
    recovered: dict[str, float]
    """Per matcher, % of the tail."""
    second: dict[str, float]
    """Per matcher, % of the prompts that are the second of their body, reused as prefix or shifted."""
    oracle: dict[str, float]
    """Per run length, % of the tail."""
    live: dict[str, float]
    """The shipped setting as the engines carry it out."""
    computed: dict[str, float]
    """Per matcher, tokens of a mean prompt that are computed; markers lengthen prompts, so shares mislead there."""


def tokenised(calls: list[PatternCall], tokeniser: Tokeniser) -> TokenLog:
    """Tokenise calls as the analyser does."""
    logged = (
        LoggedCall(CallInfo("pattern", line, call.session, call.agent, call.ts), Chat(call.messages, call.tools))
        for line, call in enumerate(calls, start=1)
    )
    return build_token_log(logged, tokeniser)


def second_calls(log: TokenLog) -> NDArray[np.bool_]:
    """Say for each call whether it is the second of its body."""
    seen: Counter[str | None] = Counter()
    seconds = []
    for call in log:
        seen[call.info.session] += 1
        seconds.append(seen[call.info.session] == 2)
    return np.array(seconds)


def measure(log: TokenLog) -> Row:
    """Replay a log through every matcher and the oracle."""
    prefix = replay_prefix(log, CONFIG)
    second = second_calls(log)
    recovered, at_second, computed = {}, {}, {}
    for name in MATCHERS:
        found = replay_matcher(log, name, prefix, CONFIG).recovered
        recovered[name] = percent(found.sum(), prefix.tail.sum())
        computed[name] = round(float((prefix.tail - found).mean()))
        reused = (found + prefix.prefix)[second].sum()
        at_second[name] = percent(reused, prefix.prompt[second].sum())
    covered = replay_oracle(log, prefix, CONFIG).covered
    oracle = {str(length): percent(covered[length].sum(), prefix.tail.sum()) for length in ORACLE_LENGTHS}
    shipped = replay_live(log, SHIPPED_MATCHER, prefix, CONFIG)
    live = {
        "recovered, % of the tail": percent(shipped.recovered.sum(), prefix.tail.sum()),
        "computed, tokens a call": round(float(shipped.computed.mean())),
        "gaps, p50": int(np.median(shipped.gaps)),
        "approximate, % of prompt tokens": percent(shipped.approximate.sum(), prefix.prompt.sum()),
    }
    return Row(sizes(prefix), recovered, at_second, oracle, live, computed)


def sizes(prefix: PrefixReplay) -> dict[str, float]:
    """Describe prompts."""
    return {
        "calls": len(prefix.prompt),
        "p50": int(np.median(prefix.prompt)),
        "max": int(prefix.prompt.max()),
        "prefix": percent(prefix.prefix.sum(), prefix.prompt.sum()),
    }


def percent(part: float, whole: float) -> float:
    """Return a share in percent, to one decimal."""
    return round(100 * float(part) / max(1.0, float(whole)), 1)


# -- the control: the paper's chunker, with its hash and with one that never forgets --


@njit(cache=True)
def never_forgetting_cuts(tokens, gears, reset):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Cut as the paper does, but with h = odd * h + gear, whose low 7 bits depend on every token since the reset."""
    cuts = [0]
    h = np.uint64(0)
    for i in range(len(tokens)):
        h = h * ODD + gears[tokens[i]]
        length = i + 1 - cuts[-1]
        if length == MAX_CHUNK or (length >= MIN_CHUNK and h & np.uint64(MASK) == 0):
            cuts.append(i + 1)
            if reset:
                h = np.uint64(0)
    if cuts[-1] < len(tokens):
        cuts.append(len(tokens))
    return np.array(cuts)


def control_cuts(name: str, tokens: Tokens, gears: NDArray[np.uint64]) -> list[int]:
    """Cut tokens by one of CONTROLS."""
    if name == "gear":
        return [int(cut) for cut in cut_points(tokens)]
    return [int(cut) for cut in never_forgetting_cuts(tokens, gears, name.endswith("cuts"))]


def control(name: str, log: TokenLog, gears: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the tokens of each prompt that lie in chunks seen before; prefixes are not matched."""
    seen: set[bytes] = set()
    found = []
    for call in log:
        cuts = control_cuts(name, call.tokens, gears)
        chunks = [(start, end, call.tokens[start:end].tobytes()) for start, end in pairwise(cuts)]
        usable = [(start, end) for start, end, key in chunks if start >= COMPARED.carve_out and key in seen]
        found.append(sum(end - start for start, end in usable if end - start >= COMPARED.min_run))
        seen.update(key for _, _, key in chunks)
    return np.array(found)


def measure_controls(log: TokenLog) -> Table:
    """Return for each control the share of all prompts, and of the second of each body."""
    lengths = np.array([len(call.tokens) for call in log])
    top = max(int(call.tokens.max()) for call in log)
    gears = np.array([gear(token) for token in range(top + 1)], dtype=np.uint64)
    second = second_calls(log)
    table = {}
    for name in CONTROLS:
        found = control(name, log, gears)
        table[name] = {
            "all calls": percent(found.sum(), lengths.sum()),
            "2nd call of each body": percent(found[second].sum(), lengths[second].sum()),
        }
    return table


# -- report --


def machine() -> dict[str, object]:
    """Say what this ran on."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "text": LIBRARY_VERSION,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown(rows: dict[str, Row], controls: dict[str, Table], facts: dict[str, object], command: str) -> str:
    """Write the results as a document."""
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    most = SHIPPED.max_runs
    return "\n".join(
        [
            "# The synthetic patterns, measured",
            "",
            f"Command: `{command}`. Machine: {about}.",
            "Definitions: [docs/patterns.md](../docs/patterns.md). Prompts",
            "only (replies are not cached), unbounded cache, DeepSeek's tokenizer, runs of at least 32 tokens.",
            "Shifted reuse is approximate; these are token counts and say nothing about quality.",
            "",
            "## Recovered tokens, % of the tail behind the exact prefix",
            "",
            *table([(name, row.facts | row.recovered | row.oracle) for name, row in rows.items()]),
            "",
            "The last three columns are the oracle: tokens in any run of at least that length seen before.",
            "",
            "## Tokens to compute, a call",
            "",
            "Markers make prompts longer and are found again themselves, so compare these where they are used.",
            "",
            *table([(name, row.computed) for name, row in rows.items()]),
            "",
            "## The shipped setting, as the engines carry it out",
            "",
            f"Rows behind a copied one are approximate and never copied again; at most {most} runs; half or nothing.",
            "",
            *table([(name, row.live) for name, row in rows.items()]),
            "",
            "## The second call of each body: prefix and recovered tokens, % of these prompts",
            "",
            *table([(name, row.second) for name, row in rows.items() if row.second]),
            "",
            "(rerank has one body, so its second call is one prompt.)",
            "",
            "## Control: does the chunker's hash forget?",
            "",
            "agent_meta, tokens in chunks seen before, % of whole prompts; no prefix is matched.",
            "",
            *table([(f"{kind}: {name}", row) for kind, rows_ in controls.items() for name, row in rows_.items()]),
            "",
        ]
    )


def table(rows: list[tuple[str, dict[str, float]]]) -> list[str]:
    """Lay out named rows as a Markdown table."""
    columns = list(rows[0][1])
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    return lines + [f"| {name} | {' | '.join(str(row[column]) for column in columns)} |" for name, row in rows]


def main() -> None:
    """Measure, print, and write the JSON object."""
    parser = argparse.ArgumentParser(description="How much of the paper's patterns does each matcher recover?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CALLS} calls a pattern, to see it run")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    arguments = parser.parse_args()
    tokeniser = load_tokeniser()
    line = marker_line(tokeniser)
    rows: dict[str, Row] = {}
    controls: dict[str, Table] = {}
    for name in PATTERNS:
        for kind, marker in (("plain", None), ("markers", line)):
            calls = generate(name, calls=QUICK_CALLS if arguments.quick else None, seed=arguments.seed, marker=marker)
            log = tokenised(list(calls), tokeniser)
            row = rows[f"{name}, {kind}"] = measure(log)
            print(f"{name}, {kind}: {row.facts} {row.recovered} {row.oracle}", flush=True)
            if name == "agent_meta":
                controls[kind] = measure_controls(log)
                print(f"  {controls[kind]}", flush=True)
    command = f"python benchmarks/patterns.py --seed {arguments.seed}{' --quick' if arguments.quick else ''}"
    if arguments.markdown:
        arguments.markdown.parent.mkdir(exist_ok=True)
        arguments.markdown.write_text(markdown(rows, controls, machine(), command))
    report = {
        "benchmark": "patterns",
        "machine": machine(),
        "rows": {name: row._asdict() for name, row in rows.items()},
        "controls": controls,
    }
    text = json.dumps(report)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
