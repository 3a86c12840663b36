"""What keys, queries, attention and hidden states of the original look like on training text.

Shape letters: L layers, T tokens, H query heads, G key heads, F frequencies, E hidden size, D distances.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

_Hook = Callable[[nn.Module, Any, Any], None]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Means over all tokens, float64 or complex128, on the CPU."""

    key_covariance_LFGG: Tensor
    """Mean of k k^H over the key heads of one frequency, before RoPE."""
    query_energy_LHF: Tensor
    """Mean of |q|^2."""
    distance_LHD: Tensor
    """Share of attention that a head pays at each distance. The first token of a text is left out: heads rest on it
    when they look for nothing, and its distance means nothing."""
    hidden_covariance_LEE: Tensor
    """Mean of y y^T over normalised hidden states, before the weight of the norm."""


@torch.inference_mode()
def collect(model: LlamaForCausalLM, sequences: Iterable[Tensor], length: int) -> Statistics:
    """Run a model over sequences and watch it.

    Args:
        model: loaded with ``attn_implementation="eager"``, which shows its attention.
        sequences: token ids, int64 [T], T <= ``length``; each starts at position 0.
        length: longest sequence.
    """
    config = model.config
    n_layers, n_heads, n_groups = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    n_freq, hidden = config.head_dim // 2, config.hidden_size
    kw = {"dtype": torch.float64, "device": model.device}
    covariance = torch.zeros(n_layers, n_freq, n_groups, n_groups, dtype=torch.complex128, device=model.device)
    energy = torch.zeros(n_layers, n_heads, n_freq, **kw)
    distance = torch.zeros(n_layers, n_heads, length, **kw)
    hidden_cov = torch.zeros(n_layers, hidden, hidden, **kw)
    n_tokens = 0
    with ExitStack() as hooks:
        for at, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            hooks.enter_context(attention.k_proj.register_forward_hook(_add_covariance(covariance[at], n_groups)))
            hooks.enter_context(attention.q_proj.register_forward_hook(_add_energy(energy[at], n_heads)))
            hooks.enter_context(attention.register_forward_hook(_add_distance(distance[at])))
            hooks.enter_context(layer.input_layernorm.register_forward_hook(_add_hidden(hidden_cov[at])))
        for token_ids_T in sequences:
            model.model(input_ids=token_ids_T[None].to(model.device), use_cache=False)
            n_tokens += len(token_ids_T)
    return Statistics(
        (covariance / n_tokens).cpu(),
        (energy / n_tokens).cpu(),
        (distance / distance.sum(-1, keepdim=True)).cpu(),
        (hidden_cov / n_tokens).cpu(),
    )


def _as_complex(x_1TX: Tensor, n_heads: int) -> Tensor:
    """Half-split heads as complex numbers: [T, heads, F]."""
    halves = x_1TX[0].double().view(x_1TX.shape[1], n_heads, 2, -1)
    return torch.complex(halves[:, :, 0], halves[:, :, 1])


def _add_covariance(sum_FGG: Tensor, n_groups: int) -> _Hook:
    def add(_module: nn.Module, _inputs: object, keys: Tensor) -> None:
        z_TGF = _as_complex(keys, n_groups)
        sum_FGG.add_(torch.einsum("tgf,thf->fgh", z_TGF, z_TGF.conj()))

    return add


def _add_energy(sum_HF: Tensor, n_heads: int) -> _Hook:
    def add(_module: nn.Module, _inputs: object, queries: Tensor) -> None:
        sum_HF.add_(_as_complex(queries, n_heads).abs().square().sum(0))

    return add


def _add_distance(sum_HD: Tensor) -> _Hook:
    """Add up the attention weights at each distance."""

    def add(_module: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor | None]) -> None:
        weights_HTT = outputs[1]
        assert weights_HTT is not None, "the model must be loaded with attn_implementation='eager'"
        weights_HTT = weights_HTT[0].float()
        weights_HTT[:, :, 0] = 0
        sum_HD[:, : weights_HTT.shape[-1]].add_(_diagonal_sums(weights_HTT))

    return add


def _diagonal_sums(weights_HTT: Tensor) -> Tensor:
    """Sum weight (t, s) over t - s = 0, 1, ...: [H, T].

    Rows reversed, padded to 2 T and read again as rows of 2 T - 1: each starts one later, so diagonals become columns.
    """
    n_heads, n_tokens, _ = weights_HTT.shape
    padded = torch.nn.functional.pad(weights_HTT.flip(-1), (0, n_tokens)).flatten(1)
    columns = padded[:, : n_tokens * (2 * n_tokens - 1)].view(n_heads, n_tokens, 2 * n_tokens - 1)
    return columns.sum(1)[:, n_tokens - 1 :]


def _add_hidden(sum_EE: Tensor) -> _Hook:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        x_TE = inputs[0][0].double()
        y_TE = x_TE * torch.rsqrt(x_TE.square().mean(-1, keepdim=True) + module.variance_epsilon)
        sum_EE.add_(y_TE.T @ y_TE)

    return add
