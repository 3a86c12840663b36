"""``irminsul reproduce``: run experiments on a checkpoint and write what they find."""

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from irminsul.engine.loading import load_model, load_tokenizer
from irminsul.errors import InputError
from irminsul.machine import describe_machine
from irminsul.output_files import require_folder
from irminsul.reproduce import consistency, invariance, rope_pitfall, rotation, sink
from irminsul.reproduce.material import python_material
from irminsul.reproduce.record import Origin, Report, file_names, write_report
from irminsul.reproduce.subject import Subject

ALL = "all"


class Experiment(Protocol):
    """A module that measures one thing."""

    def tokens_needed(self, *, quick: bool) -> int:
        """Return the longest prompt, in tokens."""

    def run(self, subject: Subject) -> Report:
        """Measure; raise InputError if the model does not read prompts of that length."""


EXPERIMENTS: dict[str, Experiment] = {
    invariance.NAME: invariance,
    sink.NAME: sink,
    rotation.NAME: rotation,
    rope_pitfall.NAME: rope_pitfall,
    consistency.NAME: consistency,
}


_DIRECTIONS = {True: "same direction", False: "OTHER direction", None: "not decided"}


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
    """Run one experiment, or all of them that fit the model; the files of each are written as soon as it is done.

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
        InputError: an unknown experiment or a directory that cannot be written to, before anything is measured; a
            model too short for one of them, after the others.
    """
    names = _names(name)
    require_folder(out, *(file for chosen in names for file in file_names(chosen)))
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
    too_long = _too_long(subject, names)
    for sentence in too_long.values():
        tell(sentence)
    written: list[Path] = []
    for chosen in (each for each in names if each not in too_long):
        tell(f"== {chosen}")
        start = time.perf_counter()
        report = EXPERIMENTS[chosen].run(subject)
        seconds = time.perf_counter() - start
        origin = Origin(shlex.join(command), shown_as, quick, seed, machine, seconds)
        written += write_report(report, origin, out)
        _tell_outcome(report, written[-3:], tell)
    if too_long:
        raise InputError("; ".join(too_long.values()))
    return written


def _names(name: str) -> list[str]:
    if name == ALL:
        return list(EXPERIMENTS)
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}; valid experiments: {', '.join((*EXPERIMENTS, ALL))}")
    return [name]


def _too_long(subject: Subject, names: list[str]) -> dict[str, str]:
    """Say of each experiment that does not fit the model why it is left out."""
    reads = subject.model.config.max_position_embeddings
    needed = {name: EXPERIMENTS[name].tokens_needed(quick=subject.quick) for name in names}
    return {
        name: f"{name} is left out: it needs prompts of {tokens} tokens, but the model reads {reads}"
        for name, tokens in needed.items()
        if tokens > reads
    }


def _tell_outcome(report: Report, files: list[Path], tell: Callable[[str], None]) -> None:
    for compared in report.comparisons:
        tell(f"{_DIRECTIONS[compared.agrees]}: {compared.claim} (ours: {compared.ours})")
    tell(f"Wrote {', '.join(str(path) for path in files)}")
