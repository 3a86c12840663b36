import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from irminsul.engine.config import ModelConfig
from irminsul.engine.model import ForwardBatch, MlaModel, Span
from irminsul.engine.weights import expected_tensors
from irminsul.errors import CheckpointError, InputError
from irminsul.testing.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("original"))


@pytest.fixture
def checkpoint(original, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(original, tmp_path / "checkpoint")


def change_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def change_config(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def logits_of(model):
    tokens = torch.arange(3, 43)
    index = torch.arange(40)
    batch = ForwardBatch(tokens, index, index, (Span(0, 40, index),), index)
    return model.forward(batch, model.new_pool(40))


def test_expected_tensors_are_what_transformers_writes(original):
    config = ModelConfig.from_checkpoint(original)
    written = {name: tuple(t.shape) for name, t in load_file(original / "model.safetensors").items()}
    assert expected_tensors(config) == written


@pytest.mark.parametrize("options", [{"max_shard_size": "100KB"}, {"save_original_format": False}])
def test_other_forms_of_the_same_checkpoint_give_the_same_bits(original, tmp_path, options):
    AutoModelForCausalLM.from_pretrained(original).save_pretrained(tmp_path, **options)
    assert torch.equal(logits_of(MlaModel.load(tmp_path)), logits_of(MlaModel.load(original)))


def test_prediction_layers_and_rotary_tables_are_ignored(original, checkpoint):
    def add(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_tensors(checkpoint, add)
    change_config(checkpoint, num_nextn_predict_layers=1)
    assert torch.equal(logits_of(MlaModel.load(checkpoint)), logits_of(MlaModel.load(original)))
    change_config(checkpoint, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight"):
        MlaModel.load(checkpoint)


def test_tied_output_is_the_embedding(checkpoint):
    change_config(checkpoint, tie_word_embeddings=True)
    model = MlaModel.load(checkpoint)  # a stored lm_head is ignored
    assert model.output is model.embedding
    change_tensors(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    assert torch.equal(logits_of(MlaModel.load(checkpoint)), logits_of(model))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.2.self_attn.kv_b_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.7.up_proj.weight",
    ],
)
def test_missing_and_misshaped_tensors_are_named(checkpoint, name):
    def narrow(tensors):
        tensors[name] = tensors[name][:-1]

    change_tensors(checkpoint, narrow)
    with pytest.raises(CheckpointError, match=rf"{name} has shape"):
        MlaModel.load(checkpoint)
    change_tensors(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"lacks tensor {name}"):
        MlaModel.load(checkpoint)


def test_unknown_tensors_are_named(checkpoint):
    change_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.0.self_attn.indexer.wk": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.indexer\.wk"):
        MlaModel.load(checkpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_named(checkpoint, dtype):
    name = "model.layers.0.self_attn.o_proj.weight"
    change_tensors(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{name} has dtype"):
        MlaModel.load(checkpoint)


def test_pickle_is_not_read(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        MlaModel.load(checkpoint)


def test_truncated_file_is_a_checkpoint_error(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        MlaModel.load(checkpoint)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}, "outside its directory"),
        ({"weight_map": {"lm_head.weight": "absent.safetensors"}}, "cannot be read"),
        ({"weight_map": []}, "index"),
        ({}, "weight_map"),
        ([], "index"),
    ],
)
def test_bad_indices_are_refused(checkpoint, index, words):
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        MlaModel.load(checkpoint)


def write_own_checkpoint(path, source, *, latent_norm):
    """Rewrite a dense V3 checkpoint as ``irminsul_mla``."""
    config = ModelConfig.from_checkpoint(source)
    values = json.loads((source / "config.json").read_text())
    values |= {
        "model_type": "irminsul_mla",
        "latent_norm": latent_norm,
        "rope_inv_freq": list(config.rope.inv_freq),
        "softmax_scale": 0.3,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if latent_norm or "kv_a_layernorm" not in n}, path / "model.safetensors"
    )


@pytest.mark.parametrize("latent_norm", [True, False])
def test_own_type_agrees_with_a_changed_deepseek(tmp_path, latent_norm):
    source = write_tiny_checkpoint(tmp_path / "v3", moe=False)
    write_own_checkpoint(tmp_path / "own", source, latent_norm=latent_norm)
    reference = AutoModelForCausalLM.from_pretrained(source)
    for layer in reference.model.layers:
        layer.self_attn.scaling = 0.3
        if not latent_norm:
            layer.self_attn.kv_a_layernorm = torch.nn.Identity()
    with torch.no_grad():
        expected = reference(torch.arange(3, 43)[None]).logits[0]
    torch.testing.assert_close(logits_of(MlaModel.load(tmp_path / "own")), expected, rtol=0, atol=1e-4)


def test_tiny_checkpoints_are_reproducible(original, tmp_path):
    same = write_tiny_checkpoint(tmp_path / "same")
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    assert (same / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert (other / "model.safetensors").read_bytes() != (original / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="v2, v3"):
        write_tiny_checkpoint(tmp_path / "v4", "v4")
