"""What does live shifted reuse make of the time to first token, beside stock SGLang in the same run?

Prediction, before the first run of the plugin (from an experiment with the same split of a batch and naive copies):
two gaps within 1.1 times the exact-prefix hit at the same number of computed tokens, five within 1.15, seventeen
within 1.5; nothing to recover within 2 per cent of stock, observing within 1; decode throughput within 1 per cent.

    python benchmarks/sglang_ttft.py --out FILE [--tokens 16384 32768 65536] [--repeats 5] [--graphs] [--flags JSON]

A model of DeepSeek-V2-Lite's shape with dummy weights (time does not depend on them), FA3, one GPU. Three engines run
side by side in one GPU, stock (no plugin loaded), irminsul, and irminsul in observe mode, and are called in turn. A
prompt is random token ids; its donor was served cold just before. Gaps: the first 200 tokens changed, 37 more inserted,
the last 512 new, and between them stretches of 32 changed tokens. ``prefix_hit_ms``: stock, a prompt that shares all
but as many tokens as the live one computes. ``nothing_to_recover``: prompts nobody has seen, and for the observing
engine also prompts that share a passage with what it has seen. Times are wall times of a whole request of one new
token; medians, with the smallest and the largest. The last line is one JSON object.
"""

import argparse
import datetime as dt
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sglang_child import SglangEngine

LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DUMMY = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "attention_backend": "fa3",
    "mem_fraction_static": 0.9,
}
"""Flags for a model without weights or tokenizer, on FlashAttention 3."""
NO_GRAPHS = {"disable_cuda_graph": True, "disable_prefill_cuda_graph": True}
HEAD, INSERTED, TAIL, MIDDLE = 200, 37, 512, 32
GAPS = (2, 5, 17, 65)
WARM_UP_TOKENS = 8000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--graphs", action="store_true", help="SGLang's default CUDA graphs; without: none")
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LITE))
        flags = {
            "model_path": folder,
            **DUMMY,
            "max_total_tokens": 250_000,
            "log_level": "info",
            **({} if arguments.graphs else NO_GRAPHS),
            **arguments.flags,
        }
        live_flags = {**flags, "radix_cache_backend": "irminsul"}
        with (
            SglangEngine("stock", flags, {"SGLANG_PLUGINS": "none"}, arguments.logs) as stock,
            SglangEngine("irminsul", live_flags, {}, arguments.logs) as live,
            SglangEngine("observe", live_flags, {"IRMINSUL_SGLANG_MODE": "observe"}, arguments.logs) as observe,
        ):
            for engine in (stock, live, observe):
                engine.wait()
            about = {
                "what": "TTFT with live shifted reuse, stock SGLang and exact-prefix hits, " + describe(flags),
                "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
                "commit": commit(),
                "gpu": gpu(),
                "versions": {name: version(name) for name in ("sglang", "torch", "triton", "irminsul-kv")},
            }
            result: dict[str, Any] = {}
            for result in measure(stock, live, observe, arguments.tokens, arguments.repeats):
                # Whatever ends the run, what was measured is kept.
                arguments.out.write_text(json.dumps(about | result, indent=1) + "\n")
    print(json.dumps(about | result))


def measure(
    stock: SglangEngine, live: SglangEngine, observe: SglangEngine, lengths: list[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Time every case, engines in turn; yield all there is after each."""
    rng = random.Random(0)
    for engine in (stock, live, observe):
        for _ in range(2):
            donor = fresh(rng, WARM_UP_TOKENS)
            engine.generate(donor, max_new_tokens=8)
            for gaps in GAPS:
                engine.generate(changed(rng, donor, gaps)[0])
    result: dict[str, Any] = {"rows": [], "nothing_to_recover": []}
    for n_tokens in lengths:
        for gaps in GAPS:
            result["rows"].append(one_case(rng, stock, live, n_tokens, gaps, repeats))
            print(json.dumps(result["rows"][-1]), flush=True)
            yield result
        result["nothing_to_recover"].append(nothing_to_recover(rng, stock, live, observe, n_tokens, repeats))
        print(json.dumps(result["nothing_to_recover"][-1]), flush=True)
        yield result
    yield result | {"decode": decode(rng, stock, live)}


def one_case(
    rng: random.Random, stock: SglangEngine, live: SglangEngine, n_tokens: int, gaps: int, repeats: int
) -> dict[str, Any]:
    """Time stock, a prefix hit and live reuse of prompts with so many gaps."""
    times: dict[str, list[float]] = {"stock": [], "prefix_hit": [], "live": []}
    info: dict[str, Any] = {}
    for _ in range(repeats):
        donor = fresh(rng, n_tokens)
        prompt, computed = changed(rng, donor, gaps)
        stock.generate(donor)
        times["stock"].append(stock.generate(prompt)["seconds"])
        hit = stock.generate(donor[: n_tokens - computed] + fresh(rng, computed))
        assert hit["outputs"][0]["meta_info"]["cached_tokens"] == n_tokens - computed, hit["outputs"][0]["meta_info"]
        times["prefix_hit"].append(hit["seconds"])
        live.generate(donor)
        answer = live.generate(prompt)
        times["live"].append(answer["seconds"])
        info = answer["outputs"][0]["meta_info"]["irminsul"][0]
        stock.flush()
        live.flush()
    return {
        "prompt_tokens": len(prompt),
        "gaps": info["gaps"],
        "computed": info["computed_tokens"],
        "shifted": info["shifted_tokens"],
        **{f"{name}_ms": milliseconds(values) for name, values in times.items()},
        **{f"{name}_ms_range": spread(values) for name, values in times.items()},
        "live_over_prefix_hit": round(statistics.median(times["live"]) / statistics.median(times["prefix_hit"]), 3),
    }


def nothing_to_recover(
    rng: random.Random, stock: SglangEngine, live: SglangEngine, observe: SglangEngine, n_tokens: int, repeats: int
) -> dict[str, Any]:
    """Time prompts of which nothing is reused: seen by nobody, or by an engine that only observes."""
    engines = {"stock": stock, "live": live, "observe": observe}
    times: dict[str, list[float]] = {name: [] for name in (*engines, "stock_moved", "observe_moved")}
    for repeat in range(repeats):
        prompt = fresh(rng, n_tokens)
        moved, _ = changed(rng, prompt, 5)
        # Each goes first as often as the others.
        for name in sorted(engines, key=lambda name: (list(engines).index(name) + repeat) % len(engines)):
            times[name].append(engines[name].generate(prompt)["seconds"])
            if name != "live":
                times[f"{name}_moved"].append(engines[name].generate(moved)["seconds"])
        for engine in engines.values():
            engine.flush()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "prompt_tokens": n_tokens,
        **{f"{name}_ms": milliseconds(values) for name, values in times.items()},
        **{f"{name}_ms_range": spread(values) for name, values in times.items()},
        "live_over_stock": round(medians["live"] / medians["stock"], 4),
        "observe_over_stock": round(medians["observe"] / medians["stock"], 4),
        "observe_over_stock_moved": round(medians["observe_moved"] / medians["stock_moved"], 4),
    }


def decode(rng: random.Random, stock: SglangEngine, live: SglangEngine, repeats: int = 3) -> dict[str, Any]:
    """Time sixteen short prompts of 256 new tokens, in both."""
    tokens: dict[str, list[float]] = {"stock": [], "live": []}
    for _ in range(repeats):
        prompts = [fresh(rng, 512) for _ in range(16)]
        for name, engine in (("stock", stock), ("live", live)):
            seconds = engine.generate(prompts, max_new_tokens=256, ignore_eos=True)["seconds"]
            tokens[name].append(16 * 256 / seconds)
    medians = {name: statistics.median(values) for name, values in tokens.items()}
    return {
        "requests": 16,
        "new_tokens": 256,
        **{f"{name}_tokens_per_s": round(value, 1) for name, value in medians.items()},
        **{f"{name}_range": [round(min(values), 1), round(max(values), 1)] for name, values in tokens.items()},
        "live_over_stock": round(medians["live"] / medians["stock"], 4),
    }


def fresh(rng: random.Random, n_tokens: int) -> list[int]:
    """Draw a prompt that nobody has seen."""
    return [rng.randrange(1000, 100_000) for _ in range(n_tokens)]


def changed(rng: random.Random, donor: list[int], gaps: int) -> tuple[list[int], int]:
    """Return a prompt that shares all but ``gaps`` stretches with its donor, and how many tokens those have."""
    body = donor[HEAD : len(donor) - TAIL - INSERTED]
    inner = gaps - 2
    for at in range(inner):
        start = (at + 1) * len(body) // (inner + 1)
        body[start : start + MIDDLE] = fresh(rng, MIDDLE)
    prompt = fresh(rng, HEAD + INSERTED) + body + fresh(rng, TAIL)
    return prompt, HEAD + INSERTED + TAIL + inner * MIDDLE


def milliseconds(values: list[float]) -> float:
    """Median, in ms."""
    return round(1000 * statistics.median(values), 1)


def spread(values: list[float]) -> list[float]:
    """Smallest and largest, in ms."""
    return [round(1000 * min(values), 1), round(1000 * max(values), 1)]


def describe(flags: dict[str, Any]) -> str:
    """Name the flags that matter."""
    shown = {name: value for name, value in flags.items() if name not in ("model_path", "log_level")}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


REVISION = "$Format:%H$"
"""Filled in by ``git archive``: where the code was unpacked there is no repository, or another one around it."""


def commit() -> str:
    """Revision of the tree, or unknown where there is none."""
    if not REVISION.startswith("$"):
        return REVISION
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return found.stdout.strip() or "unknown"


def gpu() -> str:
    """Name of the GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


if __name__ == "__main__":
    main()
