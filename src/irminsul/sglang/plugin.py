"""What SGLang loads: a radix cache backend named ``irminsul``, and hooks that do nothing unless it was chosen.

SGLang logs what a plugin raises while it is loaded, and goes on without it. So nothing that matters happens there:
all checks are made when the backend is built, in the scheduler, where an error ends the server.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from irminsul.errors import IrminsulError, UnsupportedModelError
from irminsul.namespace import Namespace
from irminsul.sglang.settings import Settings, read_request_options, read_settings

if TYPE_CHECKING:
    from irminsul.sglang.admission import Planner
    from irminsul.sglang.forward import Splitter, Unsplit

logger = logging.getLogger(__name__)

BACKEND = "irminsul"

HOOKED: dict[str, tuple[str, ...]] = {}
"""What is hooked in SGLang, and the parameters it must have."""
HOOKED_FOR_SHARED_KEYS: dict[str, tuple[str, ...]] = {}
"""As above, where FlashAttention exists: on a GPU."""
_hooks: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class Reuse:
    """The parts of a scheduler that reuses rows; one a process."""

    planner: "Planner"
    splitter: "Splitter"


_reuse: Reuse | None = None


def activate() -> None:
    """Register the backend and the hooks; SGLang's entry point ``sglang.srt.plugins``."""
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    register_radix_cache_backend(BACKEND, build_cache)
    for target in (*HOOKED, *(HOOKED_FOR_SHARED_KEYS if torch.cuda.is_available() else ())):
        HookRegistry.register(target, _hooks[target], HookType.AROUND)


def build_cache(context: Any) -> Any:  # SGLang's TreeCacheBuildContext
    """Build the tree of ``--radix-cache-backend irminsul``.

    Raises:
        RuntimeError: the settings, this SGLang, its flags or the model have not been shown to work; says which.
    """
    try:
        return _build_cache(context, read_settings())
    except IrminsulError as error:
        raise RuntimeError(f"irminsul: {error}") from error


def _build_cache(context: Any, settings: Settings) -> Any:
    global _reuse  # noqa: PLW0603  # hooks are functions of a process, which has one scheduler
    from sglang.srt.mem_cache.registry import create_unified_radix_cache  # noqa: PLC0415

    from irminsul.sglang.accounting import Accounting  # noqa: PLC0415
    from irminsul.sglang.admission import Planner  # noqa: PLC0415
    from irminsul.sglang.cache import IrminsulRadixCache  # noqa: PLC0415
    from irminsul.sglang.donors import DonorIndex  # noqa: PLC0415
    from irminsul.sglang.forward import Splitter  # noqa: PLC0415
    from irminsul.sglang.live_model import LiveModel, max_shared_keys  # noqa: PLC0415
    from irminsul.sglang.support import check_hooks, check_server, check_version  # noqa: PLC0415

    check_version(version("sglang"), force=settings.force_version)
    check_hooks(HOOKED)
    check_server(context.server_args, context.model_config)
    if context.disable_radix_cache:
        # The flag is refused above; SGLang also does without a cache where it must.
        raise UnsupportedModelError("SGLang runs this model without its prefix cache, which leaves nothing to reuse")
    cache = create_unified_radix_cache(context, cache_class=IrminsulRadixCache)
    runner = context.tp_worker.model_runner
    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    live = LiveModel.of(runner, pool)
    if settings.self_test:
        live.self_test(settings.row_kernel, context.model_config.context_len)
    donors = DonorIndex(
        len(live.layers[0]),
        page_size=context.params.page_size,
        matcher=settings.matcher,
        seed=_shared_seed(context.params.tp_cache_group),
        max_bytes=settings.max_index_mib * 2**20,
    )
    identity = Namespace(
        model=context.server_args.model_path, row_format=live.layout.fingerprint, rope=live.rope.fingerprint
    )
    cache.attach(donors, identity, settings)
    # All ranks of a tensor-parallel group serve the same requests, and /metrics adds up what processes count.
    accounting = Accounting.make(cache, enabled=context.params.enable_metrics and context.tp_rank == 0)
    planner = Planner(cache, settings.policy, accounting.count, mixed=context.server_args.enable_mixed_chunk)
    shared_keys = max_shared_keys(runner)
    if shared_keys:
        check_hooks(HOOKED_FOR_SHARED_KEYS)
    splitter = Splitter(planner, live.mover(settings.row_kernel), live.rope, live.shape, shared_keys)
    _reuse = Reuse(planner, splitter)
    logger.info(
        "irminsul %s: mode %s, matcher %s, rows %s, %s, index %.0f MiB",
        version("irminsul-kv"),
        settings.mode.value,
        settings.matcher,
        live.layout.fingerprint,
        live.rope.fingerprint,
        donors.registry.nbytes / 2**20,
    )
    return cache


def _shared_seed(group: Any) -> int:  # torch.distributed.ProcessGroup | None
    """Draw a seed that nobody can guess and all ranks share: equal indexes make equal plans."""
    import torch  # noqa: PLC0415

    seed = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    if group is not None and torch.distributed.get_world_size(group=group) > 1:
        torch.distributed.broadcast(seed, src=torch.distributed.get_global_rank(group, 0), group=group)
    return int(seed)


def _around(
    target: str, parameters: str, table: dict[str, tuple[str, ...]] = HOOKED
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function be called in place of SGLang's: with the wrapped one first, then its own arguments.

    Args:
        target: what it wraps.
        parameters: that this must have, separated by spaces.
        table: where it is listed.
    """

    def register(hook: Callable[..., Any]) -> Callable[..., Any]:
        table[target] = tuple(parameters.split())
        _hooks[target] = hook
        return hook

    return register


@_around(
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
    "self req has_chunked_req truncation_align_size",
)
def _add_one_req(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    if _reuse is None:
        return original(adder, req, *args, **kwargs)
    return _reuse.planner.admit(adder, req, lambda: original(adder, req, *args, **kwargs), first=True)


@_around(
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
    "self req",
)
def _add_chunked_req(original: Any, adder: Any, req: Any) -> Any:
    if _reuse is None:
        return original(adder, req)
    return _reuse.planner.admit(adder, req, lambda: original(adder, req), first=False)


@_around(
    "sglang.srt.managers.scheduler.Scheduler.run_batch",
    "self batch pp_proxy_tensors",
)
def _run_batch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if _reuse is not None:
        _reuse.planner.launched()
    return original(scheduler, *args, **kwargs)


@_around(
    "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
    "self batch result",
)
def _process_batch_result(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if _reuse is not None:
        _reuse.planner.processed()
    return original(scheduler, *args, **kwargs)


@_around(
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
    "spec_mrope_positions kv_loc_plan write_cols",
)
def _init_new(original: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if _reuse is None:
        return original(cls, batch, *args, **kwargs)
    return _reuse.splitter.make(batch, lambda rows: original(cls, rows, *args, **kwargs))


@_around(
    "sglang.srt.model_executor.model_runner.ModelRunner.forward",
    "self forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",
)
def _forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if _reuse is None:
        return original(runner, forward_batch, *args, **kwargs)
    return _reuse.splitter.run(forward_batch, lambda: original(runner, forward_batch, *args, **kwargs))


@_around(
    "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
    "cls forward_batch",
)
def _from_forward_batch(original: Any, cls: Any, forward_batch: Any) -> Any:
    unsplit = _unsplit()
    if unsplit is None:
        return original(cls, forward_batch)
    with unsplit.shown(forward_batch):
        return original(cls, forward_batch)


@_around(
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
    "cls backend_name",
)
def _get_handler(original: Any, cls: Any, backend_name: str) -> Any:
    handler = original(cls, backend_name)
    unsplit = _unsplit()
    if unsplit is None:
        return handler
    return lambda attention, forward_batch: unsplit.choose(handler, attention, forward_batch)


@_around(
    "sglang.srt.layers.attention.flashattention_backend.flash_attn_varlen_func",
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k page_table softmax_scale "
    "causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa only_qv "
    "sm_margin return_softmax_lse sinks score_mod aux_tensors sfq sfk sfv rel_bias rel_bias_prep_cache ver "
    "out mask_mod",
    HOOKED_FOR_SHARED_KEYS,
)
def _flash_attention(original: Any, *args: Any, **kwargs: Any) -> Any:
    unsplit = _unsplit()
    shared_keys = None if unsplit is None else unsplit.shared_keys
    if shared_keys is None or not shared_keys.meant_by(kwargs):
        return original(*args, **kwargs)
    return original(*args, **kwargs | shared_keys.arguments())


@_around(
    "sglang.srt.managers.scheduler_components.output_streamer."
    "SchedulerOutputStreamer.is_request_level_customized_info_key",
    "self key",
)
def _is_request_level(original: Any, streamer: Any, key: str) -> Any:
    from irminsul.sglang.requests import INFO_KEY  # noqa: PLC0415

    return key == INFO_KEY or original(streamer, key)


@_around(
    "sglang.srt.sampling.sampling_params.SamplingParams.verify",
    "self vocab_size",
)
def _verify(original: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    if _selected():
        read_request_options(sampling_params.custom_params)
    return original(sampling_params, *args, **kwargs)


@_around(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._stream_one_response",
    "self obj state request",
)
def _stream_one_response(original: Any, manager: Any, obj: Any, state: Any, request: Any = None) -> Any:
    outputs = original(manager, obj, state, request)
    if not (_selected() and getattr(obj, "stream", False)):
        return outputs
    from irminsul.sglang.usage import carry_counters  # noqa: PLC0415

    return carry_counters(outputs, state)


@_around(
    "sglang.srt.entrypoints.openai.usage_processor.UsageProcessor.calculate_response_usage",
    "responses n_choices enable_cache_report image_tokens audio_tokens video_tokens",
)
def _response_usage(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not _selected():
        return original(*args, **kwargs)
    from irminsul.sglang.usage import response_usage  # noqa: PLC0415

    return response_usage(original, *args, **kwargs)


@_around(
    "sglang.srt.entrypoints.openai.usage_processor.UsageProcessor.calculate_streaming_usage",
    "prompt_tokens reasoning_tokens completion_tokens cached_tokens n_choices enable_cache_report "
    "image_tokens audio_tokens video_tokens",
)
def _streaming_usage(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not _selected():
        return original(*args, **kwargs)
    from irminsul.sglang.usage import streaming_usage  # noqa: PLC0415

    return streaming_usage(original, *args, **kwargs)


def _unsplit() -> "Unsplit | None":
    """Return the split of the batch whose forward is running."""
    return None if _reuse is None else _reuse.splitter.current


def _selected() -> bool:
    """Say whether this server runs with the backend; front ends ask, too, which have no cache."""
    from sglang.srt.runtime_context import get_memory  # noqa: PLC0415

    try:
        return bool(get_memory().radix_cache_backend == BACKEND)
    except ValueError:  # no configuration is published in this process
        return False
