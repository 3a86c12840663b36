"""The usage block of SGLang's OpenAI protocol says what became of the prompt, in the embedded server's words.

SGLang sums usage up from the ``meta_info`` of all choices or, at the end of a stream, from token counts that it has
kept of each. There the count of cached tokens brings the request's counters along; nothing else of it arrives.
"""

import functools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from irminsul.plan import Mode
from irminsul.sglang.requests import INFO_KEY


class CachedTokens(int):
    """A count of cached tokens that knows the counters of its request."""

    counters: list[dict[str, Any]]


async def carry_counters(outputs: AsyncIterator[dict[str, Any]], state: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the outputs of a stream; the count of cached tokens in the last one knows the counters.

    Args:
        outputs: of SGLang's TokenizerManager, for one choice.
        state: its ReqState, which keeps what the first output reported.
    """
    async for output in outputs:
        info = output["meta_info"]
        counters = state.customized_info_accumulated.get(INFO_KEY)
        if counters and info.get("finish_reason"):
            cached = CachedTokens(info.get("cached_tokens", 0))
            cached.counters = list(counters)
            # SGLang may dump its own record of the output, which must not need irminsul to be read.
            yield {**output, "meta_info": {**info, "cached_tokens": cached}}
        else:
            yield output


def response_usage(
    original: Callable[..., Any], responses: list[dict[str, Any]], n_choices: int = 1, *args: Any, **kwargs: Any
) -> Any:  # SGLang's UsageInfo
    """Return what UsageProcessor.calculate_response_usage does, with the block."""
    _let_usage_hold_more()
    usage = original(responses, n_choices, *args, **kwargs)
    return _with_block(usage, (response["meta_info"].get(INFO_KEY) for response in responses[::n_choices]))


def streaming_usage(
    original: Callable[..., Any],
    prompt_tokens: Any,
    reasoning_tokens: Any,
    completion_tokens: Any,
    cached_tokens: dict[int, int],
    n_choices: int,
    *args: Any,
    **kwargs: Any,
) -> Any:  # SGLang's UsageInfo
    """Return what UsageProcessor.calculate_streaming_usage does, with the block."""
    _let_usage_hold_more()
    usage = original(prompt_tokens, reasoning_tokens, completion_tokens, cached_tokens, n_choices, *args, **kwargs)
    first_choices = (cached for choice, cached in cached_tokens.items() if choice % n_choices == 0)
    return _with_block(usage, (getattr(cached, "counters", None) for cached in first_choices))


@functools.cache
def _let_usage_hold_more() -> None:
    """Let SGLang's UsageInfo, and the responses that hold one, keep a field that they do not know."""
    from sglang.srt.entrypoints.openai import protocol  # noqa: PLC0415

    protocol.UsageInfo.model_config["extra"] = "allow"
    for model in (
        protocol.UsageInfo,
        protocol.CompletionResponse,
        protocol.CompletionStreamResponse,
        protocol.ChatCompletionResponse,
        protocol.ChatCompletionStreamResponse,
    ):
        model.model_rebuild(force=True)


def _with_block(usage: Any, of_prompts: Iterable[list[dict[str, Any]] | None]) -> Any:
    """Add the block, unless a prompt has no counters: the classes add up to all prompt tokens, or are not shown."""
    found = list(of_prompts)
    if found and all(found):
        blocks = [reuse_usage(counters[-1]) for counters in found if counters]
        usage.irminsul = {name: sum(block[name] for block in blocks) for name in blocks[0]}
    return usage


def reuse_usage(counters: dict[str, Any]) -> dict[str, int]:
    """Translate a request's counters; names and meaning are those of ``irminsul.server.protocol.ReuseUsage``.

    Mode observe counts what it would have copied as if it had; here that is ``planned_shifted``, and was computed, in
    one stretch.
    """
    planned, computed, gaps = counters["shifted_tokens"], counters["computed_tokens"], counters["gaps"]
    observed = counters["mode"] == Mode.OBSERVE.value
    return {
        "prefix": counters["prefix_tokens"],
        "approximate_prefix": counters["approximate_prefix_tokens"],
        "shifted": 0 if observed else planned,
        "computed": computed + planned if observed else computed,
        "gaps": 1 if observed else gaps,
        "planned_shifted": planned,
    }
