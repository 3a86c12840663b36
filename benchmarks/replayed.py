"""Does the analyser's live replay say what the plugin did on a GPU?

    python benchmarks/replayed.py STUDY.json... --loads DIR [--policy min_known=0 ...] [--json FILE]

Prediction: the same computed tokens but for prompts with more known passages than a plan may have, since SGLang plans
what is left of a prompt anew in each prefill chunk, and the replay plans a prompt once.

A study is a file of benchmarks/serve_results.py, its loads are those that benchmarks/serve_loads.py made. Only blocks
with one request at a time are compared: with more the order of events is not the load's. The last line is one JSON
object.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from irminsul.plan import ReusePolicy
from irminsul.trace.analysis import SHIPPED_MATCHER
from irminsul.trace.replay import ReplayConfig, replay_live, replay_prefix
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.tokenise import load_tokeniser

ALONE = "1 at once"
PROMPTS = ReplayConfig(replies=False)
"""What is decoded here is no prompt's beginning."""


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--loads", type=Path, required=True)
    parser.add_argument("--policy", nargs="*", default=[], metavar="NAME=NUMBER", help="knobs that the server had")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    knobs = {name: float(value) for name, value in (knob.split("=") for knob in arguments.policy)}
    policy = ReusePolicy(**knobs)  # type: ignore[arg-type]
    rows = []
    for study in arguments.studies:
        measured = json.loads(study.read_text())
        for row in measured["rows"]:
            if row["server"] == "live" and row["pace"] == ALONE:
                rows.append(compare(row, arguments.loads, policy))
                print(json.dumps(rows[-1]), flush=True)
    result = {"benchmark": "replayed", "studies": [study.name for study in arguments.studies], "policy": knobs}
    text = json.dumps(result | {"rows": rows})
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


def compare(row: dict[str, Any], loads: Path, policy: ReusePolicy) -> dict[str, Any]:
    """Return the share of prompt tokens that a block computed, and that its replay does."""
    log = read_token_log([str(loads / f"{row['load']}.jsonl.zst")], load_tokeniser())
    prefix = replay_prefix(log, PROMPTS, _quiet)
    replay = replay_live(log, SHIPPED_MATCHER, prefix, PROMPTS, _quiet, policy=policy)
    prompt = int(prefix.prompt.sum())
    shares = {
        "measured": row["tokens"]["computed"] / row["tokens"]["prompt"],
        "replayed": replay.computed.sum() / prompt,
        "prefix_caching": prefix.tail.sum() / prompt,
    }
    return {"load": row["load"]} | {name: round(float(share), 4) for name, share in shares.items()}


def _quiet(_: int) -> None:
    pass


if __name__ == "__main__":
    main()
