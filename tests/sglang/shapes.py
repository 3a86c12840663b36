"""Let SGLang build a tiny model of each shape in benchmarks/sglang_shapes.py, and run the plugin's self-test on it.

Latent, rotary and value sizes, rotary base and scaling are the model's; hidden size and heads are not. One layer. Then
let SGLang read the configurations of models that are refused. Prints a JSON line for each. A program of its own, since
SGLang has one configuration a process.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import sglang_shapes
from irminsul.sglang.live_model import LiveModel
from irminsul.sglang.support import model_problems

TINY = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "vocab_size": 2000,
    "torch_dtype": "float32",
}
ONE_DENSE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "intermediate_size": 128}
ONE_DOUBLE_LAYER = {"num_layers": 1, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 64}
MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
INDEX = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
REFUSED = {
    "DeepSeek-V3.2": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **MLA,
        **INDEX,
        "rope_theta": 10_000,
        "rope_scaling": sglang_shapes.yarn(40, 4096),
    },
    "DeepSeek-V4": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 2,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 512,
        "compress_ratios": [4, 128],
    },
    "Kimi-Linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **MLA,
        "q_lora_rank": None,
        "mla_use_nope": True,
    },
    "GLM-5": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **MLA,
        **INDEX,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "MiniCPM3": {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "max_position_embeddings": 32_768,
        "original_max_position_embeddings": 32_768,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    },
}
"""What the plugin looks at in the configuration of a model that cannot be supported."""


def main():
    """Test all."""
    for shape, config in sglang_shapes.SHAPES.items():
        sglang_shapes.SHAPES[shape] = config | TINY | (ONE_DOUBLE_LAYER if "num_layers" in config else ONE_DENSE_LAYER)
    with tempfile.TemporaryDirectory() as folder:
        paths = {shape: sglang_shapes.write_model(shape, Path(folder)) for shape in sglang_shapes.SHAPES}
        start_sglang(next(iter(paths.values())))
        for shape, path in paths.items():
            tell(name=shape, **examine(path))
    for model, config in REFUSED.items():
        tell(name=model, problems=problems_of(config))


def tell(**found):
    """Write a line."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def start_sglang(path):
    """Set up what SGLang sets up once in a process."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime, init_parallel_runtime
    from sglang.srt.models import deepseek_v2
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.network import get_open_port

    logging.disable(logging.WARNING)
    arguments = ServerArgs(
        model_path=str(path), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True, dtype="float32"
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    init_parallel_runtime(server_args=arguments, device="cpu", dist_port=get_open_port())
    init_layer_runtime(model_config=ModelConfig(str(path), dtype="float32"))
    deepseek_v2.get_rope_wrapper = with_plain_rope(deepseek_v2.get_rope_wrapper)


def with_plain_rope(get_rope_wrapper):
    """Let SGLang build on a CPU the plain rotary module that it builds on a GPU."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    def get(*args, rope_scaling, device, **kwargs):
        if rope_scaling is None:
            return get_rope(*args, **kwargs)
        return get_rope_wrapper(*args, rope_scaling=rope_scaling, device=device, **kwargs)

    return get


def examine(path):
    """Load a model and test it; returns what the plugin found."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.model_loader import get_model

    config = ModelConfig(str(path), dtype="float32")
    problems = list(model_problems(config.hf_config))
    model = get_model(
        model_config=config, load_config=LoadConfig(load_format="dummy"), device_config=DeviceConfig("cpu")
    )
    pool = MLATokenToKVPool(
        size=64,
        page_size=1,
        dtype=torch.float32,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        layer_num=config.num_attention_layers,
        device="cpu",
        enable_memory_saver=False,
    )
    live = LiveModel.of(SimpleNamespace(model=model), pool)
    live.self_test("reference", config.context_len)
    return {
        "problems": problems,
        "rotary": type(live.attention.rotary_emb).__name__,
        "pairing": live.rope.pairing,
        "sizes": [live.shape.latent, live.shape.rope, live.shape.nope, live.shape.value],
        "pool_layers": len(live.layers),
    }


def problems_of(config):
    """Return what is refused in a configuration, as SGLang reads it."""
    from sglang.srt.utils.hf_transformers import get_config

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return list(model_problems(get_config(folder, trust_remote_code=False)))


if __name__ == "__main__":
    main()
