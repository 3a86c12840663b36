"""A study of benchmarks/serve_on_gpu.py in one short file: its blocks without what they have in common, and its turns.

    python benchmarks/serve_results.py FOLDER --out FILE

Times in ms. ``rows``: a block each. ``turns``, where sessions have several calls: for each call of a session, first,
second, ..., the median TTFT over sessions and repeats, and the tokens computed for all of them together.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from irminsul.bench.results import BLOCKS, REQUESTS, Block, read_blocks, read_requests
from irminsul.errors import InputError
from irminsul.output_files import require_writable
from sglang_ttft import commit


def collect(folder: Path) -> dict[str, Any]:
    """Return what a study measured.

    Args:
        folder: with blocks.jsonl, and requests.jsonl.gz for turns.

    Raises:
        InputError: there are no blocks, or they are damaged.
    """
    blocks = read_blocks(folder)
    if not blocks:
        raise InputError(f"{folder} has no block that is complete")
    last = blocks[-1]
    return {
        "what": "load over HTTP on stock SGLang and with the plugin, DeepSeek-V2-Lite shape, dummy weights",
        "date": last["started"][:10],
        "commit": commit(),
        "gpu": next(iter(last["client"].get("gpus", [])), "none"),
        "versions": {"sglang": last["server"]["facts"].get("version"), "irminsul-kv": version("irminsul-kv")},
        "server": {name: value for name, value in last["server"]["facts"].items() if name != "radix_cache_backend"},
        "settings": {name: value for name, value in last["settings"].items() if name not in ("pace", "load")},
        "cores": last["client"]["cores"],
        "rows": [row_of(block) for block in blocks],
        "turns": turns(folder, blocks),
    }


def row_of(block: Block) -> dict[str, Any]:
    """Return what a block measured."""
    return {
        "load": load_name(block),
        "pace": block["settings"]["pace"],
        "server": block["server"]["name"],
        "repeat": block["repeat"],
        "slots": block["server"]["facts"].get("max_total_tokens"),
        **{name: block[name] for name in ("requests", "succeeded", "errors")},
        "prompt_tokens": block["load"].get("prompt_tokens_median"),
        **{
            f"{name}_ms": {key: round(1000 * value, 2) for key, value in block[f"{name}_s"].items()}
            for name in ("ttft", "itl", "end_to_end")
            if block.get(f"{name}_s")
        },
        **{name: round(block[name], 4) for name in ("seconds", "requests_per_s", "in_flight", "client_cpu_share")},
        "tokens": block.get("tokens", {}),
        "pool": {name: round(value, 4) for name, value in block.get("pool", {}).items()},
    }


def turns(folder: Path, blocks: list[Block]) -> list[dict[str, Any]]:
    """Return what became of the first, second, ... calls of sessions."""
    known = {block["id"]: (load_name(block), block["settings"]["pace"], block["server"]["name"]) for block in blocks}
    of_session: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for request in read_requests(folder):
        # A server that does not tell classes has no turns to show.
        if request["error"] is None and request["token_classes"] is not None:
            of_session[request["block"], request["session"]].append(request)
    found: dict[tuple[str, str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for (block, _), requests in of_session.items():
        for turn, request in enumerate(sorted(requests, key=lambda request: request["started_s"])):
            found[*known[block], turn].append(request)
    return [
        {
            **dict(zip(("load", "pace", "server", "turn"), key, strict=True)),
            "calls": len(requests),
            "ttft_ms": round(1000 * statistics.median(request["ttft_s"] for request in requests), 2),
            "prompt_tokens": sum(request["prompt_tokens"] for request in requests),
            "computed": sum(request["token_classes"].get("computed", 0) for request in requests),
        }
        for key, requests in sorted(found.items())
    ]


def load_name(block: Block) -> str:
    """Return the load's name, without what its file's name ends in."""
    name: str = block["load"]["name"]
    return name.removesuffix(".jsonl.zst")


def write(folder: Path, out: Path) -> None:
    """Collect a study and write it, one row a line."""
    found = collect(folder)
    lists = {name: found.pop(name) for name in ("rows", "turns")}
    text = json.dumps(found, indent=1)[:-2]
    for name, rows in lists.items():
        text += f',\n "{name}": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
    out.write_text(text + "\n}\n")


def main() -> None:
    """Collect and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        require_writable(arguments.out, inputs=[arguments.folder / BLOCKS, arguments.folder / REQUESTS])
        write(arguments.folder, arguments.out)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
