"""Is it safe to leave on? Attacks, faults, hostile input, random operations and load, in about five minutes.

    python benchmarks/soak.py [--out DIR] [--times N]

Two steps run at a time. What each checks is in the files it runs; its output is in DIR/NAME.log, and DIR/steps.json
says how each ended. ``--times`` makes random operations, hostile inputs and load so much longer. Exit 1 if a step did
not end well: with a status (its log says what it found), or at its time limit, which a machine busy with other things
can reach, too. Needs a built smollm2-mla, or what builds it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from steps import Place, Step, run_steps

PYTEST = "-m pytest -q -p no:cacheprovider"


def soak_steps(times: float) -> list[Step]:
    """List the steps, some of them so much longer."""
    minutes = 2.5 * times
    return [
        Step(
            "load",
            f"benchmarks/server_load.py --minutes {minutes:g} --kill-from {minutes / 2:g} --json {{out}}",
            int(90 * minutes + 420),
        ),
        Step(
            "operations",
            f"tests/operations/drive.py --seconds {30 * times:g} --bugs --json {{out}}",
            int(120 * times + 240),
        ),
        Step("attacks", f"{PYTEST} tests/security", 400, environment={"IRMINSUL_TEST_POISONING": "1"}),
        Step(
            "inputs",
            f"{PYTEST} tests/fuzz",
            int(180 * times + 240),
            environment={"IRMINSUL_TEST_EXAMPLES": str(int(150 * times))},
        ),
        Step("faults", f"{PYTEST} tests/faults", 400),
    ]


STEPS = soak_steps(1)


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new directory by default")
    parser.add_argument("--times", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.times <= 0:
        parser.error("--times is more than 0")
    out = arguments.out or Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"logs and figures: {out}", flush=True)
    return run_steps(soak_steps(arguments.times), out, {}, float("inf"), [Place(), Place()])


if __name__ == "__main__":
    sys.exit(main())
