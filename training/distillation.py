"""The loss, and how good the student is on held-out text.

Shape letters: X tokens of a batch, E hidden size, V vocabulary, B sequences, T tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from transformers import LlamaForCausalLM

from training.student import Student
from training.text import Sequences

Divergence = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def divergence(got_XE: Tensor, wanted_XE: Tensor, got_VE: Tensor, wanted_VE: Tensor) -> Tensor:
    """Sum over tokens of KL(wanted || got), nats, from states and the matrices that make logits of them."""
    wanted = F.linear(wanted_XE, wanted_VE).float().log_softmax(-1)
    got = F.linear(got_XE, got_VE).float().log_softmax(-1)
    return F.kl_div(got, wanted, log_target=True, reduction="sum")


def add_gradient(
    student: Student, teacher: LlamaForCausalLM, ids_BT: Tensor, chunk: int, divergence: Divergence
) -> float:
    """Add the gradient of the mean KL(teacher || student) over all tokens, and return that mean, nats.

    Args:
        student: its parameters get the gradient.
        teacher: the original.
        ids_BT: int64.
        chunk: tokens whose logits exist at a time.
        divergence: `divergence`, or the same compiled.
    """
    with torch.no_grad():
        wanted_XE = teacher.model(input_ids=ids_BT, use_cache=False).last_hidden_state.flatten(0, 1)
    hidden_XE = student.hidden(ids_BT).flatten(0, 1)
    leaf_XE = hidden_XE.detach().requires_grad_()
    total = hidden_XE.new_zeros((), dtype=torch.float32)
    for start in range(0, len(leaf_XE), chunk):
        part = slice(start, start + chunk)
        loss = divergence(leaf_XE[part], wanted_XE[part], student.embedding, teacher.lm_head.weight) / len(leaf_XE)
        loss.backward()
        total += loss.detach()
    hidden_XE.backward(leaf_XE.grad)
    return float(total)


@torch.no_grad()
def perplexity_ratios(
    student: Student, teacher: LlamaForCausalLM, held_out: Mapping[str, Sequences], lengths: tuple[int, ...]
) -> dict[str, float]:
    """Measure perplexity on the first tokens of held-out sequences.

    Returns:
        ``KIND_LENGTH``: the student's over the original's; ``KIND_LENGTH_original``: the original's.
    """
    found: dict[str, float] = {}
    for kind, rows in held_out.items():
        for length in lengths:
            losses = [_losses(student, teacher, torch.from_numpy(row[None, :length].astype("int64"))) for row in rows]
            got, original = torch.stack(losses).sum(0) / len(rows)
            found[f"{kind}_{length}"] = round(float((got - original).exp()), 4)
            found[f"{kind}_{length}_original"] = round(float(original.exp()), 3)
    return found


def _losses(student: Student, teacher: LlamaForCausalLM, ids_1T: Tensor) -> Tensor:
    """Mean loss of student and original, nats a token: float64 [2]."""
    ids_1T = ids_1T.to(student.embedding.device)
    states = (student.hidden(ids_1T), teacher.model(input_ids=ids_1T, use_cache=False).last_hidden_state)
    logits = [F.linear(hidden[0, :-1], student.embedding).float() for hidden in states]
    return torch.stack([F.cross_entropy(each, ids_1T[0, 1:]).double().cpu() for each in logits])
