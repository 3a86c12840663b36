import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irminsul.engine.config import ModelConfig, Router, _eos_token_ids
from irminsul.errors import CheckpointError, InputError, UnsupportedModelError
from irminsul.rope import Pairing

V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
V3 = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "eos_token_id": 1,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
KIMI_K2 = V3 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 50000.0,
    "eos_token_id": 163585,
}
OWN = {
    "model_type": "irminsul_mla",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 4,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_inv_freq": [1.0, 0.01],
    "latent_norm": False,
    "softmax_scale": 0.125,
    "tie_word_embeddings": True,
}


def read(tmp_path, values, generation=None):
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_checkpoint(tmp_path)


def test_reads_deepseek_v2_lite(tmp_path):
    config = read(tmp_path, V2_LITE, {"eos_token_id": [100001, 7]})
    assert (config.n_layers, config.n_heads, config.q_lora_rank, config.n_mtp_layers) == (27, 16, None, 0)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (
        512,
        128,
        64,
        128,
    )
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert config.softmax_scale == pytest.approx(192**-0.5 * mscale**2)
    assert config.rope.pairing is Pairing.INTERLEAVED
    assert config.rope.mscale == 1.0
    assert config.eos_token_ids == (100001, 7)
    assert config.latent_norm
    assert not config.is_moe_layer(0)
    assert config.is_moe_layer(1)
    moe = config.moe
    assert (moe.router, moe.n_routed, moe.n_shared, moe.top_k) == (Router.GREEDY, 64, 2, 6)
    assert (moe.normalise, moe.scaling) == (False, 1.0)


def test_reads_deepseek_v3(tmp_path):
    config = read(tmp_path, V3)
    assert (config.n_layers, config.n_mtp_layers, config.q_lora_rank) == (61, 1, 1536)
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    moe = config.moe
    assert (moe.router, moe.n_groups, moe.topk_groups, moe.normalise) == (Router.NOAUX_TC, 8, 4, True)
    assert (moe.first_layer, moe.scaling) == (3, 2.5)


def test_reads_kimi_k2_as_deepseek_v3(tmp_path):
    config = read(tmp_path, KIMI_K2)
    assert (config.model_type, config.n_heads, config.moe.n_routed, config.moe.n_groups) == ("kimi_k2", 64, 384, 1)
    assert config.rope.inv_freq[1] == pytest.approx(50000.0 ** (-2 / 64), rel=1e-6)


def test_v3_half_split_pairing_is_read(tmp_path):
    assert read(tmp_path, V3 | {"rope_interleave": False}).rope.pairing is Pairing.HALF_SPLIT


def test_reads_the_newer_spelling_of_rope_parameters(tmp_path):
    values = {key: value for key, value in V3.items() if key not in ("rope_scaling", "rope_theta")}
    config = read(tmp_path, values | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert config.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 64), rel=1e-6)
    assert config.softmax_scale == pytest.approx(192**-0.5)


def test_all_dense_checkpoint_has_no_moe(tmp_path):
    assert read(tmp_path, V3 | {"first_k_dense_replace": 61}).moe is None


def test_reads_own_type(tmp_path):
    config = read(tmp_path, OWN)
    assert config.rope.inv_freq == (1.0, 0.01)
    assert config.rope.pairing is Pairing.INTERLEAVED
    assert (config.latent_norm, config.softmax_scale, config.qk_head_dim, config.moe) == (False, 0.125, 4, None)
    assert config.eos_token_ids == ()
    layout = config.layout(torch.bfloat16)
    assert (layout.width, layout.dtype) == (36, "bfloat16")


def test_own_type_has_deepseek_defaults(tmp_path):
    values = {key: value for key, value in OWN.items() if key not in ("latent_norm", "softmax_scale")}
    config = read(tmp_path, values | {"qk_nope_head_dim": 12, "rope_interleave": False})
    assert (config.latent_norm, config.softmax_scale) == (True, 0.25)
    assert config.rope.pairing is Pairing.HALF_SPLIT


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (OWN, {"model_type": "llama"}, "deepseek_v2, deepseek_v3, kimi_k2, irminsul_mla"),
        (OWN, {"model_type": None}, "irminsul_mla"),
        (V3, {"index_topk": 2048}, "index_topk"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (V3, {"mla_use_nope": True}, "NoPE"),
        (OWN, {"qk_rope_head_dim": 0, "rope_inv_freq": []}, "NoPE"),
        (V3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (OWN, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "greedy', 'group_limited_greedy"),
        (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2_LITE, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V2_LITE, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (V3, {"mlp_bias": True}, "mlp_bias"),
        (V3, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_refuses_by_name(tmp_path, base, change, words):
    with pytest.raises(UnsupportedModelError, match=words):
        read(tmp_path, base | change)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (OWN, {"kv_lora_rank": 0}, "kv_lora_rank must be an integer >= 1, got 0"),
        (OWN, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (OWN, {"hidden_size": True}, "hidden_size"),
        (OWN, {"latent_norm": 1}, "latent_norm must be true or false"),
        (OWN, {"softmax_scale": 0}, "softmax_scale"),
        (OWN, {"softmax_scale": math.nan}, "softmax_scale"),
        (OWN, {"rope_inv_freq": [1.0]}, "rope_inv_freq must list 2 numbers"),
        (OWN, {"rope_inv_freq": None}, "rope_inv_freq"),
        (OWN, {"rope_inv_freq": [1.0, "x"]}, "rope_inv_freq"),
        (OWN, {"eos_token_id": "</s>"}, "eos_token_id"),
        (V3, {"hidden_size": "wide"}, "hidden_size"),
        (V3, {"n_routed_experts": None}, "n_routed_experts"),
        (V3, {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, "factor"),
        (V3, {"rope_scaling": [1]}, "not a valid deepseek_v3 configuration"),
        (V3, {"rope_scaling": YARN | {"factor": "x"}}, "the rope parameters cannot be used: TypeError"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": "x"}}, "the rope parameters cannot be used: TypeError"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": math.nan}}, "makes the softmax scale nan"),
        (V3, {"rope_theta": "x"}, "the rope parameters cannot be used: TypeError"),
        (V3, {"id2label": [1]}, "not a valid deepseek_v3 configuration: AttributeError"),
        (V3, {"num_attention_heads": 0, "num_key_value_heads": 0}, "num_attention_heads|ZeroDivisionError"),
        (OWN, {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        (V3, {"n_routed_experts": 250}, "250 experts in 8 groups"),
        (V3, {"topk_group": 9}, "9 groups"),
        (V3, {"num_experts_per_tok": 200}, "200 experts"),
        (V3, {"n_group": 256, "topk_group": 256}, "2 or more experts a group"),
    ],
)
def test_impossible_values_are_named(tmp_path, base, change, words):
    with pytest.raises(CheckpointError, match=words) as raised:
        read(tmp_path, base | change)
    assert "\n" not in str(raised.value)


def test_bad_frequencies_are_refused(tmp_path):
    with pytest.raises(InputError, match="inv_freq"):
        read(tmp_path, OWN | {"rope_inv_freq": [1.0, -1.0]})


def test_unreadable_files(tmp_path):
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        ModelConfig.from_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelConfig.from_checkpoint(tmp_path)
    for text, words in (("{", "JSON"), ("[]", "JSON object"), ("\xff", "JSON"), ("[" * 200_000, "JSON: maximum recur")):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=words):
            ModelConfig.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    (tmp_path / "generation_config.json").write_text("?")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelConfig.from_checkpoint(tmp_path)


@given(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4))
def test_eos_ids_are_the_union_in_order(config, generation):
    ids = _eos_token_ids({"eos_token_id": config}, {"eos_token_id": generation})
    assert set(ids) == {*config, *generation}
    assert len(set(ids)) == len(ids)
    assert ids[: len(set(config))] == tuple(dict.fromkeys(config))


def test_single_eos_id_and_none():
    assert _eos_token_ids({"eos_token_id": 5}, {}) == (5,)
    assert _eos_token_ids({"eos_token_id": None}, {"eos_token_id": 6}) == (6,)
