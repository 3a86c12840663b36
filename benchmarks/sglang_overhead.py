"""What does the plugin cost a scheduler, with much to reuse and with nothing, at 1, 16 and 64 running requests?

    python benchmarks/sglang_overhead.py --out FILE [--loads 1 16 64] [--repeats 3] [--no-graphs] [--flags JSON]

Prediction: mode off costs nothing that can be measured beside stock SGLang; observing less than 1 per cent of scheduler
time with nothing in common and 3 ms a request with a passage to find; a decode step less than 0.1 ms in any mode.

A model of DeepSeek-V2-Lite's shape with dummy weights, CUDA graphs, FA3, one GPU. Two engines side by side, stock (no
plugin loaded) and the plugin, called in turn, each with a profile of its scheduler (benchmarks/scheduler_profile.py). A
request's own mode is all that tells live, observe and off apart, so one engine with the plugin stands for the three.

A load is so many requests sent at once: prompts of 4,096 tokens, 128 new tokens each. ``passage``: between a new
beginning and a new end stands one of eight passages that was served before at another position; ``nothing``: all of it
is new. The cache is never emptied, so a load evicts what older ones left once the pool is full; the passages are served
again before each load that has them.

A row holds medians over the repeats: wall seconds of the load, new tokens a second, when the last request had its first
token, and of the scheduler the seconds of iterations that did work, in all and without waiting for the GPU; what the
parts of the plugin took of it, in ms a request, and the same for decode steps alone. ``measuring_share`` is what the
profile itself costs of the scheduler's time. ``ratios`` compares wall times. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from scheduler_profile import DECODE, HOST, PREFILL, WAITING
from sglang_child import SglangEngine
from sglang_equality import machine
from sglang_ttft import DUMMY, HEAD, INSERTED, LITE, NO_GRAPHS, TAIL, describe

PASSAGES = 8
WARM_UP = 16
"""Requests at once, of either kind on either engine, before anything is measured."""
LOWEST_TOKEN, VOCABULARY = 1000, 100_000
STOCK = "stock"
WITHOUT_PLUGIN = {"SGLANG_PLUGINS": "none"}
MODES = (STOCK, "off", "observe", "live")
PASSAGE, NOTHING = "passage", "nothing"
GRAPHS = {"cuda_graph_max_bs_decode": 64, "cuda_graph_max_bs_prefill": 2048}
"""SGLang's default CUDA graphs, for the sizes that occur."""
COMPARED = (("off", STOCK), ("observe", "off"), ("observe", STOCK), ("live", STOCK))


class Prompts:
    """Draws prompts, and the passages that some of them hold.

    Args:
        n_tokens: of each prompt.
    """

    def __init__(self, n_tokens: int) -> None:
        self._rng = random.Random(0)
        self._n_tokens = n_tokens
        self._passages = [self._draw(n_tokens - HEAD - TAIL) for _ in range(PASSAGES)]

    def donors(self) -> list[list[int]]:
        """Return prompts with the passages at another position."""
        return [self._draw(HEAD - INSERTED) + passage for passage in self._passages]

    def load(self, kind: str, count: int) -> list[list[int]]:
        """Return prompts of a kind."""
        if kind == NOTHING:
            return [self._draw(self._n_tokens) for _ in range(count)]
        return [self._draw(HEAD) + self._passages[at % PASSAGES] + self._draw(TAIL) for at in range(count)]

    def _draw(self, n_tokens: int) -> list[int]:
        return self._rng.choices(range(LOWEST_TOKEN, VOCABULARY), k=n_tokens)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 16, 64], help="requests at once")
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    if (
        min(arguments.loads) < 1
        or arguments.tokens < 2 * (HEAD + TAIL)
        or min(arguments.repeats, arguments.new_tokens) < 1
    ):
        parser.error(f"--loads, --repeats and --new-tokens are at least 1, --tokens at least {2 * (HEAD + TAIL)}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LITE))
        flags = {
            "model_path": folder,
            **DUMMY,
            # The largest load with its donors, and a little: what earlier loads left is evicted.
            "max_total_tokens": (max(arguments.loads) + PASSAGES + 4) * (arguments.tokens + arguments.new_tokens),
            "log_level": "info",
            **(NO_GRAPHS if arguments.no_graphs else GRAPHS),
            **arguments.flags,
        }
        with (
            SglangEngine(STOCK, flags, WITHOUT_PLUGIN, arguments.logs, profile=True) as stock,
            SglangEngine(
                "plugin", flags | {"radix_cache_backend": "irminsul"}, {}, arguments.logs, profile=True
            ) as plugin,
        ):
            stock.wait()
            plugin.wait()
            about = {
                "what": "what the plugin costs a scheduler, " + describe(flags),
                "prompt_tokens": arguments.tokens,
                "new_tokens": arguments.new_tokens,
                **machine(),
            }
            result: dict[str, Any] = {}
            engines = {mode: stock if mode == STOCK else plugin for mode in MODES}
            for result in measure(engines, Prompts(arguments.tokens), arguments):
                # Whatever ends the run, what was measured is kept.
                arguments.out.write_text(json.dumps(about | result, indent=1) + "\n")
    for row in result["rows"]:
        print(json.dumps(row), flush=True)
    print(json.dumps(about | result))


def measure(
    engines: dict[str, SglangEngine], prompts: Prompts, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Put every load on every engine, in turn, again and again; yield all there is after each."""
    for mode, kind in product((STOCK, "live"), (PASSAGE, NOTHING)):
        serve(engines[mode], mode, prompts, kind, min(WARM_UP, max(arguments.loads)), arguments.new_tokens)
    taken: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for repeat, load, kind in product(range(arguments.repeats), arguments.loads, (PASSAGE, NOTHING)):
        # Each goes first as often as the others.
        for at in range(len(MODES)):
            mode = MODES[(at + repeat) % len(MODES)]
            found = serve(engines[mode], mode, prompts, kind, load, arguments.new_tokens)
            taken.setdefault((load, kind, mode), []).append(found)
            rows = [row_of(key, repeats) for key, repeats in taken.items()]
            yield {"rows": rows, "ratios": ratios(rows)}


def serve(engine: SglangEngine, mode: str, prompts: Prompts, kind: str, count: int, new_tokens: int) -> dict[str, Any]:
    """Put a load on an engine; return what it and its scheduler took."""
    if kind == PASSAGE:
        engine.generate(prompts.donors())
    load = prompts.load(kind, count)
    custom = {} if mode == STOCK else {"custom_params": {"irminsul": {"mode": mode}}}
    engine.profile()
    answer = engine.generate(load, max_new_tokens=new_tokens, ignore_eos=True, **custom)
    infos = [output["meta_info"] for output in answer["outputs"]]
    counters = [info["irminsul"][0] for info in infos if info.get("irminsul")]
    return {
        "seconds": answer["seconds"],
        "tokens_per_s": count * new_tokens / answer["seconds"],
        "shifted_tokens_per_request": sum(found["shifted_tokens"] for found in counters) / count,
        "declined_plans": float(sum(found["declined_plans"] for found in counters)),
        **costs(engine.profile(), count),
    }


def costs(profile: dict[str, Any], count: int) -> dict[str, Any]:
    """Turn a profile into times a request and a decode step.

    Args:
        profile: as Profile.report returns it.
        count: requests.
    """
    of_kind = {kind: profile["seconds"][kind] for kind in (PREFILL, DECODE)}
    parts = {
        part: sum(seconds.get(part, 0.0) for seconds in of_kind.values())
        for part in {part for seconds in of_kind.values() for part in seconds}
    }
    busy = sum(parts.values())
    waiting = sum(seconds for part, seconds in parts.items() if part.endswith(WAITING))
    plugin = {part: seconds for part, seconds in parts.items() if part not in (HOST, WAITING)}
    steps = max(1, profile["iterations"][DECODE])
    decode_plugin = sum(seconds for part, seconds in of_kind[DECODE].items() if part in plugin)
    measuring = profile["calls"] * profile["cost_of_a_call_s"]
    return {
        "first_tokens_ms": 1000 * (profile["first_tokens_s"] or 0.0),
        "prefill_steps": float(profile["iterations"][PREFILL]),
        "decode_steps": float(profile["iterations"][DECODE]),
        "scheduler_s": busy,
        "scheduler_without_waiting_s": busy - waiting,
        "plugin_ms_per_request": 1000 * sum(plugin.values()) / count,
        "parts_ms_per_request": {part: 1000 * seconds / count for part, seconds in sorted(plugin.items())},
        "plugin_share": sum(plugin.values()) / busy,
        "plugin_share_without_waiting": sum(seconds for part, seconds in plugin.items() if not part.endswith(WAITING))
        / (busy - waiting),
        "decode_step_ms": 1000 * sum(of_kind[DECODE].values()) / steps,
        "plugin_ms_per_decode_step": 1000 * decode_plugin / steps,
        "measuring_share": measuring / busy,
    }


def row_of(key: tuple[int, str, str], repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a load, and of the wall times the smallest and the largest."""
    load, kind, mode = key
    row: dict[str, Any] = {"requests": load, "in_common": kind, "mode": mode, "repeats": len(repeats)}
    for name in repeats[0]:
        values = [found[name] for found in repeats]
        if name == "parts_ms_per_request":
            parts = sorted({part for value in values for part in value})
            row[name] = {part: median([value.get(part, 0.0) for value in values]) for part in parts}
        else:
            row[name] = median(values)
        if name in ("seconds", "first_tokens_ms", "plugin_ms_per_request"):
            row[f"{name}_range"] = [significant(min(values)), significant(max(values))]
    return row


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare wall times of modes at each load; only where both were measured."""
    found = {(row["requests"], row["in_common"], row["mode"]): row for row in rows}
    return [
        {
            "requests": load,
            "in_common": kind,
            "of": f"{mode} over {other}",
            "seconds": significant(found[load, kind, mode]["seconds"] / found[load, kind, other]["seconds"]),
            "first_tokens": significant(
                found[load, kind, mode]["first_tokens_ms"] / found[load, kind, other]["first_tokens_ms"]
            ),
        }
        for load, kind in dict.fromkeys((row["requests"], row["in_common"]) for row in rows)
        for mode, other in COMPARED
        if (load, kind, mode) in found and (load, kind, other) in found
    ]


def median(values: list[float]) -> float:
    """Median, to four digits."""
    return significant(statistics.median(values))


def significant(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
