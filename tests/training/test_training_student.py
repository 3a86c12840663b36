"""The student against transformers' DeepSeek-V2."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_run import TINY
from transformers import DeepseekV2ForCausalLM

from irminsul.checkpoints import distilled
from training.export import read_trained
from training.state import save_weights
from training.train import prepare

IDS = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def student(original, text, run):
    return prepare(original, text, TINY, run)


@pytest.fixture
def checkpoint(student, original, run, tiny_widths):
    """The tensors of what has been trained, which is nothing."""
    save_weights(run, student)
    return distilled.tensors(original, read_trained(run))


def fixed(student):
    """The fixed matrices and norms by the names of the checkpoint."""
    for at, layer in enumerate(student.layers):
        for name, module in layer.named_children():
            place = "" if "layernorm" in name and "kv_a" not in name else "mlp." if name in TINY.ranks else "self_attn."
            if name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
                place = "self_attn."
            yield f"model.layers.{at}.{place}{name}.weight", module
    yield "model.norm.weight", student.norm


def test_before_training_the_matrices_are_those_of_the_rewriting(student, checkpoint):
    seen = {"model.embed_tokens.weight"}
    for name, module in fixed(student):
        torch.testing.assert_close(module.weight.detach(), checkpoint[name].float(), rtol=2**-8, atol=1e-7)
        seen.add(name)
    assert seen == checkpoint.keys()


def test_before_training_the_logits_are_those_of_the_rewritten_model_in_transformers(
    student, checkpoint, original, run, tmp_path
):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(distilled.config(original, read_trained(run))))
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.items()}, folder / "model.safetensors")
    model = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, module in fixed(student):  # the checkpoint's are rounded to bfloat16
            module.weight.copy_(checkpoint[name])
        student.embedding.copy_(checkpoint["model.embed_tokens.weight"])
        expected = model(input_ids=IDS).logits
        torch.testing.assert_close(student.logits(IDS), expected, rtol=1e-4, atol=1e-4)


def test_only_factors_and_norms_are_trained(student):
    names = {name.split(".")[-1] for name, _ in student.named_parameters()}
    assert names == {"up", "down", "weight"}
    assert all(not parameter.any() for name, parameter in student.named_parameters() if name.endswith(".up"))
    norms = [name for name, _ in student.named_parameters() if name.endswith("weight")]
    assert len(norms) == 2 * 3 + 1


def test_what_is_trained_is_added_to_the_matrix(student):
    module = student.layers[0].gate_proj
    with torch.no_grad():
        module.up.fill_(0.5)
    x = torch.ones(48)
    torch.testing.assert_close(module(x), (module.weight + module.up @ module.down) @ x)
