"""Does the analyser's live replay say what the plugin did on a GPU?

    python benchmarks/replayed.py STUDY.json... --loads DIR [--policy '{"min_known": 0}'] [--json FILE]

Prediction: the same computed tokens but for prompts with more known passages than a plan may have, since SGLang plans
what is left of a prompt anew in each prefill chunk, and the replay plans a prompt once.

A study is a file of benchmarks/serve_results.py, its loads are those that benchmarks/serve_loads.py made. Only blocks
with one request at a time are compared: with more the order of events is not the load's. The last line is one JSON
object.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from irminsul.errors import InputError
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
    parser.add_argument("studies", nargs="+", type=Path, metavar="STUDY.json", help="of benchmarks/serve_results.py")
    parser.add_argument("--loads", type=Path, required=True, help="where benchmarks/serve_loads.py put them")
    parser.add_argument("--policy", type=json.loads, default={}, help="knobs that the server had, as a JSON object")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    try:
        policy = ReusePolicy(**arguments.policy)
    except TypeError as error:
        parser.error(f"--policy: {error}")
    rows = []
    for study in arguments.studies:
        for row in rows_of(study):
            if row["server"] == "live" and row["pace"] == ALONE:
                rows.append(compare(row, arguments.loads, policy))
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "benchmark": "replayed",
        "studies": [study.name for study in arguments.studies],
        "policy": arguments.policy,
    }
    text = json.dumps(result | {"rows": rows})
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


def rows_of(study: Path) -> list[dict[str, Any]]:
    """Read the blocks of a study; SystemExit if it is none."""
    try:
        rows: list[dict[str, Any]] = json.loads(study.read_text())["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{study} is no study of benchmarks/serve_results.py: {type(error).__name__}: {error}")
    return rows


def compare(row: dict[str, Any], loads: Path, policy: ReusePolicy) -> dict[str, Any]:
    """Return the share of prompt tokens that a block computed, and that its replay does."""
    log = read_token_log([str(loads / f"{row['load']}.jsonl.zst")], load_tokeniser())
    prefix = replay_prefix(log, PROMPTS)
    replay = replay_live(log, SHIPPED_MATCHER, prefix, PROMPTS, policy=policy)
    prompt = int(prefix.prompt.sum())
    shares = {
        "measured": row["tokens"]["computed"] / row["tokens"]["prompt"],
        "replayed": replay.computed.sum() / prompt,
        "prefix_caching": prefix.tail.sum() / prompt,
    }
    return {"load": row["load"]} | {name: round(float(share), 4) for name, share in shares.items()}


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
