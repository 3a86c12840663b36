"""How exact a moved k_rope is (paper, section 5: 4.7e-3 in bfloat16, not accumulating).

Real keys are turned in float64 to a source and to a target position. The key at the source is stored in the row's
dtype and moved by the code that serves requests; the error is the distance from the float64 key at the target, over
its norm (relative L2, all layers and tokens together). *fresh* is the error of just storing the float64 key of the
target: no mover can be better than that. *narrow* is a mover that takes its cosines and sines, and rotates, in the
dtype of the row: what ours does not do.

Repeated moves go through the same random positions in two ways: each from the row as first stored, which is what
Irminsul does, or each from the result of the one before.

Shape letters: L layers, T tokens, P pairs, R = 2P rotary values, W row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from irminsul.kernels.rows import move_rows
from irminsul.layout import RowLayout
from irminsul.reproduce.figures import Line, Panel
from irminsul.reproduce.record import Comparison, Report, Table
from irminsul.reproduce.rows import prefill
from irminsul.reproduce.subject import Subject
from irminsul.rope import Pairing, RopeSpec

NAME = "rotation"
DTYPES = ("bfloat16", "float16", "float32")
PAPER_ERROR = 4.7e-3


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    tokens: int
    """Keys, in every layer."""
    source_positions: int
    """Sources are drawn below this."""
    deltas: tuple[int, ...]
    moves: tuple[int, ...]
    """Numbers of repeated moves."""
    move_positions: int
    """Their targets are drawn below this."""


FULL = Sizes(1024, 4096, (1, 10, 100, 1000, 4096, 32768, 100_000), (1, 2, 4, 8, 16, 32, 64), 32768)
QUICK = replace(FULL, tokens=128)

Mover = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From stored keys [L, T, R], source and target positions [T] to moved keys."""


def tokens_needed(*, quick: bool) -> int:
    """Return the longest prompt."""
    return (QUICK if quick else FULL).tokens


def run(subject: Subject) -> Report:
    """Measure the error over the distance, and over repeated moves."""
    sizes = QUICK if subject.quick else FULL
    generator = subject.generator()
    subject.require_length(tokens_needed(quick=subject.quick))
    subject.tell("Keys of real text, moved")
    keys_LTR = base_keys(subject, sizes.tokens, generator)
    rope = subject.model.config.rope
    sources_T, *path = (
        torch.randint(end, (sizes.tokens,), generator=generator).to(keys_LTR.device)
        for end in (sizes.source_positions, *[sizes.move_positions] * sizes.moves[-1])
    )
    by_delta = {name: errors_by_delta(keys_LTR, rope, name, sources_T, sizes.deltas) for name in DTYPES}
    repeated = {
        name: errors_of_repeated_moves(keys_LTR, rope, name, [sources_T, *path], sizes.moves) for name in DTYPES
    }
    return _report(sizes, by_delta, repeated)


def base_keys(subject: Subject, n_tokens: int, generator: torch.Generator) -> Tensor:
    """Compute keys of surrounding text and turn them back to position 0: float64 [L, T, R], on the model's device."""
    pool_LTW = prefill(subject.model, subject.material.surroundings(n_tokens, generator))
    _, rope_LTR = subject.model.layout.split(pool_LTW)
    return turned_exactly(rope_LTR.double(), subject.model.config.rope, -torch.arange(n_tokens, device=pool_LTW.device))


def turned_exactly(keys_LTR: Tensor, rope: RopeSpec, positions_T: Tensor) -> Tensor:
    """Turn float64 keys [L, T, R] by the positions, in float64: the truth, written apart from the code it judges."""
    frequencies_P = torch.tensor(rope.inv_freq, dtype=torch.float64, device=keys_LTR.device)
    angles_TP = positions_T.double()[:, None] * frequencies_P
    turn_TP = torch.polar(torch.ones_like(angles_TP), angles_TP)
    if rope.pairing is Pairing.INTERLEAVED:
        pairs_LTP = torch.view_as_complex(keys_LTR.reshape(*keys_LTR.shape[:-1], -1, 2))
        return torch.view_as_real(pairs_LTP * turn_TP).flatten(-2)
    turned_LTP = torch.complex(*keys_LTR.chunk(2, dim=-1)) * turn_TP
    return torch.cat([turned_LTP.real, turned_LTP.imag], dim=-1)


def moved_by_irminsul(rope: RopeSpec) -> Mover:
    """Return the mover that serves requests; it runs on the device of what it moves."""

    def move(stored_LTR: Tensor, sources_T: Tensor, targets_T: Tensor) -> Tensor:
        # A row needs a latent; one column of zeros will do.
        pool_LTW = torch.cat([torch.zeros_like(stored_LTR[..., :1]), stored_LTR], dim=-1)
        layout = RowLayout(1, rope.rotary_dim, str(stored_LTR.dtype).removeprefix("torch."))
        slots_T = torch.arange(len(sources_T), device=sources_T.device)
        move_rows(pool_LTW, layout, rope, slots_T, slots_T, sources_T, targets_T)
        return pool_LTW[..., 1:]

    return move


def moved_narrowly(rope: RopeSpec) -> Mover:
    """Return a mover that does everything but the angles in the dtype of the row."""

    def move(stored_LTR: Tensor, sources_T: Tensor, targets_T: Tensor) -> Tensor:
        angles_TP = rope.move_angles(sources_T, targets_T)
        cos_TP, sin_TP = angles_TP.cos().to(stored_LTR.dtype), angles_TP.sin().to(stored_LTR.dtype)
        interleaved = rope.pairing is Pairing.INTERLEAVED
        first, second = (stored_LTR[..., 0::2], stored_LTR[..., 1::2]) if interleaved else stored_LTR.chunk(2, dim=-1)
        turned = (first * cos_TP - second * sin_TP, second * cos_TP + first * sin_TP)
        return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)

    return move


def errors_by_delta(
    keys_LTR: Tensor, rope: RopeSpec, dtype: str, sources_T: Tensor, deltas: Sequence[int]
) -> dict[str, list[float]]:
    """Relative L2 error for each distance: of a fresh key, of ours, and of the narrow mover."""
    stored_LTR = turned_exactly(keys_LTR, rope, sources_T).to(getattr(torch, dtype))
    errors: dict[str, list[float]] = {"fresh": [], "moved": [], "narrow": []}
    for delta in deltas:
        targets_T = sources_T + delta
        truth_LTR = turned_exactly(keys_LTR, rope, targets_T)
        errors["fresh"].append(relative_error(truth_LTR.to(stored_LTR.dtype), truth_LTR))
        for name, mover in (("moved", moved_by_irminsul(rope)), ("narrow", moved_narrowly(rope))):
            errors[name].append(relative_error(mover(stored_LTR, sources_T, targets_T), truth_LTR))
    return errors


def errors_of_repeated_moves(
    keys_LTR: Tensor, rope: RopeSpec, dtype: str, path: Sequence[Tensor], moves: Sequence[int]
) -> dict[str, list[float]]:
    """Relative L2 error after so many moves along a path of positions [T], the first of which is the source."""
    move = moved_by_irminsul(rope)
    stored_LTR = turned_exactly(keys_LTR, rope, path[0]).to(getattr(torch, dtype))
    chained_LTR = stored_LTR
    errors: dict[str, list[float]] = {"from the stored base": [], "from the last result": []}
    for count in range(1, moves[-1] + 1):
        chained_LTR = move(chained_LTR, path[count - 1], path[count])
        if count in moves:
            truth_LTR = turned_exactly(keys_LTR, rope, path[count])
            errors["from the stored base"].append(relative_error(move(stored_LTR, path[0], path[count]), truth_LTR))
            errors["from the last result"].append(relative_error(chained_LTR, truth_LTR))
    return errors


def relative_error(values: Tensor, truth: Tensor) -> float:
    """Distance over the norm of the truth, all values together."""
    return float((values.double() - truth).norm() / truth.norm())


def _report(
    sizes: Sizes, by_delta: dict[str, dict[str, list[float]]], repeated: dict[str, dict[str, list[float]]]
) -> Report:
    return Report(
        name=NAME,
        title="Error of moving k_rope",
        method=(
            f"Keys of {sizes.tokens} tokens in every layer, stored at random positions below {sizes.source_positions} "
            "and moved, against float64; relative L2 error. Repeated moves go through random positions below "
            f"{sizes.move_positions}. *fresh* only stores the key of the target, which no mover can beat; *moved* is "
            "the mover that serves requests; *narrow* is one that takes cosines and sines and rotates in the row's own "
            "dtype."
        ),
        sizes=sizes,
        results={"by_delta": by_delta, "repeated": repeated},
        tables=(_delta_table(sizes, by_delta), _repeated_table(sizes, repeated)),
        comparisons=_comparisons(by_delta["bfloat16"], repeated["bfloat16"]),
        panels=_panels(sizes, by_delta, repeated),
    )


def _delta_table(sizes: Sizes, by_delta: dict[str, dict[str, list[float]]]) -> Table:
    columns = [errors[kind] for errors in by_delta.values() for kind in errors]
    header = ("distance (tokens)", *(f"{dtype} {kind}" for dtype, errors in by_delta.items() for kind in errors))
    rows = (
        (str(delta), *(f"{value:.2e}" for value in values))
        for delta, *values in zip(sizes.deltas, *columns, strict=True)
    )
    return Table("Relative L2 error by distance:", header, tuple(rows))


def _repeated_table(sizes: Sizes, repeated: dict[str, dict[str, list[float]]]) -> Table:
    columns = [errors[kind] for errors in repeated.values() for kind in errors]
    header = ("moves", *(f"{dtype}, {kind}" for dtype, errors in repeated.items() for kind in errors))
    rows = (
        (str(count), *(f"{value:.2e}" for value in values))
        for count, *values in zip(sizes.moves, *columns, strict=True)
    )
    return Table("Relative L2 error after repeated moves:", header, tuple(rows))


def _comparisons(by_delta: dict[str, list[float]], repeated: dict[str, list[float]]) -> tuple[Comparison, ...]:
    worst = max(by_delta["moved"])
    base, chained = repeated["from the stored base"], repeated["from the last result"]
    return (
        Comparison(
            "a move in bfloat16 costs at most the paper's error, at any distance",
            f"{PAPER_ERROR:.1e}",
            f"at most {worst:.1e} (only storing: {max(by_delta['fresh']):.1e}; turning in bfloat16: "
            f"{max(by_delta['narrow']):.1e})",
            worst <= PAPER_ERROR,
        ),
        Comparison(
            "repeated moves from the stored base do not accumulate",
            "does not accumulate",
            f"{base[0]:.1e} after the first, {base[-1]:.1e} after the last (chained: {chained[-1]:.1e})",
            max(base) < 1.2 * base[0],
        ),
    )


def _panels(
    sizes: Sizes, by_delta: dict[str, dict[str, list[float]]], repeated: dict[str, dict[str, list[float]]]
) -> tuple[Panel, ...]:
    narrow = ("bfloat16", "float16")
    return (
        Panel(
            title="One move",
            x_label="distance (tokens)",
            y_label="relative L2 error",
            lines=tuple(
                Line(f"{dtype}, {kind}", sizes.deltas, by_delta[dtype][kind])
                for dtype in narrow
                for kind in by_delta[dtype]
            ),
            log_x=10,
            log_y=True,
        ),
        Panel(
            title="Repeated moves",
            x_label="number of moves",
            y_label="relative L2 error",
            lines=tuple(
                Line(f"{dtype}, {kind}", sizes.moves, repeated[dtype][kind])
                for dtype in narrow
                for kind in repeated[dtype]
            ),
            log_x=2,
            log_y=True,
        ),
    )
