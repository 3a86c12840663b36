"""The oracle for rotated rows is transformers: its rotary modules and its apply functions, never our own code."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    KimiLinearConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
    Mistral4Config,
    PreTrainedConfig,
    YoutuConfig,
)
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm
from transformers.models.longcat_flash import modeling_longcat_flash as longcat
from transformers.models.minicpm3 import modeling_minicpm3 as minicpm3
from transformers.models.mistral4 import modeling_mistral4 as mistral4
from transformers.models.youtu import modeling_youtu as youtu

from irminsul.errors import InputError, UnsupportedModelError
from irminsul.rope import AngleSource, Pairing, RopeSpec, apply_rope, rotate

# A float32 rotation of a pair of norm n is off by at most 4·√2·u·n (u = 2^-24): cos and sin by 2u, the products and
# their sum by u each. A moved row against a fresh one has met three of them: 17u = 1.01e-6. Measured: 2.4e-7.
FLOAT32_ROUNDING = 1e-6
BFLOAT16_ROUNDING = 2.0**-8

POSITIONS = (0, 1, 63, 4097, 31_000, 100_000)


def yarn(theta, factor, original, **more):
    fixed = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    return fixed | more


DEEPSEEK_V3_YARN = yarn(10_000.0, 40.0, 4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)


def fresh_v2(module, config, x_TR, positions_T):
    """V2 multiplies complex numbers, and keeps the pairs where they were."""
    k = x_TR[None, None]
    _, k = module.apply_rotary_emb(k, k, module.DeepseekV2RotaryEmbedding(config)(x_TR, positions_T[None]))
    return k[0, 0]


def fresh_interleaved(module, config, x_TR, positions_T):
    """The interleaved function returns all first values, then all second ones: put them back into pairs."""
    k = x_TR[None, None]
    cos, sin = rotary_module(module, config)(x_TR, positions_T[None])
    _, k = module.apply_rotary_pos_emb_interleave(k, k, cos, sin)
    return torch.stack(k[0, 0].chunk(2, dim=-1), dim=-1).flatten(-2)


def fresh_half_split(module, config, x_TR, positions_T):
    k = x_TR[None, None]
    cos, sin = rotary_module(module, config)(x_TR, positions_T[None])
    _, k = module.apply_rotary_pos_emb(k, k, cos, sin)
    return k[0, 0]


def rotary_module(module, config):
    (rotary,) = (cls for name, cls in vars(module).items() if name.endswith("RotaryEmbedding"))
    return rotary(config)


@dataclass(frozen=True)
class Oracle:
    module: object
    make_config: Callable[[], PreTrainedConfig]
    apply: Callable
    pairing: Pairing = Pairing.INTERLEAVED

    def fresh(self, x_TR, positions_T):
        return self.apply(self.module, self.make_config(), x_TR, positions_T)


def v2_lite():
    scaling = yarn(10_000.0, 40.0, 4096, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707)
    return DeepseekV2Config(max_position_embeddings=163_840, rope_parameters=scaling)


def v3_config(parameters, **more):
    return DeepseekV3Config(max_position_embeddings=163_840, rope_parameters=dict(parameters), **more)


def kimi_k2():
    scaling = yarn(50_000.0, 32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    return DeepseekV3Config(max_position_embeddings=131_072, rope_parameters=scaling)


def moonlight():
    return DeepseekV3Config(max_position_embeddings=8192, rope_theta=50_000.0)


def ratio_not_one():
    return v3_config(DEEPSEEK_V3_YARN | {"mscale_all_dim": 0.5})


ORACLES = {
    "deepseek-v2-lite": Oracle(v2, v2_lite, fresh_v2),
    "deepseek-v3": Oracle(v3, lambda: v3_config(DEEPSEEK_V3_YARN), fresh_interleaved),
    "kimi-k2": Oracle(v3, kimi_k2, fresh_interleaved),
    "moonlight": Oracle(v3, moonlight, fresh_interleaved),
    "glm-4.7-flash": Oracle(
        glm, lambda: Glm4MoeLiteConfig(rope_theta=1_000_000.0, partial_rotary_factor=1.0), fresh_interleaved
    ),
    "mistral-small-4": Oracle(mistral4, Mistral4Config, fresh_interleaved),
    "youtu": Oracle(youtu, lambda: YoutuConfig(rope_theta=1_600_000.0), fresh_interleaved),
    "longcat-flash": Oracle(longcat, LongcatFlashConfig, fresh_interleaved),
    "linear": Oracle(
        v3, lambda: v3_config({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}), fresh_interleaved
    ),
    "mscale-ratio": Oracle(v3, ratio_not_one, fresh_interleaved),
    "yarn-without-mscale": Oracle(v3, lambda: v3_config(yarn(10_000.0, 40.0, 4096)), fresh_interleaved),
    "half-split": Oracle(
        v3, lambda: v3_config(DEEPSEEK_V3_YARN, rope_interleave=False), fresh_half_split, Pairing.HALF_SPLIT
    ),
    "minicpm3": Oracle(minicpm3, MiniCPM3Config, fresh_half_split, Pairing.HALF_SPLIT),
}

every_oracle = pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)


def pair_norms(x_TR, pairing):
    x_TR = x_TR.to(torch.float64)
    first, second = (x_TR[..., 0::2], x_TR[..., 1::2]) if pairing is Pairing.INTERLEAVED else x_TR.chunk(2, dim=-1)
    return torch.hypot(first, second)


def assert_rows_agree(rows_TR, fresh_TR, pairing, *, rounding=FLOAT32_ROUNDING, angle_bound_TP=0.0):
    """Each pair is where it should be, to within ``rounding`` and ``angle_bound_TP`` (radians) times its norm."""
    error_TP = pair_norms(rows_TR.to(torch.float64) - fresh_TR.to(torch.float64), pairing)
    allowed_TP = (rounding + angle_bound_TP) * pair_norms(fresh_TR, pairing)
    worst = (error_TP / allowed_TP).max().item()
    assert worst <= 1.0, f"a pair is {worst:.3g} times further off than allowed"


def moves():
    """All ordered pairs of POSITIONS: distances up to 100,000, both ways."""
    positions = torch.tensor(POSITIONS)
    return positions.repeat_interleave(len(positions)), positions.repeat(len(positions))


def random_rows(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class Case:
    """Rows computed by transformers at the source and at the target positions, and what we made of the former."""

    def __init__(self, oracle, spec=None):
        self.spec = spec or RopeSpec.from_config(oracle.make_config())
        self.sources, self.targets = moves()
        x_TR = random_rows(len(self.sources), self.spec.rotary_dim)
        self.stored, self.fresh = oracle.fresh(x_TR, self.sources), oracle.fresh(x_TR, self.targets)
        self.true_pairing = oracle.pairing

    def moved(self, source, scale=1.0):
        return rotate(self.stored, self.spec.move_angles(self.sources, self.targets, source), self.spec.pairing, scale)

    def check(self, source, scale=1.0):
        exact = source is AngleSource.EXACT
        bound = self.spec.move_angle_bound(self.sources, self.targets) if exact else 0.0
        assert_rows_agree(self.moved(source, scale), self.fresh, self.true_pairing, angle_bound_TP=bound)


# Reading a model.


@every_oracle
def test_config_gives_the_frequencies_and_scaling_of_the_live_module(oracle):
    config = oracle.make_config()
    live = rotary_module(oracle.module, config)
    spec = RopeSpec.from_config(config)
    assert torch.equal(torch.tensor(spec.inv_freq, dtype=torch.float32), live.inv_freq)
    assert spec == RopeSpec.from_inv_freq(live.inv_freq, oracle.pairing, live.attention_scaling)
    assert spec.rotary_dim == config.qk_rope_head_dim


@every_oracle
def test_reading_a_config_leaves_it_alone(oracle):
    config = oracle.make_config()
    before = copy.deepcopy(config.to_dict())
    RopeSpec.from_config(config)
    assert config.to_dict() == before


class CalledError(Exception):
    pass


def announce(name):
    def apply(*_args, **_kwargs):
        raise CalledError(name)

    return apply


@every_oracle
def test_the_oracle_applies_what_the_models_attention_applies(oracle, monkeypatch):
    """And so the pairing is the model's: what the config says, or for V2, LongCat and MiniCPM3 what we know."""
    names = {fresh_v2: "apply_rotary_emb", fresh_half_split: "apply_rotary_pos_emb"}
    for name in [name for name in vars(oracle.module) if name.startswith("apply_rotary")]:
        monkeypatch.setattr(oracle.module, name, announce(name))
    (attention,) = (cls for name, cls in vars(oracle.module).items() if name.endswith(("Attention", "MLA")))
    config = oracle.make_config()
    with torch.device("meta"):
        hidden = torch.zeros(1, 3, config.hidden_size)
        positions = torch.zeros(1, 3, dtype=torch.int64)
        angles = rotary_module(oracle.module, config)(hidden, positions)
        layer = attention(config, layer_idx=0)
        with pytest.raises(CalledError) as called:
            layer(hidden, position_embeddings=angles, attention_mask=None, position_ids=positions)
    assert called.value.args == (names.get(oracle.apply, "apply_rotary_pos_emb_interleave"),)


class KimiK2Config(PreTrainedConfig):
    """The form of Kimi-K2's own config class: no head_dim, rope_theta and rope_scaling as attributes."""

    model_type = "kimi_k2"

    def __init__(self, rope_parameters=None, rope_theta=None, **more):
        self.qk_rope_head_dim = 64
        self.hidden_size = 7168
        self.num_attention_heads = 64
        self.max_position_embeddings = 131_072
        self.rope_parameters = rope_parameters
        self.rope_theta = rope_theta
        super().__init__(**more)


def test_configs_of_remote_code_are_read_like_ours():
    scaling = {key: value for key, value in kimi_k2().rope_parameters.items() if key not in ("rope_type", "rope_theta")}
    remote = KimiK2Config({"type": "yarn", **scaling}, rope_theta=50_000.0)
    assert RopeSpec.from_config(remote) == RopeSpec.from_config(kimi_k2())
    assert RopeSpec.from_config(KimiK2Config(rope_theta=50_000.0)) == RopeSpec.from_config(moonlight())


def test_a_module_cast_to_bfloat16_is_read_as_it_is():
    rounded = torch.tensor([1.0, 0.7499]).to(torch.bfloat16)
    assert RopeSpec.from_inv_freq(rounded, Pairing.INTERLEAVED).inv_freq == (1.0, 0.75)


def nope_by_flag():
    config = moonlight()
    config.mla_use_nope = True
    return config


def different_layers():
    config = DeepseekV3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    default = {"rope_type": "default", "rope_theta": 10_000.0}
    config.rope_parameters = {"full_attention": default, "sliding_attention": default}
    return config


def scaled(rope_type, **more):
    return v3_config({"rope_type": rope_type, "rope_theta": 10_000.0, **more})


REFUSED = {
    "longrope": (
        lambda: scaled("longrope", factor=4.0, short_factor=[1.0] * 32, long_factor=[2.0] * 32),
        "rope type 'longrope' is not supported: .*length.*; supported: default, linear, yarn",
    ),
    "dynamic": (lambda: scaled("dynamic", factor=4.0), "rope type 'dynamic' .*dynamic NTK.*: default, linear, yarn"),
    "llama3": (
        lambda: scaled(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
        "rope type 'llama3' .*not been shown to work",
    ),
    "proportional": (lambda: scaled("proportional"), "rope type 'proportional' "),
    "unknown": (lambda: scaled("spiral"), "rope type 'spiral' .*supported: default, linear, yarn"),
    "nope by flag": (nope_by_flag, "NoPE .*deepseek_v3"),
    "nope without parameters": (KimiLinearConfig, "NoPE .*kimi_linear"),
    "nope by size": (lambda: DeepseekV3Config(qk_rope_head_dim=0), "NoPE .*deepseek_v3"),
    "not MLA": (LlamaConfig, "llama has no qk_rope_head_dim"),
    "partial": (
        lambda: Glm4MoeLiteConfig(partial_rotary_factor=0.5),
        "glm4_moe_lite turns 32 values of a head, but its rows have 64",
    ),
    "layers": (different_layers, "differ between layers are not supported: deepseek_v3"),
    "unstated pairing": (lambda: DeepseekV3Config(rope_interleave=None), "pairing of deepseek_v3 is not known"),
}


@pytest.mark.parametrize(("make_config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_not_been_shown_to_work_is_refused_by_name(make_config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        RopeSpec.from_config(make_config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inv_freq": ()}, "NoPE"),
        ({"inv_freq": (1.0, 0.0)}, "inv_freq must be finite and > 0"),
        ({"inv_freq": (1.0, math.nan)}, "inv_freq must be finite and > 0"),
        ({"inv_freq": (math.inf,)}, "inv_freq must be finite and > 0"),
        ({"mscale": 0.0}, "mscale must be finite and > 0"),
        ({"mscale": math.inf}, "mscale must be finite and > 0"),
        ({"pairing": "interleaved"}, "pairing must be a Pairing .interleaved, half_split."),
    ],
)
def test_impossible_rotations_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        replace(RopeSpec((1.0, 0.5), Pairing.INTERLEAVED), **changes)


@pytest.mark.parametrize("inv_freq", [torch.ones(2, 2), torch.ones(2, dtype=torch.int64)])
def test_frequencies_are_a_floating_point_vector(inv_freq):
    with pytest.raises(InputError, match="inv_freq must be a floating point vector"):
        RopeSpec.from_inv_freq(inv_freq, Pairing.INTERLEAVED)


def test_fingerprint_is_frozen_and_tells_rotations_apart():
    spec = RopeSpec((1.0, 0.1), Pairing.INTERLEAVED)
    assert spec.fingerprint == "rope-interleaved-29ef0bff7f926bb3"
    others = [
        replace(spec, inv_freq=(1.0, math.nextafter(0.1, 1.0))),
        replace(spec, pairing=Pairing.HALF_SPLIT),
        replace(spec, mscale=1.25),
        replace(spec, inv_freq=(1.0, 0.1, 1.0)),
    ]
    assert len({other.fingerprint for other in (spec, *others)}) == 5


# Rows against transformers.


@every_oracle
def test_a_fresh_row_is_that_of_transformers(oracle):
    spec = RopeSpec.from_config(oracle.make_config())
    positions = torch.tensor(POSITIONS)
    x_TR = random_rows(len(positions), spec.rotary_dim)
    fresh = oracle.fresh(x_TR, positions)
    assert_rows_agree(apply_rope(x_TR, positions, spec, AngleSource.TABLE), fresh, oracle.pairing)
    bound = spec.move_angle_bound(torch.zeros_like(positions), positions)
    assert_rows_agree(apply_rope(x_TR, positions, spec), fresh, oracle.pairing, angle_bound_TP=bound)


@every_oracle
@pytest.mark.parametrize("source", AngleSource)
def test_a_moved_row_is_the_row_transformers_computes_at_the_target(oracle, source):
    Case(oracle).check(source)


def test_exact_angles_need_their_bound_far_away():
    """Without it the check fails: near 100,000 the engine's own angle is off by thousandths of a radian."""
    case = Case(ORACLES["deepseek-v3"])
    with pytest.raises(AssertionError):
        assert_rows_agree(case.moved(AngleSource.EXACT), case.fresh, case.true_pairing)
    assert 0.002 < case.spec.move_angle_bound(torch.tensor(0), torch.tensor(100_000))[1] < 0.005


@every_oracle
@pytest.mark.parametrize("source", AngleSource)
def test_the_check_fails_for_the_wrong_pairing(oracle, source):
    spec = RopeSpec.from_config(oracle.make_config())
    (wrong,) = set(Pairing) - {spec.pairing}
    with pytest.raises(AssertionError, match="further off"):
        Case(oracle, replace(spec, pairing=wrong)).check(source)


@pytest.mark.parametrize("name", sorted(set(ORACLES) - {"minicpm3"}))
@pytest.mark.parametrize("source", AngleSource)
def test_the_check_fails_for_plain_base_10000_frequencies(name, source):
    """MiniCPM3 is left out because these are its frequencies."""
    spec = RopeSpec.from_config(ORACLES[name].make_config())
    plain = tuple(10_000.0 ** (-2 * pair / spec.rotary_dim) for pair in range(spec.rotary_dim // 2))
    with pytest.raises(AssertionError, match="further off"):
        Case(ORACLES[name], replace(spec, inv_freq=plain)).check(source)


@pytest.mark.parametrize("name", ["mscale-ratio", "yarn-without-mscale"])
def test_moving_does_not_scale_again(name):
    case = Case(ORACLES[name])
    assert case.spec.mscale > 1.1
    for source in AngleSource:
        case.check(source)
        with pytest.raises(AssertionError, match="further off"):
            case.check(source, scale=case.spec.mscale)


@pytest.mark.parametrize("source", AngleSource)
def test_bfloat16_rows_are_rounded_once_more_by_a_move(source):
    """Stored row, moved row and fresh row are each rounded once: 3 · 2^-8 of the norm of a pair, at most."""
    oracle = ORACLES["deepseek-v3"]
    case = Case(oracle)
    case.stored = case.stored.to(torch.bfloat16)
    moved = case.moved(source)
    unrounded = rotate(case.stored.float(), case.spec.move_angles(case.sources, case.targets, source), oracle.pairing)
    assert torch.equal(moved, unrounded.to(torch.bfloat16))
    assert (moved.float() - unrounded).abs().le(BFLOAT16_ROUNDING * unrounded.abs()).all()
    bound = case.spec.move_angle_bound(case.sources, case.targets)
    fresh = case.fresh.to(torch.bfloat16)
    rounding = 3 * BFLOAT16_ROUNDING * (1 + BFLOAT16_ROUNDING)
    assert_rows_agree(moved, fresh, oracle.pairing, rounding=rounding, angle_bound_TP=bound)


# What holds for all inputs.

angles = st.floats(-1e5, 1e5)
pairings = st.sampled_from(Pairing)
positions = st.integers(0, 2**24 - 1)
frequencies = st.floats(2.0**-24, 1.0, width=32)


def test_sign_and_pairs_by_hand():
    quarter = torch.tensor([math.pi / 2, math.pi], dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = rotate(x, quarter, Pairing.INTERLEAVED)
    torch.testing.assert_close(turned, torch.tensor([-2.0, 1.0, -3.0, -4.0]))
    turned = rotate(x, quarter, Pairing.HALF_SPLIT)
    torch.testing.assert_close(turned, torch.tensor([-3.0, -2.0, 1.0, -4.0]))
    torch.testing.assert_close(rotate(x, quarter, Pairing.HALF_SPLIT, scale=2.0), 2 * turned)


@given(angles, angles, pairings, st.integers(0, 2**31))
def test_turning_twice_is_turning_by_the_sum(first, second, pairing, seed):
    x = random_rows(3, 8, seed)
    one, two = (torch.full((4,), angle, dtype=torch.float64) for angle in (first, second))
    assert_rows_agree(rotate(rotate(x, one, pairing), two, pairing), rotate(x, one + two, pairing), pairing)


@given(angles, pairings, st.integers(0, 2**31))
def test_turning_keeps_the_norm_of_every_pair_and_turning_back_undoes_it(angle, pairing, seed):
    x = random_rows(3, 8, seed)
    turn = torch.full((4,), angle, dtype=torch.float64)
    turned = rotate(x, turn, pairing)
    torch.testing.assert_close(pair_norms(turned, pairing), pair_norms(x, pairing), rtol=FLOAT32_ROUNDING, atol=0.0)
    assert_rows_agree(rotate(turned, -turn, pairing), x, pairing)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4),
    pairings,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_turning_by_zero_changes_no_bit(bits, pairing, dtype):
    """For every pattern of bits: signed zeros, subnormals, infinities and NaNs too."""
    carrier = torch.int32 if dtype is torch.float32 else torch.int16
    x = torch.tensor(bits, dtype=torch.int32).view(carrier).view(dtype)
    still = torch.zeros(len(x) // 2, dtype=torch.float64)
    assert torch.equal(rotate(x, still, pairing).view(carrier), x.view(carrier))


@given(positions, st.sampled_from(AngleSource), st.lists(frequencies, min_size=1, max_size=4))
def test_a_move_to_the_same_place_turns_by_zero(position, source, inv_freq):
    here = torch.tensor([position])
    assert not RopeSpec(tuple(inv_freq), Pairing.INTERLEAVED).move_angles(here, here, source).any()


@given(positions, positions, st.lists(frequencies, min_size=1, max_size=4))
@settings(max_examples=300)
def test_exact_and_table_angles_differ_by_no_more_than_the_bound(start, end, inv_freq):
    spec = RopeSpec(tuple(inv_freq), Pairing.INTERLEAVED)
    source, target = torch.tensor([start]), torch.tensor([end])
    exact = spec.move_angles(source, target)
    table = spec.move_angles(source, target, AngleSource.TABLE)
    assert (exact - table).abs().le(spec.move_angle_bound(source, target)).all()


@given(positions, positions, frequencies)
def test_exact_move_angles_are_the_float64_product(start, end, frequency):
    assume(start != end)
    spec = RopeSpec((frequency,), Pairing.INTERLEAVED)
    angle = spec.move_angles(torch.tensor(start, dtype=torch.int32), torch.tensor(end, dtype=torch.int32))
    assert angle.dtype == torch.float64
    assert angle.item() == (end - start) * frequency


# Shapes.


def test_positions_broadcast_over_layers_and_heads():
    spec = RopeSpec((1.0, 0.3, 0.01), Pairing.INTERLEAVED, mscale=1.5)
    positions_T = torch.tensor([3, 700, 41])
    heads_THR = random_rows(3 * 5, 6).view(3, 5, 6)
    by_head = torch.stack([apply_rope(heads_THR[:, head], positions_T, spec) for head in range(5)], dim=1)
    assert torch.equal(apply_rope(heads_THR, positions_T[:, None], spec), by_head)
    layers_LTR = heads_THR.transpose(0, 1)
    assert torch.equal(apply_rope(layers_LTR, positions_T, spec), by_head.transpose(0, 1))


@pytest.mark.parametrize(
    ("x", "angles_shape"),
    [
        (torch.zeros(3, 8), (3, 8)),
        (torch.zeros(3, 8), (2, 3, 4)),
        (torch.zeros(3, 8, dtype=torch.float64), (3, 4)),
        (torch.zeros(3, 8, dtype=torch.int32), (3, 4)),
    ],
    ids=["a table of both halves", "more angles than vectors", "float64", "integers"],
)
def test_rotate_refuses_what_it_would_get_wrong(x, angles_shape):
    with pytest.raises(AssertionError):
        rotate(x, torch.zeros(angles_shape, dtype=torch.float64), Pairing.INTERLEAVED)


@pytest.mark.parametrize("source", AngleSource)
def test_positions_are_integers(source):
    with pytest.raises(AssertionError):
        RopeSpec((1.0,), Pairing.INTERLEAVED).position_angles(torch.tensor([0.5]), source)
