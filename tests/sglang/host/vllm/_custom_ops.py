"""What SGLang 0.5.23 takes from vLLM where there is neither CUDA nor its own CPU kernels: the rotation of keys."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Turn query and key in place; the contract is vLLM's."""
    cos, sin = cos_sin_cache[positions].float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    for tensor in (query, key):
        heads = tensor.view(len(positions), -1, head_size)
        turned = heads[..., : 2 * cos.shape[-1]]
        if is_neox:
            a, b = turned.float().chunk(2, -1)
            turned.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
        else:
            a, b = turned[..., 0::2].float(), turned[..., 1::2].float()
            turned.copy_(torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2))
