"""All measurements of the SGLang plugin on a GPU host.

    python benchmarks/on_gpu.py --out DIR --checkpoint DIRECTORY --texts FILE.jsonl --loads DIR [--only NAMES]

Needs SGLang 0.5.23, GPUs of 140 GB, the project on the path, a built smollm2-mla (`irminsul model build smollm2-mla`),
a text file for its prompts (benchmarks/held_out.py) and the loads of benchmarks/serve_loads.py; steps that need
something that is not given are not run. All of it takes two to three hours on one GPU. On a host of several GPUs one
step runs on each, on cores of its own; what needs two GPUs runs first, alone. A step that fails or runs into its limit
does not stop the others; what it wrote stays, its output is in DIR/NAME.log. DIR/steps.json says what became of each.
Exit 1 if any did not end well.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from steps import Place, Step, places_of_gpus, run_steps

FEW_GRAPHS = '"cuda_graph_max_bs_decode": 32, "cuda_graph_max_bs_prefill": 2048'
"""SGLang's CUDA graphs for fewer sizes: captured in seconds."""
DEFAULT_GRAPHS = '"cuda_graph_max_bs_decode": 32, "cuda_graph_max_bs_prefill": 8192'
"""As many of prefill as SGLang captures by default; they take GPU memory, so pools are smaller."""
TWO_RANKS = '"tp_size": 2, "disable_custom_all_reduce": true, "enforce_disable_flashinfer_allreduce_fusion": true'
CHECK_RANKS = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
"""Ranks that do not agree on a plan end the server."""
ALL_CONFIGURATIONS = "eager graphs page64 page64-graphs no-overlap absorbed one-shot chunked-kv mixed"

STEPS = (
    Step(
        "equality_tp2",
        "benchmarks/sglang_equality.py --out {out} --lite --tokens 4000 12000 --new-tokens 8 "
        f"--configurations one-shot --flags '{{{TWO_RANKS}}}'",
        360,
        gpus=2,
        environment=CHECK_RANKS,
    ),
    Step(
        "ttft_tp2",
        f"benchmarks/sglang_ttft.py --out {{out}} --repeats 3 --graphs --flags '{{{FEW_GRAPHS}, {TWO_RANKS}}}'",
        480,
        gpus=2,
    ),
    Step("kernel-tests", "-m pytest -q tests/kernels tests/sglang/test_shared_keys.py -m gpu", 200, gpus=1),
    Step("rows_kernel", "benchmarks/rows_kernel.py --json {out}", 150, gpus=1),
    Step("ttft_eager", "benchmarks/sglang_ttft.py --out {out} --repeats 3", 420, gpus=1),
    Step(
        "ttft_graphs",
        f"benchmarks/sglang_ttft.py --out {{out}} --repeats 3 --graphs --flags '{{{FEW_GRAPHS}}}'",
        480,
        gpus=1,
    ),
    Step(
        "ttft_default",
        "benchmarks/sglang_ttft.py --out {out} --tokens 16384 65536 --repeats 3 --graphs "
        f"--flags '{{{DEFAULT_GRAPHS}, \"max_total_tokens\": 160000}}'",
        480,
        gpus=1,
    ),
    Step(
        "equality_smollm2",
        "benchmarks/sglang_equality.py --out {out} --checkpoint {checkpoint} --texts {texts} "
        f"--configurations {ALL_CONFIGURATIONS} --at-once 3",
        900,
        gpus=1,
    ),
    Step(
        "equality_lite",
        "benchmarks/sglang_equality.py --out {out} --lite --tokens 30000 --new-tokens 8 --configurations one-shot",
        300,
        gpus=1,
    ),
    Step(
        "equality_forms",
        "benchmarks/sglang_equality.py --out {out} --lite --tokens 7000 --new-tokens 8 --configurations eager",
        200,
        gpus=1,
    ),
    Step("equality_shapes", "benchmarks/sglang_shapes.py --out {out} --new-tokens 8 --at-once 3", 700, gpus=1),
    Step(
        "load",
        "benchmarks/sglang_load.py --out {out} --checkpoint {checkpoint} --seconds 45 --sample 4 "
        "--configurations graphs page64 mixed eager --at-once 2",
        420,
        gpus=1,
    ),
    *(
        Step(name, f"benchmarks/serve_on_gpu.py --out {{folder}} --loads {{loads}} --studies {name}", limit_s, gpus=1)
        for name, limit_s in (
            ("patterns", 1200),
            ("markers", 700),
            ("sessions", 400),
            ("logs", 1500),
            ("pressure", 900),
        )
    ),
    Step(
        "default_graphs",
        "benchmarks/serve_on_gpu.py --out {folder} --loads {loads} --studies patterns sessions --repeats 1 "
        "--only agent_meta-8K agent_meta-17K agent_meta-32K agent_meta-64K "
        "rerank-8K rerank-17K rerank-32K rerank-64K edited-20 "
        f"--flags '{{{DEFAULT_GRAPHS}, \"max_total_tokens\": 860000}}'",
        600,
        gpus=1,
    ),
    Step("energy", f"benchmarks/energy.py --out {{out}} --models mla --graphs --flags '{{{FEW_GRAPHS}}}'", 420, gpus=1),
    Step(
        "energy_others",
        "benchmarks/energy.py --out {out} --models gqa mha hybrid --tokens 8192 --repeats 2 "
        f"--graphs --flags '{{{FEW_GRAPHS}}}'",
        420,
        gpus=1,
    ),
    Step("overhead", "benchmarks/sglang_overhead.py --out {out} --repeats 2", 300, gpus=1),
)


def main() -> int:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="a built smollm2-mla")
    parser.add_argument("--texts", type=Path, help="agent.jsonl of benchmarks/held_out.py")
    parser.add_argument("--loads", type=Path, help="what benchmarks/serve_loads.py made, with all five logs")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all steps together")
    parser.add_argument("--one-at-a-time", action="store_true", help="one step at a time, whatever GPUs there are")
    arguments = parser.parse_args()
    given = {name: path for name in ("checkpoint", "texts", "loads") if (path := getattr(arguments, name)) is not None}
    steps = [step for step in STEPS if arguments.only is None or step.name in arguments.only]
    places = [Place()] if arguments.one_at_a_time else places_of_gpus()
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a file")
    return run_steps(steps, arguments.out, given, arguments.limit, places)


if __name__ == "__main__":
    sys.exit(main())
