"""Does the plugin start, pass its self-test and splice right for the attention of every model class it accepts?

    python benchmarks/sglang_shapes.py --out FILE [--only NAME ...] [--at-once N] [--logs FOLDER] [--flags JSON]

For each model a configuration with its own hidden size, heads, latent, rotary and value sizes, rotary base and scaling,
rule of routing and experts a token, but few layers (one dense where the model has any), few and narrow experts and a
vocabulary of 32,000: random weights of the scale of trained ones, 0.6 to 3.5 GB. Each runs as one configuration of
benchmarks/sglang_equality.py: three engines (stock; the plugin with forced plans; the plugin as an operator runs it),
the same comparisons and rows, with ``shape``. An engine of the plugin that answers has passed its self-test. A shape
that does not start is recorded with its sentence, and the others go on.

What this shows: shapes, rotary modules and forward paths. Not: what shifted reuse costs a model in quality, which needs
its trained weights.

Prediction: on every shape the shifted path is as far from the cold run as stock's own prefix hit, and rows turned by 37
positions too many are at least three times as far. The last line is one JSON object.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sglang_equality import COMMON, Keep, machine, run_all, run_configuration
from sglang_ttft import describe

CONFIGURATION = "eager"
VOCABULARY = 32_000
LOWEST_TOKEN = 1000
"""Ids below are left out: special tokens."""

MLA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""What all shapes share unless they say otherwise."""
MOE = {
    **MLA,
    # Less than the models have, and not attention's.
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
DEEPSEEK_V2 = {
    **MOE,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
DEEPSEEK_V3 = {**MOE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rms_norm_eps": 1e-6}
MISTRAL = {
    **MOE,
    # As SGLang makes of Mistral's params.json. A config.json does, too, if the path does not hold the model's name.
    "architectures": ["MistralLarge3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": None,
    "routing_method_type": 1,
}


def heads(count: int) -> dict[str, int]:
    """Name a number of heads as both configuration keys do."""
    return {"num_attention_heads": count, "num_key_value_heads": count}


def yarn(factor: float, original: int, **more: float) -> dict[str, Any]:
    """Frequencies of YaRN, as DeepSeek-V3 and its relatives write them."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        **DEEPSEEK_V2,
        **heads(16),
        "hidden_size": 2048,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "deepseek-v2": {
        **DEEPSEEK_V2,
        **heads(128),
        "hidden_size": 5120,
        "q_lora_rank": 1536,
        "n_routed_experts": 24,
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
        "topk_method": "group_limited_greedy",
    },
    # R1 and V3.1 too.
    "deepseek-v3": {
        **DEEPSEEK_V3,
        **heads(128),
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "max_position_embeddings": 163_840,
        "rope_theta": 10_000,
        "rope_scaling": yarn(40, 4096),
        "n_routed_experts": 24,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
    },
    "kimi-k2": {
        **DEEPSEEK_V3,
        **heads(64),
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "max_position_embeddings": 131_072,
        "rope_theta": 50_000,
        "rope_scaling": yarn(32, 4096, beta_fast=1),
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
    },
    "moonlight": {
        **DEEPSEEK_V3,
        **heads(16),
        "hidden_size": 2048,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 50_000,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.446,
    },
    "glm-4.7-flash": {
        **MOE,
        **heads(20),
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
    },
    "joyai-flash": {
        **DEEPSEEK_V3,
        **heads(32),
        "hidden_size": 2048,
        "q_lora_rank": 1536,
        "max_position_embeddings": 131_072,
        "rope_theta": 32_000_000,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
    },
    "longcat-flash": {
        **MLA,
        **heads(64),
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "attention_method": "MLA",
        "hidden_size": 6144,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 10_000_000,
        # The checkpoint leaves it out, and SGLang 0.5.23 fails on that before any plugin has a say.
        "rope_scaling": {"rope_type": "default", "rope_theta": 10_000_000},
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "num_layers": 2,
        "ffn_hidden_size": 2048,
        "expert_ffn_hidden_size": 256,
        "n_routed_experts": 16,
        "moe_topk": 12,
        "zero_expert_num": 8,
        "zero_expert_type": "identity",
        "routed_scaling_factor": 6.0,
    },
    "mistral-large-3": {
        **MISTRAL,
        **heads(128),
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "max_position_embeddings": 294_912,
        "rope_scaling": yarn(36, 8192, apply_yarn_scaling=False),
    },
    "mistral-small-4": {
        **MISTRAL,
        **heads(32),
        "hidden_size": 4096,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1_048_576,
        "rope_scaling": yarn(128, 8192, apply_yarn_scaling=False),
        "first_k_dense_replace": 0,
    },
}
"""Attention of each model. DeepSeek-V3, GLM-4.7-Flash, LongCat-Flash and Mistral-Small-4: the defaults of transformers'
configuration classes (5.24). The others as remembered, with MoonshotAI's and JoyAI's compared with the arguments that
radixark/miles trains them with. Not compared with anything: Mistral-Large-3's factor 36."""


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), choices=SHAPES, metavar="NAME")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1500, 6000])
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=1, help="so many shapes beside each other on the GPU")
    parser.add_argument("--flags", type=json.loads, default={}, help="more arguments of sglang.Engine, as JSON")
    parser.add_argument("--logs", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(1)
    prompts = [[rng.randrange(LOWEST_TOKEN, VOCABULARY) for _ in range(length)] for length in arguments.tokens]
    # A batch locks its donors and takes as many slots again, twice.
    flags = {**COMMON, "load_format": "dummy", "max_total_tokens": 10 * sum(arguments.tokens)}
    result = {
        "what": "plugin against stock SGLang for each shape of attention, " + describe({**flags, **arguments.flags}),
        **machine(),
        "configurations": {},
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:

        def run(shape: str, keep: Keep) -> dict[str, Any]:
            place = write_model(shape, Path(folder))
            logs = arguments.logs / shape if arguments.logs else None
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
            own = {**flags, "model_path": str(place)}
            found = run_configuration(
                CONFIGURATION,
                own,
                arguments.flags,
                prompts,
                arguments.new_tokens,
                place,
                logs,
                lambda row: keep({"shape": shape, **row}),
                lite=True,
            )
            return {"config": SHAPES[shape], **found}

        run_all(arguments.only, arguments.at_once, run, result, arguments.out)


def write_model(shape: str, folder: Path) -> Path:
    """Write a shape's config.json into a folder of its own; return that.

    It is named by number: SGLang takes a path that holds "mistral-large-3" for Mistral's own format.
    """
    place = folder / f"shape-{list(SHAPES).index(shape)}"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return place


if __name__ == "__main__":
    main()
