"""What the embedded engine must know about a checkpoint, read from its config.json.

DeepSeek families are read through transformers' own configuration classes, so that defaults and old spellings mean
what they mean there. ``irminsul_mla`` is ours: a dense model with DeepSeek's field and tensor names, of these
differences, each stated by a key of its config.json:

* ``rope_inv_freq`` (required): radians a position of each rotary pair, ``qk_rope_head_dim / 2`` numbers.
* ``rope_interleave``: pairs (0, 1), (2, 3), ... if true (the default), (j, j + R/2) if false.
* ``latent_norm``: whether the latent passes an RMSNorm (``kv_a_layernorm``) before it is stored; true by default.
* ``softmax_scale``: factor on the attention scores; 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim) by default.

A setting that has not been shown to work is refused by name.
"""

import copy
import json
import math
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

from irminsul.errors import CheckpointError, InputError, UnsupportedModelError
from irminsul.layout import RowLayout
from irminsul.rope import Pairing, RopeSpec

_HF_CONFIG_OF_TYPE: dict[str, type[PreTrainedConfig]] = {
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "kimi_k2": DeepseekV3Config,
}
OWN_MODEL_TYPE = "irminsul_mla"
SUPPORTED_MODEL_TYPES = (*_HF_CONFIG_OF_TYPE, OWN_MODEL_TYPE)

_ADAPTER_NAME = "adapter_config.json"
_LIMIT = 2**31 - 1
_LIMITS = {"num_hidden_layers": 10_000, "qk_rope_head_dim": 4096}
"""Of sizes that transformers makes lists and tables of before anything else is read of them."""


class Router(StrEnum):
    """How a token chooses its experts (DeepSeek's ``topk_method``)."""

    GREEDY = "greedy"
    """Softmax scores; the best experts of all."""
    GROUP_LIMITED_GREEDY = "group_limited_greedy"
    """Softmax scores; the best experts of the groups with the best expert."""
    NOAUX_TC = "noaux_tc"
    """Sigmoid scores; a bias per expert takes part in the choice (best two of each group), not in the weight."""


_ROUTERS_OF_TYPE = {
    "deepseek_v2": (Router.GREEDY, Router.GROUP_LIMITED_GREEDY),
    "deepseek_v3": (Router.NOAUX_TC,),
    "kimi_k2": (Router.NOAUX_TC,),
}
_SCORING_OF_TYPE = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid", "kimi_k2": "sigmoid"}


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts in the layers from ``first_layer`` on."""

    first_layer: int
    """Layers before it have a dense MLP."""
    n_routed: int
    n_shared: int
    """Experts every token passes, stored as one MLP."""
    top_k: int
    """Routed experts of a token."""
    intermediate_size: int
    """Of one expert."""
    router: Router
    n_groups: int
    topk_groups: int
    """Groups a token may choose from."""
    normalise: bool
    """Whether the weights of the chosen experts are scaled to a sum of 1."""
    scaling: float
    """Factor on the weights, after that."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of an MLA model; sizes are in values, frequencies in radians a position."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense MLPs."""
    n_layers: int
    n_mtp_layers: int
    """Multi-token prediction layers stored behind the others; they are not loaded."""
    n_heads: int
    q_lora_rank: int | None
    """None: queries come from the hidden state by one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """May be 0: then all of a query meets the rotary part of the rows."""
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm: bool
    softmax_scale: float
    """Factor on attention scores, YaRN's correction included."""
    rope: RopeSpec
    rms_norm_eps: float
    """Of the norms on the hidden state."""
    tie_word_embeddings: bool
    attention_bias: bool
    """On the projections of DeepSeek's ``attention_bias``: q_a, kv_a and o."""
    mlp_bias: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    """From config.json and generation_config.json, without repetition."""
    moe: MoeConfig | None

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "ModelConfig":
        """Read the configuration of a checkpoint directory.

        Raises:
            CheckpointError: config.json is missing, is not JSON, or holds an impossible value.
            UnsupportedModelError: a model type or setting that has not been shown to work.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a checkpoint directory")
        if (path / _ADAPTER_NAME).exists():
            raise UnsupportedModelError(f"{path / _ADAPTER_NAME} asks for an adapter, which is not supported: merge it")
        raw = _read_json_object(path / "config.json")
        generation_path = path / "generation_config.json"
        generation = _read_json_object(generation_path) if generation_path.exists() else {}
        model_type = _refuse_unsupported(raw)
        if model_type == OWN_MODEL_TYPE:
            return _read_own(_Fields(raw), _eos_token_ids(raw, generation))
        hf = _hf_config(raw, model_type)
        # transformers' reading of each key, and the keys its class does not know (V3's topk_method).
        fields = _Fields({**raw, **hf.to_dict(), "model_type": model_type})
        return _read_deepseek(fields, hf, _eos_token_ids(fields.values, generation))

    @property
    def qk_head_dim(self) -> int:
        """Values of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def layout(self, dtype: torch.dtype) -> RowLayout:
        """Return what a cached row of this model is; UnsupportedModelError for a dtype that rows may not have."""
        return RowLayout(self.kv_lora_rank, self.qk_rope_head_dim, str(dtype).removeprefix("torch."))

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer has experts in place of a dense MLP."""
        return self.moe is not None and layer >= self.moe.first_layer


@contextmanager
def refusing_faults(what: str) -> Iterator[None]:
    """Turn whatever transformers raises over a file that it did not expect into a CheckpointError of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # a boundary to foreign code, which checks little
        raise CheckpointError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class _Fields:
    """Typed reading of a JSON object; CheckpointError names the key."""

    values: dict[str, Any]

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < minimum:
            raise CheckpointError(f"config.json: {key} must be an integer >= {minimum}, got {reprlib.repr(value)}")
        limit = _LIMITS.get(key, _LIMIT)
        if value > limit:
            raise CheckpointError(f"config.json: {key} must be <= {limit}, got {reprlib.repr(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0.0 < value <= sys.float_info.max:
            raise CheckpointError(f"config.json: {key} must be a number > 0, got {reprlib.repr(value)}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise CheckpointError(f"config.json: {key} must be true or false, got {reprlib.repr(value)}")
        return value

    def one_of(self, key: str, default: object, choices: tuple[object, ...]) -> object:
        value = self._value(key, default)
        if value not in choices:
            listed = ", ".join(repr(choice.value if isinstance(choice, Router) else choice) for choice in choices)
            raise UnsupportedModelError(f"{key} {reprlib.repr(value)} is not supported; supported: {listed}")
        return value

    def _value(self, key: str, default: object) -> Any:  # noqa: ANN401 - JSON
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {key} is missing")
        return value


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _refuse_unsupported(raw: dict[str, Any]) -> str:
    """Return the model type, or refuse what no supported model has."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {reprlib.repr(model_type)} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    assert isinstance(model_type, str)
    if raw.get("index_topk") is not None:
        raise UnsupportedModelError("sparse attention (DSA) is not supported: config.json has index_topk")
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError("quantised weights are not supported: config.json has quantization_config")
    if raw.get("mla_use_nope") or raw.get("qk_rope_head_dim") == 0:
        raise UnsupportedModelError("NoPE models are not supported: their keys are not turned to a position")
    fields = _Fields(raw)
    for key in _LIMITS:
        fields.optional_integer(key)
    fields.one_of("hidden_act", "silu", ("silu",))
    fields.one_of("moe_layer_freq", 1, (1,))
    if raw.get("num_key_value_heads") not in (None, raw.get("num_attention_heads")):
        raise UnsupportedModelError("num_key_value_heads must equal num_attention_heads: MLA has no key/value groups")
    return model_type


def _hf_config(raw: dict[str, Any], model_type: str) -> PreTrainedConfig:
    hf_class = _HF_CONFIG_OF_TYPE[model_type]
    with refusing_faults(f"config.json is not a valid {model_type} configuration"):
        # The class writes into the dictionary it is given, and warns where the model type is not its own.
        values = {**copy.deepcopy(raw), "model_type": hf_class.model_type}
        return hf_class.from_dict(values)


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in listed):
            raise CheckpointError(f"eos_token_id must be a token id or a list of them, got {reprlib.repr(value)}")
        ids.extend(listed)
    return tuple(dict.fromkeys(ids))


def _read_deepseek(fields: _Fields, hf: PreTrainedConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    if fields.values["model_type"] != "deepseek_v2":
        fields.one_of("mlp_bias", False, (False,))  # V3's code has none
    with refusing_faults("config.json: the rope parameters cannot be used"):
        rope = RopeSpec.from_config(hf)
        softmax_scale = _deepseek_softmax_scale(fields, hf.rope_parameters)
    return _read(
        fields,
        rope=rope,
        softmax_scale=softmax_scale,
        latent_norm=True,
        mlp_bias=fields.flag("mlp_bias", default=False),
        moe=_read_moe(fields),
        eos_token_ids=eos_token_ids,
    )


def _read_own(fields: _Fields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    rope_dim = fields.integer("qk_rope_head_dim")
    frequencies = fields.values.get("rope_inv_freq")
    if not isinstance(frequencies, list) or 2 * len(frequencies) != rope_dim:
        raise CheckpointError(f"config.json: rope_inv_freq must list {rope_dim / 2:g} numbers (qk_rope_head_dim / 2)")
    if not all(type(frequency) in (int, float) for frequency in frequencies):
        raise CheckpointError("config.json: rope_inv_freq must list numbers")
    interleaved = fields.flag("rope_interleave", default=True)
    pairing = Pairing.INTERLEAVED if interleaved else Pairing.HALF_SPLIT
    head_dim = fields.integer("qk_nope_head_dim", minimum=0) + rope_dim
    return _read(
        fields,
        rope=RopeSpec.from_inv_freq(torch.tensor(frequencies, dtype=torch.float64), pairing),
        softmax_scale=fields.number("softmax_scale", head_dim**-0.5),
        latent_norm=fields.flag("latent_norm", default=True),
        mlp_bias=fields.flag("mlp_bias", default=False),
        moe=None,
        eos_token_ids=eos_token_ids,
    )


def _read(
    fields: _Fields,
    *,
    rope: RopeSpec,
    softmax_scale: float,
    latent_norm: bool,
    mlp_bias: bool,
    moe: MoeConfig | None,
    eos_token_ids: tuple[int, ...],
) -> ModelConfig:
    """Read what all families state alike."""
    return ModelConfig(
        model_type=str(fields.values["model_type"]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        n_layers=fields.integer("num_hidden_layers"),
        n_mtp_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0),
        n_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", minimum=0),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        latent_norm=latent_norm,
        softmax_scale=softmax_scale,
        rope=rope,
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=mlp_bias,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        eos_token_ids=eos_token_ids,
        moe=moe,
    )


def _deepseek_softmax_scale(fields: _Fields, rope_parameters: dict[str, Any]) -> float:
    """1 / sqrt(query head), times YaRN's mscale squared where ``mscale_all_dim`` asks for it (as transformers does)."""
    scale = (fields.integer("qk_nope_head_dim", minimum=0) + fields.integer("qk_rope_head_dim")) ** -0.5
    mscale_all_dim = rope_parameters.get("mscale_all_dim", 0)
    if rope_parameters["rope_type"] == "default" or not mscale_all_dim:
        return float(scale)
    factor = rope_parameters["factor"]
    mscale = 1.0 if factor <= 1 else 0.1 * mscale_all_dim * math.log(factor) + 1.0
    scale *= mscale * mscale
    if not 0.0 < scale < math.inf:
        raise CheckpointError(f"config.json: mscale_all_dim {mscale_all_dim} makes the softmax scale {scale}")
    return float(scale)


def _read_moe(fields: _Fields) -> MoeConfig | None:
    first_layer = fields.integer("first_k_dense_replace", minimum=0)
    if first_layer >= fields.integer("num_hidden_layers"):
        return None
    model_type = str(fields.values["model_type"])
    fields.one_of("scoring_func", _SCORING_OF_TYPE[model_type], (_SCORING_OF_TYPE[model_type],))
    routers = _ROUTERS_OF_TYPE[model_type]
    router = Router(str(fields.one_of("topk_method", routers[0], routers)))
    grouped = router is not Router.GREEDY
    normalise = fields.flag("norm_topk_prob", default=False)
    if normalise and router is not Router.NOAUX_TC:
        raise UnsupportedModelError(f"norm_topk_prob is not supported with topk_method {router.value!r}")
    moe = MoeConfig(
        first_layer=first_layer,
        n_routed=fields.integer("n_routed_experts"),
        n_shared=fields.integer("n_shared_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        router=router,
        n_groups=fields.integer("n_group") if grouped else 1,
        topk_groups=fields.integer("topk_group") if grouped else 1,
        normalise=normalise,
        scaling=fields.number("routed_scaling_factor"),
    )
    _check_groups(moe)
    return moe


def _check_groups(moe: MoeConfig) -> None:
    group_size, rest = divmod(moe.n_routed, moe.n_groups)
    smallest = 2 if moe.router is Router.NOAUX_TC else 1
    if rest or group_size < smallest or moe.topk_groups > moe.n_groups or moe.top_k > group_size * moe.topk_groups:
        raise CheckpointError(
            f"config.json: {moe.n_routed} experts in {moe.n_groups} groups cannot give {moe.top_k} experts of "
            f"{moe.topk_groups} groups ({smallest} or more experts a group)"
        )
