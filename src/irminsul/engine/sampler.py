"""Drawing the next token of each request from its logits.

Each request is drawn alone, from its own random numbers: what else is in a batch never changes its tokens. Computed in
float64, on the CPU.

Shape letters: B requests, V vocabulary, K candidates.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from irminsul.engine.types import SamplingParams


@dataclass(eq=False)
class SamplingState:
    """How one request draws its tokens, and its random numbers."""

    params: SamplingParams
    random: np.random.Generator = field(init=False)
    """Seeded by ``params.seed``, or by the operating system if that is None; advanced once per token drawn."""

    def __post_init__(self) -> None:
        seed = self.params.seed
        # numpy takes no negative seed; 64 bits of two's complement keep all others apart.
        self.random = np.random.default_rng(None if seed is None else seed % 2**64)


@dataclass(frozen=True)
class Drawn:
    """One token; log probabilities are of the model's distribution, before temperature and limits."""

    token_id: int
    logprob: float | None = None
    """None unless asked for."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


class Sampler:
    """Draws tokens; it keeps nothing between calls, the requests' states do."""

    def draw(self, logits_BV: Tensor, states: list[SamplingState]) -> list[Drawn]:
        """Draw one token for each request.

        At temperature 0 it is the most likely token; of equals, the one with the lowest id. Otherwise the logits are
        divided by the temperature, the ``top_k`` most likely tokens are kept (of equals, the lowest ids), of these the
        fewest whose probability reaches ``top_p``, and one is drawn by its probability.

        Args:
            logits_BV: float32, on any device, no NaN.
            states: one for each row; each that draws at random is advanced.
        """
        assert len(logits_BV) == len(states), (logits_BV.shape, len(states))
        assert not bool(logits_BV.isnan().any()), "the model computed NaN"
        logits_BV = logits_BV.to("cpu", torch.float64)
        return [_draw(logits_V, state) for logits_V, state in zip(logits_BV, states, strict=True)]


def _draw(logits_V: Tensor, state: SamplingState) -> Drawn:
    params = state.params
    token_id = int(logits_V.argmax()) if params.temperature == 0 else _draw_at_random(logits_V, state)
    if params.top_logprobs is None:
        return Drawn(token_id)
    logprobs_V = logits_V.log_softmax(dim=-1)
    top = tuple((int(token), float(logprobs_V[token])) for token in _most_likely(logprobs_V, params.top_logprobs))
    return Drawn(token_id, float(logprobs_V[token_id]), top)


def _draw_at_random(logits_V: Tensor, state: SamplingState) -> int:
    params = state.params
    limited = 0 < params.top_k < len(logits_V)
    tokens_K = _most_likely(logits_V, params.top_k) if limited else torch.arange(len(logits_V))
    logits_K = logits_V[tokens_K]
    # From the largest downwards, so that no temperature, however small, makes an infinite quotient of it.
    probabilities_K = ((logits_K - logits_K.max()) / params.temperature).softmax(dim=-1)
    if params.top_p < 1.0:
        kept = _nucleus(logits_K, probabilities_K, params.top_p)
        tokens_K, probabilities_K = tokens_K[kept], probabilities_K[kept]
    return int(tokens_K[_invert(probabilities_K.cumsum(0), state.random.random())])


def _nucleus(logits_K: Tensor, probabilities_K: Tensor, top_p: float) -> Tensor:
    """Indices of the fewest candidates whose probability reaches ``top_p``, in falling order, at least one."""
    # Candidates below this share have less than 1 - top_p together, so none of them is needed: do not sort them.
    indices = (probabilities_K >= (1.0 - top_p) / len(probabilities_K)).nonzero().flatten()
    indices = indices[logits_K[indices].argsort(descending=True, stable=True)]
    probabilities = probabilities_K[indices]
    before = probabilities.cumsum(0) - probabilities
    return indices[: max(1, int((before < top_p).sum()))]


def _most_likely(values_V: Tensor, count: int) -> Tensor:
    """Indices [min(count, V)] of the largest values, in falling order; of equals, the lowest first."""
    count = min(count, len(values_V))
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    # topk alone may return any of several equals.
    smallest_kept = values_V.topk(count).values[-1]
    indices = (values_V >= smallest_kept).nonzero().flatten()
    return indices[values_V[indices].argsort(descending=True, stable=True)][:count]


def _invert(cumulative_K: Tensor, uniform: float) -> int:
    """Return the index whose share of [0, total) holds ``uniform`` (in [0, 1)) of the total; its share is not empty."""
    # 1 - 2^-53, the largest uniform number, times the total is below the total: there is always such a share.
    return int(torch.searchsorted(cumulative_K, uniform * cumulative_K[-1], right=True))
