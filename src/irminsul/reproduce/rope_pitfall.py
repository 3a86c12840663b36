"""What a wrong rotation does to the output (paper, appendix D; Leyline's wrong pairing).

A passage stands in a prompt; its rows come from a donor that stood behind the same text without its first tokens, as
after an edit of the history. So the donor's context is nearly the prompt's, and what differs between movers is the
rotation. The tokens behind the passage are forced; their next-token distributions are compared with those of the prompt
computed in full.

Shape letters: T forced tokens, V vocabulary, S rows of the prompt, N rows of the passage, L layers, W row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from irminsul.reproduce.cases import is_lower, mean_case
from irminsul.reproduce.figures import Line, Panel
from irminsul.reproduce.record import Comparison, Report, Table, number
from irminsul.reproduce.rows import extend, prefill, with_moved_rows
from irminsul.reproduce.subject import Subject
from irminsul.rope import Pairing, RopeSpec

NAME = "rope-pitfall"
RIGHT = "right"
NAIVE = "not turned (naive)"
_PLAIN_BASE = 10000.0
_YARN_FACTOR = 40.0
"""DeepSeek's; its factor on cos and sin stands in for a model's own where that is 1."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured; lengths in tokens."""

    prompts: int
    before: int
    """Text in front of the passage."""
    passage: int
    forced: int
    """Tokens behind it."""
    deltas: tuple[int, ...]
    """How much further back the passage stands in the prompt than at the donor; at most ``before``."""


FULL = Sizes(16, 3072, 256, 64, (1, 8, 64, 512, 1536, 3072))
QUICK = Sizes(2, 512, 160, 48, (1, 32, 512))


@dataclass(frozen=True)
class Mover:
    """A way to move rows."""

    rope: RopeSpec
    scale: float = 1.0
    """Factor on the rotary part."""
    turns: bool = True


class Fidelity(NamedTuple):
    """Of the forced tokens of one prompt, one mover and one distance."""

    kl: float
    """Mean KL(full || path), nats a token."""
    argmax_match: float
    """Share of tokens whose most likely next token is that of the full computation."""


Results = dict[str, dict[int, list[Fidelity]]]
"""By mover and distance, the same prompts in the same order."""


def tokens_needed(*, quick: bool) -> int:
    """Return the longest prompt."""
    sizes = QUICK if quick else FULL
    return sizes.before + sizes.passage + sizes.forced


def run(subject: Subject) -> Report:
    """Measure every mover at every distance."""
    sizes = QUICK if subject.quick else FULL
    subject.require_length(tokens_needed(quick=subject.quick))
    rope = subject.model.config.rope
    return _report(sizes, measure(subject, sizes, movers(rope)), rope)


def movers(rope: RopeSpec) -> dict[str, Mover]:
    """Return the right mover of a model and the wrong ones, by name."""
    n_pairs = len(rope.inv_freq)
    plain = tuple(_PLAIN_BASE ** (-at / n_pairs) for at in range(n_pairs))
    other = Pairing.HALF_SPLIT if rope.pairing is Pairing.INTERLEAVED else Pairing.INTERLEAVED
    return {
        RIGHT: Mover(rope),
        "plain base 10000": Mover(RopeSpec(plain, rope.pairing)),
        "wrong pairing": Mover(RopeSpec(rope.inv_freq, other)),
        "double mscale": Mover(rope, scale=_mscale(rope)),
        NAIVE: Mover(rope, turns=False),
    }


def _mscale(rope: RopeSpec) -> float:
    return rope.mscale if rope.mscale != 1.0 else 0.1 * math.log(_YARN_FACTOR) + 1.0


def measure(subject: Subject, sizes: Sizes, chosen: dict[str, Mover]) -> Results:
    """Measure every prompt."""
    generator = subject.generator()
    texts = subject.material.passages(sizes.prompts, sizes.passage + sizes.forced, generator)
    results: Results = {name: {delta: [] for delta in sizes.deltas} for name in chosen}
    for at, text_T in enumerate(texts):
        subject.tell(f"Prompt {at + 1} of {len(texts)}")
        before_T = subject.material.surroundings(sizes.before, generator)
        for (name, delta), compared_T2 in _compare(subject, sizes, chosen, before_T, text_T):
            results[name][delta].append(Fidelity(*compared_T2.mean(dim=0).tolist()))
    return results


def _compare(
    subject: Subject, sizes: Sizes, chosen: dict[str, Mover], before_T: Tensor, text_T: Tensor
) -> Iterable[tuple[tuple[str, int], Tensor]]:
    """Yield, for each mover and distance, KL and match of each forced token, float64 [T, 2]."""
    model = subject.model
    passage_T, forced_T = text_T.tensor_split([sizes.passage])
    full_LSW = prefill(model, torch.cat([before_T, text_T]))
    full_TV = extend(model, full_LSW, forced_T)
    for delta in sizes.deltas:
        donor_before_T = before_T[delta:]
        donor_LNW = prefill(model, torch.cat([donor_before_T, passage_T]))[:, len(donor_before_T) :]
        for name, mover in chosen.items():
            scaled_LNW = donor_LNW.clone()
            model.layout.split(scaled_LNW)[1].mul_(mover.scale)
            source_start = len(donor_before_T) if mover.turns else sizes.before
            pool_LSW = with_moved_rows(
                full_LSW, scaled_LNW, model.layout, mover.rope, source_start=source_start, target_start=sizes.before
            )
            yield (name, delta), compare_logits(full_TV, extend(model, pool_LSW, forced_T))


def compare_logits(full_TV: Tensor, path_TV: Tensor) -> Tensor:
    """KL(full || path) in nats, and whether the argmax is the same, of each token: float64 [T, 2]."""
    full_log_TV, path_log_TV = full_TV.double().log_softmax(dim=-1), path_TV.double().log_softmax(dim=-1)
    kl_T = (full_log_TV.exp() * (full_log_TV - path_log_TV)).sum(dim=-1)
    match_T = full_TV.argmax(dim=-1) == path_TV.argmax(dim=-1)
    return torch.stack([kl_T, match_T.double()], dim=-1)


def is_plain(rope: RopeSpec) -> bool:
    """Whether the model's own frequencies are those of plain base 10000."""
    return torch.allclose(torch.tensor(movers(rope)["plain base 10000"].rope.inv_freq), torch.tensor(rope.inv_freq))


def _notes(sizes: Sizes, rope: RopeSpec) -> tuple[str, ...]:
    own = "the model's own factor, which its rows carry already"
    stand_in = f"this model has no factor, so YaRN's at a factor of {_YARN_FACTOR:g} stands in"
    reason = own if rope.mscale != 1.0 else stand_in
    notes = [f"Double mscale multiplies the rotary part by {number(_mscale(rope))}: {reason}."]
    if sizes.deltas[-1] == sizes.before:
        notes.append(
            f"At distance {sizes.before} the donor has none of the text in front of the passage: what `{RIGHT}` shows "
            "there beyond the other distances is lost context, not rotation."
        )
    if is_plain(rope):
        notes.append("The model's own frequencies are those of plain base 10000, so that mover is right here.")
    return tuple(notes)


def _report(sizes: Sizes, results: Results, rope: RopeSpec) -> Report:
    return Report(
        name=NAME,
        title="The price of a wrong rotation",
        method=(
            f"{sizes.prompts} prompts of {sizes.before} tokens, a passage of {sizes.passage} and {sizes.forced} forced "
            "tokens. The passage's rows come from a donor that stood behind the same text without its first tokens, "
            "as many as the distance says. KL(full || path) in nats a token and argmax match, over the forced tokens; "
            "directions are decided by paired 95 % intervals over prompts."
        ),
        sizes=sizes,
        results={
            "by_mover_and_delta": {
                name: {
                    str(delta): {**mean_case(prompts)._asdict(), "cases": [fidelity._asdict() for fidelity in prompts]}
                    for delta, prompts in by_delta.items()
                }
                for name, by_delta in results.items()
            },
        },
        tables=(
            _table("KL, nats a token, by distance moved:", sizes, results, "kl"),
            _table("Argmax match by distance moved:", sizes, results, "argmax_match"),
        ),
        comparisons=_comparisons(sizes, results, is_plain(rope)),
        panels=(
            _panel("KL(full || path)", "nats a token (lower is better)", sizes, results, "kl"),
            _panel("Argmax match", "share of tokens (higher is better)", sizes, results, "argmax_match"),
        ),
        notes=_notes(sizes, rope),
    )


def _comparisons(
    sizes: Sizes,
    results: Results,
    plain_is_right: bool,  # noqa: FBT001
) -> tuple[Comparison, ...]:
    compared = list(_pairing_comparisons(sizes, results))
    right = _over_distances(results[RIGHT])
    wrong = {"plain base 10000": "KL 3.51, match .125; right .054, .888", "double mscale": "worse; no figure given"}
    for name, paper in wrong.items():
        if name == "plain base 10000" and plain_is_right:
            continue
        own = _over_distances(results[name])
        compared.append(
            Comparison(
                f"{name} has a higher KL than the right rotation, over all distances",
                paper,
                f"KL {_shown(own)}; right {_shown(right)}",
                is_lower([case.kl for case in right], [case.kl for case in own]),
            )
        )
    return tuple(compared)


def _pairing_comparisons(sizes: Sizes, results: Results) -> tuple[Comparison, Comparison]:
    """Both halves of "a wrong pairing hides near zero and shows far away"."""
    nearest, farthest = sizes.deltas[0], sizes.deltas[-1]
    right = {delta: [case.kl for case in results[RIGHT][delta]] for delta in sizes.deltas}
    wrong = {delta: [case.kl for case in results["wrong pairing"][delta]] for delta in sizes.deltas}

    def excess(delta: int, factor: float) -> list[float]:
        return [factor * (own - other) for own, other in zip(wrong[delta], right[delta], strict=True)]

    return (
        Comparison(
            f"a wrong pairing hides at distance {nearest}: its KL beyond the right rotation's is under a tenth of that "
            f"at {farthest}",
            "error near 0 at distance 0, growing (Leyline)",
            f"{number(fmean(excess(nearest, 1.0)))} and {number(fmean(excess(farthest, 1.0)))}",
            is_lower(excess(nearest, 10.0), excess(farthest, 1.0)),
        ),
        Comparison(
            f"a wrong pairing shows at distance {farthest}: its KL is higher than the right rotation's",
            "error near 0 at distance 0, growing (Leyline)",
            f"KL {number(fmean(wrong[farthest]))}; right {number(fmean(right[farthest]))}",
            is_lower(right[farthest], wrong[farthest]),
        ),
    )


def _over_distances(by_delta: dict[int, list[Fidelity]]) -> list[Fidelity]:
    """Return the mean over distances of each prompt."""
    return [mean_case(of_prompt) for of_prompt in zip(*by_delta.values(), strict=True)]


def _shown(cases: Sequence[Fidelity]) -> str:
    mean = mean_case(cases)
    return f"{number(mean.kl)}, match {number(mean.argmax_match)}"


def _table(caption: str, sizes: Sizes, results: Results, field: str) -> Table:
    rows = tuple(
        (name, *(number(getattr(mean_case(by_delta[delta]), field)) for delta in sizes.deltas))
        for name, by_delta in results.items()
    )
    return Table(caption, ("mover", *(str(delta) for delta in sizes.deltas)), rows)


def _panel(title: str, unit: str, sizes: Sizes, results: Results, field: str) -> Panel:
    return Panel(
        title=title,
        x_label="distance moved (tokens)",
        y_label=unit,
        lines=tuple(
            Line(name, sizes.deltas, [getattr(mean_case(by_delta[delta]), field) for delta in sizes.deltas])
            for name, by_delta in results.items()
        ),
        log_x=2,
        log_y=field == "kl",
    )
