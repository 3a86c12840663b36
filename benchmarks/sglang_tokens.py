"""Does SGLang compute from smollm2-mla what transformers computes?

Prediction: yes; greedy tokens are equal wherever the two best logits are further apart than bfloat16 can blur.

    python benchmarks/sglang_tokens.py CHECKPOINT [--tokens 32] [--json FILE]

Needs SGLang 0.5.23 and a GPU. The reference is DeepseekV2ForCausalLM in float32; SGLang runs in bfloat16 with FA3,
which attends short prompts by up-projected keys and decodes in absorbed form. The last line is one JSON object.
"""

import argparse
import json
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


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.checkpoint)
    expected = [reference(arguments.checkpoint, prompt, arguments.tokens) for prompt in prompts]
    served = serve(arguments.checkpoint, prompts, arguments.tokens)
    rows = [compare(want, margins, got) for (want, margins), got in zip(expected, served["outputs"], strict=True)]
    result = {
        "benchmark": "sglang_tokens",
        "checkpoint": arguments.checkpoint.name,
        "prompts": len(prompts),
        "tokens": arguments.tokens,
        "equal": sum(row["equal"] for row in rows),
        "rows": rows,
        "versions": served["versions"],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
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


def reference(checkpoint: Path, prompt: list[int], n_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers in float32, and how far the best logit leads at each."""
    import torch

    model = _reference_model(checkpoint)
    ids, margins = list(prompt), []
    with torch.inference_mode():
        for _ in range(n_tokens):
            best = model(input_ids=torch.tensor([ids], device="cuda")).logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            margins.append(round(float(best.values[0] - best.values[1]), 4))
            if ids[-1] == model.config.eos_token_id:
                break
    return ids[len(prompt) :], margins


_LOADED: dict[Path, Any] = {}


def _reference_model(checkpoint: Path) -> Any:  # noqa: ANN401
    import torch
    from transformers import AutoModelForCausalLM

    if checkpoint not in _LOADED:
        _LOADED[checkpoint] = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda()
    return _LOADED[checkpoint]


def serve(checkpoint: Path, prompts: list[list[int]], n_tokens: int) -> dict[str, Any]:
    """Greedy tokens of SGLang."""
    import sglang
    import torch

    _LOADED.clear()
    torch.cuda.empty_cache()
    engine = sglang.Engine(
        model_path=str(checkpoint),
        dtype="bfloat16",
        attention_backend="fa3",
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.3,
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        log_level="warning",
    )
    try:
        outputs = [
            engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": n_tokens})
            for prompt in prompts
        ]
        versions = {"sglang": sglang.__version__, "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
        return {"outputs": [list(output["output_ids"]) for output in outputs], "versions": versions}
    finally:
        engine.shutdown()


def compare(want: list[int], margins: list[float], got: list[int]) -> dict[str, Any]:
    """Say where two texts part, and how sure the reference was there."""
    part = next((at for at, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    equal = want == got
    return {
        "equal": equal,
        "first_difference": None if equal else part,
        "margin_there": None if equal or part >= len(margins) else margins[part],
        "smallest_margin": min(margins),
        "length": len(want),
    }


if __name__ == "__main__":
    main()
