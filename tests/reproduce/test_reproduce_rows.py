"""Rows of one prompt: computed, extended, replaced."""

from dataclasses import replace

import torch

from irminsul.reproduce.rows import extend, prefill, with_moved_rows


def test_extending_gives_the_rows_and_logits_of_the_whole(model, material):
    ids_S = material.sources_T[:50]
    whole_LSW = prefill(model, ids_S)
    pool_LSW = whole_LSW.clone()
    pool_LSW[:, 30:] = 0
    logits_TV = extend(model, pool_LSW, ids_S[30:])
    assert logits_TV.shape == (20, 512)
    torch.testing.assert_close(pool_LSW, whole_LSW, rtol=1e-4, atol=1e-4)
    assert torch.equal(pool_LSW[:, :30], whole_LSW[:, :30])
    torch.testing.assert_close(extend(model, whole_LSW.clone(), ids_S[-1:]), logits_TV[-1:], rtol=1e-3, atol=1e-3)


def test_moved_rows_of_the_first_layer_are_those_computed_there(model, material):
    """The first layer's rows depend on the token and its position alone."""
    before, passage = material.sources_T[:40], material.pages_T[:12]
    donor_LNW = prefill(model, torch.cat([before[:7], passage]))[:, 7:]
    fresh_LSW = prefill(model, torch.cat([before, passage, before]))
    own = fresh_LSW.clone()
    moved_LSW = with_moved_rows(fresh_LSW, donor_LNW, model.layout, model.config.rope, source_start=7, target_start=40)
    torch.testing.assert_close(moved_LSW[0], fresh_LSW[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(moved_LSW[2, 40:52], fresh_LSW[2, 40:52], atol=1e-2)
    assert torch.equal(moved_LSW[:, :40], own[:, :40])
    assert torch.equal(moved_LSW[:, 52:], own[:, 52:])
    assert torch.equal(fresh_LSW, own)


def test_equal_positions_copy_every_bit(model, material):
    donor_LNW = prefill(model, material.pages_T[:12])
    pool_LSW = prefill(model, material.sources_T[:40])
    rope = replace(model.config.rope, mscale=3.0)
    moved_LSW = with_moved_rows(pool_LSW, donor_LNW, model.layout, rope, source_start=5, target_start=5)
    assert torch.equal(moved_LSW[:, 5:17], donor_LNW)
