"""The feed-forward parts of a layer: a dense gated MLP, and DeepSeek's mixture of experts.

Shape letters: T tokens, E hidden size, I intermediate size, X experts, G groups, K chosen experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from irminsul.engine.config import ModelConfig, MoeConfig, Router
from irminsul.engine.weights import Checkpoint


@dataclass(frozen=True, eq=False)
class Mlp:
    """``down(silu(gate(x)) * up(x))``, with gate and up as one product."""

    gate_up: Tensor
    """[2I, E]."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[E, I]."""
    down_bias: Tensor | None

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> "Mlp":
        """Read ``{prefix}gate_proj`` and so on."""
        names = [prefix + "gate_proj", prefix + "up_proj"]
        return cls(
            gate_up=torch.cat([checkpoint.tensor(name + ".weight") for name in names]),
            gate_up_bias=torch.cat([checkpoint.tensor(name + ".bias") for name in names]) if config.mlp_bias else None,
            down=checkpoint.tensor(prefix + "down_proj.weight"),
            down_bias=checkpoint.optional_tensor(prefix + "down_proj.bias", present=config.mlp_bias),
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map [T, E] to [T, E]."""
        return gated_mlp(x_TE, self.gate_up, self.gate_up_bias, self.down, self.down_bias)


def gated_mlp(
    x_TE: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> Tensor:
    """Gated MLP of tokens [T, E] by the weights ``gate_up`` [2I, E] and ``down`` [E, I]."""
    gate_TI, up_TI = F.linear(x_TE, gate_up, gate_up_bias).chunk(2, dim=-1)
    # In place: at 1,536 wide and 2,048 tokens a fresh tensor costs as much as the activation.
    return F.linear(F.silu(gate_TI, inplace=True).mul_(up_TI), down, down_bias)


@dataclass(frozen=True, eq=False)
class MoeMlp:
    """Shared experts, which every token passes, plus the weighted sum of the experts its router chose."""

    config: MoeConfig
    gate: Tensor
    """Router weights [X, E], float32 as the reference keeps them."""
    correction_bias_X: Tensor | None
    """Added to the scores for the choice alone; float32. None: scores are softmax, not sigmoid."""
    gate_up: Tensor
    """[X, 2I, E]."""
    down: Tensor
    """[X, E, I]."""
    shared: Mlp

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> "MoeMlp":
        """Read ``{prefix}gate``, ``{prefix}experts`` and ``{prefix}shared_experts``."""
        moe = config.moe
        assert moe is not None
        if checkpoint.packed_experts:
            gate_up = checkpoint.tensor(prefix + "experts.gate_up_proj")
            down = checkpoint.tensor(prefix + "experts.down_proj")
        else:
            gate_up = torch.stack([_expert_gate_up(checkpoint, prefix, expert) for expert in range(moe.n_routed)])
            down_names = [f"{prefix}experts.{expert}.down_proj.weight" for expert in range(moe.n_routed)]
            down = torch.stack([checkpoint.tensor(name) for name in down_names])
        has_bias = moe.router is Router.NOAUX_TC
        return cls(
            config=moe,
            gate=checkpoint.tensor(prefix + "gate.weight", torch.float32),
            correction_bias_X=(
                checkpoint.tensor(prefix + "gate.e_score_correction_bias", torch.float32) if has_bias else None
            ),
            gate_up=gate_up,
            down=down,
            shared=Mlp.load(checkpoint, prefix + "shared_experts.", config),
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Map [T, E] to [T, E]."""
        chosen_TK, weights_TK = self.route(x_TE)
        return self._run_experts(x_TE, chosen_TK, weights_TK).add_(self.shared(x_TE))

    def route(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token: their ids, int64 [T, K], and weights, float32 [T, K]."""
        config = self.config
        scores_TX, preference_TX = self._scores(F.linear(x_TE.to(torch.float32), self.gate))
        if config.router is not Router.GREEDY:
            preference_TX = _within_best_groups(preference_TX, config)
        chosen_TK = preference_TX.topk(config.top_k, dim=-1, sorted=False).indices
        weights_TK = scores_TX.gather(-1, chosen_TK)
        if config.normalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen_TK, weights_TK * config.scaling

    def _scores(self, logits_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores that weigh experts and those that choose them."""
        if self.correction_bias_X is None:
            scores_TX = logits_TX.softmax(dim=-1)
            return scores_TX, scores_TX
        scores_TX = logits_TX.sigmoid()
        return scores_TX, scores_TX + self.correction_bias_X

    def _run_experts(self, x_TE: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TE = torch.zeros_like(x_TE)
        # Every (token, choice) pair, grouped by expert.
        order = chosen_TK.flatten().argsort(stable=True)
        tokens = order // self.config.top_k
        weights = weights_TK.flatten()[order]
        counts = chosen_TK.flatten().bincount(minlength=self.config.n_routed).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            rows = tokens[start : start + count]
            result = gated_mlp(x_TE[rows], self.gate_up[expert], None, self.down[expert], None)
            out_TE.index_add_(0, rows, (result * weights[start : start + count, None]).to(out_TE.dtype))
            start += count
        return out_TE


def _within_best_groups(preference_TX: Tensor, config: MoeConfig) -> Tensor:
    """Put the experts of all but the best groups out of reach."""
    grouped_TGX = preference_TX.view(len(preference_TX), config.n_groups, -1)
    # A group is as good as its best expert (V2), or its best two together (V3).
    n_judged = 2 if config.router is Router.NOAUX_TC else 1
    group_scores_TG = grouped_TGX.topk(n_judged, dim=-1).values.sum(dim=-1)
    best_groups = group_scores_TG.topk(config.topk_groups, dim=-1, sorted=False).indices
    out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(-1, best_groups, value=False)
    return grouped_TGX.masked_fill(out_TG[..., None], float("-inf")).view_as(preference_TX)


def _expert_gate_up(checkpoint: Checkpoint, prefix: str, expert: int) -> Tensor:
    names = [f"{prefix}experts.{expert}.{part}_proj.weight" for part in ("gate", "up")]
    return torch.cat([checkpoint.tensor(name) for name in names])
