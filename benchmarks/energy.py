"""What does a prefill cost in energy: computed, found in the prefix cache, or copied from another position?

    python benchmarks/energy.py --out FILE [--models mla gqa mha hybrid] [--tokens 8192 32768] [--repeats 3] [--graphs]

Prediction: energy follows the tokens that are computed, not those that are reused; a shifted hit costs what a prefix
hit with as many computed tokens costs, within 10 per cent; half a prompt reused saves less than half.

Needs an NVIDIA GPU, SGLang 0.5.23 and nvidia-ml-py. Models have the shape of DeepSeek-V2-Lite (mla), Llama-3.1-8B
(gqa), Llama-2-7B with a longer context (mha) and Qwen3-Next-80B-A3B with an eighth of its experts and as many of them
active (hybrid: three of four layers keep a state in place of rows), with dummy weights. One model at a time: stock
SGLang, and for mla the plugin beside it. One request at a time, one new token. Each case of a length in turn, then all
again: so many readings as ``--repeats`` says; medians, with the smallest and the largest.

A reading is the difference of two values of NVML's total-energy counter, both read when it has just moved (every
100 ms on an H200), at least ``--seconds`` and five requests apart, and holds only requests of its case. The donor that
they share a passage with was served before; in all else each prompt is new. Every answer says how many tokens were
reused, and a case whose answers say something else has failed. Idle power is measured with the engines loaded, before
the first reading and after the last; their mean is taken off each reading for its whole length. ``net_j`` is what is
left for a request; ``gross_j`` is that and idle power for as long as the request takes, so that the pause until the
counter moves is in neither. Raw joules and seconds stand beside them.

The last line is one JSON object; before it the table that the paper's Table 1 is.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sglang_child import SglangEngine
from sglang_equality import last_error, machine
from sglang_ttft import DUMMY, HEAD, INSERTED, LITE, NO_GRAPHS, TAIL, describe

LEAST_REQUESTS = 5
"""Of a reading."""
WARM_UP = 2
"""Requests of a case before each reading of it; they also say how many prompts it will need."""
SETTLE_S = 2.0
"""Before idle power is measured: clocks and power come down slowly behind work."""
STUCK_S = 5.0
CHANCE = 4
"""Tokens that random prompts may share by chance."""
LOWEST_TOKEN, VOCABULARY = 1000, 32_000
"""Ids that all models have."""
SHARES = (25, 50, 75)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_3 = {
    **LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
LLAMA_2 = {
    **LLAMA,
    "intermediate_size": 11_008,
    "num_key_value_heads": 32,
    "vocab_size": 32_000,
    "rope_theta": 10_000.0,
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000_000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Model:
    """A shape, and how it is served."""

    attention: str
    config: dict[str, Any]
    kv_bytes_per_token: int
    state_bytes: int = 0
    """Of a sequence, whatever its length: what layers keep that have no rows."""
    shifts: bool = False
    """Whether the plugin serves it, too."""
    reused_in_steps_of: int = 1
    """A hit may end so many tokens earlier: states are kept at some positions only."""
    flags: dict[str, Any] = field(default_factory=dict)


BF16, FLOAT32 = 2, 4
MODELS = {
    "mla": Model("multi-head latent", LITE, 27 * (512 + 64) * BF16, shifts=True),
    "gqa": Model("grouped-query", LLAMA_3, 32 * 2 * 8 * 128 * BF16),
    # Rows of half a megabyte: a smaller pool.
    "mha": Model("multi-head", LLAMA_2, 32 * 2 * 32 * 128 * BF16, flags={"max_total_tokens": 150_000}),
    "hybrid": Model(
        "hybrid, gated delta net",
        QWEN3_NEXT,
        12 * 2 * 2 * 256 * BF16,
        state_bytes=36 * (32 * 128 * 128 * FLOAT32 + 8192 * 3 * BF16),
        reused_in_steps_of=256,
        # Left alone SGLang may choose a kernel here that is compiled at the first prefill.
        flags={"linear_attn_prefill_backend": "triton", "mem_fraction_static": 0.8},
    ),
}
COMMON = {
    **DUMMY,
    "max_total_tokens": 250_000,
    "log_level": "info",
}
STOCK = {"SGLANG_PLUGINS": "none"}
"""Environment of SGLang without the plugin."""
LIVE = {"IRMINSUL_SGLANG_MIN_KNOWN": "0"}
"""With it: a quarter of a prompt is copied here, too."""


class ReadingError(Exception):
    """A reading is not what its case says."""


# -- the counter -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """The counter when it had just moved."""

    seconds: float
    joules: float


@dataclass(frozen=True)
class Reading:
    """What the counter says of some requests."""

    joules: float
    """From mark to mark, as the GPU drew them."""
    seconds: float
    """From mark to mark."""
    request_seconds: tuple[float, ...]
    """Of each request, without what lies between them."""
    reused: int
    """Tokens of a prompt, the fewest that an answer told."""

    def per_request(self, idle_w: float) -> dict[str, float]:
        """Return energy, time and power of a request.

        Args:
            idle_w: power of the same GPU without work, in watts.
        """
        n_requests = len(self.request_seconds)
        seconds = sum(self.request_seconds) / n_requests
        net_j = (self.joules - idle_w * self.seconds) / n_requests
        gross_j = net_j + idle_w * seconds
        return {"gross_j": gross_j, "net_j": net_j, "seconds": seconds, "watts": gross_j / seconds}


class EnergyMeter:
    """Reads a counter of energy that moves in steps.

    Args:
        read_millijoules: reads the counter.
        clock: in seconds.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        read_millijoules: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._read = read_millijoules
        self._clock = clock
        self._sleep = sleep

    def mark(self) -> Mark:
        """Wait until the counter moves; ReadingError if it does not."""
        first, deadline = self._read(), self._clock() + STUCK_S
        while (value := self._read()) == first:
            if self._clock() > deadline:
                raise ReadingError(f"the energy counter has not moved for {STUCK_S:.0f} s; does this GPU have one?")
            self._sleep(0.001)
        return Mark(self._clock(), value / 1000)

    def idle_watts(self, seconds: float) -> float:
        """Return the mean power over at least so many seconds in which nobody asks for anything."""
        self._sleep(SETTLE_S)
        start = self.mark()
        self._sleep(seconds)
        end = self.mark()
        return (end.joules - start.joules) / (end.seconds - start.seconds)

    def read(self, request: Callable[[], tuple[float, int]], seconds: float) -> Reading:
        """Take a reading.

        Args:
            request: serves a request; returns how many seconds it took, and how many tokens were reused.
            seconds: that it spans at least.
        """
        start = self.mark()
        taken, reused = [], []
        while len(taken) < LEAST_REQUESTS or self._clock() - start.seconds < seconds:
            request_seconds, request_reused = request()
            taken.append(request_seconds)
            reused.append(request_reused)
        end = self.mark()
        return Reading(end.joules - start.joules, end.seconds - start.seconds, tuple(taken), min(reused))


def about_gpu() -> tuple[dict[str, Any], str]:
    """Describe the machine and name its GPU: of CUDA's device 0, which need not be NVML's."""
    import torch

    return machine(), str(torch.cuda.get_device_properties(0).uuid)


def in_child(function: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Call a function in a process that ends: what it makes on the GPU goes with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function).result()


def nvml_counter(uuid: str) -> Callable[[], int]:
    """Return what reads the total-energy counter of a GPU, in mJ."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))


# -- the cases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kind of prompt: which engine serves it, and how much of it was served before."""

    name: str
    column: str
    """Of the table."""
    shifted: bool
    reused: int
    """Tokens of the prompt."""


def cases_of(n_tokens: int, *, shifts: bool) -> list[Case]:
    """List the cases of a length; those of the plugin at last."""
    partial = {f"{share} %": n_tokens * share // 100 for share in SHARES}
    cases = [Case("miss", "miss", shifted=False, reused=0)]
    cases += [Case(f"{name} as prefix", name, shifted=False, reused=reused) for name, reused in partial.items()]
    cases += [Case("exact hit", "hit", shifted=False, reused=n_tokens - TAIL)]
    if shifts:
        cases += [Case(f"{name} shifted", name, shifted=True, reused=reused) for name, reused in partial.items()]
        cases += [Case("shifted hit", "hit", shifted=True, reused=n_tokens - HEAD - TAIL)]
    return cases


class Prompts:
    """A donor, and any number of prompts that share its passage and nothing else.

    Args:
        rng: draws token ids.
        case: what they share: a beginning, or a passage that moves by INSERTED tokens.
        n_tokens: of each prompt.
    """

    def __init__(self, rng: random.Random, case: Case, n_tokens: int) -> None:
        self._rng = rng
        self._n_tokens = n_tokens
        self._head = HEAD if case.shifted else 0
        self._passage = draw(rng, case.reused)
        # No longer than what is shared: a state that is kept for its end is one that can be used.
        self.donor = draw(rng, HEAD - INSERTED if case.shifted else 0) + self._passage
        self._ready: list[list[int]] = []

    def prepare(self, count: int) -> None:
        """Draw prompts before they are needed."""
        self._ready += [self._draw() for _ in range(count - len(self._ready))]

    def next(self) -> list[int]:
        """Return a prompt that nobody has seen."""
        return self._ready.pop() if self._ready else self._draw()

    def _draw(self) -> list[int]:
        tail = self._n_tokens - self._head - len(self._passage)
        return draw(self._rng, self._head) + self._passage + draw(self._rng, tail)


def draw(rng: random.Random, n_tokens: int) -> list[int]:
    """Draw token ids."""
    return rng.choices(range(LOWEST_TOKEN, VOCABULARY), k=n_tokens)


def check_reused(case: Case, info: dict[str, Any], slack: int) -> int:
    """Return how many tokens an answer says were reused as the case has it; ReadingError if it is another number.

    Args:
        case: the case.
        info: ``meta_info`` of an answer.
        slack: so many fewer are right, too.
    """
    prefix = info["cached_tokens"]
    shifted = info["irminsul"][0]["shifted_tokens"] if case.shifted else 0
    reused, other = (shifted, prefix) if case.shifted else (prefix, shifted)
    if not case.reused - slack - CHANCE <= reused <= case.reused + CHANCE or other > CHANCE:
        raise ReadingError(
            f"{case.name}: {case.reused:,} of {info['prompt_tokens']:,} tokens should be reused, but {prefix:,} were "
            f"found as prefix and {shifted:,} shifted"
        )
    return int(reused)


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(
    model: Model,
    engines: dict[bool, SglangEngine],
    meter: EnergyMeter,
    lengths: list[int],
    repeats: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Read every case; yield all there is after each reading.

    Args:
        model: what the engines serve.
        engines: stock, and under True the one that shifts.
        meter: of their GPU.
        lengths: of prompts, in tokens.
        repeats: readings of each case.
        seconds: that a reading spans at least.
    """
    rng = random.Random(0)
    readings: dict[tuple[int, Case], list[Reading]] = {
        (n_tokens, case): [] for n_tokens in lengths for case in cases_of(n_tokens, shifts=model.shifts)
    }
    failed: dict[tuple[int, Case], str] = {}
    idle = [meter.idle_watts(seconds)]
    for _ in range(repeats):
        for key, taken in readings.items():
            if key in failed:
                continue
            n_tokens, case = key
            try:
                taken.append(
                    take_reading(rng, case, n_tokens, engines[case.shifted], meter, seconds, model.reused_in_steps_of)
                )
            except ReadingError as error:
                failed[key] = str(error)
                print(error, file=sys.stderr, flush=True)
            yield summary(readings, failed, idle)
    idle.append(meter.idle_watts(seconds))
    yield summary(readings, failed, idle)


def take_reading(
    rng: random.Random, case: Case, n_tokens: int, engine: SglangEngine, meter: EnergyMeter, seconds: float, steps: int
) -> Reading:
    """Serve the donor, warm up, and read the counter over requests of a case alone."""
    prompts = Prompts(rng, case, n_tokens)

    def request() -> tuple[float, int]:
        answer = engine.generate(prompts.next())
        return answer["seconds"], check_reused(case, answer["outputs"][0]["meta_info"], steps - 1)

    engine.flush()
    if prompts.donor:
        engine.generate(prompts.donor)
    for at in range(WARM_UP):
        answer = engine.generate(prompts.next())
        if at == WARM_UP - 1:
            # The first may find less: a server that keeps states learns from it where one is wanted.
            check_reused(case, answer["outputs"][0]["meta_info"], steps - 1)
    prompts.prepare(max(LEAST_REQUESTS, math.ceil(1.2 * seconds / answer["seconds"])))
    return meter.read(request, seconds)


def summary(
    readings: dict[tuple[int, Case], list[Reading]], failed: dict[tuple[int, Case], str], idle: list[float]
) -> dict[str, Any]:
    """Take idle power off what was read."""
    idle_w = statistics.mean(idle)
    rows = []
    for key, taken in readings.items():
        n_tokens, case = key
        row: dict[str, Any] = {"prompt_tokens": n_tokens, "case": case.name, "column": case.column}
        row |= {"shifted": case.shifted, "readings": len(taken)}
        if taken:
            row |= {"reused": min(reading.reused for reading in taken), **medians(taken, idle_w)}
            row["raw"] = [raw(reading) for reading in taken]
        if key in failed:
            row["failed"] = failed[key]
        if taken or key in failed:
            rows.append(row)
    return {"idle_w": dict(zip(("before", "after"), (round(watts, 2) for watts in idle), strict=False)), "rows": rows}


def medians(readings: list[Reading], idle_w: float) -> dict[str, Any]:
    """Return the medians of energy, time and power of a request, and their smallest and largest."""
    each = [reading.per_request(idle_w) for reading in readings]
    values = {name: [one[name] for one in each] for name in each[0]}
    return {name: significant(statistics.median(of)) for name, of in values.items()} | {
        f"{name}_range": [significant(min(of)), significant(max(of))] for name, of in values.items()
    }


def raw(reading: Reading) -> dict[str, Any]:
    """Return what a reading counted, so that it can be worked out again."""
    return {
        "joules": round(reading.joules, 3),
        "seconds": round(reading.seconds, 4),
        "requests": len(reading.request_seconds),
        "request_seconds": round(sum(reading.request_seconds), 4),
    }


def significant(value: float) -> float:
    """Round to four digits."""
    return float(f"{value:.4g}")


# -- the table -------------------------------------------------------------------------------------------------------


def table(models: dict[str, dict[str, Any]]) -> str:
    """Return energy per request as Markdown, in the form of the paper's Table 1.

    Args:
        models: by name, as in the result.
    """
    columns = ["miss", *(f"{share} %" for share in SHARES), "hit"]
    lines = [
        "Joules a request, net of idle power (gross in brackets); a hit: all of the prompt is reused but its ends.",
        "",
        "| model | KV bytes a token | tokens | reused as | miss | 25 % | 50 % | 75 % | hit | a hit saves |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, model in models.items():
        for n_tokens in dict.fromkeys(row["prompt_tokens"] for row in model["rows"]):
            of_length = [row for row in model["rows"] if row["prompt_tokens"] == n_tokens]
            for shifted in dict.fromkeys(row["shifted"] for row in of_length):
                # A miss is a miss, whatever might have been reused.
                found = {
                    row["column"]: row for row in of_length if row["shifted"] == shifted or row["column"] == "miss"
                }
                cells = [cell(found.get(column)) for column in columns]
                where = [name, f"{model['kv_bytes_per_token']:,}", f"{n_tokens:,}", "shifted" if shifted else "prefix"]
                lines.append(f"| {' | '.join([*where, *cells, saving(found)])} |")
        if "failed" in model:
            lines.append(f"| {name} | failed: {model['failed'].replace('|', '/')} | | | | | | | | |")
    return "\n".join(lines)


def cell(row: dict[str, Any] | None) -> str:
    """Show a case."""
    if row is None:
        return "-"
    return f"{row['net_j']:.1f} ({row['gross_j']:.1f})" if "net_j" in row else "failed"


def saving(found: dict[str, dict[str, Any]]) -> str:
    """Show what a hit saves of a miss, net."""
    miss, hit = (found.get(column, {}).get("net_j") for column in ("miss", "hit"))
    return f"{100 * (1 - hit / miss):.0f} %" if miss and hit is not None else "-"


# -- the program -----------------------------------------------------------------------------------------------------


def run_model(
    name: str, flags: dict[str, Any], meter: EnergyMeter, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Start the engines of a model, measure, and close them; yield all there is after each reading."""
    model = MODELS[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        (Path(folder) / "config.json").write_text(json.dumps(model.config))
        own = {"model_path": folder, **flags, **model.flags, **arguments.flags}

        def start(kind: str, more: dict[str, Any], environment: dict[str, str]) -> SglangEngine:
            return stack.enter_context(SglangEngine(f"{name}-{kind}", own | more, environment, arguments.logs))

        engines = {False: start("stock", {}, STOCK)}
        if model.shifts:
            engines[True] = start("live", {"radix_cache_backend": "irminsul"}, LIVE)
        for engine in engines.values():
            engine.wait()
        about = {
            "attention": model.attention,
            "kv_bytes_per_token": model.kv_bytes_per_token,
            **({"state_bytes_per_sequence": model.state_bytes} if model.state_bytes else {}),
            "flags": describe(own),
        }
        for found in measure(model, engines, meter, arguments.tokens, arguments.repeats, arguments.seconds):
            yield about | found


def main() -> None:
    """Measure and print; SystemExit at the end if a model or a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="NAME")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=3, help="readings of each case")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a reading spans at least")
    parser.add_argument("--graphs", action="store_true", help="SGLang's default CUDA graphs; without: none")
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    if min(arguments.tokens) < 4 * (HEAD + TAIL) or arguments.repeats < 1 or arguments.seconds <= 0:
        parser.error(f"--tokens are at least {4 * (HEAD + TAIL)}, --repeats at least 1, --seconds more than 0")
    try:
        about, uuid = in_child(about_gpu)
        meter = EnergyMeter(nvml_counter(uuid))
    except Exception as error:  # noqa: BLE001  # whatever is missing: without a GPU and its counter there is nothing to do
        sys.exit(f"no energy counter: {type(error).__name__}: {error}")
    result = {
        "what": "energy of a prefill by NVML's total-energy counter, joules a request",
        **about,
        "gpu_uuid": uuid,
        "seconds_of_a_reading": arguments.seconds,
        "models": {},
    }
    run_models(arguments, meter, result)


def run_models(arguments: argparse.Namespace, meter: EnergyMeter, result: dict[str, Any]) -> None:
    """Measure one model after the other, and print; whatever ends the run, what was measured is in the file."""
    flags = COMMON | ({} if arguments.graphs else NO_GRAPHS)
    models = result["models"]
    for name in arguments.models:
        try:
            for found in run_model(name, flags, meter, arguments):
                models[name] = found
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        except (SystemExit, ReadingError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            # Of a model that ended on the way, what was read before stays beside the sentence.
            models.setdefault(name, {"rows": []})["failed"] = last_error(str(error))
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    result["table"] = table(models)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(result["table"])
    print(json.dumps(result))
    failed = [name for name, model in models.items() if "failed" in model]
    failed += [f"{name}: {row['case']}" for name, model in models.items() for row in model["rows"] if "failed" in row]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
