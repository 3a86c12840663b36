"""From a trained student to the file, and from the file to the checkpoint."""

import pytest
import torch
from tiny_run import TINY

from irminsul.checkpoints import distilled
from irminsul.checkpoints.delta import ATTENTION_MATRICES, MLP_MATRICES, Delta
from irminsul.errors import InputError
from training.export import read_trained, write
from training.state import save_weights
from training.train import prepare


@pytest.fixture
def student(original, text, run):
    """Trained by chance, so much that what was added is as large as what it is added to."""
    made = prepare(original, text, TINY, run)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(".up"):
                parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("weight"):
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=generator))
    save_weights(run, made)
    return made


@pytest.mark.usefixtures("tiny_widths")
def test_the_checkpoint_is_the_student_within_the_rounding(student, original, run, tmp_path):
    path = tmp_path / "delta.safetensors"
    write(read_trained(run), path)
    delta = Delta.read(path)
    assert delta.rope_theta == TINY.theta
    tensors = distilled.tensors(original, delta)
    for at, layer in enumerate(student.layers):
        for name in (*ATTENTION_MATRICES, *MLP_MATRICES):
            place = "self_attn" if name in ATTENTION_MATRICES else "mlp"
            module = getattr(layer, name)
            error = tensors[f"model.layers.{at}.{place}.{name}.weight"].float() - module.matrix()
            added = (module.up @ module.down).norm()
            assert added > 0.3 * module.weight.norm()
            # 8-bit factors, then bfloat16.
            assert error.norm() < 0.02 * added + 2**-8 * module.matrix().norm()
        latent = tensors[f"model.layers.{at}.self_attn.kv_a_layernorm.weight"].float()
        torch.testing.assert_close(latent, layer.kv_a_layernorm.weight.detach(), rtol=2**-8, atol=0)
    torch.testing.assert_close(tensors["model.norm.weight"].float(), student.norm.weight.detach(), rtol=2**-8, atol=0)


def test_the_same_weights_give_the_same_file(student, run, tmp_path):
    files = [tmp_path / "first", tmp_path / "second"]
    for path in files:
        write(read_trained(run), path)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_that_cannot_be_written_is_told(student, run, tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*/nowhere/delta"):
        write(read_trained(run), tmp_path / "nowhere" / "delta")
    with pytest.raises(InputError, match=r"cannot write the weights to .*/nowhere"):
        save_weights(tmp_path / "nowhere", student)


@pytest.mark.usefixtures("student")
def test_damaged_weights_are_refused(run):
    path = run / "weights_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"the weights in .*/run cannot be read"):
        read_trained(run)


def test_a_run_that_has_not_ended_cannot_be_exported(original, text, run):
    prepare(original, text, TINY, run)
    with pytest.raises(InputError, match="has no weights_"):
        read_trained(run)
