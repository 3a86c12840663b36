"""Does a server with the plugin live through load: retraction, eviction, aborts, sessions, tenants, all at once?

    python benchmarks/sglang_load.py --out FILE --checkpoint smollm2-mla [--seconds 60] [--flags JSON]
    python benchmarks/sglang_load.py --out FILE --lite --configurations eager page64 graphs mixed --at-once 2

Robustness, not speed. Rounds of 16 to 32 requests at once meet a pool far too small for them: prompts of passages that
recur in another order behind new text, next turns of earlier requests, the same prompt twice; some with log
probabilities, with the plugin off, or with a tenant; some aborted. Every prompt is random token ids.

Then every slot of the pool must be free or in the tree, with none locked there; SGLang's own check of the pool runs
after every step and ends the server if a slot is lost. At last some of the requests are served again, each by itself on
an empty cache: greedy tokens of requests with nothing shifted should be the same up to the rounding of a batch; of the
others the share is reported and nothing asserted, as shifted reuse is approximate. ``--stock`` puts the same load on
SGLang without the plugin. Exit 1 if a server ended or a pool is not whole. The last line is one JSON object.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_child import SglangEngine
from sglang_equality import COMMON, CONFIGURATIONS, HOST, Keep, machine, resolved, run_all
from sglang_ttft import LITE, describe

PASSAGES = 16
EARLIER = 24
"""Requests that may have a next turn."""
CLASSES = ("prefix_tokens", "approximate_prefix_tokens", "shifted_tokens", "computed_tokens", "gaps", "declined_plans")
NEVER_SHIFTED = "nothing shifted"
SHIFTED = "shifted, derived or retracted"


@dataclass(frozen=True)
class Load:
    """Sizes of the load; pairs are the smallest and the largest."""

    seconds: float
    requests: tuple[int, int]
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    sample: int
    vocabulary: int


@dataclass
class Traffic:
    """Draws requests; the same seed and the same answers give the same ones."""

    load: Load
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    passages: list[list[int]] = field(default_factory=list)
    earlier: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        longest = self.load.prompt_tokens[1]
        self.passages = [self.fresh(self.rng.randint(longest // 20, longest // 3)) for _ in range(PASSAGES)]

    def fresh(self, n_tokens: int) -> list[int]:
        """Draw token ids that nobody has seen."""
        return [self.rng.randrange(3, self.load.vocabulary) for _ in range(n_tokens)]

    def prompt(self) -> list[int]:
        """Draw a prompt."""
        low, high = self.load.prompt_tokens
        if self.earlier and self.rng.random() < 0.25:
            return (self.rng.choice(self.earlier) + self.fresh(self.rng.randint(1, 60)))[:high]
        length = self.rng.randint(low, high)
        tokens = self.fresh(self.rng.randint(1, 80))
        while len(tokens) < length:
            tokens += self.rng.choice(self.passages) + self.fresh(self.rng.randint(0, 40))
        return tokens[:length]

    def round(self, takes_s: float) -> list[dict[str, Any]]:
        """Draw requests to be sent at once, to be aborted at any time of a round, which takes so long."""
        prompts = [self.prompt() for _ in range(self.rng.randint(*self.load.requests))]
        prompts[-1] = prompts[0]
        return [self.request(prompt, takes_s) for prompt in prompts]

    def request(self, prompt: list[int], takes_s: float) -> dict[str, Any]:
        """Draw what else is asked for."""
        sampling = {"temperature": 0, "max_new_tokens": self.rng.randint(*self.load.new_tokens), "ignore_eos": True}
        request: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
        kind = self.rng.random()
        if kind < 0.1:
            sampling["custom_params"] = {"irminsul": {"mode": "off"}}
        elif kind < 0.25:
            sampling["custom_params"] = {"irminsul": {"tenant": self.rng.choice("ab")}}
        elif kind < 0.3:
            request |= {"return_logprob": True, "top_logprobs_num": 4}
        if self.rng.random() < 0.15:
            request["abort_after_s"] = self.rng.uniform(0, takes_s)
        return request


def main() -> None:
    """Load, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--lite", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--requests", type=int, nargs=2, default=(16, 32))
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(500, 4000))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(128, 300))
    parser.add_argument("--sample", type=int, default=16, help="so many requests are served again by themselves")
    parser.add_argument("--configurations", nargs="+", default=["eager"], choices=CONFIGURATIONS, metavar="NAME")
    parser.add_argument("--at-once", type=int, default=1, help="so many configurations beside each other on the GPU")
    parser.add_argument("--stock", action="store_true", help="without the plugin")
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    if not arguments.lite and not arguments.checkpoint:
        parser.error("give --checkpoint or --lite")
    with tempfile.TemporaryDirectory() as name:
        if arguments.lite:
            (Path(name) / "config.json").write_text(json.dumps(LITE))
            model = {"model_path": name, "load_format": "dummy"}
        else:
            model = {"model_path": str(arguments.checkpoint)}
        flags = {
            **model,
            **COMMON,
            # Room for about eight of the longest requests, and next to none kept for what they will generate.
            "max_total_tokens": 32_768,
            "schedule_conservativeness": 0.05,
            "chunked_prefill_size": 2048,
            **({} if arguments.stock else {"radix_cache_backend": "irminsul"}),
        }
        load = Load(
            seconds=arguments.seconds,
            requests=tuple(arguments.requests),
            prompt_tokens=tuple(arguments.prompt_tokens),
            new_tokens=tuple(arguments.new_tokens),
            sample=arguments.sample,
            vocabulary=json.loads((Path(model["model_path"]) / "config.json").read_text())["vocab_size"],
        )
        who = "stock SGLang" if arguments.stock else "plugin"
        result = {
            "what": f"{who} under load, {describe(flags | arguments.flags)}",
            "model": "DeepSeek-V2-Lite shape, scaled random weights" if arguments.lite else arguments.checkpoint.name,
            **machine(),
            "configurations": {},
            "rows": [],
        }

        def run(name: str, keep: Keep) -> dict[str, Any]:
            configuration = CONFIGURATIONS[name]
            environment = {
                **configuration.environment,
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
                "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
                "PYTHONPATH": f"{HOST}:{os.environ.get('PYTHONPATH', '')}",
                **({"SGLANG_HOST_WEIGHTS": "scaled"} if arguments.lite else {}),
                **({"SGLANG_PLUGINS": "sglang_host"} if arguments.stock else {}),
            }
            own = {**flags, **configuration.flags, **arguments.flags}
            with SglangEngine(f"{name}-load", own, environment, arguments.logs, observe=True) as engine:
                engine.wait()
                return {
                    "flags": {**configuration.flags, **arguments.flags},
                    "environment": configuration.environment,
                    "resolved": resolved(engine),
                    **put_under_load(engine, load, keep),
                }

        run_all(arguments.configurations, arguments.at_once, run, result, arguments.out)


def put_under_load(engine: SglangEngine, load: Load, keep: Keep) -> dict[str, Any]:
    """Send rounds of requests until the time is over, then check what is left."""
    traffic = Traffic(load)
    counts: Counter[str] = Counter()
    forwards: Counter[str] = Counter()
    finished: list[tuple[dict[str, Any], dict[str, Any]]] = []
    end = time.monotonic() + load.seconds
    takes_s = 1.0
    while time.monotonic() < end:
        requests = traffic.round(takes_s)
        answer = engine.generate_apart(requests)
        takes_s = answer["seconds"]
        forwards.update(answer["forwards"])
        counts["rounds"] += 1
        for request, output in zip(requests, answer["outputs"], strict=True):
            count(counts, output)
            if not was_aborted(output):
                finished.append((request, output))
                traffic.earlier.append(request["input_ids"] + list(output["output_ids"]))
        traffic.earlier = traffic.earlier[-EARLIER:]
    counts["retraction_lines"] = engine.log.read_text(errors="replace").count("Retract requests.")
    pool = engine.pool()
    engine.flush()
    flushed = engine.pool()
    whole = pool["free"] + pool["in_tree"] == pool["slots"] and pool["free_request_slots"] == pool["request_slots"]
    empty = flushed["free"] == flushed["slots"]
    sample = random.Random(1).sample(finished, min(load.sample, len(finished)))
    for row in serve_again(engine, sample):
        keep(row)
    return {
        **({} if whole and empty else {"failed": "the pool is not whole"}),
        "counts": dict(counts),
        "forwards": dict(forwards),
        "pool": pool,
        "pool_after_flush": flushed,
    }


def was_aborted(output: dict[str, Any]) -> bool:
    """Say whether a request ended by an abort."""
    return bool(output["meta_info"]["finish_reason"]["type"] == "abort")


def count(counts: Counter[str], output: dict[str, Any]) -> None:
    """Add what became of one request."""
    meta = output["meta_info"]
    counts["requests"] += 1
    counts["aborted"] += was_aborted(output)
    counts["retractions"] += meta.get("num_retractions", 0)
    counts["prompt_tokens"] += meta.get("prompt_tokens", 0)
    counts["new_tokens"] += meta.get("completion_tokens", 0)
    for found in meta.get("irminsul") or []:
        counts[f"mode {found['mode']}"] += 1
        for name in CLASSES:
            counts[name] += found[name]


def serve_again(engine: SglangEngine, sample: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Serve requests again, each by itself on an empty cache; return what share of greedy tokens is the same."""
    same: dict[str, list[float]] = {NEVER_SHIFTED: [], SHIFTED: []}
    for request, output in sample:
        engine.flush()
        (alone,) = engine.generate_apart([{**request, "abort_after_s": None}])["outputs"]
        pairs = list(zip(alone["output_ids"], output["output_ids"], strict=True))
        before = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        found = (output["meta_info"].get("irminsul") or [{}])[0]
        # Counters are of a request's last admission; before it was retracted it may have been served from shifted rows.
        retracted = output["meta_info"].get("num_retractions", 0)
        derived = found.get("shifted_tokens", 0) + found.get("approximate_prefix_tokens", 0)
        same[SHIFTED if derived or retracted else NEVER_SHIFTED].append(before / len(pairs))
    return [
        {
            "requests": name,
            "served_again": len(shares),
            "all_greedy_tokens_same": sum(share == 1 for share in shares),
            "share_of_tokens_before_the_first_difference": round(sum(shares) / len(shares), 4),
        }
        for name, shares in same.items()
        if shares
    ]


if __name__ == "__main__":
    main()
