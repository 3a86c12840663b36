"""Which form of attention is cheaper."""

import numpy as np
import pytest

from irminsul.sglang.attention import AttentionShape, absorbed_is_cheaper, attention_products

LITE = AttentionShape(heads=16, latent=512, rope=64, nope=128, value=128)
"""DeepSeek-V2-Lite."""


def rows(*bounds):
    starts_B, ends_B = np.array(bounds, dtype=np.int64).T
    return starts_B, ends_B


def counted(shape, starts_B, ends_B):
    """The same, token by token."""
    mha = mla = 0
    for start, end in zip(starts_B.tolist(), ends_B.tolist(), strict=True):
        up_projection = shape.latent * (shape.nope + shape.value)
        mha += end * up_projection
        mla += (end - start) * up_projection
        for query in range(start, end):
            mha += (query + 1) * (shape.nope + shape.rope + shape.value)
            mla += (query + 1) * (2 * shape.latent + shape.rope)
    return shape.heads * mha, shape.heads * mla


@pytest.mark.parametrize("bounds", [[(0, 1)], [(0, 50)], [(90, 100)], [(10, 20), (50, 51), (70, 100)]])
def test_products_are_those_counted_token_by_token(bounds):
    assert attention_products(LITE, *rows(*bounds)) == pytest.approx(counted(LITE, *rows(*bounds)))


def test_heads_scale_both():
    many = AttentionShape(heads=128, latent=512, rope=64, nope=128, value=128)
    few = attention_products(LITE, *rows((5, 40)))
    assert attention_products(many, *rows((5, 40))) == pytest.approx([8 * product for product in few])


def test_a_cold_prompt_is_up_projected():
    assert not absorbed_is_cheaper(LITE, *rows((0, 32_768)))


def test_one_token_behind_a_long_prefix_is_absorbed():
    assert absorbed_is_cheaper(LITE, *rows((32_767, 32_768)))


def test_short_rows_over_one_long_prefix_are_absorbed_where_one_long_row_is_not():
    gaps = [(at, at + 60) for at in range(3_000, 54_000, 3_000)]
    assert len(gaps) == 17
    assert absorbed_is_cheaper(LITE, *rows(*gaps))
    assert not absorbed_is_cheaper(LITE, *rows((54_000 - 17 * 60, 54_000)))


def test_long_prompts_do_not_overflow():
    mha, mla = attention_products(LITE, *rows((0, 10_000_000)))
    assert 0 < mha < mla < float("inf")
