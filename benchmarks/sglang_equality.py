"""Is the plugin's splice right, on a GPU: the same tokens and logits as SGLang where they should be the same?

    python benchmarks/sglang_equality.py --out FILE --checkpoint smollm2-mla --texts FILE.jsonl ... [--flags JSON]
    python benchmarks/sglang_equality.py --out FILE --lite

Stock SGLang gives the reference: a prompt served cold (``cold``), once more with its prefix cached (``hit``), and cold
again (``repeat``), which say how much its own numbers move. A second engine always misses its prefix tree
(SGLANG_RADIX_FORCE_MISS) and has no carve-out, so that a prompt served before comes back through the shifted path at
delta 0, behind the identical context: whole (``shifted``), and with 1, 4 or 16 gaps forced into it. There the only
difference from full computation is rounding. Turned by a wrong angle (``wrong 1``, ``wrong 37``) it must be far off.

Compared: the distribution of the first new token (KL over the reference's 64 best tokens, and the largest difference
of a log probability among its 16 best), and greedy tokens. ``--lite``: DeepSeek-V2-Lite's shape, random weights of the
scale of trained ones. A third engine, as an operator runs it, serves prompts in which nothing can be shifted: its
tokens must be stock's. The last line is one JSON object.
"""

import argparse
import datetime as dt
import json
import math
import os
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sglang_child import SglangEngine
from sglang_ttft import LITE, commit, describe, fresh, gpu

HOST = Path(__file__).parent.parent / "tests" / "sglang" / "host"
FORCED_GAPS = (0, 1, 4, 16)
WRONG = (1, 37)
NEW_TOKENS = 24


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--lite", action="store_true")
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--flags", type=json.loads, default={})
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.lite:
            (folder / "config.json").write_text(json.dumps(LITE))
            rng = random.Random(1)
            prompts = [fresh(rng, length) for length in arguments.tokens or (4000, 12_000, 30_000)]
            model = {"model_path": name, "load_format": "dummy"}
        else:
            prompts = read_prompts(arguments.checkpoint, arguments.texts, arguments.tokens or [700, 2000, 6000])
            model = {"model_path": str(arguments.checkpoint)}
        flags = {
            **model,
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "attention_backend": "fa3",
            "mem_fraction_static": 0.9,
            "max_total_tokens": 100_000 if arguments.lite else 60_000,
            "log_level": "info",
            **arguments.flags,
        }
        forced_file = folder / "forced.json"
        host = {"PYTHONPATH": f"{HOST}:{os.environ.get('PYTHONPATH', '')}"}
        weights = {"SGLANG_HOST_WEIGHTS": "scaled"} if arguments.lite else {}
        live_flags = {**flags, "radix_cache_backend": "irminsul"}
        always_miss = {
            "SGLANG_RADIX_FORCE_MISS": "1",
            "SGLANG_HOST_FORCED": str(forced_file),
            "IRMINSUL_SGLANG_CARVE_OUT": "0",
            "IRMINSUL_SGLANG_MIN_RUN": "16",
            "IRMINSUL_SGLANG_GAP_COST": "0",
            "IRMINSUL_SGLANG_MAX_RUNS": "64",
        }
        with (
            SglangEngine("stock", flags, host | weights | {"SGLANG_PLUGINS": "sglang_host"}, arguments.logs) as stock,
            SglangEngine("forced", live_flags, host | weights | always_miss, arguments.logs) as forced,
            SglangEngine("live", live_flags, host | weights, arguments.logs) as live,
        ):
            for engine in (stock, forced, live):
                engine.wait()
            rows = [row for prompt in prompts for row in compare(stock, forced, live, forced_file, prompt)]
    for row in rows:
        print(json.dumps(row))
    result = {
        "what": "plugin against stock SGLang, " + describe(flags),
        "model": "DeepSeek-V2-Lite shape, scaled random weights" if arguments.lite else arguments.checkpoint.name,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": commit(),
        "gpu": gpu(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton", "irminsul-kv")},
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def read_prompts(checkpoint: Path, texts: list[Path], lengths: list[int]) -> list[list[int]]:
    """Beginnings of documents, one of each file and length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = []
    for path in texts:
        documents = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        for at, length in enumerate(lengths):
            ids = tokenizer(documents[at % len(documents)], add_special_tokens=False).input_ids
            prompts.append(ids[:length])
    return prompts


def compare(
    stock: SglangEngine, forced: SglangEngine, live: SglangEngine, forced_file: Path, prompt: list[int]
) -> list[dict[str, Any]]:
    """Serve a prompt in every way."""
    stock.flush()
    cold = ask(stock, prompt)
    answers = {"hit": ask(stock, prompt)}
    stock.flush()
    answers["repeat"] = ask(stock, prompt)
    answers["live, nothing to shift"] = ask(live, prompt)
    forced_file.write_text("{}")
    answers["always-miss, cold"] = ask(forced, prompt)
    for gaps in FORCED_GAPS:
        forced_file.write_text(json.dumps({"gaps": gaps}))
        answers[f"shifted, {gaps} forced gaps"] = ask(forced, prompt)
    for wrong in WRONG:
        forced_file.write_text(json.dumps({"gaps": 4, "wrong_delta": wrong}))
        answers[f"shifted, 4 forced gaps, turned by {wrong} too much"] = ask(forced, prompt)
    forced.flush()
    return [{"prompt_tokens": len(prompt), "case": name, **differ(cold, answer)} for name, answer in answers.items()]


def ask(engine: SglangEngine, prompt: list[int]) -> dict[str, Any]:
    """Greedy tokens, the best log probabilities of the first, and the plugin's counters."""
    output = engine.generate(
        prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, return_logprob=True, top_logprobs_num=64
    )["outputs"][0]
    meta = output["meta_info"]
    return {
        "tokens": list(output["output_ids"]),
        "best": {token: logprob for logprob, token, _ in meta["output_top_logprobs"][0]},
        "counters": (meta.get("irminsul") or [None])[0],
    }


def differ(reference: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """How far an answer is from the reference."""
    p, q = reference["best"], answer["best"]
    lowest = min(q.values())
    kl = sum(math.exp(logprob) * (logprob - q.get(token, lowest)) for token, logprob in p.items())
    top = sorted(p, key=p.__getitem__, reverse=True)[:16]
    same = [a == b for a, b in zip(reference["tokens"], answer["tokens"], strict=False)]
    counters = answer["counters"] or {}
    return {
        "kl": round(kl, 5),
        "largest_logprob_difference": round(max(abs(p[token] - q.get(token, lowest)) for token in top), 4),
        "first_token_same": same[0],
        "greedy_tokens_same": same.index(False) if False in same else len(same),
        **{name: counters[name] for name in ("shifted_tokens", "computed_tokens", "gaps") if name in counters},
    }


if __name__ == "__main__":
    main()
