"""Is the plugin's splice right, on a GPU: the same tokens and logits as SGLang where they should be the same?

    python benchmarks/sglang_equality.py --out FILE --checkpoint smollm2-mla --texts FILE.jsonl ... [--flags JSON]
    python benchmarks/sglang_equality.py --out FILE --lite
    ... --configurations eager graphs page64 --at-once 2

Stock SGLang gives the reference: a prompt served cold (``cold``), once more with its prefix cached (``hit``), and cold
again (``repeat``), which say how much its own numbers move. A second engine always misses its prefix tree
(SGLANG_RADIX_FORCE_MISS) and has no carve-out, so that a prompt served before comes back through the shifted path at
delta 0, behind the identical context: whole (``shifted``), and with 1, 4 or 16 gaps forced into it. There the only
difference from full computation is rounding. Turned by a wrong angle (``wrong 1``, ``wrong 37``) it must be far off.

The fair pair: all but the last 64, 512 or 2,048 tokens are served first, then the whole prompt. Stock takes the first
part from its tree, the plugin copies it, and both compute the same rest over the same rows (prediction: no difference
where both take the same form of attention). The rest stands there backwards, so that nothing of it is found elsewhere.
With 512 computed beside 4 forced gaps the plugin takes the up-projected form, with 2,048 in any case.

A batch: all prompts, served before and with 4 gaps forced into each, and between them as many new ones (the same tokens
backwards) in one call, each against stock's cold run by itself; stock's own cold batch says what batching changes. Once
more without log probabilities, as SGLang puts prefill and decode into one batch only where nobody asks for them.

``--configurations``: each is run with three engines of its own, one configuration after the other or ``--at-once`` so
many beside each other on the GPU. FILE is written after each row, so that a run that is cut short keeps what it has.

Compared: the distribution of the first new token (KL over the reference's 64 best tokens, and the largest difference
of a log probability among its 16 best), and greedy tokens. ``forwards``: the forms of attention of the prefills of the
call. ``--lite``: DeepSeek-V2-Lite's shape, random weights of the scale of trained ones. A third engine, as an operator
runs it, serves prompts in which nothing can be shifted: its tokens must be stock's. The last line is one JSON object.
"""

import argparse
import datetime as dt
import json
import math
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parent))
from sglang_child import SglangEngine
from sglang_ttft import LITE, NO_GRAPHS, commit, describe, fresh, gpu

HOST = Path(__file__).parent.parent / "tests" / "sglang" / "host"
FORCED_GAPS = (0, 1, 4, 16)
WRONG = (1, 37)
TAILS = (64, 512, 2048)
PAGE = 64
"""Beginnings that are served first end at the border of a page of this many tokens, in every configuration."""
GAPS_OF_BATCH = 4

Keep: TypeAlias = Callable[[dict[str, Any]], None]
"""Takes a row of the result."""


@dataclass(frozen=True)
class Configuration:
    """A mode of SGLang that the plugin accepts; stock runs in the same."""

    flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


UP_PROJECTED = {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "0"}
CONFIGURATIONS = {
    "eager": Configuration(NO_GRAPHS),
    # SGLang's default for both phases, captured for fewer sizes so that the start does not take minutes.
    "graphs": Configuration({"cuda_graph_max_bs_decode": 32, "cuda_graph_max_bs_prefill": 2048}),
    "page64": Configuration({**NO_GRAPHS, "page_size": 64}),
    "page64-graphs": Configuration(
        {"page_size": 64, "cuda_graph_max_bs_decode": 32, "cuda_graph_max_bs_prefill": 2048}
    ),
    "no-overlap": Configuration({**NO_GRAPHS, "disable_overlap_schedule": True}),
    "absorbed": Configuration(NO_GRAPHS, {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "1000000000"}),
    "one-shot": Configuration(NO_GRAPHS, UP_PROJECTED),
    "chunked-kv": Configuration(NO_GRAPHS, {**UP_PROJECTED, "SGLANG_MAX_KV_CHUNK_CAPACITY": "2048"}),
    "mixed": Configuration({**NO_GRAPHS, "enable_mixed_chunk": True, "chunked_prefill_size": 1024}),
}
RESOLVED = ("page_size", "chunked_prefill_size", "enable_mixed_chunk", "disable_overlap_schedule", "attention_backend")
COMMON = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "attention_backend": "fa3",
    "mem_fraction_static": 0.9,
    "sleep_on_idle": True,  # many engines share the cores, and only one of three has work
    "log_level": "info",
}


@dataclass(frozen=True)
class Engines:
    """The three of a configuration."""

    stock: SglangEngine
    forced: SglangEngine
    live: SglangEngine
    forced_file: Path
    """Where the second reads what is forced."""
    new_tokens: int

    def force(self, **plans: int) -> None:
        """Force plans from now on; nothing: none."""
        self.forced_file.write_text(json.dumps(plans))


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--lite", action="store_true")
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--configurations", nargs="+", default=["eager"], choices=CONFIGURATIONS, metavar="NAME")
    parser.add_argument("--at-once", type=int, default=1, help="so many configurations beside each other on the GPU")
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    if not arguments.lite and not (arguments.checkpoint and arguments.texts):
        parser.error("give --checkpoint and --texts, or --lite")
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
            **COMMON,
            # A batch locks its donors and takes as many slots again, twice.
            "max_total_tokens": 200_000 if arguments.lite else 100_000,
        }
        result = {
            "what": "plugin against stock SGLang, " + describe({**flags, **arguments.flags}),
            "model": "DeepSeek-V2-Lite shape, scaled random weights" if arguments.lite else arguments.checkpoint.name,
            **machine(),
            "configurations": {},
            "rows": [],
        }

        def run(name: str, keep: Keep) -> dict[str, Any]:
            return run_configuration(
                name,
                flags,
                arguments.flags,
                prompts,
                arguments.new_tokens,
                folder,
                arguments.logs,
                keep,
                lite=arguments.lite,
            )

        run_all(arguments.configurations, arguments.at_once, run, result, arguments.out)


def machine() -> dict[str, Any]:
    """Say when, of what and where a result is."""
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": commit(),
        "gpu": gpu(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton", "irminsul-kv")},
    }


def resolved(engine: SglangEngine) -> dict[str, Any]:
    """Return what SGLang made of the flags of a configuration, so that a result says what ran."""
    found = engine.resolved(("cuda_graph_config", *RESOLVED))
    graphs = found.pop("cuda_graph_config")
    return {
        f"{phase}_graphs": {name: graphs[phase][name] for name in ("backend", "max_bs")} for phase in graphs
    } | found


def run_all(
    names: list[str],
    at_once: int,
    run: Callable[[str, Keep], dict[str, Any]],
    result: dict[str, Any],
    out: Path,
) -> None:
    """Run configurations, add what each found to a result and write it; SystemExit at the end if one failed.

    Args:
        names: of configurations.
        at_once: so many beside each other.
        run: gives rows away one by one, and returns ``flags``, ``environment``, ... of a configuration, or raises.
        result: gets ``configurations``, by name, and all ``rows``.
        out: the file, written after each row and each configuration: a run that is cut short keeps what it has.
    """
    writing = Lock()

    def keep(name: str, row: dict[str, Any]) -> None:
        with writing:
            result["rows"].append({"configuration": name, **row})
            print(json.dumps(result["rows"][-1]), flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(at_once) as threads:
        running = {threads.submit(run, name, partial(keep, name)): name for name in names}
        for done in as_completed(running):
            name = running[done]
            try:
                found = done.result()
            except (SystemExit, Exception) as error:  # noqa: BLE001  # whatever it is, the other configurations go on
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                found = {"failed": last_error(f"{type(error).__name__}: {error}")}
            with writing:
                result["configurations"][name] = found
                out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if failed := [name for name, found in result["configurations"].items() if found.get("failed")]:
        sys.exit(f"failed: {', '.join(failed)}")


def last_error(log: str) -> str:
    """Return the last error in a log, or its last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[-1])


def run_configuration(
    name: str,
    flags: dict[str, Any],
    more_flags: dict[str, Any],
    prompts: list[list[int]],
    new_tokens: int,
    folder: Path,
    logs: Path | None,
    keep: Keep,
    *,
    lite: bool,
) -> dict[str, Any]:
    """Compare in one configuration, with engines of its own; ``keep`` is given each row."""
    configuration = CONFIGURATIONS[name]
    forced_file = folder / f"forced-{name}.json"
    own = {**flags, **configuration.flags, **more_flags}
    live_own = {**own, "radix_cache_backend": "irminsul"}
    environment = {
        **configuration.environment,
        "PYTHONPATH": f"{HOST}:{os.environ.get('PYTHONPATH', '')}",
        **({"SGLANG_HOST_WEIGHTS": "scaled"} if lite else {}),
    }
    always_miss = {
        "SGLANG_RADIX_FORCE_MISS": "1",
        "SGLANG_HOST_FORCED": str(forced_file),
        "IRMINSUL_SGLANG_CARVE_OUT": "0",
        "IRMINSUL_SGLANG_MIN_RUN": "16",
        "IRMINSUL_SGLANG_GAP_COST": "0",
        "IRMINSUL_SGLANG_MIN_KNOWN": "0",
        "IRMINSUL_SGLANG_MAX_RUNS": "64",
    }
    with ExitStack() as stack:

        def start(kind: str, own: dict[str, Any], more: dict[str, str]) -> SglangEngine:
            engine = SglangEngine(f"{name}-{kind}", own, environment | more, logs, observe=True)
            return stack.enter_context(engine)

        engines = Engines(
            stock=start("stock", own, {"SGLANG_PLUGINS": "sglang_host"}),
            forced=start("forced", live_own, always_miss),
            live=start("live", live_own, {}),
            forced_file=forced_file,
            new_tokens=new_tokens,
        )
        for engine in (engines.stock, engines.forced, engines.live):
            engine.wait()
        for prompt in prompts:
            for row in chain(compare(engines, prompt), compare_tails(engines, prompt)):
                keep(row)
        for row in compare_batch(engines, prompts):
            keep(row)
        ran = resolved(engines.stock)
    return {
        "flags": {**configuration.flags, **more_flags},
        "environment": configuration.environment,
        "resolved": ran,
    }


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


def compare(engines: Engines, prompt: list[int]) -> Iterator[dict[str, Any]]:
    """Serve a prompt in every way; all against stock's cold run."""
    cold = ask_cold(engines, engines.stock, prompt)
    answers = {"hit": ask(engines, engines.stock, prompt)}
    answers["repeat"] = ask_cold(engines, engines.stock, prompt)
    answers["live, nothing to shift"] = ask_cold(engines, engines.live, prompt)
    engines.force()
    answers["always-miss, cold"] = ask_cold(engines, engines.forced, prompt)
    for gaps in FORCED_GAPS:
        engines.force(gaps=gaps)
        answers[f"shifted, {gaps} forced gaps"] = ask(engines, engines.forced, prompt)
    for wrong in WRONG:
        engines.force(gaps=4, wrong_delta=wrong)
        answers[f"shifted, 4 forced gaps, turned by {wrong} too much"] = ask(engines, engines.forced, prompt)
    for case, answer in answers.items():
        yield row_of(case, prompt, "cold", cold, answer)


def compare_tails(engines: Engines, prompt: list[int]) -> Iterator[dict[str, Any]]:
    """Serve all but the last tokens of a prompt, then all: stock takes them from its tree, the plugin copies them."""
    whole = prompt[: len(prompt) // PAGE * PAGE]
    for tail in TAILS:
        if len(whole) < 2 * tail:
            continue
        first = whole[:-tail]
        prompt = first + whole[-tail:][::-1]
        cold = ask_cold(engines, engines.stock, prompt)
        ask_cold(engines, engines.stock, first)
        hit_case, hit = f"stock's hit, last {tail} computed", ask(engines, engines.stock, prompt)
        yield row_of(hit_case, prompt, "cold", cold, hit)
        for gaps in (0, 4):
            engines.force()
            ask_cold(engines, engines.forced, first)
            engines.force(gaps=gaps)
            answer = ask(engines, engines.forced, prompt)
            case = f"shifted, last {tail} computed" + (f", {gaps} forced gaps" if gaps else "")
            yield row_of(case, prompt, "cold", cold, answer)
            yield row_of(case, prompt, hit_case, hit, answer)


def compare_batch(engines: Engines, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Serve prompts with forced gaps, and new prompts between them, in one call."""
    batch = [tokens for prompt in prompts for tokens in (prompt[::-1], prompt)]
    cold = [ask_cold(engines, engines.stock, prompt) for prompt in batch]
    for logprobs in (True, False):
        engines.stock.flush()
        stock = ask_all(engines, engines.stock, batch, logprobs=logprobs)
        engines.forced.flush()
        engines.force()
        for prompt in prompts:
            ask(engines, engines.forced, prompt)
        engines.force(gaps=GAPS_OF_BATCH)
        forced = ask_all(engines, engines.forced, batch, logprobs=logprobs)
        where = "in a batch" if logprobs else "in a batch, no log probabilities"
        for at, prompt in enumerate(batch):
            kind = f"shifted, {GAPS_OF_BATCH} forced gaps" if at % 2 else "new prompt"
            yield row_of(f"{where}: stock, cold", prompt, "cold", cold[at], stock[at])
            yield row_of(f"{where}: {kind}", prompt, "cold", cold[at], forced[at])


def ask_cold(engines: Engines, engine: SglangEngine, prompt: list[int]) -> dict[str, Any]:
    """Serve one prompt on an empty cache."""
    engine.flush()
    return ask(engines, engine, prompt)


def ask(engines: Engines, engine: SglangEngine, prompt: list[int]) -> dict[str, Any]:
    """Serve one prompt."""
    return ask_all(engines, engine, [prompt])[0]


def ask_all(
    engines: Engines, engine: SglangEngine, prompts: list[list[int]], *, logprobs: bool = True
) -> list[dict[str, Any]]:
    """Serve prompts in one call.

    Returns:
        For each its greedy tokens, the best log probabilities of the first (none unless asked for), and the counters;
        for all of them together the forms of attention.
    """
    asked = {"return_logprob": True, "top_logprobs_num": 64} if logprobs else {}
    found = engine.generate(prompts, max_new_tokens=engines.new_tokens, ignore_eos=True, **asked)
    return [
        {
            "tokens": list(output["output_ids"]),
            "best": {token: value for value, token, _ in output["meta_info"].get("output_top_logprobs", [[]])[0]},
            "cached_tokens": output["meta_info"]["cached_tokens"],
            "counters": (output["meta_info"].get("irminsul") or [{}])[0],
            "forwards": found["forwards"],
        }
        for output in found["outputs"]
    ]


def row_of(
    case: str, prompt: list[int], against: str, reference: dict[str, Any], answer: dict[str, Any]
) -> dict[str, Any]:
    """Return one row of the result: how far an answer is from the reference."""
    same = [a == b for a, b in zip(reference["tokens"], answer["tokens"], strict=True)]
    counters = ("shifted_tokens", "computed_tokens", "gaps", "declined_plans")
    return {
        "prompt_tokens": len(prompt),
        "case": case,
        "against": against,
        **(distance(reference["best"], answer["best"]) if answer["best"] else {}),
        "first_token_same": same[0],
        "greedy_tokens_same": same.index(False) if False in same else len(same),
        "cached_tokens": answer["cached_tokens"],
        **{name: answer["counters"][name] for name in counters if name in answer["counters"]},
        "forwards": answer["forwards"],
    }


def distance(p: dict[int, float], q: dict[int, float]) -> dict[str, float]:
    """Compare the best log probabilities of a token with those of a reference, p."""
    lowest = min(q.values())
    kl = sum(math.exp(logprob) * (logprob - q.get(token, lowest)) for token, logprob in p.items())
    top = sorted(p, key=p.__getitem__, reverse=True)[:16]
    difference = max(abs(p[token] - q.get(token, lowest)) for token in top)
    return {"kl": round(kl, 5), "largest_logprob_difference": round(difference, 4)}


if __name__ == "__main__":
    main()
