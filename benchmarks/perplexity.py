"""What does rewriting SmolLM2 as MLA with 64 rotated values cost in perplexity?

Prediction (from the parts tried while it was made): 2 to 4 per cent at 768 tokens, without any training.

    python benchmarks/perplexity.py [--limit 768] [--json FILE]

Texts are held out: two of ours, pages of the language reference, sources of the standard library (so the figures depend
a little on the version of Python). The last line is one JSON object.
"""

import argparse
import json
import platform
from pathlib import Path

import torch
import transformers

from irminsul.checkpoints.perplexity import held_out_texts, perplexity, token_sequences
from irminsul.checkpoints.smollm2 import find_checkpoint, find_gguf, load_source
from irminsul.engine.model import MlaModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=768, help="tokens of each text")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    model, tokenizer = load_source(find_gguf())
    sequences = token_sequences(tokenizer, held_out_texts().values(), limit=arguments.limit)

    @torch.inference_mode()
    def original(token_ids_T: torch.Tensor) -> torch.Tensor:
        return model(input_ids=token_ids_T[None]).logits[0]

    before = perplexity(original, sequences)
    after = perplexity(MlaModel.load(find_checkpoint("smollm2")), sequences)
    result = {
        "benchmark": "perplexity",
        "limit": arguments.limit,
        "tokens": sum(map(len, sequences)),
        "original": round(before, 3),
        "rotary-64": round(after, 3),
        "ratio": round(after / before, 4),
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(f"original {before:.3f}, rotary-64 {after:.3f}: {100 * (after / before - 1):+.1f} %")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
