"""What tokens cost: prefill FLOPs of an MLA model, and TTFT read off measured points.

FLOPs of the tokens that are computed (a multiply and an add are two)::

    per token and layer   2 * (parameters of its attention projections + parameters of the MLP it passes)
    per pair and layer    2 * heads * (qk_nope + qk_rope + v)       a pair: a computed token and a position it sees

Attention is counted as prefill does it, with keys and values projected up from the latent. Not counted: the embedding,
the output head (one token of a prompt needs it), norms, the router's softmax, and the up-projection of rows that are
only read, which depends on the engine.
"""

import reprlib
from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from irminsul.errors import InputError
from irminsul.trace.lines import LineError, parse_json

# No real model or prompt comes near, and sums of products stay numbers.
_MAX_SIZE = 2**31
_MAX_MS = 1e9


@dataclass(frozen=True)
class ModelCost:
    """What a token of a model costs in prefill."""

    name: str
    """``model_type`` of the config."""
    active_parameters: int
    """Weights that one token meets in all layers."""
    flops_per_pair: int
    """Of attention in all layers, for a token and one position it sees."""

    @property
    def flops_per_token(self) -> int:
        """Apart from attention over positions."""
        return 2 * self.active_parameters

    def flops(self, tokens: int, pairs: int) -> int:
        """Return the FLOPs of computed tokens that see ``pairs`` positions together."""
        return tokens * self.flops_per_token + pairs * self.flops_per_pair

    @classmethod
    def from_config(cls, path: Path) -> "ModelCost":
        """Read a model's ``config.json``.

        Raises:
            InputError: the file cannot be read, or it is not the config of an MLA model.
        """
        raw = _read_object(path)
        config = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
        if "kv_lora_rank" not in config:
            raise InputError(f"{path}: no kv_lora_rank, so this is no MLA model, and irminsul does not serve it")
        shape = _Fields(path, config)
        layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
        head_dim = shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"] + shape["v_head_dim"]
        parameters = layers * _attention_parameters(shape, heads) + _mlp_parameters(shape, layers)
        return cls(str(config.get("model_type", path.stem)), parameters, 2 * layers * heads * head_dim)


class _Fields:
    """Sizes of a config; a missing or impossible one is an InputError."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path, self._config = path, config

    def __contains__(self, name: str) -> bool:
        return bool(self._config.get(name))

    def __getitem__(self, name: str) -> int:
        value = self._config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_SIZE:
            raise InputError(f"{self._path}: {name} must be a whole number >= 0 and < 2^31, got {reprlib.repr(value)}")
        return value

    def get(self, name: str, default: int) -> int:
        """Return a size, or ``default`` where the config leaves it out."""
        return default if self._config.get(name) is None else self[name]


def _attention_parameters(shape: _Fields, heads: int) -> int:
    hidden, latent, rope = shape["hidden_size"], shape["kv_lora_rank"], shape["qk_rope_head_dim"]
    query_out = heads * (shape["qk_nope_head_dim"] + rope)
    query = hidden * query_out
    if "q_lora_rank" in shape:
        query = shape["q_lora_rank"] * (hidden + query_out)
    keys_values = hidden * (latent + rope) + latent * heads * (shape["qk_nope_head_dim"] + shape["v_head_dim"])
    return query + keys_values + heads * shape["v_head_dim"] * hidden


def _mlp_parameters(shape: _Fields, layers: int) -> int:
    """Parameters of the MLPs that one token passes, all layers together: gate, up and down projection of each."""
    hidden = shape["hidden_size"]
    dense = 3 * hidden * shape["intermediate_size"]
    if "n_routed_experts" not in shape:
        return layers * dense
    first, step = shape.get("first_k_dense_replace", 0), max(1, shape.get("moe_layer_freq", 1))
    sparse_layers = len(range(-(-first // step) * step, layers, step))
    experts = shape["num_experts_per_tok"] + shape.get("n_shared_experts", 0)
    router = hidden * shape["n_routed_experts"]
    return (layers - sparse_layers) * dense + sparse_layers * (
        3 * hidden * shape["moe_intermediate_size"] * experts + router
    )


def computed_pairs(start: int, end: int) -> int:
    """Return how many positions the tokens [start, end) of a prompt see together; each sees itself, too."""
    return (end * (end + 1) - start * (start + 1)) // 2


@dataclass(frozen=True)
class Point:
    """One measurement."""

    total: int
    """Prompt tokens."""
    computed: int
    """Of these, not cached."""
    ms: float


@dataclass(frozen=True)
class Estimate:
    """A TTFT read off the table."""

    ms: float
    inside: bool
    """Whether the measured points surround it; if not, this is the value at the nearest edge."""


class CostModel:
    """Interpolates TTFT between measured points.

    For each prompt length that was measured, time is linear between neighbours in computed tokens. Between two lengths
    it is linear along equal shares of the way from the least computed measured to all computed, so that a cold prompt
    is compared with cold ones. Beyond the table the nearest edge is used, and the estimate says so.

    Args:
        name: what was measured.
        source: where the points come from.
        points: at least two prompt lengths; each with ``computed == total`` (cold) and one point below that.

    Raises:
        InputError: the points do not make such a table.
    """

    def __init__(self, name: str, source: str, points: tuple[Point, ...]) -> None:
        self.name, self.source = name, source
        ordered = sorted(points, key=lambda point: (point.total, point.computed))
        self._levels = [tuple(group) for _, group in groupby(ordered, key=lambda point: point.total)]
        self._totals = [level[0].total for level in self._levels]
        if len(self._levels) < 2:
            raise InputError("a cost model needs points at two prompt lengths or more")
        for level in self._levels:
            if len(level) < 2 or level[-1].computed != level[-1].total:
                raise InputError(
                    f"a cost model needs, at {level[0].total} prompt tokens, a point where all tokens are computed and "
                    "one where fewer are"
                )
            if len({point.computed for point in level}) < len(level):
                raise InputError(f"a cost model has two points for the same tokens at {level[0].total} prompt tokens")

    @classmethod
    def from_file(cls, path: Path) -> "CostModel":
        """Read ``{"name", "source", "points": [{"total", "computed", "ms"}, ...]}``.

        Raises:
            InputError: the file cannot be read, or its points make no table.
        """
        raw = _read_object(path)
        points = raw.get("points")
        if not isinstance(points, list):
            raise InputError(f'{path}: "points" must be a list of {{"total", "computed", "ms"}}')
        try:
            return cls(str(raw.get("name", path.name)), str(raw.get("source", path.name)), tuple(map(_point, points)))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def estimate(self, computed: int, total: int) -> Estimate:
        """Estimate the TTFT of a prompt of ``total`` tokens of which ``computed`` are not cached."""
        assert 0 < computed <= total, (computed, total)
        held = min(max(total, self._totals[0]), self._totals[-1])
        above = max(1, bisect_left(self._totals, held))
        low, high = self._levels[above - 1], self._levels[above]
        weight = (held - low[0].total) / (high[0].total - low[0].total)
        least = (1 - weight) * low[0].computed + weight * high[0].computed
        share = min(max((computed - least) / max(held - least, 1.0), 0.0), 1.0)
        ms = (1 - weight) * _at_share(low, share) + weight * _at_share(high, share)
        return Estimate(ms, held == total and computed >= least)


def _at_share(level: tuple[Point, ...], share: float) -> float:
    """Return the time of one prompt length, ``share`` of the way from its least to its most computed tokens."""
    computed = level[0].computed + share * (level[-1].computed - level[0].computed)
    above = max(1, bisect_left([point.computed for point in level], computed))
    left, right = level[above - 1], level[min(above, len(level) - 1)]
    if left is right:
        return left.ms
    return left.ms + (right.ms - left.ms) * (computed - left.computed) / (right.computed - left.computed)


def _point(raw: object) -> Point:
    fields = raw if isinstance(raw, dict) else {}
    total, computed, ms = (fields.get(name) for name in ("total", "computed", "ms"))
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in (total, computed))
    if not whole or not 0 < fields["computed"] <= fields["total"] < _MAX_SIZE:
        raise InputError(f"a point needs whole numbers 0 < computed <= total < 2^31, got {reprlib.repr(raw)}")
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 < ms < _MAX_MS:
        raise InputError(f"a point needs a time ms > 0 and < {_MAX_MS:g}, got {reprlib.repr(raw)}")
    return Point(fields["total"], fields["computed"], float(ms))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, LineError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold a JSON object")
    return raw


MEASURED_H200 = CostModel(
    "DeepSeek-V2-Lite shape on one H200",
    "one request at a time, SGLang 0.5.23, FA3, bfloat16, no prefill graphs, chunked prefill of 8,192 tokens, page "
    "size 1; whole-request wall time with one generated token",
    tuple(
        Point(total, total if computed is None else computed, ms)
        for computed, row in {
            None: {4096: 72.0, 16384: 291.0, 32768: 705.0, 65536: 1852.0},
            512: {4096: 61.0, 16384: 64.0, 32768: 66.0, 65536: 70.0},
            2048: {16384: 72.0, 32768: 74.0, 65536: 110.0},
        }.items()
        for total, ms in row.items()
    ),
)
"""The default: an exact-prefix hit and a cold prompt at four lengths. An eager forward costs 60 ms there at least."""
