"""Play prompts on two engines that hold the same model, one with prefix caching alone and one live, and compare.

Both engines see the same prompts in the same order, one at a time, so both caches hold the same texts. Which engine
goes first alternates from prompt to prompt, so that a machine that slows down or speeds up favours neither.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from irminsul.demo.oracle import Oracle
from irminsul.demo.prompts import Prompt, scenario_prompts, trace_prompts
from irminsul.demo.report import live_progress, print_report
from irminsul.demo.results import DemoReport, RequestResult, write_json
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.loading import load_model, load_tokenizer
from irminsul.engine.types import Request, SamplingParams, StepOutput, Usage
from irminsul.errors import InputError
from irminsul.machine import describe_machine
from irminsul.output_files import require_writable
from irminsul.plan import Mode

MAX_TOKENS = 4
"""Length of each answer: enough to put an output into the cache, short enough that prefill is what is measured."""
_WARM_UP_TOKENS = 256
_WARM_UP_SHIFT = 32


class DemoEngine(Protocol):
    """What the demo needs of an engine."""

    max_prompt_tokens: int
    on_first_logits: Callable[[str, torch.Tensor], None] | None
    """Called with the request id and the logits of the first token, float32, shape [vocab]."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request."""
        ...

    def step(self) -> list[StepOutput]:
        """Run one forward; return the tokens drawn."""
        ...


@dataclass(frozen=True, eq=False)
class _Played:
    """One prompt on one engine."""

    output: tuple[int, ...]
    usage: Usage
    ttft: float
    first_logits_V: torch.Tensor
    """Shape [vocab], float32."""


def demo_command(
    *,
    checkpoint: Path,
    traces: Sequence[Path] = (),
    limit: int = 20,
    json_path: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    console: Console | None = None,
) -> DemoReport:
    """Run the demo and print its table.

    Args:
        checkpoint: directory of the model and its tokenizer.
        traces: logs to replay, a scenario each; the demo's own conversations if there are none.
        limit: calls taken of each log.
        json_path: where to write the report as JSON.
        device: cpu or cuda.
        dtype: of weights and rows.
        console: where to print; standard output by default.

    Raises:
        InputError: a log, the checkpoint, device, dtype or json_path cannot be used.
    """
    if json_path is not None:
        require_writable(json_path, inputs=traces)
    tokenizer = load_tokenizer(checkpoint)
    # Encoded before the model is loaded: a bad log is refused at once.
    prompts = list(trace_prompts(traces, limit, tokenizer) if traces else scenario_prompts(tokenizer))
    model = load_model(checkpoint, device=device, dtype=dtype)
    report = compare(
        Engine(model, EngineConfig(mode=Mode.OFF)),
        Engine(model, EngineConfig(mode=Mode.LIVE)),
        prompts,
        device=device,
        dtype=dtype,
        console=console or Console(),
    )
    if json_path is not None:
        write_json(report, json_path)
    return report


def compare(
    server_prefix: DemoEngine,
    server_live: DemoEngine,
    prompts: Sequence[Prompt],
    *,
    device: str,
    dtype: str,
    console: Console,
) -> DemoReport:
    """Run the demo on two engines under a progress bar and print its table.

    Raises:
        InputError: no prompt is short enough for the engines.
    """
    longest = min(server_prefix.max_prompt_tokens, server_live.max_prompt_tokens) - MAX_TOKENS
    played = [prompt for prompt in prompts if len(prompt.token_ids) <= longest]
    if not played:
        raise InputError(f"none of the {len(prompts)} prompts has at most {longest} tokens, the most this model takes")
    with live_progress(console, len(played)) as progress:
        results = run_demo(server_prefix, server_live, played, progress)
    report = DemoReport(results, skipped=len(prompts) - len(played), machine=describe_machine(device, dtype))
    print_report(console, report)
    return report


def run_demo(
    server_prefix: DemoEngine,
    server_live: DemoEngine,
    prompts: Sequence[Prompt],
    progress: Callable[[RequestResult], None],
) -> tuple[RequestResult, ...]:
    """Play each prompt on both engines, greedily; scenarios are namespaces of their own.

    Args:
        server_prefix: an idle engine in mode off.
        server_live: an idle engine in mode live with the same model.
        prompts: at least one, in the order they are sent; each fits the engines with MAX_TOKENS more.
        progress: called after each prompt.

    Returns:
        The comparison of each prompt.
    """
    for engine in (server_prefix, server_live):
        _warm_up(engine, prompts[0].token_ids)
    oracle = Oracle()
    sent: Counter[str] = Counter()
    results = []
    for index, prompt in enumerate(prompts):
        sent[prompt.scenario] += 1
        order = (server_prefix, server_live) if index % 2 == 0 else (server_live, server_prefix)
        played = {
            id(engine): _play(engine, f"demo-{index}", f"demo/{prompt.scenario}", prompt.token_ids) for engine in order
        }
        full, live = played[id(server_prefix)], played[id(server_live)]
        result = RequestResult(
            scenario=prompt.scenario,
            number=sent[prompt.scenario],
            prefix_caching=full.usage,
            live=live.usage,
            oracle=oracle.reusable(prompt.scenario, prompt.token_ids, prefix=full.usage.prefix),
            ttft_prefix=full.ttft,
            ttft_live=live.ttft,
            first_token_agrees=full.output[0] == live.output[0],
            kl_first=kl_divergence(full.first_logits_V, live.first_logits_V),
        )
        oracle.remember(prompt.scenario, (*prompt.token_ids, *full.output))
        results.append(result)
        progress(result)
    return tuple(results)


def _warm_up(engine: DemoEngine, token_ids: tuple[int, ...]) -> None:
    """Run everything once that compiles or allocates on first use, a shifted hit included, in a namespace of its own."""
    text = token_ids[:_WARM_UP_TOKENS]
    _play(engine, "warm-up-1", "warm-up", text)
    _play(engine, "warm-up-2", "warm-up", text[_WARM_UP_SHIFT:] or text)


def _play(engine: DemoEngine, request_id: str, namespace: str, token_ids: tuple[int, ...]) -> _Played:
    logits: list[torch.Tensor] = []
    engine.on_first_logits = lambda _, logits_V: logits.append(logits_V.detach().clone())
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    ttft = 0.0
    outputs: list[StepOutput] = []
    start = time.perf_counter()
    engine.submit(Request(request_id, token_ids, sampling, cache_salt=namespace))
    while engine.has_work:
        drawn = engine.step()
        if drawn and not outputs:
            ttft = time.perf_counter() - start
        outputs += drawn
    engine.on_first_logits = None
    assert outputs, "an engine ended a request without a token"
    usage = outputs[0].usage
    assert usage is not None, outputs[0]
    assert len(logits) == 1, len(logits)
    tokens = tuple(output.token_id for output in outputs)
    return _Played(tokens, usage, ttft, logits[0])


def kl_divergence(full_V: torch.Tensor, live_V: torch.Tensor) -> float:
    """Return KL(full || live) in nats of the distributions behind two vectors of logits, shape [vocab].

    Computed in float64; tokens that are impossible in ``full`` add nothing. Rounding below zero is cut off.
    """
    full = torch.log_softmax(full_V.double(), dim=-1)
    live = torch.log_softmax(live_V.double(), dim=-1)
    terms = torch.where(full == -torch.inf, 0.0, full.exp() * (full - live))
    return max(0.0, float(terms.sum()))
