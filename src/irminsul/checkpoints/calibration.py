"""What a model's keys and attention look like on the calibration text that ships with the package.

The text is ours: prose, reference pages, code in six languages, tool results and chat turns, about 9,000 tokens.

Shape letters: T tokens, L layers, H query heads, G key heads, F frequencies, Z = G * F complex key coordinates.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

_Hook = Callable[[nn.Module, Any, Any], None]


@dataclass(frozen=True, eq=False)
class KeyStatistics:
    """Means over all tokens of the calibration text."""

    covariance_LZZ: Tensor
    """complex128: mean of z z^H over keys before RoPE, in the coordinates of `as_complex`."""
    typical_turn_LHF: Tensor
    """complex128 of modulus 1: direction of the mean, over what a head attends to, of exp(i distance theta_f).

    The first token is left out: heads rest on it when they look for nothing, and its distance means nothing.
    """


def read_texts(folder: str) -> list[str]:
    """Return the texts of a folder of this package's data (``calibration`` or ``held_out``), by name of file."""
    files = (resources.files("irminsul.checkpoints") / "data" / folder).iterdir()
    return [file.read_text(encoding="utf-8") for file in sorted(files, key=lambda file: file.name)]


def as_complex(keys_TK: Tensor, n_kv_heads: int) -> Tensor:
    """Read half-split keys [T, G * D] as complex128 [T, G * D/2], head first: the form in which RoPE is a product."""
    halves = keys_TK.double().view(len(keys_TK), n_kv_heads, 2, -1)
    return torch.complex(halves[:, :, 0], halves[:, :, 1]).flatten(1)


@torch.inference_mode()
def key_statistics(model: LlamaForCausalLM, sequences: Iterable[Tensor]) -> KeyStatistics:
    """Run a model over sequences and watch its keys and its attention.

    Args:
        model: with ``attn_implementation="eager"``, which shows its attention.
        sequences: token ids, int64 [T] each, T >= 2; every one starts at position 0.
    """
    config = model.config
    n_complex = config.num_key_value_heads * config.head_dim // 2
    inv_freq_F = model.model.rotary_emb.inv_freq.double()
    covariance_LZZ = torch.zeros(config.num_hidden_layers, n_complex, n_complex, dtype=torch.complex128)
    turn_LHF = covariance_LZZ.new_zeros(config.num_hidden_layers, config.num_attention_heads, len(inv_freq_F))
    n_tokens = 0
    with ExitStack() as hooks:
        for layer, covariance_ZZ, turn_HF in zip(model.model.layers, covariance_LZZ, turn_LHF, strict=True):
            attention = layer.self_attn
            add_keys = _covariance_adder(covariance_ZZ, config.num_key_value_heads)
            hooks.enter_context(attention.k_proj.register_forward_hook(add_keys))
            hooks.enter_context(attention.register_forward_hook(_turn_adder(turn_HF, inv_freq_F)))
        for token_ids_T in sequences:
            # The decoder without the output matrix: nobody reads its logits.
            model.model(input_ids=token_ids_T[None], use_cache=False)
            n_tokens += len(token_ids_T)
    return KeyStatistics(covariance_LZZ / n_tokens, turn_LHF / turn_LHF.abs())


def _covariance_adder(sum_ZZ: Tensor, n_kv_heads: int) -> _Hook:
    def add(_module: nn.Module, _inputs: object, keys_1TK: Tensor) -> None:
        z_TZ = as_complex(keys_1TK[0], n_kv_heads)
        sum_ZZ.add_(z_TZ.T @ z_TZ.conj())

    return add


def _turn_adder(sum_HF: Tensor, inv_freq_F: Tensor) -> _Hook:
    """Add exp(i (t - s) theta) over all queries t and keys s > 0, weighted by attention."""

    def add(_module: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor | None]) -> None:
        weights_1HTS = outputs[1]
        assert weights_1HTS is not None, "the model must be loaded with attn_implementation='eager'"
        weights_HTS = weights_1HTS[0, :, :, 1:]
        angles_TF = torch.arange(weights_HTS.shape[1], dtype=torch.float64)[:, None] * inv_freq_F
        keys_SF = torch.polar(torch.ones_like(angles_TF), -angles_TF)[1:].to(torch.complex64)
        mean_key_HTF = torch.complex(weights_HTS @ keys_SF.real, weights_HTS @ keys_SF.imag)
        sum_HF.add_((torch.polar(torch.ones_like(angles_TF), angles_TF) * mean_key_HTF).sum(dim=1))

    return add
