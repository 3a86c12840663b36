"""The model that is trained: the original's embedding, and layers whose attention has DeepSeek's format.

Every matrix is a fixed one plus one of low rank, added up before it is used, so that what is trained is what is
written. Products run in bfloat16 where the matrices are cast to it; the residual stream stays in float32.

Shape letters: B sequences, T tokens, E hidden size, H heads, N/R/V standing, rotary and value width, P rotary pairs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.nn.attention import SDPBackend, sdpa_kernel

from irminsul.checkpoints.delta import ATTENTION_MATRICES, MLP_MATRICES, NORMS

NORM_EPS = 1e-5
LATENT_NORM_EPS = 1e-6
"""What transformers gives this norm, whatever ``rms_norm_eps`` says."""
VALUE_WIDTH = 128
"""Values are widened to this with zeros inside the attention."""
ATTENTION_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Dims:
    """Widths of the attention."""

    heads: int
    latent: int
    nope: int
    rope: int
    value: int


class LowRank(nn.Module):
    """A fixed matrix [out, in] plus the product of two trained ones, ``up`` (zeros at first) and ``down``."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        n_out, n_in = weight.shape
        self.down = nn.Parameter(torch.randn(rank, n_in, generator=generator) * n_in**-0.5)
        self.up = nn.Parameter(torch.zeros(n_out, rank))

    def matrix(self) -> Tensor:
        """Return the sum, float32 [out, in]."""
        return self.weight + self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in the dtype of ``x``."""
        return F.linear(x, self.matrix().to(x.dtype))


class Norm(nn.Module):
    """RMSNorm that computes in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.float().clone())
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise the last dimension and round to ``dtype``."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(dtype)


class Layer(nn.Module):
    """One decoder layer; ``weights`` has the names of `ATTENTION_MATRICES`, `MLP_MATRICES` and `NORMS`."""

    def __init__(
        self, weights: Mapping[str, Tensor], ranks: Mapping[str, int], dims: Dims, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.dims = dims
        for name in NORMS:
            eps = LATENT_NORM_EPS if name == "kv_a_layernorm" else NORM_EPS
            self.add_module(name, Norm(weights[name], eps))
        for name in (*ATTENTION_MATRICES, *MLP_MATRICES):
            self.add_module(name, LowRank(weights[name], ranks[name], generator))

    def forward(self, x: Tensor, cos_TP: Tensor, sin_TP: Tensor, dtype: torch.dtype) -> Tensor:
        """Residual stream float32 [B, T, E] to the same; products run in ``dtype``."""
        x = x + self.attend(self.input_layernorm(x, dtype), cos_TP, sin_TP).float()
        y = self.post_attention_layernorm(x, dtype)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)).float()

    def attend(self, x_BTE: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
        """Multi-head latent attention over normalised states, keys and values written out for every head."""
        dims = self.dims
        nope_BTHN, rope_BTHR = self.q_proj(x_BTE).unflatten(-1, (dims.heads, -1)).split([dims.nope, dims.rope], -1)
        latent_BTC, key_BTR = self.kv_a_proj_with_mqa(x_BTE).split([dims.latent, dims.rope], -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent_BTC, x_BTE.dtype)).unflatten(-1, (dims.heads, -1))
        key_BTHN, value_BTHV = up.split([dims.nope, dims.value], -1)
        key_BTHR = _turn(key_BTR[..., None, :], cos_TP, sin_TP).expand(-1, -1, dims.heads, -1)
        query = torch.cat([nope_BTHN, _turn(rope_BTHR, cos_TP, sin_TP)], -1).transpose(1, 2)
        key = torch.cat([key_BTHN, key_BTHR], -1).transpose(1, 2)
        # For keys of 192 and values of 128, cuDNN's kernels take half the time of the others.
        value = F.pad(value_BTHV, (0, VALUE_WIDTH - dims.value)).transpose(1, 2)
        with sdpa_kernel(ATTENTION_KERNELS):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)[..., : dims.value]
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Student(nn.Module):
    """The whole model; the embedding, which is the output matrix too, is fixed."""

    def __init__(
        self,
        embedding: Tensor,
        layers: Sequence[Mapping[str, Tensor]],
        final_norm: Tensor,
        ranks: Mapping[str, int],
        dims: Dims,
        inv_freq_P: Tensor,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("inv_freq_P", inv_freq_P.double(), persistent=False)
        self.layers = nn.ModuleList(Layer(weights, ranks, dims, generator) for weights in layers)
        self.norm = Norm(final_norm, NORM_EPS)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Normalised states of the last layer [B, T, E], in the dtype of the embedding; times it they are logits."""
        angles_TP = torch.arange(ids_BT.shape[1], device=ids_BT.device)[:, None] * self.inv_freq_P
        cos_TP, sin_TP = angles_TP.cos().float(), angles_TP.sin().float()
        x = F.embedding(ids_BT, self.embedding).float()
        for layer in self.layers:
            x = layer(x, cos_TP, sin_TP, self.embedding.dtype)
        return self.norm(x, self.embedding.dtype)

    def logits(self, ids_BT: Tensor) -> Tensor:
        """[B, T, vocabulary]."""
        return F.linear(self.hidden(ids_BT), self.embedding)


def _turn(x_BTHR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn interleaved pairs."""
    first, second = x_BTHR.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2).to(x_BTHR.dtype)
