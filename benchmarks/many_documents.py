"""What does copying up to 64 short documents cost in quality, against the 16 longest and computing the others?

Prediction: with 64 runs fewer than a third as many tokens are computed; KL rises by about a half, because more rows
carry documents that are not in front of them any more, and stays below a tenth of naive's; greedy tokens agree a little
less often, and no difference in right answers shows. Recomputing 32 tokens of each run takes back what 64 runs cost.

    python benchmarks/many_documents.py [--n 10] [--size 7680] [--device cuda] [--json FILE]

As the task *qa* of ``irminsul fidelity``, but some 40 documents: re-ranked for each request, one left out, behind
another preamble. All else is the harness's. Differences are to 16 runs, case by case, in brackets the 95 % interval,
which takes 5 cases; of the answers, how many that full computation has right are lost, and the other way, won. The last
line is one JSON object.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from irminsul.checkpoints.smollm2 import find_checkpoint
from irminsul.engine.loading import load_tokenizer
from irminsul.fidelity import paths, texts
from irminsul.fidelity.estimates import estimate, summary
from irminsul.fidelity.measure import CaseResult
from irminsul.fidelity.tasks import Case, Draft, Task
from irminsul.fidelity.workers import Setup
from irminsul.machine import describe_machine
from irminsul.markdown import markdown_table
from irminsul.output_files import require_writable

BASE = "16 runs"
_RUNS16 = replace(paths.PATHS["shifted-carve64"].policy, max_runs=16)
_RUNS64 = replace(_RUNS16, max_runs=64)
COMPARED = (
    paths.Path(BASE, "the 16 longest copied and turned", _RUNS16),
    paths.Path("64 runs", "up to 64 copied and turned", _RUNS64),
    paths.Path("64 runs, w32", "first 32 tokens of each computed", replace(_RUNS64, recompute=32)),
    paths.Path("64 runs, naive", "copied, not turned", _RUNS64, movement=paths.Movement.COPIED),
)
_LENGTHS = (64, 96, 160, 320)
"""Tokens that a document is filled up to, about."""
LEAST_SIZE = 2048
_ROOM = 384
"""Tokens that a prompt keeps for all but its documents."""
HEADER = ("path", "KL", "worst", "KL - 16 runs", "computed", "runs", "tokens agree", "agree - 16 runs", "right")


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--n", type=int, default=10, help="cases")
    parser.add_argument("--size", type=int, default=7680, help="most tokens of a prompt and its answer")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if arguments.size < LEAST_SIZE or arguments.n < 1:
        parser.error(f"--size is at least {LEAST_SIZE}, --n at least 1")
    if arguments.json:
        require_writable(arguments.json)
    checkpoint = find_checkpoint("smollm2-mla")
    task = Task("many-documents", "some 40 documents in another order", arguments.size, 24, many_documents)
    cases = task.cases(Draft(load_tokenizer(checkpoint)), arguments.n, 0, quick=False)
    harness = Setup(checkpoint, arguments.device, "float32", "winnow64", COMPARED).harness()
    results = []
    for number, case in enumerate(cases):
        started = time.perf_counter()
        results.append(harness.measure(task.name, number, case, COMPARED, task.max_tokens))
        kls = ", ".join(f"{name} {one.kl:.4f}" for name, one in results[-1].paths.items())
        print(f"{time.perf_counter() - started:.0f} s, {case.note}; KL: {kls}", file=sys.stderr, flush=True)
    rows = measured(results)
    print(markdown_table(HEADER, [cells(name, row) for name, row in rows.items()], numbers=True))
    machine = asdict(describe_machine(arguments.device, "float32"))
    result = {"benchmark": "many_documents", "checkpoint": checkpoint.name, "machine": machine, "size": arguments.size}
    result |= {"paths": rows, "cases": [asdict(case) for case in results]}
    if arguments.json:
        arguments.json.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))


def many_documents(draft: Draft, rng: random.Random, size: int) -> Case:
    """Draw short documents until they fill a prompt; the donor has them in another order, and one more."""
    documents: list[tuple[str, texts.Fact]] = []
    room = size - _ROOM
    for place in texts.places(rng, 100):
        facts = texts.facts_about(place, rng)[: rng.randint(2, 6)]
        document = texts.record(place, facts, rng, draft.count, rng.choice(_LENGTHS))
        room -= draft.count(document) + 2
        if room < 0:
            break
        documents.append((document, rng.choice(facts)))
    *kept, spare = documents

    def prompt(order: list[tuple[str, texts.Fact]], question: str) -> tuple[int, ...]:
        records = "Read these records.\n\n" + "\n\n".join(text for text, _ in order)
        turns = [("user", records), ("assistant", "I have read it."), ("user", question)]
        return draft.conversation([("system", draft.preamble(rng)), *turns])

    order, wanted = rng.sample(kept, len(kept)), rng.choice(kept)
    return Case(
        donors=(prompt([*rng.sample(kept, len(kept)), spare], spare[1].question),),
        prompt=prompt(order, wanted[1].question),
        # No path here goes on with a session or shifts rows twice.
        session_end=0,
        middle=(),
        answer=wanted[1].answer,
        note=f"{len(kept)} documents, the one asked for is number {order.index(wanted) + 1}",
    )


def measured(cases: list[CaseResult]) -> dict[str, dict[str, Any]]:
    """Return the harness's figures of each path, its runs, and what it differs by from the path of 16 runs."""
    rows = summary(cases)
    for name, row in rows.items():
        pairs = [(case.paths[name], case.paths[BASE]) for case in cases]
        row["runs"] = fmean(len(own.runs) for own, _ in pairs)
        row["kl_against_16"] = asdict(estimate([own.kl - base.kl for own, base in pairs]))
        row["argmax_against_16"] = asdict(estimate([own.argmax_match - base.argmax_match for own, base in pairs]))
    return rows


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    kl, agree = row["kl_against_16"], row["argmax_against_16"]
    return [
        *(name, cell(row["kl_mean"], row["kl_ci95"], ".4f"), f"{row['kl_max']:.3f}"),
        cell(kl["mean"], kl["interval"], "+.4f"),
        *(f"{row['computed']:,.0f} of {row['prompt_tokens']:,.0f}", f"{row['runs']:.1f}", f"{row['argmax_match']:.1%}"),
        cell(agree["mean"], agree["interval"], "+.1%"),
        f"{row['score'] * row['scored']:.0f}, {row['right_to_wrong']} lost, {row['wrong_to_right']} won",
    ]


def cell(mean: float, interval: tuple[float, float] | None, form: str) -> str:
    """Write a mean with its interval, if there is one."""
    return f"{mean:{form}}" + (f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "")


if __name__ == "__main__":
    main()
