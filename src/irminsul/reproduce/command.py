"""``irminsul reproduce``: run experiments on a checkpoint and write what they find."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from irminsul.engine.loading import load_model, load_tokenizer
from irminsul.errors import InputError
from irminsul.machine import describe_machine
from irminsul.reproduce import consistency, invariance, rope_pitfall, rotation, sink
from irminsul.reproduce.material import python_material
from irminsul.reproduce.record import Origin, Report, write_report
from irminsul.reproduce.subject import Subject

ALL = "all"
EXPERIMENTS: dict[str, Callable[[Subject], Report]] = {
    invariance.NAME: invariance.run,
    sink.NAME: sink.run,
    rotation.NAME: rotation.run,
    rope_pitfall.NAME: rope_pitfall.run,
    consistency.NAME: consistency.run,
}


def reproduce_command(
    name: str,
    checkpoint: Path,
    out: Path,
    *,
    quick: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    shown_as: str | None = None,
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """Run one experiment, or all of them.

    Args:
        name: a key of `EXPERIMENTS`, or "all".
        checkpoint: directory of the model and its tokenizer.
        out: directory that the files are written to, ``<name>.json``, ``.md`` and ``.png`` for each experiment.
        quick: reduced sizes, for two CPU cores.
        device: cpu or cuda.
        dtype: of the model and its rows.
        seed: of all random choices.
        shown_as: how the user named the checkpoint, for the record.
        tell: told what is being done, and what was found.

    Returns:
        The files written.

    Raises:
        InputError: an unknown experiment, a model too short for it, or a directory that cannot be written to.
    """
    names = _names(name)
    shown_as = shown_as or str(checkpoint)
    command = ["irminsul", "reproduce", name, shown_as, "--out", str(out), *(["--quick"] if quick else [])]
    command += ["--device", device, "--dtype", dtype, "--seed", str(seed)]
    subject = Subject(
        model=load_model(checkpoint, device=device, dtype=dtype),
        checkpoint=checkpoint,
        material=python_material(load_tokenizer(checkpoint)),
        quick=quick,
        seed=seed,
        tell=tell,
    )
    machine = describe_machine(device, dtype)
    written: list[Path] = []
    for chosen in names:
        tell(f"== {chosen}")
        start = time.perf_counter()
        report = EXPERIMENTS[chosen](subject)
        seconds = time.perf_counter() - start
        origin = Origin(shlex.join(command), shown_as, quick, seed, machine, seconds)
        written += write_report(report, origin, out)
        _tell_outcome(report, written[-3:], tell)
    return written


def _names(name: str) -> list[str]:
    if name == ALL:
        return list(EXPERIMENTS)
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}; valid experiments: {', '.join((*EXPERIMENTS, ALL))}")
    return [name]


def _tell_outcome(report: Report, files: list[Path], tell: Callable[[str], None]) -> None:
    for compared in report.comparisons:
        tell(f"{'same' if compared.agrees else 'OTHER'} direction: {compared.claim} (ours: {compared.ours})")
    tell(f"Wrote {', '.join(str(path) for path in files)}")
