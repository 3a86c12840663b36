"""All measurements of the SGLang plugin on a GPU host, one after the other, each alone on the machine.

    python benchmarks/on_gpu.py --out DIR --checkpoint smollm2-mla --texts FILE.jsonl [--only NAMES] [--limit SECONDS]

Needs SGLang 0.5.23, the project on the path, and a built smollm2-mla (`irminsul model build smollm2-mla`). A step that
fails or runs into its limit does not stop the others; what it wrote stays, its output is in DIR/NAME.log.
DIR/steps.json says what became of each. Exit 1 if any did not end well.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FEW_GRAPHS = '{"cuda_graph_max_bs_decode": 32, "cuda_graph_max_bs_prefill": 2048}'
"""SGLang's CUDA graphs for fewer sizes: captured in seconds."""
TWO_RANKS = '{"tp_size": 2, "disable_custom_all_reduce": true, "enforce_disable_flashinfer_allreduce_fusion": true}'
ALL_CONFIGURATIONS = "eager graphs page64 page64-graphs no-overlap absorbed one-shot chunked-kv mixed"


@dataclass(frozen=True)
class Step:
    """One program.

    In ``command``, {out}, {checkpoint} and {texts} stand for the file it writes and what was given.
    """

    name: str
    command: str
    limit_s: int
    gpus: int = 1


STEPS = (
    Step("kernel-tests", "-m pytest -q tests/kernels tests/sglang/test_shared_keys.py -m gpu", 200),
    Step("rows_kernel", "benchmarks/rows_kernel.py --json {out}", 150),
    Step("ttft_eager", "benchmarks/sglang_ttft.py --out {out} --repeats 3", 420),
    Step("ttft_graphs", f"benchmarks/sglang_ttft.py --out {{out}} --repeats 3 --graphs --flags '{FEW_GRAPHS}'", 480),
    Step(
        "equality_smollm2",
        "benchmarks/sglang_equality.py --out {out} --checkpoint {checkpoint} --texts {texts} "
        f"--configurations {ALL_CONFIGURATIONS} --at-once 3",
        900,
    ),
    Step("equality_lite", "benchmarks/sglang_equality.py --out {out} --lite --configurations one-shot", 300),
    Step("equality_shapes", "benchmarks/sglang_shapes.py --out {out} --at-once 3", 700),
    Step(
        "load",
        "benchmarks/sglang_load.py --out {out} --checkpoint {checkpoint} --seconds 45 "
        "--configurations graphs page64 mixed eager --at-once 2",
        420,
    ),
    Step("energy", f"benchmarks/energy.py --out {{out}} --models mla --graphs --flags '{FEW_GRAPHS}'", 420),
    Step(
        "energy_others",
        "benchmarks/energy.py --out {out} --models gqa mha hybrid --tokens 8192 --repeats 2 "
        f"--graphs --flags '{FEW_GRAPHS}'",
        420,
    ),
    Step("overhead", "benchmarks/sglang_overhead.py --out {out} --repeats 2", 300),
    Step(
        "equality_tp2",
        "benchmarks/sglang_equality.py --out {out} --lite --tokens 4000 12000 --configurations one-shot "
        f"--flags '{TWO_RANKS}'",
        420,
        gpus=2,
    ),
)


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="NAME")
    parser.add_argument("--limit", type=int, help="seconds for all steps together; the last one is cut short")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = float("inf") if arguments.limit is None else time.monotonic() + arguments.limit
    told = []
    for step in STEPS:
        if arguments.only is not None and step.name not in arguments.only:
            continue
        told.append(run(step, arguments, ends - time.monotonic()))
        print(json.dumps(told[-1]), flush=True)
        (arguments.out / "steps.json").write_text(json.dumps(told, indent=1) + "\n")
    return int(any(step["ended"] != "well" for step in told))


def run(step: Step, arguments: argparse.Namespace, left_s: float) -> dict[str, object]:
    """Run a step; say what became of it."""
    missing = step.gpus - gpus()
    if missing > 0 or left_s <= 0:
        why = f"needs {step.gpus} GPUs" if missing > 0 else "no time was left"
        return {"step": step.name, "ended": f"not run: {why}"}
    command = command_of(step, arguments)
    environment = dict(os.environ)
    if step.gpus > 1:
        # Ranks that do not agree on a plan end the server.
        environment["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
    started = time.monotonic()
    with (arguments.out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(  # noqa: S602  # the commands are those above
            command,
            shell=True,
            cwd=HERE.parent,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = "well" if process.wait(min(step.limit_s, left_s)) == 0 else f"with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = "at its time limit"
            os.killpg(process.pid, 9)
            process.wait()
    return {"step": step.name, "ended": ended, "seconds": round(time.monotonic() - started, 1)}


def command_of(step: Step, arguments: argparse.Namespace) -> str:
    """Return a step's command line."""
    given = {"out": arguments.out / f"{step.name}.json", "checkpoint": arguments.checkpoint, "texts": arguments.texts}
    command = f"exec {shlex.quote(sys.executable)} {step.command}"
    for name, path in given.items():
        # Not str.format: flags that are JSON have braces, too.
        command = command.replace(f"{{{name}}}", shlex.quote(str(path.resolve())))
    return command


def gpus() -> int:
    """Count the GPUs that programs may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device])
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)  # noqa: S607
    return len(found.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
