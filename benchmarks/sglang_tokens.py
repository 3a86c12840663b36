"""Does SGLang compute from smollm2-mla what transformers computes?

Prediction, after a first run in which 6 of 16 texts were equal: in float32 SGLang's greedy tokens are those of
transformers; in bfloat16 both engines part from float32 wherever the two best logits are closer than bfloat16 can
blur, and SGLang's log probabilities are no further from float32 than transformers' own bfloat16 ones are.

    python benchmarks/sglang_tokens.py CHECKPOINT [--tokens 32] [--variants NAME ...] [--json FILE]

Needs SGLang 0.5.23 and a GPU. The reference is DeepseekV2ForCausalLM in float32. Each variant of SGLang is a process
of its own; one that SGLang refuses is recorded with its reason. For each: greedy tokens of each prompt, and the log
probability of each token of prompt and reference text under teacher forcing. The last line is one JSON object.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Write a Python function that adds two numbers.",
    "What is 2 + 2?",
    "Explain what a cache is in one sentence.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "List the days of the week.",
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a small village by the sea, and in it",
    "import json\nimport sys\n\n\ndef main():\n",
    "The three laws of motion were first stated by",
    '{"name": "irminsul", "version": ',
    "To be, or not to be, that is",
    "1, 2, 3, 4, 5, 6,",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "float32-triton": {"dtype": "float32", "attention_backend": "triton"},
    "bfloat16-fa3": {"dtype": "bfloat16", "attention_backend": "fa3"},
    "bfloat16-fa3-float32-head": {"dtype": "bfloat16", "attention_backend": "fa3", "enable_fp32_lm_head": True},
}
STARTUP_LIMIT_S = 240


def main() -> None:
    """Compare and print; or, as a child process, serve one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.checkpoint, arguments.serve, arguments.work, arguments.tokens)
        return
    prompts = read_prompts(arguments.checkpoint)
    reference = transformers_outputs(arguments.checkpoint, "float32", prompts, arguments.tokens, forced=None)
    texts = [prompt + row["greedy"] for prompt, row in zip(prompts, reference, strict=True)]
    outputs: dict[str, Any] = {
        "transformers-bfloat16": transformers_outputs(
            arguments.checkpoint, "bfloat16", prompts, arguments.tokens, forced=texts
        )
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "prompts.json").write_text(json.dumps({"prompts": prompts, "texts": texts}))
        for variant in arguments.variants:
            outputs[variant] = run_variant(arguments.checkpoint, variant, work, arguments.tokens)
    result = {
        "benchmark": "sglang_tokens",
        "checkpoint": arguments.checkpoint.name,
        "prompts": len(prompts),
        "tokens": arguments.tokens,
        "smallest_margins": [min(row["margins"]) for row in reference],
        "variants": {name: summarise(reference, got) for name, got in outputs.items()},
        "versions": versions(),
    }
    for name, row in result["variants"].items():
        print(name, row if "refused" in row else {key: row[key] for key in row if key != "rows"})
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def read_prompts(checkpoint: Path) -> list[list[int]]:
    """Token ids of short prompts, chats first."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in (*chats, *TEXTS)]


def transformers_outputs(
    checkpoint: Path, dtype: str, prompts: list[list[int]], n_tokens: int, forced: list[list[int]] | None
) -> list[dict[str, Any]]:
    """Greedy tokens of transformers with the lead of the best logit, and log probabilities of the ``forced`` texts.

    Without ``forced`` the texts are the prompts with the greedy tokens behind them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).cuda()
    rows = []
    with torch.inference_mode():
        for at, prompt in enumerate(prompts):
            ids, margins = list(prompt), []
            for _ in range(n_tokens):
                best = model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1].float().topk(2)
                ids.append(int(best.indices[0]))
                margins.append(round(float(best.values[0] - best.values[1]), 4))
                if ids[-1] == model.config.eos_token_id:
                    break
            text = forced[at] if forced else ids
            logits = model(input_ids=torch.tensor([text], device="cuda")).logits[0].float()
            chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(text[1:], device="cuda")[:, None])[:, 0]
            rows.append({"greedy": ids[len(prompt) :], "margins": margins, "logprobs": chosen.tolist()})
    return rows


def run_variant(checkpoint: Path, variant: str, work: Path, n_tokens: int) -> list[dict[str, Any]] | dict[str, str]:
    """Serve in a child process; what it wrote, or why there is nothing."""
    command = [sys.executable, __file__, str(checkpoint), "--serve", variant, "--work", str(work)]
    log = work / f"{variant}.log"
    with log.open("w") as file:
        try:
            subprocess.run(  # noqa: S603
                [*command, "--tokens", str(n_tokens)], stdout=file, stderr=file, timeout=STARTUP_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"refused": f"no answer in {STARTUP_LIMIT_S} s"}
    written = work / f"{variant}.json"
    if not written.is_file():
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        return {"refused": (lines or ["the process ended without a result"])[-1][-400:]}
    rows: list[dict[str, Any]] = json.loads(written.read_text())
    return rows


def serve(checkpoint: Path, variant: str, work: Path, n_tokens: int) -> None:
    """Write what SGLang generates, and the log probabilities it gives to the reference texts."""
    import sglang

    given = json.loads((work / "prompts.json").read_text())
    engine = sglang.Engine(
        model_path=str(checkpoint),
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.9,
        max_total_tokens=20_000,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        log_level="warning",
        **VARIANTS[variant],
    )
    try:
        rows = []
        for prompt, text in zip(given["prompts"], given["texts"], strict=True):
            greedy = engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": n_tokens})
            forced = engine.generate(
                input_ids=text,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
            )
            logprobs = [entry[0] for entry in forced["meta_info"]["input_token_logprobs"][1:]]
            rows.append({"greedy": list(greedy["output_ids"]), "logprobs": logprobs})
        (work / f"{variant}.json").write_text(json.dumps(rows))
    finally:
        engine.shutdown()


def summarise(reference: list[dict[str, Any]], got: list[dict[str, Any]] | dict[str, str]) -> dict[str, Any]:
    """How far from the reference: equal texts, where they part, and the distance of log probabilities."""
    if isinstance(got, dict):
        return got
    rows = [compare(want, row) for want, row in zip(reference, got, strict=True)]
    squares = [
        (a - b) ** 2
        for want, row in zip(reference, got, strict=True)
        for a, b in zip(want["logprobs"], row["logprobs"], strict=True)
    ]
    margins = [row["margin_there"] for row in rows if row["margin_there"] is not None]
    return {
        "equal": sum(row["equal"] for row in rows),
        "largest_margin_where_parted": max(margins, default=None),
        "logprob_rms": round(math.sqrt(sum(squares) / len(squares)), 6),
        "logprob_max": round(math.sqrt(max(squares)), 5),
        "rows": rows,
    }


def compare(want: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """Say where two greedy texts part, and how sure the reference was there."""
    a, b = want["greedy"], got["greedy"]
    part = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    equal = a == b
    margin = want["margins"][part] if not equal and part < len(want["margins"]) else None
    return {"equal": equal, "first_difference": None if equal else part, "margin_there": margin, "length": len(a)}


def versions() -> dict[str, str]:
    """What this ran on."""
    from importlib.metadata import version

    import torch

    names = ("sglang", "torch", "transformers")
    return {name: version(name) for name in names} | {"gpu": torch.cuda.get_device_name()}


if __name__ == "__main__":
    main()
