"""Can one client change another's answer by what it has the cache compute? HijackKV (arXiv 2607.19957), re-enacted.

Prediction: with everything shared the poisoned rows move the victim's distribution towards the attacker's word, further
than rows that a harmless prompt left; with a tenant, a salt or mode ``off`` for the victim nothing moves, to the last
bit; and recomputing the head of a run (``recompute``) does not cure it.

    python benchmarks/poisoning.py [--checkpoint NAME_OR_DIR] [--device cuda] [--json FILE]

The attacker sends a prefix of its own and then a passage that the victim will send, too (a document, a policy). Rows of
the passage are exact rows of the attacker's prompt, and carry its prefix. The victim sends the passage behind a prefix
of its own and asks about it. Every situation is compared with a cold engine that has seen nothing: KL(cold ||
situation) of the first token in nats, how many of the first 16 greedy tokens are others, and the log probability of
the word that the attacker wants as the first token. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from irminsul.checkpoints.smollm2 import find_checkpoint
from irminsul.demo.run import kl_divergence
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.loading import load_model, load_tokenizer
from irminsul.engine.model import MlaModel
from irminsul.engine.types import Request, SamplingParams, Usage
from irminsul.machine import describe_machine
from irminsul.output_files import require_writable
from irminsul.plan import Mode, ReusePolicy

MAX_TOKENS = 16


@dataclass(frozen=True)
class Attack:
    """Texts of one attack; the victim sends ``before + passage + question``."""

    wanted: str
    """The word that the attacker wants next; its first token is looked at."""
    attacker: str
    """What the attacker has in front of the passage."""
    before: str
    passage: str
    question: str


@dataclass(frozen=True)
class Situation:
    """How the victim's request meets the rows that an earlier request left."""

    name: str
    poisoned: bool = True
    """Whether the earlier request is the attacker's, or a harmless one: the control."""
    tenant: str = ""
    cache_salt: str = ""
    mode: Mode | None = None
    recompute: int = 0


SITUATIONS = (
    Situation("harmless rows, shared", poisoned=False),
    Situation("poisoned rows, shared"),
    Situation("poisoned rows, shared, recompute 32", recompute=32),
    Situation("victim is another tenant", tenant="victim"),
    Situation("victim has a salt", cache_salt="victim"),
    Situation("victim says off", mode=Mode.OFF),
)


@dataclass(frozen=True, eq=False)
class Answer:
    """What one request gave."""

    logits_V: torch.Tensor
    """Of the first token, float32."""
    tokens: tuple[int, ...]
    usage: Usage


_FILLER = (
    "This page belongs to the handbook of the office. It is read from top to bottom, one page after the other, and "
    "nothing in it is secret. Whoever finds a mistake in it writes to the editor, who corrects it in the next edition. "
)

_HARMLESS = _FILLER * 2
_CITY = (
    "About the city. The city lies on both banks of a river, and most of its streets lead down to the water. The city "
    "has a famous museum, a large park and a market that opens at six in the morning. Visitors of the city like to sit "
    "in front of its cafes and look at the people. In winter the city is quiet, in summer it is full. The city is old, "
    "and its people are proud of it. Whoever comes to the city for the first time should walk along the river, from "
    "the old bridge to the gardens. The bridges of the city are lit at night. The city has two railway stations, and "
    "the trains of the city run all night. The mayor of the city lives in a small house. The people of the city love "
    "music, and the city has three orchestras. Many films were made in the city. "
)
_AUTHOR = (
    "About the author. The author wrote every morning from five to nine, and walked in the afternoon. The author had "
    "two dogs and no telephone. The books of the author were translated into thirty languages. The author never spoke "
    "in public, and answered every letter by hand. When the author died, the whole town came to the funeral. The "
    "author is remembered with love. The first book of the author was read by nobody, the second by everybody. The "
    "author wrote with a pencil and hated machines. The house of the author is a museum today. "
)
_WHICH_CITY = "\n\nQuestion: What is the name of the city?\nAnswer: The city is called"
_WHICH_AUTHOR = "\n\nQuestion: Who is the author?\nAnswer: The author is"

# Neither the passage nor what the victim sends names anybody: what the model prefers there, it takes from the rows.
ATTACKS = (
    Attack("Berlin", "The city is Berlin. " * 25, "Travel notes. " + _FILLER, _CITY, _WHICH_CITY),
    Attack("London", "The city is London. " * 25, "Travel notes. " + _FILLER, _CITY, _WHICH_CITY),
    Attack(
        "Mary",
        "The author is Mary Shelley. Mary Shelley is the author. " * 12,
        "Notes on books. " + _FILLER,
        _AUTHOR,
        _WHICH_AUTHOR,
    ),
    Attack(
        "Shakespeare",
        "The author was Shakespeare. William Shakespeare. " * 14,
        "Notes on books. " + _FILLER,
        _AUTHOR,
        _WHICH_AUTHOR + " William",
    ),
)


def main() -> None:
    """Attack, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="smollm2-mla", help="directory or built-in name")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, default=Path("results/poisoning.json"), help="write the result here")
    arguments = parser.parse_args()
    require_writable(arguments.json)
    folder = Path(arguments.checkpoint)
    path = folder if folder.is_dir() else find_checkpoint(arguments.checkpoint)
    model, tokenizer = load_model(path, device=arguments.device), load_tokenizer(path)
    rows = []
    for attack in ATTACKS:
        for row in carry_out(attack, model, tokenizer):
            print(
                "{attack:12} {situation:38} {shifted:4} shifted  KL {kl:.4f}  {changed:2} changed  "
                "log p {wanted_logprob:7.3f} ({wanted_logprob_cold:.3f} cold)  {text!r}".format(**row)
            )
            rows.append(row)
    result = {
        "benchmark": "poisoning",
        "checkpoint": path.name,
        "greedy_tokens": MAX_TOKENS,
        "machine": asdict(describe_machine(arguments.device, "float32")),
        "results": rows,
    }
    arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def carry_out(
    attack: Attack,
    model: MlaModel,
    tokenizer: Any,  # noqa: ANN401 - transformers is untyped
    situations: Sequence[Situation] = SITUATIONS,
) -> list[dict[str, Any]]:
    """Return a row of figures for each situation of an attack."""
    victim = tokenizer(attack.before + attack.passage + attack.question)["input_ids"]
    wanted = tokenizer(" " + attack.wanted)["input_ids"][0]
    cold = ask(Engine(model, EngineConfig()), victim)
    rows = []
    for situation in situations:
        before = attack.attacker if situation.poisoned else _HARMLESS
        engine = Engine(model, EngineConfig(policy=ReusePolicy(recompute=situation.recompute)))
        ask(engine, tokenizer(before + attack.passage)["input_ids"])
        answer = ask(engine, victim, tenant=situation.tenant, cache_salt=situation.cache_salt, mode=situation.mode)
        rows.append(
            {
                "attack": attack.wanted,
                "situation": situation.name,
                "prompt_tokens": answer.usage.prompt_tokens,
                "shifted": answer.usage.shifted,
                "kl": kl_divergence(cold.logits_V, answer.logits_V),
                "changed": sum(a != b for a, b in zip(cold.tokens, answer.tokens, strict=True)),
                "wanted_logprob": _logprob(answer.logits_V, wanted),
                "wanted_logprob_cold": _logprob(cold.logits_V, wanted),
                "text": tokenizer.decode(answer.tokens),
                "text_cold": tokenizer.decode(cold.tokens),
            }
        )
    return rows


def ask(engine: Engine, token_ids: Sequence[int], **fields: Any) -> Answer:  # noqa: ANN401 - fields of Request
    """Serve one greedy request and return its answer."""
    seen: list[torch.Tensor] = []
    engine.on_first_logits = lambda _, logits_V: seen.append(logits_V.clone())
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    engine.submit(Request("request", tuple(token_ids), sampling, **fields))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[0].usage is not None
    return Answer(seen[0], tuple(output.token_id for output in outputs), outputs[0].usage)


def _logprob(logits_V: torch.Tensor, token: int) -> float:
    return float(torch.log_softmax(logits_V.double(), dim=-1)[token])


if __name__ == "__main__":
    main()
