"""How close to a plain copy does the Triton kernel move rows, and what do plain torch operations take?

Prediction (written before the first run, for one H200): from 4K rows of 27 layers on, the kernel alone moves its bytes
at 70 % or more of the device's own copy bandwidth, less at 1K rows, where the start and the end of the launch show.
The whole call adds 0.1 to 0.3 ms for angles and one wait for the device. The reference moves three to four times the
bytes in some fifteen launches a block, so it takes four to eight times as long; layer by layer, hundreds of launches
cost 2 ms and more whatever the number of rows.

    python benchmarks/rows_kernel.py [--rows 1024 4096] [--layers 27] [--repeats 20] [--json FILE]

Protocol: rows of 512 + 64 bfloat16 values, as DeepSeek's, in slots drawn at random from a pool twice as large; sources
and targets disjoint; half of the rows move backwards. Before anything is timed, the first and the last layer are
compared with the reference. CUDA events around each call, on warmed-up code; variants interleaved; 512 MiB are written
between calls, so that the L2 cache is cold and the kernel's launch is hidden behind them. Waits for the device inside
a call are part of its time. Medians, p20 and p80. Bytes: each row read and written once in each layer, slots and the
cosines and sines read once. Copy bandwidth: 2 GiB copied to 2 GiB, by torch. The last line is one JSON object.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from irminsul.kernels.layer_rows import LayerRows
from irminsul.kernels.row_movers import row_mover
from irminsul.kernels.rows import move_rows
from irminsul.layout import RowLayout
from irminsul.rope import Pairing, RopeSpec, Turn

ROWS = (1024, 4096, 16_384, 65_536)
LAYERS = (27, 61)
LAYOUT = RowLayout(512, 64, "bfloat16")
ROPE = RopeSpec(tuple(10_000 ** (-pair / 32) for pair in range(32)), Pairing.INTERLEAVED)
WARM_UP = 3
FLUSH_BYTES = 512 * 2**20
COPY_BYTES = 2 * 2**30
AIM = 0.7
AIM_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Moves:
    """Rows to move: where from, where to, and their positions; int64 on the GPU."""

    sources_N: Tensor
    targets_N: Tensor
    old_N: Tensor
    new_N: Tensor

    @classmethod
    def draw(cls, rows: int, slots: int) -> "Moves":
        """Draw disjoint slots, and positions below 128K."""
        generator = torch.Generator(device="cuda").manual_seed(rows)
        shuffled_S = torch.randperm(slots, generator=generator, device="cuda")
        old_N, new_N = torch.randint(2**17, (2, rows), generator=generator, device="cuda")
        return cls(shuffled_S[:rows].contiguous(), shuffled_S[rows : 2 * rows].contiguous(), old_N, new_N)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order in which functions that move rows take them."""
        return self.sources_N, self.targets_N, self.old_N, self.new_N


class Clock:
    """Times calls on the GPU, each after the L2 cache has been overwritten."""

    def __init__(self) -> None:
        self.scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Return how long one call took."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.scratch.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def compare(self, variants: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
        """Time each variant in turn, again and again; milliseconds."""
        samples: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(WARM_UP + repeats):
            for name, call in variants.items():
                samples[name].append(self.milliseconds(call))
        return {name: percentiles(times[WARM_UP:]) for name, times in samples.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("rows_kernel.py measures a GPU kernel, and torch sees no CUDA device")
    clock = Clock()
    copy_bandwidth = measure_copy(clock, arguments.repeats)
    print(f"copy bandwidth: {copy_bandwidth / 1e9:.0f} GB/s, reads and writes counted")
    cases = []
    for layers in arguments.layers:
        for rows in arguments.rows:
            case = measure(clock, rows, layers, copy_bandwidth, arguments.repeats)
            print_case(case)
            cases.append(case)
    large = [case["share"] for case in cases if case["rows"] >= AIM_ROWS]
    report = {
        "benchmark": "rows_kernel",
        "copy_gb_s": round(copy_bandwidth / 1e9, 1),
        "cases": cases,
        "aim": {"share": AIM, "from_rows": AIM_ROWS, "lowest": min(large, default=None)},
        "layout": LAYOUT.fingerprint,
        "repeats": arguments.repeats,
        "machine": machine(),
    }
    line = json.dumps(report)
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)


def measure_copy(clock: Clock, repeats: int) -> float:
    """Return the bytes a second that a plain copy reads and writes."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = clock.compare({"copy": lambda: target.copy_(source)}, repeats)
    return 2 * COPY_BYTES / times["copy"]["p50"] * 1e3


def measure(clock: Clock, rows: int, layers: int, copy_bandwidth: float, repeats: int) -> dict[str, object]:
    """Compare all variants on the same rows of the same pool."""
    from irminsul.kernels import rows_triton

    slots = 2 * rows + 64
    pool_LSW = torch.empty(layers, slots, LAYOUT.width, dtype=torch.bfloat16, device="cuda").normal_()
    moves = Moves.draw(rows, slots)
    check(pool_LSW, moves)
    bound = LayerRows.of(pool_LSW.unbind(0), LAYOUT)
    turn = Turn.by(ROPE.move_angles(moves.old_N, moves.new_N), ROPE.pairing)
    call = row_mover("triton", bound.layers_SW, LAYOUT, check_slots=False)
    times = clock.compare(
        {
            "kernel": lambda: rows_triton._launch(bound, turn, moves.sources_N, moves.targets_N),  # noqa: SLF001
            "call": lambda: call(ROPE, *moves.columns),
            "reference": lambda: move_rows(pool_LSW, LAYOUT, ROPE, *moves.columns),
            "by layer": lambda: move_by_layer(bound.layers_SW, moves),
        },
        repeats,
    )
    moved = bytes_moved(rows, layers)
    bandwidth = moved / times["kernel"]["p50"] * 1e3
    return {
        "rows": rows,
        "layers": layers,
        "bytes": moved,
        "ms": times,
        "gb_s": round(bandwidth / 1e9, 1),
        "share": round(bandwidth / copy_bandwidth, 3),
    }


def check(pool_LSW: Tensor, moves: Moves) -> None:
    """Stop if the kernel's first or last layer is not the reference's, to the bit."""
    ends_LSW = pool_LSW[[0, -1]]
    move_rows(ends_LSW, LAYOUT, ROPE, *moves.columns)
    row_mover("triton", pool_LSW.unbind(0), LAYOUT)(ROPE, *moves.columns)
    if not torch.equal(pool_LSW[[0, -1]].view(torch.int16), ends_LSW.view(torch.int16)):
        sys.exit("the kernel's rows are not the reference's: nothing was timed")


def move_by_layer(layers_SW: tuple[Tensor, ...], moves: Moves) -> None:
    """Move rows as one would write it first: angles once, then select, turn and copy for each layer."""
    turn = Turn.by(ROPE.move_angles(moves.old_N, moves.new_N), ROPE.pairing)
    for layer_SW in layers_SW:
        moved_NW = layer_SW.index_select(0, moves.sources_N)
        rope_NR = LAYOUT.split(moved_NW)[1]
        rope_NR.copy_(turn(rope_NR))
        layer_SW.index_copy_(0, moves.targets_N, moved_NW)


def bytes_moved(rows: int, layers: int) -> int:
    """Bytes that moving rows has to read and write."""
    slots_and_angles = 2 * 8 + 2 * 4 * (LAYOUT.rope_dim // 2)
    return rows * (2 * LAYOUT.bytes_per_token(layers) + slots_and_angles)


def percentiles(times: list[float]) -> dict[str, float]:
    """Return p20, p50 and p80."""
    cuts = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return dict(zip(("p20", "p50", "p80"), (round(value, 4) for value in cuts.tolist()), strict=True))


def print_case(case: dict[str, object]) -> None:
    """Print one line a case."""
    times = ", ".join(f"{name} {time['p50']:.3f}" for name, time in case["ms"].items())
    print(
        f"{case['rows']:6d} rows x {case['layers']} layers, {case['bytes'] / 2**20:8.1f} MiB: {times} ms; "
        f"kernel {case['gb_s']:.0f} GB/s, {case['share']:.0%} of a copy"
    )


def machine() -> dict[str, object]:
    """Say what this ran on."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    main()
