"""What has been shown to work with SGLang and what is refused: one table for the server, ``irminsul doctor`` and docs.

Default deny: an option whose value is not in its row's set, a model that is not listed, or an SGLang whose surface
differs is refused with a sentence that names it. The last column says why, or where it was shown.

``python -m irminsul.sglang.support`` writes the tables as docs/sglang-support.md.
"""

import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from irminsul.errors import UnsupportedModelError
from irminsul.markdown import markdown_table

TESTED_VERSION = "0.5.23"
_MISSING = object()


@dataclass(frozen=True)
class Option:
    """A flag of SGLang (``--`` and dashes for underscores) and the values it may have."""

    name: str
    allowed: tuple[Any, ...]
    reason: str

    def allows(self, value: Any) -> bool:
        """Say whether a value is one of the allowed; True and 1 are different."""
        return any(type(value) is type(choice) and value == choice for choice in self.allowed)

    @property
    def flag(self) -> str:
        """As on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The values allowed, as on a command line."""
        shown = ("not given" if value is None or value is False else str(value) for value in self.allowed)
        return tuple(dict.fromkeys(shown))


OFF = (None, False)
_DP_ATTENTION = "ranks agree on token counts before a batch is split; replicas by --dp-size are separate servers"
ATTENTION_BACKENDS = (None, "fa3", "flashinfer", "flashmla", "triton", "torch_native")
OPTIONS: tuple[Option, ...] = (
    Option("speculative_algorithm", OFF, "draft rows would not be moved with the target's"),
    Option("disaggregation_mode", ("null",), "the decode server would receive approximate rows as if exact"),
    Option("enable_hierarchical_cache", (False,), "rows that come back from the host are not indexed yet"),
    Option("enable_unified_cache_external_linker", (False,), "linker and irminsul would both load rows for a request"),
    Option("disable_radix_cache", (False,), "it leaves nothing to reuse"),
    Option("enable_lmcache", OFF, "it brings its own tree"),
    Option("enable_flexkv", OFF, "it brings its own tree"),
    Option("enable_hisparse", (False,), "sparse rows on the host are not moved"),
    Option("enable_unified_memory", (False,), "its slots are not those of a plain pool"),
    Option("enable_page_major_kv_layout", (False,), "rows of a layer are not one tensor"),
    Option("enable_kv_cache_sharding", (False,), "a rank holds only a part of the rows"),
    Option("pp_size", (1,), "stages plan at different times; not shown to agree"),
    Option("nnodes", (1,), "not tried across machines"),
    Option("dcp_size", (1,), "a rank holds only a part of the rows"),
    Option("attn_cp_size", (1,), "a rank computes only a part of a gap"),
    Option("enable_dp_attention", (False,), _DP_ATTENTION),
    Option("attn_dp_size", (1,), _DP_ATTENTION),
    Option("enable_two_batch_overlap", (False,), "it splits a batch by itself"),
    Option("enable_pdmux", (False,), "it splits a prefill by layers"),
    Option("tokenizer_worker_num", (1,), "SGLang loads no plugins in further front ends"),
    Option("smg_grpc_mode", OFF, "only the HTTP front end hands out the counters of a request"),
    Option("grpc_mode", OFF, "only the HTTP front end hands out the counters of a request"),
    Option("enable_streaming_session", (False,), "a session's rows are not in the tree"),
    Option("enable_deterministic_inference", OFF, "approximate reuse depends on what is in the cache"),
    Option("kv_canary", (None, "none", "off", False), "it checks that a row was computed where it stands"),
    Option("dllm_algorithm", (None,), "rows of a block depend on what follows"),
    Option("enable_mis", (False,), "items of a prompt are attended apart"),
    Option("enable_watermark", OFF, "it keeps state for each row of a batch"),
    Option("enable_encoder_swa_bounded_replay", OFF, "it splits a batch by itself"),
    Option("is_embedding", (False,), "embeddings would change"),
    Option("cpu_offload_gb", (0,), "not shown to work"),
    Option("enable_lora", OFF, "adapters have their own namespaces, but batches with adapters have not been run split"),
    Option("enable_return_hidden_states", (False,), "hidden states are handed out by unsplit positions"),
    Option("moe_a2a_backend", ("none",), "ranks agree on token counts before a batch is split"),
    Option("moe_dense_tp_size", (None,), "ranks agree on token counts before a batch is split"),
    Option("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "packed rows (fp8, fp4) are not moved"),
    Option("attention_backend", ATTENTION_BACKENDS, "only fa3 has been shown on a GPU"),
    Option("prefill_attention_backend", ATTENTION_BACKENDS, "as above"),
    Option("decode_attention_backend", ATTENTION_BACKENDS, "as above"),
)

REFUSED_VARIABLES = {
    "SGLANG_RUST_SERVER": "its front end passes wrong options of requests, and hands out no counters",
}


class Support(StrEnum):
    """How far a model has been shown to work."""

    SHOWN = "shown"
    SHAPE = "shape"
    REFUSED = "refused"

    @property
    def meaning(self) -> str:
        """In words."""
        return _MEANINGS[self]


_MEANINGS = {
    Support.SHOWN: "a model of this class was served with trained weights on a GPU (docs/sglang.md)",
    Support.SHAPE: "its attention, true sizes and random weights, equalled stock SGLang's on a GPU (docs/sglang.md)",
    Support.REFUSED: "the server does not start",
}


@dataclass(frozen=True)
class Architecture:
    """A model class, as in ``architectures`` of a config."""

    name: str
    models: str
    support: Support
    note: str = ""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        "DeepseekV2ForCausalLM",
        "smollm2-mla, DeepSeek-V2, DeepSeek-V2-Lite",
        Support.SHOWN,
        "smollm2-mla with its trained weights, the others' attention with random ones",
    ),
    Architecture("DeepseekV3ForCausalLM", "DeepSeek-V3, R1, V3.1, Kimi-K2, Moonlight, JoyAI-LLM-Flash", Support.SHAPE),
    Architecture("Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", Support.SHAPE),
    Architecture(
        "LongcatFlashForCausalLM",
        "LongCat-Flash",
        Support.SHAPE,
        "two attentions a layer; SGLang itself needs `rope_scaling` in its config",
    ),
    Architecture(
        "MistralLarge3ForCausalLM",
        "Mistral-Large-3, Mistral-Small-4 without vision encoder",
        Support.SHAPE,
        "with a vision encoder SGLang uses a class that is not listed",
    ),
    Architecture(
        "DeepseekV32ForCausalLM", "DeepSeek-V3.2", Support.REFUSED, "DSA index keys cannot be turned in place"
    ),
    Architecture("GlmMoeDsaForCausalLM", "GLM-5", Support.REFUSED, "DSA index keys cannot be turned in place"),
    Architecture("DeepseekV4ForCausalLM", "DeepSeek-V4", Support.REFUSED, "its rows are compressed over positions"),
    Architecture("KimiLinearForCausalLM", "Kimi-Linear", Support.REFUSED, "hybrid: a recurrent state cannot be moved"),
    Architecture(
        "MiniCPM3ForCausalLM", "MiniCPM3", Support.REFUSED, "longrope changes its frequencies with the length"
    ),
)
_KNOWN = {architecture.name: architecture for architecture in ARCHITECTURES}
ROPE_TYPES = ("default", "yarn", "deepseek_yarn", "linear")


def check_version(found: str, *, force: bool) -> None:
    """Refuse a release of SGLang that has not been tested, unless forced."""
    if found != TESTED_VERSION and not force:
        raise UnsupportedModelError(
            f"SGLang {found} has not been tested, {TESTED_VERSION} has; force_version = true starts nevertheless"
        )


def check_hooks(hooked: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse an SGLang in which a hooked function has other parameters, or is not hooked."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415

    for target, expected in hooked.items():
        try:
            found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError) as error:
            raise UnsupportedModelError(f"this SGLang has no {target}: {error}") from None
        # A class method shows no cls once it is bound.
        if found != tuple(name for name in expected if name != "cls"):
            raise UnsupportedModelError(f"{target} takes ({', '.join(found)}), expected ({', '.join(expected)})")
        if target not in HookRegistry._patched:  # noqa: SLF001  # failures to hook are only logged there
            raise UnsupportedModelError(f"{target} was not hooked; SGLang's log says why")


def check_server(server_args: Any, model_config: Any) -> None:  # SGLang's own
    """Refuse the first option or model that has not been shown to work."""
    for problem in problems(server_args, model_config.hf_config):
        raise UnsupportedModelError(problem)


def problems(server_args: Any, hf_config: Any) -> Iterator[str]:
    """Yield a sentence for each option and model property that is refused."""
    yield from environment_problems(os.environ)
    yield from option_problems(server_args)
    yield from model_problems(hf_config)


def environment_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that chooses parts of SGLang in which nothing can be hooked."""
    for name, reason in REFUSED_VARIABLES.items():
        if environment.get(name, "0").lower() not in ("", "0", "false", "no", "n"):
            yield f"{name}={environment[name]} is not supported: {reason}; unset it"


def option_problems(server_args: Any) -> Iterator[str]:
    """Yield a sentence for each option that is refused."""
    for option in OPTIONS:
        value = getattr(server_args, option.name, _MISSING)
        if value is _MISSING:
            yield f"this SGLang has no {option.flag}: its flags differ from those of {TESTED_VERSION}"
        elif not option.allows(value):
            allowed = ", ".join(option.choices)
            yield f"{option.flag} {value!r} is not supported: {option.reason}; supported: {allowed}"


def architecture_of(hf_config: Any) -> Architecture | None:  # transformers' PretrainedConfig
    """Return the row of a config's model class, or None if it is not listed."""
    return _KNOWN.get(_class_name(hf_config))


def _class_name(hf_config: Any) -> str:
    return next(iter(getattr(hf_config, "architectures", None) or ()), "(none)")


def model_problems(hf_config: Any) -> Iterator[str]:  # transformers' PretrainedConfig
    """Yield a sentence for each property of a model that is refused."""
    found = architecture_of(hf_config)
    if found is None:
        supported = ", ".join(row.name for row in ARCHITECTURES if row.support is not Support.REFUSED)
        yield f"model class {_class_name(hf_config)} has not been shown to work; supported: {supported}"
    elif found.support is Support.REFUSED:
        yield f"{found.models} ({found.name}) is not supported: {found.note}"
    if getattr(hf_config, "index_topk", None):
        yield "sparse attention (DSA) is not supported: its index keys cannot be turned in place"
    scaling = getattr(hf_config, "rope_scaling", None) or getattr(hf_config, "rope_parameters", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        yield f"rope type {kind!r} is not supported: its frequencies change with the length of the sequence"
    if getattr(hf_config, "qk_rope_head_dim", 1) == 0 or getattr(hf_config, "mla_use_nope", False):
        yield "NoPE models are not supported: their keys are not turned"


_DOCUMENT = """\
# What works with SGLang

Made by `python -m irminsul.sglang.support` from the table that the server itself obeys. SGLang {version}; another
release is refused unless `force_version` is set. A model class, or a value of a flag, that is not listed here is
refused when the server starts, with a sentence that names it. `irminsul doctor MODEL -- FLAGS` (flags of
`sglang serve`) says beforehand what would be refused, except for values that SGLang chooses by itself while it starts.

## Models

{meanings}

{models}

Whatever the model class: rotary types {rope_types} only;
no sparse attention (DSA), no NoPE; rows that are plain bfloat16, float16 or float32. At start a self-test compares
moved rows of layer 0 with computed ones.

## Options

Flags that are not in this table are not looked at.

{options}

Variables of SGLang's environment that must not be set:

{variables}

## Several GPUs and machines

{placements}
"""

_PLACEMENTS = (
    (
        "tensor parallel (`--tp-size`)",
        "allowed; on two GPUs the same plans, and the answers of stock SGLang where they should be",
        (
            "Every rank holds all rows and plans by itself, from equal state: the same requests in the same order, and "
            "an index whose seed the first rank draws and broadcasts. Each rank copies its own rows."
        ),
    ),
    (
        "replicas (`--dp-size`)",
        "allowed, not yet run on two GPUs",
        (
            "Separate servers behind one address, each with its own tree and index: what one has read is found only by "
            "requests that come to the same one."
        ),
    ),
    (
        "DP attention (`--attn-dp-size`, `--enable-dp-attention`)",
        "refused",
        "Ranks agree on token counts before a batch is split into gaps.",
    ),
    (
        "context parallel (`--attn-cp-size`, `--dcp-size`)",
        "refused",
        "A rank has only a part of the rows, or of a gap.",
    ),
    ("pipeline parallel (`--pp-size`)", "refused", "Stages plan at different times; not shown to agree."),
    ("several machines (`--nnodes`)", "refused", "Not tried."),
)


def markdown() -> str:
    """Return the document: which models and options are supported, and what holds for several GPUs."""
    return _DOCUMENT.format(
        version=TESTED_VERSION,
        meanings="\n".join(f"* **{support.value}**: {support.meaning}." for support in Support),
        models=markdown_table(
            ("class", "models", "support", "note"),
            ((f"`{row.name}`", row.models, row.support.value, row.note) for row in ARCHITECTURES),
        ),
        rope_types=", ".join(f"`{kind}`" for kind in ROPE_TYPES),
        variables=markdown_table(("variable", "why"), ((f"`{name}`", why) for name, why in REFUSED_VARIABLES.items())),
        options=markdown_table(
            ("flag", "values", "why no other"),
            ((f"`{option.flag}`", ", ".join(option.choices), option.reason) for option in OPTIONS),
        ),
        placements=markdown_table(("placement", "state", "what holds"), _PLACEMENTS),
    )


if __name__ == "__main__":
    sys.stdout.write(markdown())
