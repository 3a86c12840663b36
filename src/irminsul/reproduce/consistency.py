"""Output consistency in the form of the paper's Table 2 (section 7.3, appendix H).

The fidelity harness measures: the greedy text of the full computation is forced through each path; KL(full || path) a
token, argmax match, and tokens of greedy text before the first that differs. Here only three of its paths are run: what
the engine does by default, the paper's form of reuse (``shifted``), and ``naive``; the numbers are put beside the
paper's. Our texts are not the paper's: facts in documents for HotpotQA and MuSiQue, free continuation for GovReport,
shorter haystacks for its needle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from irminsul.fidelity.command import fidelity_command
from irminsul.fidelity.estimates import FEWEST
from irminsul.fidelity.paths import shipped_path
from irminsul.fidelity.tasks import TASKS
from irminsul.reproduce.figures import Line, Panel
from irminsul.reproduce.record import Comparison, Report, Table, number
from irminsul.reproduce.subject import Subject

NAME = "consistency"
REUSE = tuple(dict.fromkeys((shipped_path(), "shifted")))
"""The engine's default, and the paper's: only positions below 32 computed."""
PATHS = (*REUSE, "naive")

_PAPER = {
    "qa": "QA: TransMLA-4B .054/.112, DSv2-Lite .146/.210, Moonlight .051/.070, JoyAI .539/.743",
    "continuation": (
        "GovReport: TransMLA-4B .173/.175, DSv2-Lite .297/.276 (shifted is worse), Moonlight .116/.137, JoyAI .369/.419"
    ),
    "needle": "NIAH: DSv2-Lite .053/.063, Moonlight .021/.031, JoyAI .484/.624",
}
"""KL shifted/naive by kind of text; other kinds are not in the paper."""

Row = Mapping[str, Any]
"""What the harness says about one path on one task."""
Tasks = Mapping[str, Mapping[str, Row]]
"""By task and path."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    tasks: tuple[str, ...]
    """Names of the fidelity harness."""
    cases: int
    """Of each task."""


FULL = Sizes(("needle-2k", "needle-4k", "qa", "agent", "continuation", "self-copy"), 20)
QUICK = Sizes(("needle-1k", "qa", "continuation"), 2)


def tokens_needed(*, quick: bool) -> int:
    """Return the longest prompt."""
    return max(TASKS[name].sized(quick=quick) for name in (QUICK if quick else FULL).tasks)


def run(subject: Subject) -> Report:
    """Run the fidelity harness on the subject's checkpoint, which it loads by itself."""
    sizes = QUICK if subject.quick else FULL
    subject.tell(f"{sizes.cases} cases each of {', '.join(sizes.tasks)}")
    report = fidelity_command(
        checkpoint=subject.checkpoint,
        quick=subject.quick,
        tasks=",".join(sizes.tasks),
        paths=",".join(PATHS),
        n=sizes.cases,
        seed=subject.seed,
        device=subject.model.device.type,
        dtype=subject.model.layout.dtype,
        console=Console(quiet=True),
        progress=Console(quiet=True),
    )
    return _report(sizes, report)


def _report(sizes: Sizes, report: Mapping[str, Any]) -> Report:
    tasks: Tasks = report["tasks"]
    return Report(
        name=NAME,
        title="Output consistency under reuse",
        method=(
            f"{sizes.cases} cases of each task of the fidelity harness. KL(full || path) in nats a token and argmax "
            "match over the greedy text of the full computation; first divergence in tokens, a text that agrees to its "
            "end counting with its length. Means over cases; intervals are bootstraps over cases, 95 %, and none below "
            f"{FEWEST} cases; directions are decided by that of the difference to naive. `{REUSE[0]}` is what the "
            "engine does by default, `shifted` the paper's form (only positions below 32 computed)."
        ),
        sizes=sizes,
        results={
            "tasks": {task: {path: dict(rows[path]) for path in PATHS} for task, rows in tasks.items()},
            "against_naive": report["against_naive"],
            "cases": report["cases"],
        },
        tables=(_table(tasks),),
        comparisons=tuple(
            _comparison(task, path, rows, report["against_naive"][task][path])
            for task, rows in tasks.items()
            for path in REUSE
        ),
        panels=(
            _panel("KL(full || path)", "nats a token (lower is better)", "kl_mean", tasks),
            _panel("Argmax match", "share of tokens (higher is better)", "argmax_match", tasks),
        ),
    )


def _table(tasks: Tasks) -> Table:
    header = ("task", "n", *(f"{what} {path}" for what in ("KL", "match", "first divergence") for path in PATHS))
    rows = tuple(
        (
            task,
            str(rows["shifted"]["n"]),
            *(_kl(rows[path]) for path in PATHS),
            *(number(rows[path]["argmax_match"]) for path in PATHS),
            *(f"{rows[path]['first_divergence']:.1f} of {rows[path]['tokens']:.1f}" for path in PATHS),
        )
        for task, rows in tasks.items()
    )
    return Table("Shifted and naive reuse against full computation:", header, rows)


def _kl(row: Row) -> str:
    interval = row["kl_ci95"]
    return number(row["kl_mean"]) + (f" ({number(interval[0])}, {number(interval[1])})" if interval else "")


def _comparison(task: str, path: str, rows: Mapping[str, Row], against_naive: Mapping[str, Any]) -> Comparison:
    kind = task.split("-", maxsplit=1)[0]
    return Comparison(
        claim=f"{path} has a lower KL than naive on {task}",
        paper=_PAPER.get(kind, "not measured"),
        ours=f"{number(rows[path]['kl_mean'])}/{number(rows['naive']['kl_mean'])}",
        agrees=against_naive["better"],
    )


def _panel(title: str, unit: str, field: str, tasks: Tasks) -> Panel:
    return Panel(
        title=title,
        x_label="task",
        y_label=unit,
        lines=tuple(
            Line(
                path,
                list(tasks),
                [rows[path][field] for rows in tasks.values()],
                [rows[path]["kl_ci95"] for rows in tasks.values()] if field == "kl_mean" else (),
            )
            for path in PATHS
        ),
        log_y=field == "kl_mean",
    )
