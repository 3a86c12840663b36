"""Rotary positions: the one place that knows how a key is turned.

Everything about the rotation is fixed here, and no other module builds a cos or sin table.

**Sign.** The pair (a, b) turned by the angle φ is ``(a·cos φ - b·sin φ, b·cos φ + a·sin φ)``: the complex number
a + ib times e^{iφ}. At position p the pair j of a key is turned by p·f_j, with ``f = inv_freq`` in radians a position.

**Moving.** Rotations of a pair add up, so a row stored at position s is moved to position t by turning it by
(t - s)·f_j. A row that holds the model's ``mscale`` (the factor YaRN multiplies into cos and sin) keeps it: a move is
a pure rotation and never scales. Only a freshly computed row is multiplied by it, once (`apply_rope`).

**Pairing.** Which two of the R values form pair j: `Pairing`. It describes rows as they are *stored*, and must be the
model's; a wrong pairing is nearly invisible at small distances. Engines store interleaved rows in the order of the
weights. transformers is the exception: its interleaved apply function returns ``[a_0, a_1, … | b_0, b_1, …]``.

**Angles.** `AngleSource.EXACT` multiplies in float64. Engines multiply in float32, so their angle at position p is off
by up to u·p·f with u = 2^-24: 0.004 rad near p = 100,000, where float32 values are 0.0078 apart. `AngleSource.TABLE`
makes the same float32 products and turns by their difference, which reproduces the row that such an engine would have
computed at the target. EXACT and TABLE moves therefore differ by at most u·(s + t)·f_j, see
`RopeSpec.move_angle_bound`.

**Precision.** Angles are float64; cos and sin are taken in float64 and rounded to float32; the rotation runs in
float32; its result is rounded once to the dtype of the row. So a move adds to each value at most 2^-8 of it in
bfloat16 and 2^-11 in float16, beside about 1e-6 of the norm of the pair from the float32 arithmetic.

Shape letters: ``T`` tokens, ``R`` rotary values of a row, ``P`` pairs (R = 2P).
"""

import copy
import functools
import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from irminsul.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_UNIT_ROUNDOFF = 2.0**-24
"""Largest relative error of rounding to float32."""


class Pairing(StrEnum):
    """Which two values of a rotary vector turn together."""

    INTERLEAVED = "interleaved"
    """Pairs (0, 1), (2, 3), …: DeepSeek's MLA."""
    HALF_SPLIT = "half_split"
    """Pairs (j, j + R/2): NeoX, Llama, and DeepSeek's sparse-attention indexer."""


class AngleSource(StrEnum):
    """How the angle of a position is computed; the module's documentation compares them."""

    EXACT = "exact"
    """p·f in float64."""
    TABLE = "table"
    """float32(p)·float32(f) rounded to float32, as engines fill their tables."""


_SUPPORTED_ROPE_TYPES = ("default", "linear", "yarn")
_REASONS = {
    "dynamic": "dynamic NTK changes its frequencies with the length of the sequence",
    "longrope": "longrope changes its frequencies with the length of the sequence",
}
_PAIRING_OF_MODEL = {
    "deepseek_v2": Pairing.INTERLEAVED,
    "kimi_k2": Pairing.INTERLEAVED,
    "longcat_flash": Pairing.INTERLEAVED,
    "minicpm3": Pairing.HALF_SPLIT,
}
"""Models whose code fixes the pairing of their MLA keys; the other supported ones state it as ``rope_interleave``."""


@dataclass(frozen=True)
class RopeSpec:
    """How a model turns its keys.

    Raises InputError for frequencies that are not finite and positive, or an ``mscale`` that is not.
    """

    inv_freq: tuple[float, ...]
    """Radians a position, one for each pair, exactly the model's (usually float32 values)."""
    pairing: Pairing
    mscale: float = 1.0
    """Factor the model multiplies into cos and sin of fresh rows; stored rows carry it, moves never apply it."""

    def __post_init__(self) -> None:
        if not self.inv_freq:
            raise UnsupportedModelError("NoPE models are not supported: inv_freq is empty, their keys are not turned")
        if not all(0.0 < frequency < math.inf for frequency in self.inv_freq):
            raise InputError(f"inv_freq must be finite and > 0, got {self.inv_freq!r}")
        if not isinstance(self.pairing, Pairing):
            raise InputError(f"pairing must be a Pairing ({', '.join(Pairing)}), got {self.pairing!r}")
        if not 0.0 < self.mscale < math.inf:
            raise InputError(f"mscale must be finite and > 0, got {self.mscale!r}")

    @classmethod
    def from_config(cls, config: "PreTrainedConfig") -> "RopeSpec":
        """Read the rotation of an MLA model from its transformers configuration, which is left as it was.

        Args:
            config: text configuration with ``qk_rope_head_dim`` and ``rope_parameters``.

        Raises:
            UnsupportedModelError: keys without rotation (NoPE), a rope type other than default, linear and yarn,
                rotation of only a part of the rotary values or of another part in other layers, or a model type
                whose pairing is not known.
        """
        rope_dim = _rope_dim(config)
        own = _with_whole_head_rotary(config, rope_dim)
        inv_freq_P, mscale = _frequencies(own, rope_dim)
        return cls.from_inv_freq(inv_freq_P, _pairing(config), mscale)

    @classmethod
    def from_inv_freq(cls, inv_freq_P: Tensor, pairing: Pairing, mscale: float = 1.0) -> "RopeSpec":
        """Read the frequencies of a live rotary module: a floating point tensor [P] on any device, taken as it is."""
        if inv_freq_P.dim() != 1 or not inv_freq_P.is_floating_point():
            raise InputError(
                f"inv_freq must be a floating point vector, got {inv_freq_P.dtype} of shape {tuple(inv_freq_P.shape)}"
            )
        return cls(tuple(inv_freq_P.detach().to(torch.float64).tolist()), pairing, float(mscale))

    @property
    def rotary_dim(self) -> int:
        """Values that are turned (R)."""
        return 2 * len(self.inv_freq)

    @property
    def fingerprint(self) -> str:
        """A name of the rotation, the same in every process: caches share rows only where it is equal."""
        exact = [value.hex() for value in (*self.inv_freq, self.mscale)]
        digest = hashlib.blake2b(" ".join(exact).encode(), digest_size=8).hexdigest()
        return f"rope-{self.pairing.value}-{digest}"

    def angles(self, positions: Tensor) -> Tensor:
        """Angles in radians, float64 [..., P], of integer positions [...], on their device."""
        return _column(positions, torch.float64) * self._frequencies_on(positions.device)

    def table_angles(self, positions: Tensor) -> Tensor:
        """The float32 products engines keep in their tables, float64 [..., P]; positions are below 2^24."""
        products_P = _column(positions, torch.float32) * self._frequencies_on(positions.device).to(torch.float32)
        return products_P.to(torch.float64)

    def position_angles(self, positions: Tensor, source: AngleSource) -> Tensor:
        """Angles of integer positions [...] from the source named, float64 [..., P]."""
        match source:
            case AngleSource.EXACT:
                return self.angles(positions)
            case AngleSource.TABLE:
                return self.table_angles(positions)
            case _:
                assert_never(source)

    def move_angles(
        self, source_positions: Tensor, target_positions: Tensor, source: AngleSource = AngleSource.EXACT
    ) -> Tensor:
        """Angles, float64 [..., P], that move rows from one position to another; both are integers [...].

        EXACT is (t - s)·f; TABLE is the difference of the two table angles. Both are exactly 0 where t = s.
        """
        match source:
            case AngleSource.EXACT:
                return self.angles(target_positions - source_positions)
            case AngleSource.TABLE:
                return self.table_angles(target_positions) - self.table_angles(source_positions)
            case _:
                assert_never(source)

    def move_angle_bound(self, source_positions: Tensor, target_positions: Tensor) -> Tensor:
        """How far, in radians, an EXACT move can be from the TABLE move: float64 [..., P].

        The table angle of p is p·f rounded to float32, so it is off by at most u·p·f (u = 2^-24, p < 2^24 and f a
        float32 value); a move meets that error at both ends. An angle off by ε displaces a pair of norm n by at most
        ε·n.
        """
        return _UNIT_ROUNDOFF * (self.angles(source_positions) + self.angles(target_positions))

    def _frequencies_on(self, device: torch.device) -> Tensor:
        return _frequencies_on(self.inv_freq, device)


@functools.lru_cache(maxsize=64)
def _frequencies_on(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, because a copy to a GPU at every move would cost more than the move of a few rows."""
    return torch.tensor(inv_freq, dtype=torch.float64, device=device)


@dataclass(frozen=True, eq=False)
class Turn:
    """A rotation worked out for the positions of some vectors, to be applied to many: one set for all layers."""

    cos_P: Tensor
    """float32 [..., P], times the scale."""
    sin_P: Tensor
    still_P: Tensor | None
    """Where the angle is 0 and nothing is scaled; None: nowhere. (On a GPU it may be nowhere True.)"""
    pairing: Pairing

    @classmethod
    def by(cls, angles_P: Tensor, pairing: Pairing, scale: float = 1.0) -> "Turn":
        """Prepare a rotation; the arguments are those of `rotate`."""
        still_P = angles_P == 0
        # Looking spares work on a CPU; on a GPU it would wait for everything queued before.
        unmoved = scale == 1.0 and (angles_P.device.type != "cpu" or bool(still_P.any()))
        cos_P, sin_P = angles_P.cos().to(torch.float32) * scale, angles_P.sin().to(torch.float32) * scale
        return cls(cos_P, sin_P, still_P if unmoved else None, pairing)

    def __call__(self, x_R: Tensor) -> Tensor:
        """Turn vectors [..., R], float32 or narrower; see `rotate`."""
        assert x_R.is_floating_point(), x_R.dtype
        assert x_R.itemsize <= 4, x_R.dtype
        assert x_R.shape[-1] == 2 * self.cos_P.shape[-1], (x_R.shape, self.cos_P.shape)
        turned_R = _turn(x_R.to(torch.float32), self.cos_P, self.sin_P, self.pairing).to(x_R.dtype)
        assert turned_R.shape == x_R.shape, (x_R.shape, self.cos_P.shape)
        if self.still_P is None:
            return turned_R
        # x·1 - y·0 loses the sign of a negative zero, and makes NaN of an infinite y: choose, do not compute.
        return torch.where(_pair(self.still_P, self.still_P, self.pairing), x_R, turned_R)


def rotate(x_R: Tensor, angles_P: Tensor, pairing: Pairing, scale: float = 1.0) -> Tensor:
    """Turn rotary vectors by the angles given.

    Args:
        x_R: vectors [..., R], float32 or narrower.
        angles_P: radians, float64 [..., P], on the device of the vectors. All but the last dimension broadcast
            against those of the vectors: [T, P] serves [L, T, R]; [T, 1, P] serves heads [T, H, R].
        pairing: which values form a pair.
        scale: factor on cos and sin; 1 for moves.

    Returns:
        New vectors, shape and dtype of ``x_R``. With scale 1, a pair whose angle is 0 keeps every bit.
    """
    return Turn.by(angles_P, pairing, scale)(x_R)


def _turn(x_R: Tensor, cos_P: Tensor, sin_P: Tensor, pairing: Pairing) -> Tensor:
    """Multiply each pair, as a complex number, by cos + i·sin; all float32.

    Written out in real products, each rounded by itself: torch's complex product rounds differently at the end of a
    vector than inside it, so that a row's bits would depend on what is moved with it.
    """
    first_P, second_P = _unpair(x_R, pairing)
    return _pair(first_P * cos_P - second_P * sin_P, second_P * cos_P + first_P * sin_P, pairing)


def _unpair(x_R: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Return the first and the second value of each pair, [..., P] each."""
    match pairing:
        case Pairing.INTERLEAVED:
            return x_R[..., 0::2], x_R[..., 1::2]
        case Pairing.HALF_SPLIT:
            half = x_R.shape[-1] // 2
            return x_R[..., :half], x_R[..., half:]
        case _:
            assert_never(pairing)


def apply_rope(x_R: Tensor, positions: Tensor, spec: RopeSpec, source: AngleSource = AngleSource.EXACT) -> Tensor:
    """Turn fresh, unrotated vectors to their positions, with the model's ``mscale``.

    Args:
        x_R: vectors [..., R], float32 or narrower.
        positions: integers that broadcast against all but the last dimension of the vectors: [T] serves [L, T, R];
            [T, 1] serves heads [T, H, R].
        spec: the model's rotation.
        source: TABLE gives what an engine with float32 tables computes.

    Returns:
        New vectors, shape and dtype of ``x_R``.
    """
    return rotate(x_R, spec.position_angles(positions, source), spec.pairing, spec.mscale)


def _column(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Integer positions [...] as [..., 1] of a floating dtype, ready to multiply frequencies [P]."""
    assert not positions.is_floating_point(), positions.dtype
    return positions[..., None].to(dtype)


def _pair(first_P: Tensor, second_P: Tensor, pairing: Pairing) -> Tensor:
    """Undo `_unpair`."""
    match pairing:
        case Pairing.INTERLEAVED:
            return torch.stack((first_P, second_P), dim=-1).flatten(-2)
        case Pairing.HALF_SPLIT:
            return torch.cat((first_P, second_P), dim=-1)
        case _:
            assert_never(pairing)


def _rope_dim(config: "PreTrainedConfig") -> int:
    """Rotary values of a key; UnsupportedModelError where keys are not turned."""
    rope_dim: int | None = getattr(config, "qk_rope_head_dim", None)
    if rope_dim is None:
        raise UnsupportedModelError(
            f"{config.model_type} has no qk_rope_head_dim: not an MLA model, or not its text configuration"
        )
    # Configs of remote code may keep rope_theta outside rope_parameters; one with neither states no rotation.
    states_rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    if rope_dim == 0 or getattr(config, "mla_use_nope", False) or not states_rotation:
        raise UnsupportedModelError(f"NoPE models are not supported: {config.model_type} does not turn its keys")
    return rope_dim


def _pairing(config: "PreTrainedConfig") -> Pairing:
    fixed = _PAIRING_OF_MODEL.get(config.model_type)
    if fixed is not None:
        return fixed
    interleave = getattr(config, "rope_interleave", None)
    if not isinstance(interleave, bool):
        raise UnsupportedModelError(
            f"the rope pairing of {config.model_type} is not known: its config has no rope_interleave (true or false)"
        )
    return Pairing.INTERLEAVED if interleave else Pairing.HALF_SPLIT


def _with_whole_head_rotary(config: "PreTrainedConfig", rope_dim: int) -> "PreTrainedConfig":
    """Return a copy whose head is just the rotary part.

    transformers derives the rotary size from ``head_dim`` and ``partial_rotary_factor``, and its MLA configs disagree
    about what a head is: the rotary part (DeepSeek), the whole key (Mistral), or unset (remote code).
    """
    own = copy.copy(config)
    own.rope_parameters = copy.deepcopy(getattr(config, "rope_parameters", None))
    own.standardize_rope_params()
    parameters: dict[str, Any] = own.rope_parameters
    if "rope_type" not in parameters:
        raise UnsupportedModelError(
            f"rope parameters that differ between layers are not supported: {config.model_type}"
        )
    head_dim = getattr(config, "head_dim", None) or rope_dim
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if rotary_dim != rope_dim:
        raise UnsupportedModelError(
            f"{config.model_type} turns {rotary_dim} values of a head, but its rows have {rope_dim} rotary values"
        )
    own.head_dim = rope_dim
    own.rope_parameters["partial_rotary_factor"] = 1.0
    return own


def _frequencies(config: "PreTrainedConfig", rope_dim: int) -> tuple[Tensor, float]:
    """Return (inv_freq float32 [P], mscale) as transformers computes them, to the bit."""
    rope_type: str = config.rope_parameters["rope_type"]
    if rope_type not in _SUPPORTED_ROPE_TYPES:
        reason = _REASONS.get(rope_type, "it has not been shown to work")
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not supported: {reason}; supported: {', '.join(_SUPPORTED_ROPE_TYPES)}"
        )
    if rope_type == "default":
        theta: float = config.rope_parameters["rope_theta"]
        exponents_P = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
        return 1.0 / (theta**exponents_P), 1.0
    inv_freq_P, mscale = ROPE_INIT_FUNCTIONS[rope_type](config)
    return inv_freq_P, mscale
