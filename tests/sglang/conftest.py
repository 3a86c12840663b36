"""Tests against SGLang 0.5.23's own classes and server, on a CPU; without SGLang they are skipped, with the reason."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "host"
TINY = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    # SGLang has no plain rotary module for MLA on a CPU; a factor of 1 scales nothing.
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def pytest_collection_modifyitems(items):
    """Skip where SGLang is missing; where it is there, its own warnings are not ours to act on."""
    try:
        version("sglang")
    except PackageNotFoundError:
        mark = pytest.mark.skip(reason="SGLang 0.5.23 is not installed here; `make test` installs it in a folder apart")
    else:
        mark = pytest.mark.filterwarnings("ignore")
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(mark)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A directory with the configuration of a tiny MLA model; SGLang draws its weights."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def published(tiny_checkpoint):
    """Publish SGLang's configuration for this process, as its scheduler does."""
    sys.path.insert(0, str(HOST))
    from mini_server import publish_configuration

    return publish_configuration(tiny_checkpoint)
