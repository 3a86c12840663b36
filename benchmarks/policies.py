"""What does each knob of the plan cost on real logs, in recovered tokens?

Prediction: recomputing 32 tokens of each run costs a few per cent of what is recovered, because most recovered tokens
lie in runs of hundreds of tokens; runs below 128 tokens are many and hold little.

    python benchmarks/policies.py LOG... [--token-cache DIR] [--json FILE]

``irminsul fidelity`` says what each knob is good for. The last line is one JSON object.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from irminsul.plan import ReusePolicy
from irminsul.trace.replay import ReplayConfig, replay_matcher, replay_prefix
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.tokenise import load_tokeniser

PLAIN = ReusePolicy(carve_out=32, min_run=64, recompute=0)
POLICIES = {
    "plain": PLAIN,
    **{f"w{w}": replace(PLAIN, recompute=w) for w in (8, 16, 32, 64)},
    **{f"run{length}": replace(PLAIN, min_run=length) for length in (128, 256, 512)},
    "carve128": replace(PLAIN, carve_out=128),
    "run128-w16": replace(PLAIN, min_run=128, recompute=16),
    "run128-w32": replace(PLAIN, min_run=128, recompute=32),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--token-cache", type=Path, help="keep tokens here for the next time")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    logs = {path.name.split(".")[0]: recovered(path, arguments.token_cache) for path in arguments.logs}
    print("| log | tail tokens | " + " | ".join(POLICIES) + " |")
    print("|---|---:|" + "---:|" * len(POLICIES))
    for name, row in logs.items():
        shares = (f"{100 * row[policy] / row['tail']:.1f} %" for policy in POLICIES)
        print(f"| {name} | {row['tail']:,} | " + " | ".join(shares) + " |")
    result = {"benchmark": "policies", "logs": logs}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def recovered(path: Path, token_cache: Path | None) -> dict[str, int]:
    """Recovered tokens by policy, and the tokens that prefix caching computes (``tail``)."""
    log = read_token_log([str(path)], load_tokeniser(), cache=token_cache)
    config = ReplayConfig()
    prefix = replay_prefix(log, config, _quiet)
    by_policy = {
        name: int(replay_matcher(log, "winnow64", prefix, config, _quiet, policy=policy).recovered.sum())
        for name, policy in POLICIES.items()
    }
    return {"tail": int(prefix.tail.sum())} | by_policy


def _quiet(_tokens: int) -> None:
    pass


if __name__ == "__main__":
    main()
