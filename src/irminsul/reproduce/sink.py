"""Where attention rests, and whether reused rows move it (paper, section 7.1 and appendix A).

*W* is the share, of the attention that the queries of a chunk give to their own chunk, that falls on its first 32
tokens; the queries are those behind these 32. *S* is the share of all their attention on the absolute positions
[0, 32). Then the same S for the queries behind a reused passage, with the passage computed, shifted (copied, turned)
and naive (copied, not turned): reuse should not move it.

Shape letters: L layers, Q queries, H heads, S rows, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from irminsul.engine.attention import LatentAttention
from irminsul.engine.model import MlaModel
from irminsul.reproduce.cases import all_hold, is_lower, is_within, mean_case
from irminsul.reproduce.figures import Line, Panel
from irminsul.reproduce.record import Comparison, Report, Table, number
from irminsul.reproduce.rows import extend, prefill, with_moved_rows
from irminsul.reproduce.subject import Subject
from irminsul.reproduce.watch import attention_weights, watched

NAME = "sink"
SINK = 32
"""Tokens at the start of a prompt, or of a chunk, that the paper calls its sink."""
PATHS = ("full", "shifted", "naive")

_NOTE = (
    "The paper does not give the length of its chunks, so levels of W cannot be compared, only directions; nor over "
    "what its MAD is taken. So two metrics stand here: by how much the mean S of a path is off from full (mean S), "
    "and, finer, the mean absolute difference head by head and query by query (MAD)."
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured; lengths in tokens."""

    chunks: int
    chunk_length: int
    chunk_positions: tuple[int, ...]
    prompts: int
    passage_length: int
    passage_positions: tuple[int, ...]
    donor_position: int
    """Where the reused passage was computed, behind other text."""
    queries: int
    """Tokens behind the reused passage."""


FULL = Sizes(24, 128, (0, 32, 512, 1024, 2048, 3584), 24, 256, (512, 1024, 2048, 3584), 64, 64)
QUICK = Sizes(2, 128, (0, 32, 256, 768), 2, 256, (256, 640), 64, 32)


class Share(NamedTuple):
    """Of one chunk at one position; means over layers, heads and queries."""

    within: float
    """W: of the attention within the chunk, on its first 32 tokens."""
    absolute: float
    """S: of all attention, on positions [0, 32)."""


class Drift(NamedTuple):
    """Of one prompt and path at one position, means over layers, heads and queries."""

    mass: float
    """Attention on [0, 32)."""
    mad: float
    """Mean absolute difference of that from the full path's, query by query and head by head."""


Shares = dict[int, list[Share]]
"""By position, the same chunks in the same order."""
Drifts = dict[int, dict[str, list[Drift]]]
"""By position and path, the same passages in the same order."""


def tokens_needed(*, quick: bool) -> int:
    """Return the longest prompt."""
    sizes = QUICK if quick else FULL
    return max(
        sizes.chunk_positions[-1] + sizes.chunk_length,
        sizes.passage_positions[-1] + sizes.passage_length + sizes.queries,
    )


def run(subject: Subject) -> Report:
    """Measure both, for each position."""
    sizes = QUICK if subject.quick else FULL
    subject.require_length(tokens_needed(quick=subject.quick))
    subject.tell("Attention within chunks")
    shares = measure_shares(subject, sizes)
    subject.tell("Attention behind reused passages")
    return _report(sizes, shares, measure_drift(subject, sizes))


def uniform_share(chunk_length: int) -> float:
    """W of attention that is spread evenly over the tokens of the chunk that a query sees."""
    return sum(SINK / (at + 1) for at in range(SINK, chunk_length)) / (chunk_length - SINK)


def measure_shares(subject: Subject, sizes: Sizes) -> Shares:
    """Put the same chunks at each position, behind other text every time."""
    generator = subject.generator()
    chunks = subject.material.passages(sizes.chunks, sizes.chunk_length, generator)
    shares: Shares = {}
    for start in sizes.chunk_positions:
        shares[start] = []
        for chunk_T in chunks:
            ids_S = torch.cat([subject.material.surroundings(start, generator), chunk_T])
            looking = _Looking(sizes.chunk_length - SINK, partial(_share, chunk_start=start))
            prefill(looking.at(subject.model), ids_S)
            shares[start].append(Share(*torch.stack(looking.seen).mean(dim=0).tolist()))
    return shares


def _share(weights_QHS: Tensor, chunk_start: int) -> Tensor:
    of_chunk_QHT = weights_QHS[..., chunk_start:]
    within_QH = of_chunk_QHT[..., :SINK].sum(dim=-1) / of_chunk_QHT.sum(dim=-1)
    return torch.stack([within_QH.mean(), _mass(weights_QHS).mean()])


def _mass(weights_QHS: Tensor) -> Tensor:
    return weights_QHS[..., :SINK].sum(dim=-1)


@dataclass(frozen=True, eq=False)
class _Looking:
    """Sees the attention weights of the last queries of a forward, layer by layer, and keeps what is asked for."""

    n_queries: int
    keep: Callable[[Tensor], Tensor]
    """From weights [Q, H, S]."""
    seen: list[Tensor] = field(default_factory=list)
    """One for each layer."""

    def at(self, model: MlaModel) -> MlaModel:
        return watched(model, self._look)

    def _look(self, _layer: int, attention: LatentAttention, query_THD: Tensor, rows_SW: Tensor) -> None:
        first_position = len(rows_SW) - self.n_queries
        self.seen.append(self.keep(attention_weights(attention, query_THD[-self.n_queries :], rows_SW, first_position)))


def measure_drift(subject: Subject, sizes: Sizes) -> Drifts:
    """Reuse the same passages at each position, from donors that stood behind other text."""
    generator = subject.generator()
    texts = subject.material.passages(sizes.prompts, sizes.passage_length + sizes.queries, generator)
    drifts: Drifts = {}
    for start in sizes.passage_positions:
        drifts[start] = {path: [] for path in PATHS}
        for text_T in texts:
            before_T = subject.material.surroundings(start, generator)
            donor_before_T = subject.material.surroundings(sizes.donor_position, generator)
            masses = _masses(subject.model, sizes, before_T, donor_before_T, text_T)
            for path, mass_LQH in masses.items():
                mad = float((mass_LQH - masses["full"]).abs().mean())
                drifts[start][path].append(Drift(float(mass_LQH.mean()), mad))
    return drifts


def _masses(
    model: MlaModel, sizes: Sizes, before_T: Tensor, donor_before_T: Tensor, text_T: Tensor
) -> dict[str, Tensor]:
    """Attention on [0, 32) of the queries behind the passage, [L, Q, H], by path."""
    passage_T, queries_Q = text_T.tensor_split([sizes.passage_length])
    full_LSW = prefill(model, torch.cat([before_T, text_T]))
    donor_LNW = prefill(model, torch.cat([donor_before_T, passage_T]))[:, len(donor_before_T) :]
    start = len(before_T)

    def moved(source_start: int) -> Tensor:
        rope = model.config.rope
        return with_moved_rows(full_LSW, donor_LNW, model.layout, rope, source_start=source_start, target_start=start)

    pools = {"full": full_LSW, "shifted": moved(len(donor_before_T)), "naive": moved(start)}
    masses = {}
    for path, pool_LSW in pools.items():
        looking = _Looking(sizes.queries, _mass)
        extend(looking.at(model), pool_LSW, queries_Q)
        masses[path] = torch.stack(looking.seen)
    return masses


def _report(sizes: Sizes, shares: Shares, drifts: Drifts) -> Report:
    uniform = uniform_share(sizes.chunk_length)
    return Report(
        name=NAME,
        title="Attention sinks under reuse",
        method=(
            f"W: of the attention within a chunk of {sizes.chunk_length} tokens, the share on its first {SINK}, for "
            f"the queries behind these; {sizes.chunks} chunks at each position. S: share of all attention on positions "
            f"[0, {SINK}). Below, S of {sizes.queries} queries behind a reused passage of {sizes.passage_length} "
            f"tokens that was computed at position {sizes.donor_position} behind other text; {sizes.prompts} prompts "
            "at each position. Means over layers, heads and queries; directions are decided by paired 95 % intervals "
            "over chunks or prompts."
        ),
        sizes=sizes,
        results={
            "uniform_within_share": uniform,
            "by_chunk_position": {
                str(start): {**mean_case(chunks)._asdict(), "cases": [share._asdict() for share in chunks]}
                for start, chunks in shares.items()
            },
            "by_passage_position": {
                str(start): {
                    path: {**mean_case(prompts)._asdict(), "cases": [drift._asdict() for drift in prompts]}
                    for path, prompts in paths.items()
                }
                for start, paths in drifts.items()
            },
        },
        tables=(_share_table(shares, uniform), _drift_table(drifts)),
        comparisons=_comparisons(shares, drifts),
        panels=_panels(shares, drifts, uniform),
        notes=(_NOTE,),
    )


def _share_table(shares: Shares, uniform: float) -> Table:
    means = {start: mean_case(chunks) for start, chunks in shares.items()}
    rows = tuple((str(start), number(share.within), number(share.absolute)) for start, share in means.items())
    return Table(
        f"Attention of a chunk by its position (W of even attention: {number(uniform)}):",
        ("chunk position", "W: own first 32 tokens", "S: positions [0, 32)"),
        rows,
    )


def _drift_table(drifts: Drifts) -> Table:
    rows = []
    for start, paths in drifts.items():
        means = {path: mean_case(prompts) for path, prompts in paths.items()}
        masses = [number(means[path].mass) for path in PATHS]
        rows.append((str(start), *masses, *(number(means[path].mad, 4) for path in PATHS[1:])))
    header = ("passage position", *(f"mean S, {path}" for path in PATHS), *(f"MAD, {path}" for path in PATHS[1:]))
    return Table(
        "Attention on [0, 32) behind a reused passage: its mean, and its mean absolute difference from full by head "
        "and query:",
        header,
        tuple(rows),
    )


def _off(paths: dict[str, list[Drift]], path: str) -> list[float]:
    """By how much the mean S of each prompt is off from full."""
    return [own.mass - full.mass for own, full in zip(paths[path], paths["full"], strict=True)]


def _comparisons(shares: Shares, drifts: Drifts) -> tuple[Comparison, ...]:
    behind = [start for start in shares if start >= SINK]
    off = {path: max(abs(fmean(_off(paths, path))) for paths in drifts.values()) for path in PATHS[1:]}
    mad = {path: [mean_case(paths[path]).mad for paths in drifts.values()] for path in PATHS[1:]}
    pairs = zip(mad["naive"], mad["shifted"], strict=True)
    times = [naive / shifted if shifted else math.inf for naive, shifted in pairs]
    return (
        _falls("W", "within", "MLA .26 to .23, GQA .25 to .24 (32 to 3584)", shares, behind),
        _falls("S", "absolute", "MLA .48 to .42, GQA .61 to .50 (32 to 3584)", shares, behind),
        Comparison(
            "mean S: shifted reuse stays within .003 of full at every position",
            "MAD at most .003",
            f"off by at most {number(off['shifted'], 4)} (naive: {number(off['naive'], 4)})",
            all_hold(is_within(_off(paths, "shifted"), 0.003) for paths in drifts.values()),
        ),
        Comparison(
            "mean S: naive reuse is further off than shifted reuse at every position",
            "2.4-9.0 times",
            f"at most {number(off['naive'], 4)} against {number(off['shifted'], 4)}",
            all_hold(
                is_lower(*([abs(value) for value in _off(paths, path)] for path in PATHS[1:]))
                for paths in drifts.values()
            ),
        ),
        Comparison(
            "MAD by head and query: naive reuse is further off than shifted reuse at every position",
            "2.4-9.0 times",
            f"{min(times):.1f}-{max(times):.1f} times ({_range(mad['naive'])} against {_range(mad['shifted'])})",
            all_hold(
                is_lower(*([drift.mad for drift in paths[path]] for path in PATHS[1:])) for paths in drifts.values()
            ),
        ),
    )


def _falls(name: str, field: str, paper: str, shares: Shares, behind: list[int]) -> Comparison:
    """Compare the nearest and the farthest position, chunk by chunk."""
    near, far = ([getattr(share, field) for share in shares[start]] for start in (behind[0], behind[-1]))
    return Comparison(
        f"{name} is lower at position {behind[-1]} than at {behind[0]}",
        paper,
        f"{number(fmean(near))} to {number(fmean(far))}",
        is_lower(far, near),
    )


def _range(values: list[float]) -> str:
    return f"{number(min(values), 4)}-{number(max(values), 4)}"


def _panels(shares: Shares, drifts: Drifts, uniform: float) -> tuple[Panel, ...]:
    means = [mean_case(chunks) for chunks in shares.values()]
    return (
        Panel(
            title="Attention of a chunk",
            x_label="position of the chunk (tokens)",
            y_label="share of attention",
            lines=(
                Line("W: own first 32 tokens", list(shares), [share.within for share in means]),
                Line("S: positions [0, 32)", list(shares), [share.absolute for share in means]),
            ),
            level=uniform,
            level_label="W of even attention",
            from_zero=True,
        ),
        Panel(
            title="Drift of S behind a reused passage (lower is better)",
            x_label="position of the passage (tokens)",
            y_label="MAD from full, by head and query",
            lines=tuple(
                Line(path, list(drifts), [mean_case(paths[path]).mad for paths in drifts.values()])
                for path in PATHS[1:]
            ),
            from_zero=True,
        ),
    )
