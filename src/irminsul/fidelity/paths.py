"""The ways in which a prompt's rows can come about, each of which is measured against computing all of them.

``shifted`` is the paper's form of reuse: rows copied and turned, nothing recomputed but positions below 32. The paths
named after it change one knob each; one of them is what the engine does by default (see `shipped_path`). Three paths
are there to keep the harness honest: ``prefix`` is lossless and shows the noise floor, ``naive`` forgets the rotation,
and ``control`` turns the wrong way, which must look bad.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from irminsul.plan import ReusePolicy

FULL = "full"
"""The name of the reference in results: every row computed, in one forward."""


class History(StrEnum):
    """Which rows a path finds when its prompt arrives."""

    DONORS = "donors"
    """Exact rows of earlier prompts, as the engine's cache has them."""
    WHOLE_PROMPT = "whole_prompt"
    """Exact rows of the prompt itself, all but the last, computed by another forward in slices."""
    OWN_SESSION = "own_session"
    """Derived rows of the session's earlier turn, which itself reused shifted rows of the donors."""
    SHIFTED_DONOR = "shifted_donor"
    """Donor rows that were shifted themselves, which the engine never allows."""


class Movement(StrEnum):
    """What is done to a row on its way to another position."""

    TURNED = "turned"
    """Its rotary part is turned by the angle of the move."""
    COPIED = "copied"
    """Nothing: the row claims to stand where it stood."""
    TURNED_BACKWARDS = "turned_backwards"
    """Its rotary part is turned by the angle of the move in the wrong direction."""


@dataclass(frozen=True)
class Path:
    """One way to serve a prompt."""

    name: str
    about: str
    policy: ReusePolicy
    history: History = History.DONORS
    movement: Movement = Movement.TURNED
    matcher: str | None = None
    """None: the one the harness was told to use."""


SHIFTED = ReusePolicy(
    carve_out=32,
    min_run=64,
    max_runs=64,
    gap_cost=16.0,
    recompute=0,
    min_recovered=0,
    min_known=0.0,
    approximate_prefix=True,
)
"""Written out, so that the paths keep their meaning when the engine's defaults change."""
_RECOMPUTED = (8, 16, 32, 64)


def _knob(name: str, about: str, policy: ReusePolicy, matcher: str | None = None) -> Path:
    return Path(f"shifted-{name}", f"as shifted, but {about}", policy, matcher=matcher)


def _run_knob(length: int, matcher: str | None = None) -> Path:
    found = "" if matcher is None else f", always found by {matcher}"
    return _knob(f"run{length}", f"runs of {length} and more{found}", replace(SHIFTED, min_run=length), matcher)


PATHS = {
    path.name: path
    for path in (
        Path("prefix", "prefix cache, lossless; only the order of sums differs", SHIFTED, History.WHOLE_PROMPT),
        Path("naive", "rows copied, not turned", SHIFTED, movement=Movement.COPIED),
        Path(
            "shifted", "rows copied and turned, in the paper's form; runs of 64 and more, from position 32 on", SHIFTED
        ),
        *(_knob(f"w{w}", f"first {w} tokens of each run computed", replace(SHIFTED, recompute=w)) for w in _RECOMPUTED),
        _knob("carve0", "no carve-out", replace(SHIFTED, carve_out=0)),
        _knob("carve64", "positions below 64 computed", replace(SHIFTED, carve_out=64)),
        _knob("carve128", "positions below 128 computed", replace(SHIFTED, carve_out=128)),
        _run_knob(32, "winnow32"),
        *(_run_knob(length) for length in (128, 256, 512)),
        Path("derived", "next turn of a session with shifted rows", SHIFTED, History.OWN_SESSION),
        Path("chained", "rows shifted twice; the engine forbids it", SHIFTED, History.SHIFTED_DONOR),
        Path("control", "rows turned the wrong way; must be bad", SHIFTED, movement=Movement.TURNED_BACKWARDS),
    )
}
"""By name, in the order of the tables."""

QUICK_PATHS = ("prefix", "naive", "shifted", "shifted-w16", "shifted-w64", "shifted-carve64", "derived", "control")
"""What ``--quick`` measures unless told otherwise."""


def shipped_path() -> str:
    """Return the name of the path that plans as the engine does by default, where enough is known for it to copy."""
    shipped = replace(ReusePolicy(), min_known=SHIFTED.min_known)
    plain = (path for path in PATHS.values() if path.history is History.DONORS and path.movement is Movement.TURNED)
    return next(path.name for path in plain if path.policy == shipped and path.matcher is None)
