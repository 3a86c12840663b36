"""In a pool too small for a load: how many prefix hits does SGLang's tree keep, with the plugin and without?

    PYTHONPATH=tests/sglang/host python benchmarks/sglang_pressure.py LOAD... [--shares 0.1 0.25 0.5]
        [--at-once 1 2 3 4 6 8] [--json FILE]

Prediction (after a first run with four at a time, which found half a point fewer): with the plugin as many prefix
tokens as without, exact and approximate together, within a point of the prompt tokens, in some orders more and in some
fewer, since it hangs on which of a few long prompts is evicted when; fewer computed in all.

SGLang's own tree, allocator and batches, driven by hand and without a model (tests/sglang/mini_server.py): on a CPU,
with the stand-ins for what SGLang misses there on the path; it only counts. Loads are those of
benchmarks/serve_loads.py, so many requests at a time: each number is another order of events. A pool has so large a
share of the slots that a tree with every prompt takes, and at least room for two of the longest prompts. Each pool once
with requests that only observe, which leaves SGLang's tree as it is, and once live. The last line is one JSON object.
"""

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "sglang"))
from mini_server import MiniServer, publish_configuration

from irminsul.errors import InputError
from irminsul.output_files import require_writable
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.tokenise import load_tokeniser
from sglang_ttft import LITE

NEW_TOKENS = 16
CHUNK = 8192


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="+", type=Path, metavar="LOAD")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.25, 0.5])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--core", choices=("python", "rust"), default="python", help="of SGLang's tree")
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    if arguments.json:
        require_writable(arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LITE))
        publish_configuration(folder)
    rows = []
    for load in arguments.loads:
        prompts = [call.tokens.tolist() for call in read_token_log([str(load)], load_tokeniser())]
        facts = json.loads((load.parent / "loads.json").read_text())[load.name.split(".")[0]]
        for share in arguments.shares:
            slots = max(2 * (facts["longest"] + NEW_TOKENS), int(share * facts["working_set"]))
            for at_once, mode in product(arguments.at_once, ("observe", "live")):
                about = {"load": load.name.split(".")[0], "share": share, "slots": slots, "at_once": at_once}
                counted = serve(prompts, slots, facts["longest"], mode, arguments.core, at_once)
                rows.append({**about, "mode": mode, **counted})
                print(json.dumps(rows[-1]), flush=True)
    text = json.dumps({"benchmark": "sglang_pressure", "core": arguments.core, "rows": rows})
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


def serve(prompts: list[list[int]], slots: int, longest: int, mode: str, core: str, at_once: int) -> dict[str, int]:
    """Serve prompts; return their tokens by class."""
    server = MiniServer(slots=slots, core=core, chunk=CHUNK, context=longest + 2 * NEW_TOKENS, computes=False)
    left = iter(prompts)
    served = 0
    while True:
        for _ in range(at_once - len(server.waiting) - len(server.running) - (server.chunked is not None)):
            if (prompt := next(left, None)) is not None:
                server.submit(prompt, output=NEW_TOKENS, options={"mode": mode})
        running = list(server.running)
        if not server.step() and not running:
            break
        # An answer takes as long as the next prefill.
        for req in running:
            server.finish(req)
            served += 1
    server.check_identity()
    if served != len(prompts):
        raise InputError(f"{len(prompts) - served} of {len(prompts)} requests were not served")
    prompt_tokens = sum(map(len, prompts))
    found = {name: sum(getattr(step, name) for step in server.counted) for name in ("prefix", "history", "shifted")}
    if mode == "observe":
        found["shifted"] = 0
    return {"prompt": prompt_tokens, **found, "computed": prompt_tokens - sum(found.values())}


if __name__ == "__main__":
    main()
