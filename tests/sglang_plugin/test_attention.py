"""Which form of attention is cheaper, and the keys that batch rows of a request share."""

import numpy as np
import pytest
import torch

from irminsul.sglang.attention import (
    QUERY_TILE,
    AttentionShape,
    KeyBlocks,
    SharedKeys,
    absorbed_is_cheaper,
    attention_products,
)

LITE = AttentionShape(heads=16, latent=512, rope=64, nope=128, value=128)
"""DeepSeek-V2-Lite."""


def rows(*bounds):
    starts_B, ends_B = np.array(bounds, dtype=np.int64).T
    return starts_B, ends_B


def apart(*bounds):
    """Rows that share nothing."""
    starts_B, ends_B = rows(*bounds)
    return starts_B, ends_B, int(ends_B.sum())


def shared(*bounds):
    """Rows of one request."""
    starts_B, ends_B = rows(*bounds)
    return starts_B, ends_B, int(ends_B.max())


def counted(shape, starts_B, ends_B, up_projected):
    """The same, token by token."""
    projection = shape.latent * (shape.nope + shape.value)
    mha = up_projected * projection
    mla = 0.0
    for start, end in zip(starts_B.tolist(), ends_B.tolist(), strict=True):
        length = end - start
        tiled = -(-length // QUERY_TILE) * QUERY_TILE
        mla += length * projection
        for query in range(start, end):
            mha += (query + 1) * (shape.nope + shape.rope + shape.value) * tiled / length
            mla += (query + 1) * (2 * shape.latent + shape.rope)
    return shape.heads * mha, shape.heads * mla


@pytest.mark.parametrize("bounds", [[(0, 1)], [(0, 50)], [(90, 300)], [(10, 20), (50, 51), (70, 100)]])
@pytest.mark.parametrize("arrange", [apart, shared])
def test_products_are_those_counted_token_by_token(bounds, arrange):
    assert attention_products(LITE, *arrange(*bounds)) == pytest.approx(counted(LITE, *arrange(*bounds)))


def test_heads_scale_both():
    many = AttentionShape(heads=128, latent=512, rope=64, nope=128, value=128)
    few = attention_products(LITE, *apart((5, 40)))
    assert attention_products(many, *apart((5, 40))) == pytest.approx([8 * product for product in few])


def test_a_cold_prompt_is_up_projected():
    assert not absorbed_is_cheaper(LITE, *apart((0, 32_768)))


def test_one_token_behind_a_long_prefix_is_absorbed():
    assert absorbed_is_cheaper(LITE, *apart((32_767, 32_768)))


def test_short_rows_over_one_long_prefix_are_absorbed_unless_they_share_keys():
    gaps = [(at, at + 100) for at in range(3_000, 54_000, 3_000)]
    assert len(gaps) == 17
    assert absorbed_is_cheaper(LITE, *apart(*gaps))
    assert not absorbed_is_cheaper(LITE, *shared(*gaps))


def test_long_prompts_do_not_overflow():
    mha, mla = attention_products(LITE, *apart((0, 10_000_000)))
    assert 0 < mha < mla < float("inf")


def test_every_row_finds_its_own_keys_in_the_block_of_its_request():
    table = torch.randperm(4 * 50).reshape(4, 50)
    owners_B, ends_B, lines = np.array([0, 0, 1, 2, 2]), np.array([10, 31, 7, 50, 12]), [3, 0, 2]
    found = SharedKeys.of(KeyBlocks.of(owners_B, ends_B), table, lines)
    assert found.max_seqlen_k == 50
    assert len(found.slots) == int(found.cu_seqlens_k[-1]) == 31 + 7 + 50
    for row, (owner, end) in enumerate(zip(owners_B, ends_B, strict=True)):
        start = int(found.cu_seqlens_k[row])
        assert int(found.seqused_k[row]) == end
        assert found.slots[start : start + end].tolist() == table[lines[owner], :end].tolist()


def test_keys_of_other_calls_are_left_alone():
    table = torch.arange(50).reshape(1, 50)
    shared = SharedKeys.of(KeyBlocks.of(np.array([0, 0]), np.array([10, 40])), table, [0])
    assert shared.meant_by({"k": torch.zeros(40, 2, 8), "causal": True})
    assert not shared.meant_by({"k": torch.zeros(50, 2, 8), "causal": True})
    assert not shared.meant_by({"k": torch.zeros(40, 2, 8), "causal": False})
    assert not shared.meant_by({})
