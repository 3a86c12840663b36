"""Statistics of keys and attention, compared with a plain computation, and the texts themselves."""

import re

import pytest
import torch
from tiny_llama import tiny_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from irminsul.checkpoints.calibration import as_complex, key_statistics, read_texts
from irminsul.checkpoints.perplexity import held_out_texts

SEQUENCES = [torch.randint(3, 320, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 25)]


@torch.inference_mode()
def test_key_covariance_is_the_mean_over_all_tokens():
    model = tiny_llama()
    found = key_statistics(model, SEQUENCES).covariance_LZZ
    # The first layer reads nothing but embeddings, so its keys can be computed for all tokens at once.
    layer = model.model.layers[0]
    keys_TK = layer.self_attn.k_proj(layer.input_layernorm(model.model.embed_tokens(torch.cat(SEQUENCES))))
    z_TZ = as_complex(keys_TK, 2)
    expected = sum(torch.outer(z_Z, z_Z.conj()) for z_Z in z_TZ) / len(z_TZ)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, found.mH, rtol=0, atol=1e-9)
    assert torch.linalg.eigvalsh(found).min() > -1e-9


@torch.inference_mode()
def test_typical_turn_is_the_direction_of_the_mean_turn_under_attention():
    model = tiny_llama()
    found = key_statistics(model, SEQUENCES).typical_turn_LHF
    sums = torch.zeros_like(found)
    for token_ids_T in SEQUENCES:
        attentions = model(input_ids=token_ids_T[None], output_attentions=True).attentions
        for layer, weights_1HTS in enumerate(attentions):
            for query in range(len(token_ids_T)):
                for key in range(1, query + 1):  # not the first token
                    angles_F = (query - key) * model.model.rotary_emb.inv_freq.double()
                    turn_F = torch.polar(torch.ones_like(angles_F), angles_F)
                    sums[layer] += weights_1HTS[0, :, query, key, None] * turn_F
    torch.testing.assert_close(found, sums / sums.abs(), rtol=0, atol=1e-4)
    assert (found.angle().abs() > 0.1).any()


def test_hooks_are_gone_afterwards():
    model = tiny_llama()
    key_statistics(model, SEQUENCES[:1])
    assert not any(module._forward_hooks for module in model.modules())


def test_attention_must_be_visible():
    model = tiny_llama()
    model.set_attn_implementation("sdpa")
    with pytest.raises(AssertionError, match="eager"):
        key_statistics(model, SEQUENCES[:1])


def test_as_complex_is_the_form_in_which_llamas_rope_is_a_product():
    keys = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))  # [1, G, T, D]
    angles_TF = torch.arange(9)[:, None] * 10.0 ** (-torch.arange(8) / 3)
    table = torch.cat([angles_TF, angles_TF], dim=-1)[None]
    turned, _ = apply_rotary_pos_emb(keys, keys, table.cos(), table.sin())
    before, after = (as_complex(x[0].transpose(0, 1).flatten(1), 2).view(9, 2, 8) for x in (keys, turned))
    expected = before * torch.polar(torch.ones_like(angles_TF), angles_TF)[:, None]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


def shingles(text, length=12):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def test_texts_are_small_varied_and_disjoint_from_held_out_texts():
    calibration = read_texts("calibration")
    assert len(calibration) >= 4
    assert 20_000 < sum(len(text.encode()) for text in calibration) < 100_000
    held_out = held_out_texts()
    assert len(held_out) >= 8
    seen = set().union(*map(shingles, calibration))
    for name, text in held_out.items():
        assert len(text) > 2_000, name
        assert not seen & shingles(text), name
