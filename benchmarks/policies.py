"""What does each knob of the plan cost on real logs, in recovered tokens?

Prediction: recomputing 32 tokens of each run costs a few per cent of what is recovered, because most recovered tokens
lie in runs of hundreds of tokens; runs below 128 tokens are many and hold little.

For ``min_known`` (written after an experiment on small logs): since rows behind a copied one are never donors, copying
a little in front of much new text costs more later than it saves now; at one half more tokens are recovered in all than
at 0 wherever texts recur that share a part with others, and fewer prompt tokens are approximate.

    python benchmarks/policies.py LOG... [--token-cache DIR] [--json FILE]

First all rows are donors, to see a knob by itself; then, for ``min_known`` and ``min_recovered``, as the engines do it.
``irminsul fidelity`` says what each knob is good for. The last line is one JSON object.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from irminsul.errors import InputError
from irminsul.output_files import require_writable
from irminsul.plan import ReusePolicy
from irminsul.trace.replay import ReplayConfig, replay_live, replay_matcher, replay_prefix
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.tokenise import load_tokeniser

PLAIN = ReusePolicy(carve_out=32, min_run=64, recompute=0, min_known=0)
POLICIES = {
    "plain": PLAIN,
    **{f"w{w}": replace(PLAIN, recompute=w) for w in (8, 16, 32, 64)},
    **{f"run{length}": replace(PLAIN, min_run=length) for length in (128, 256, 512)},
    "carve128": replace(PLAIN, carve_out=128),
    "run128-w16": replace(PLAIN, min_run=128, recompute=16),
    "run128-w32": replace(PLAIN, min_run=128, recompute=32),
}
LIVE = {
    **{f"min_known {share}": ReusePolicy(min_known=share) for share in (0, 0.25, 0.5, 0.75)},
    "min_recovered 2048": ReusePolicy(min_recovered=2048),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--token-cache", type=Path, help="keep tokens here for the next time")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if arguments.json:
        require_writable(arguments.json)
    logs = {path.name.split(".")[0]: recovered(path, arguments.token_cache) for path in arguments.logs}
    print("| log | tail tokens | " + " | ".join(POLICIES) + " |")
    print("|---|---:|" + "---:|" * len(POLICIES))
    for name, row in logs.items():
        shares = (f"{100 * row[policy] / row['tail']:.1f} %" for policy in POLICIES)
        print(f"| {name} | {row['tail']:,} | " + " | ".join(shares) + " |")
    print()
    print(f"| log | {' | '.join(f'{name}: saved | approximate' for name in LIVE)} |")
    print(f"|---|{'---:|---:|' * len(LIVE)}")
    for name, row in logs.items():
        cells = []
        for one in row["live"].values():
            cells += [
                f"{100 * (1 - one['computed'] / row['tail']):.1f} %",
                f"{100 * one['approximate'] / row['prompt']:.0f} %",
            ]
        print(f"| {name} | {' | '.join(cells)} |")
    result = {"benchmark": "policies", "logs": logs}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def recovered(path: Path, token_cache: Path | None) -> dict[str, Any]:
    """Return recovered tokens by policy, and what prefix caching computes (``tail``).

    Under ``live``: tokens that the engines compute, and prompt tokens whose rows are approximate.
    """
    log = read_token_log([str(path)], load_tokeniser(), cache=token_cache)
    config = ReplayConfig()
    prefix = replay_prefix(log, config)
    by_policy = {
        name: int(replay_matcher(log, "winnow64", prefix, config, policy=policy).recovered.sum())
        for name, policy in POLICIES.items()
    }
    live = {}
    for name, policy in LIVE.items():
        found = replay_live(log, "winnow64", prefix, config, policy=policy)
        live[name] = {"computed": int(found.computed.sum()), "approximate": int(found.approximate.sum())}
    return {"prompt": int(prefix.prompt.sum()), "tail": int(prefix.tail.sum()), "live": live} | by_policy


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
