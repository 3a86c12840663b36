"""FlashAttention's own call with the keys that batch rows of a request share; needs a GPU."""

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.gpu]

LENGTHS = (1, 127, 128, 129, 300)
"""Queries of the batch rows."""


@pytest.mark.parametrize(("key", "value"), [(192, 128), (256, 256)])
def test_shared_keys_give_what_keys_of_its_own_give_to_each_row(key, value):
    flash = pytest.importorskip("sglang.srt.layers.attention.flashattention_backend").flash_attn_varlen_func
    from irminsul.sglang.attention import KeyBlocks, SharedKeys

    generator = torch.Generator("cuda").manual_seed(0)
    heads = 4
    owners_B = np.array([0, 0, 0, 1, 1])
    starts_B = np.array([0, 200, 1000, 64, 500])
    ends_B = starts_B + np.array(LENGTHS)
    blocks = KeyBlocks.of(owners_B, ends_B)
    table = torch.arange(2 * 2048, dtype=torch.int32, device="cuda").reshape(2, 2048)
    shared = SharedKeys.of(blocks, table, [0, 1])

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    queries, pool_k, pool_v = draw(sum(LENGTHS), heads, key), draw(4096, heads, key), draw(4096, heads, value)
    counts = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device="cuda")
    common = {"softmax_scale": key**-0.5, "causal": True, "max_seqlen_q": max(LENGTHS), "ver": 3}
    slots = shared.slots.long()
    call = {"q": queries, "k": pool_k[slots], "v": pool_v[slots], "cu_seqlens_q": counts, **common}
    assert shared.meant_by(call)
    together = flash(**call, **shared.arguments())
    for row, (owner, end) in enumerate(zip(owners_B, ends_B, strict=True)):
        part = slice(int(counts[row]), int(counts[row + 1]))
        own = table[owner, :end].long()
        alone = flash(
            q=queries[part],
            k=pool_k[own],
            v=pool_v[own],
            cu_seqlens_q=torch.tensor([0, LENGTHS[row]], dtype=torch.int32, device="cuda"),
            cu_seqlens_k=torch.tensor([0, end], dtype=torch.int32, device="cuda"),
            max_seqlen_k=int(end),
            **common,
        )
        torch.testing.assert_close(together[part], alone, atol=2e-2, rtol=2e-2)
