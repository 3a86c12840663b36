"""Which parts of a row stay the same when its text moves (paper, section 5 and appendix F).

The same blocks of text stand at several positions of windows full of other text. *Positives* are pairs of one block at
two positions; *negatives* are pairs of different blocks, each at any of the positions. The area under the ROC curve is
the chance that a positive pair is more alike than a negative one: 1 tells blocks apart wherever they stand, 0.5 is
chance. Of the negatives, one in A stands at the same position, of the positives none: what shows nothing but the
position gets (1 - 1/A) / 2, which is 0.4 for five positions.

The paper does not say how a block's rows become one number. Two measures are reported, for each layer:

* *block mean*: cosine of the two blocks' mean rows. Its whole-row and k_rope values are near the paper's.
* *token by token*: mean, over a block's tokens, of the cosine of its rows with those of the same places in the other.

Shape letters: L layers, B blocks, A positions they stand at, K = B * A placed blocks, T tokens of a block, W row width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from irminsul.engine.model import MlaModel
from irminsul.reproduce.figures import Line, Panel
from irminsul.reproduce.original import load_original
from irminsul.reproduce.record import Comparison, Report, Table, number
from irminsul.reproduce.rows import prefill
from irminsul.reproduce.subject import Subject
from irminsul.rope import rotate

NAME = "invariance"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    blocks: int
    """A multiple of the number of positions."""
    block_length: int
    positions: tuple[int, ...]
    window: int
    blocks_behind_same_text: int
    """Blocks of a second run, in which the same text stands in front of every block but those at position 0."""
    same_text: int
    """Length of that text, in tokens."""


FULL = Sizes(200, 64, (0, 512, 1024, 2048, 3584), 4096, 50, 256)
QUICK = Sizes(10, 64, (0, 64, 128, 256, 448), 512, 0, 64)
"""An eighth of the paper's positions."""

_POSITION_NOTE = (
    "What shows nothing but the position gets {auc} here: one negative pair in {places} shares a position, and no "
    "positive pair does."
)
_MEASURE_NOTE = (
    "The paper does not say how a block becomes one vector; token by token is the sharper test, block mean is the one "
    "whose values resemble the paper's."
)

_SAME = 0.02
"""AUC within which two parts count as equally invariant."""

Similarity = Callable[[Tensor], Tensor]
"""From placed blocks [K, T, X] to the similarity of each two [K, K]."""
Scores = dict[str, dict[str, list[float]]]
"""By component and measure: one AUC for each layer."""


class Components(NamedTuple):
    """Parts of the rows of one layer, [K, T, X] each."""

    c_kv: Tensor
    k_rope: Tensor
    """As stored: turned to its position."""
    k_rope_base: Tensor
    """Turned back to position 0."""
    row: Tensor
    """c_kv and k_rope."""
    moved_row: Tensor
    """The row moved to position 0, as a shifted hit would move it."""


def tokens_needed(*, quick: bool) -> int:
    """Return the longest prompt."""
    return (QUICK if quick else FULL).window


def run(subject: Subject) -> Report:
    """Measure the parts of the model's rows, and the original's keys and values where there is one."""
    sizes = QUICK if subject.quick else FULL
    subject.require_length(tokens_needed(quick=subject.quick))
    original = load_original(subject)
    scores = {"other text": measure(subject.model, subject, sizes)}
    if sizes.blocks_behind_same_text:
        subject.tell("The same text in front of every block")
        scores["same text"] = measure(subject.model, subject, sizes, same_text=True)
    if original.model is not None:
        subject.tell("The original's keys and values")
        parts = measure(original.model, subject, sizes)
        scores["original"] = {"K": parts["k_rope"], "K before RoPE": parts["k_rope_base"], "V": parts["c_kv"]}
    return _report(sizes, scores, original.note)


def measure(model: MlaModel, subject: Subject, sizes: Sizes, *, same_text: bool = False) -> Scores:
    """Place the blocks, compute the windows and compare, layer by layer."""
    rows_LKTW = _placed_rows(model, subject, sizes, same_text=same_text)
    n_places = len(sizes.positions)
    owner_K = torch.arange(rows_LKTW.shape[1], device=model.device) // n_places
    scores: Scores = {name: {measure: [] for measure in SIMILARITIES} for name in Components._fields}
    for rows_KTW in rows_LKTW:
        components = _components(rows_KTW.to(model.device), model, sizes)
        for name, part_KTX in components._asdict().items():
            for measure_name, similarity in SIMILARITIES.items():
                scores[name][measure_name].append(_layer_auc(similarity(part_KTX.float()), owner_K))
    return scores


def auc(positives: Tensor, negatives: Tensor) -> float:
    """Area under the ROC curve of two samples [N], [M]: the chance that a positive is larger, ties counting half."""
    ordered_M = negatives.sort().values
    below = torch.searchsorted(ordered_M, positives, right=False)
    not_above = torch.searchsorted(ordered_M, positives, right=True)
    return float((below + not_above).double().mean()) / (2 * len(ordered_M))


def position_only_auc(sizes: Sizes) -> float:
    """AUC of a similarity that is higher for two blocks at one position and otherwise says nothing."""
    return (1 - 1 / len(sizes.positions)) / 2


def block_mean_similarity(part_KTX: Tensor) -> Tensor:
    """Cosine of the blocks' mean rows."""
    mean_KX = F.normalize(part_KTX.mean(dim=1), dim=-1)
    return mean_KX @ mean_KX.T


def token_similarity(part_KTX: Tensor) -> Tensor:
    """Mean, over the places of a block, of the cosine of the rows there."""
    flat_KY = F.normalize(part_KTX, dim=-1).flatten(1)
    return flat_KY @ flat_KY.T / part_KTX.shape[1]


SIMILARITIES: dict[str, Similarity] = {"block mean": block_mean_similarity, "token by token": token_similarity}


def _layer_auc(similarity_KK: Tensor, owner_K: Tensor) -> float:
    once_KK = torch.ones_like(similarity_KK, dtype=torch.bool).triu_(1)
    same_KK = owner_K[:, None] == owner_K
    return auc(similarity_KK[once_KK & same_KK], similarity_KK[once_KK & ~same_KK])


def _components(rows_KTW: Tensor, model: MlaModel, sizes: Sizes) -> Components:
    latent_KTC, rope_KTR = model.layout.split(rows_KTW)
    starts_A = torch.tensor(sizes.positions, device=rows_KTW.device)
    positions_AT = starts_A[:, None] + torch.arange(sizes.block_length, device=rows_KTW.device)
    rope = model.config.rope
    by_place_BATR = rope_KTR.view(-1, *positions_AT.shape, rope_KTR.shape[-1])
    base_KTR = rotate(by_place_BATR, rope.angles(-positions_AT), rope.pairing).flatten(0, 1)
    return Components(latent_KTC, rope_KTR, base_KTR, rows_KTW, torch.cat([latent_KTC, base_KTR], dim=-1))


def _placed_rows(model: MlaModel, subject: Subject, sizes: Sizes, *, same_text: bool) -> Tensor:
    """Compute the rows of every block at every position: [L, K, T, W] on the CPU, placed blocks of a block together.

    Window number w holds A blocks of one group, block (w + a) mod A at position a: after A windows each block of the
    group has stood at each position, every time among other text and behind other blocks.
    """
    n_places = len(sizes.positions)
    n_blocks = sizes.blocks_behind_same_text if same_text else sizes.blocks
    assert n_blocks % n_places == 0, (n_blocks, n_places)
    generator = subject.generator()
    blocks_BT = subject.material.passages(n_blocks, sizes.block_length, generator)
    same_S = subject.material.surroundings(sizes.same_text, generator) if same_text else None
    length = sizes.positions[-1] + sizes.block_length
    placed = torch.empty(
        *(model.config.n_layers, n_blocks, n_places, sizes.block_length, model.layout.width), dtype=model.dtype
    )
    for window in range(n_blocks):
        if window % 50 == 0:
            subject.tell(f"Window {window + 1} of {n_blocks}")
        first = window - window % n_places
        members = [first + (window + place) % n_places for place in range(n_places)]
        # Nothing behind the last block changes its rows: the rest of the window is not computed.
        ids_S = subject.material.surroundings(sizes.window, generator)[:length].clone()
        _place(ids_S, blocks_BT[members], sizes.positions, same_S)
        pool_LSW = prefill(model, ids_S)
        for place, (block, start) in enumerate(zip(members, sizes.positions, strict=True)):
            placed[:, block, place] = pool_LSW[:, start : start + sizes.block_length].cpu()
    return placed.flatten(1, 2)


def _place(ids_S: Tensor, blocks_AT: Tensor, positions: tuple[int, ...], same_S: Tensor | None) -> None:
    """Write the blocks into a window, each behind the same text if there is one and the place has room for it."""
    for block_T, start in zip(blocks_AT, positions, strict=True):
        if same_S is not None and start:
            ids_S[start - len(same_S) : start] = same_S
        ids_S[start : start + len(block_T)] = block_T


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _report(sizes: Sizes, scores: dict[str, Scores], note: str) -> Report:
    mean = {
        (run_name, part, how): _mean(layers)
        for run_name, parts in scores.items()
        for part, measures in parts.items()
        for how, layers in measures.items()
    }
    places = ", ".join(str(position) for position in sizes.positions)
    return Report(
        name=NAME,
        title="Position invariance of the parts of a row",
        method=(
            f"{sizes.blocks} blocks of {sizes.block_length} tokens stand at positions {places} of windows of "
            f"{sizes.window} tokens, among other text every time. AUC of telling the same block at two positions "
            "from different blocks, by cosine; mean over layers."
        ),
        sizes=sizes,
        results={
            "auc_mean_over_layers": {" / ".join(key): value for key, value in mean.items()},
            "auc_by_layer": scores,
            "auc_of_position_alone": position_only_auc(sizes),
            "positive_pairs": sizes.blocks * len(sizes.positions) * (len(sizes.positions) - 1) // 2,
            "negative_pairs": sizes.blocks * (sizes.blocks - 1) // 2 * len(sizes.positions) ** 2,
            "original": note,
        },
        tables=(_table(mean, scores),),
        comparisons=_comparisons(mean, has_original="original" in scores),
        panels=_panels(scores),
        notes=(
            note,
            _POSITION_NOTE.format(auc=number(position_only_auc(sizes)), places=len(sizes.positions)),
            _MEASURE_NOTE,
        ),
    )


def _table(mean: dict[tuple[str, str, str], float], scores: dict[str, Scores]) -> Table:
    rows = []
    for run_name, parts in scores.items():
        for part in parts:
            values = [number(mean[run_name, part, how]) for how in SIMILARITIES]
            rows.append((f"{part} ({'original GQA' if run_name == 'original' else run_name})", *values))
    return Table(
        "AUC by component; in brackets, what stood around the blocks:", ("component", *SIMILARITIES), tuple(rows)
    )


def _comparisons(mean: dict[tuple[str, str, str], float], *, has_original: bool) -> tuple[Comparison, ...]:
    """Compare by block mean."""
    ours = {part: mean["other text", part, "block mean"] for part in Components._fields}
    c_kv, k_rope, row = (number(ours[part]) for part in ("c_kv", "k_rope", "row"))
    compared = [
        Comparison(
            "c_kv is told apart above chance and better than the whole row",
            "c_kv .74-.81, whole row .51-.53",
            f"c_kv {c_kv}, whole row {row}",
            ours["c_kv"] > max(0.5, ours["row"]),
        ),
        Comparison(
            "k_rope as stored is at or below chance",
            "k_r .43-.44",
            f"k_rope {k_rope}",
            ours["k_rope"] <= 0.5,
        ),
        Comparison(
            "k_rope turned back is told apart above chance, and better than as stored (the paper's premise)",
            "not given",
            f"{k_rope} to {number(ours['k_rope_base'])}",
            ours["k_rope_base"] > max(0.5, ours["k_rope"]),
        ),
        Comparison(
            f"the whole row with k_rope turned back is told apart like c_kv (within {_SAME}), the row as stored is not",
            "not given",
            f"{row} to {number(ours['moved_row'])}, c_kv {c_kv}",
            ours["moved_row"] >= ours["c_kv"] - _SAME > ours["row"],
        ),
    ]
    if has_original:
        keys, values = mean["original", "K", "block mean"], mean["original", "V", "block mean"]
        compared.append(
            Comparison(
                "the original's V is told apart above chance, its turned K is not",
                "V .71-.76, GQA K .45",
                f"V {number(values)}, K {number(keys)}",
                values > 0.5 >= keys,
            )
        )
    return tuple(compared)


def _panels(scores: dict[str, Scores]) -> tuple[Panel, ...]:
    titles = {"other text": "Rows of the model", "original": "Original grouped-query model"}
    return tuple(
        Panel(
            title=f"{title} (block mean)",
            x_label="layer",
            y_label="AUC (0.5 is chance)",
            lines=tuple(
                Line(part, range(len(measures["block mean"])), measures["block mean"])
                for part, measures in scores[run_name].items()
            ),
            level=0.5,
            level_label="chance",
        )
        for run_name, title in titles.items()
        if run_name in scores
    )
