"""Load on stock SGLang and on SGLang with the plugin, over HTTP, on one GPU: `irminsul bench serve` in studies.

    python benchmarks/serve_on_gpu.py --out DIR --loads DIR [--studies patterns sessions ...] [--limit SECONDS]

Needs SGLang 0.5.23 and loads made by benchmarks/serve_loads.py. Both servers run DeepSeek-V2-Lite's shape with dummy
weights (time does not depend on them), FA3 and CUDA graphs, side by side on the GPU; one has work at a time. Each study
is measured in a directory of its own (docs/bench.md), with every request, and summarised in DIR/STUDY.json
(benchmarks/serve_results.py); what is measured already is not measured again. Studies that need a pool of the same size
share their servers. ``--limit``: seconds for everything, the servers' start included; a study that is cut short keeps
its blocks.

  patterns   the five patterns at 8K, 17K, 32K and 64K, one request at a time
  markers    the same with markers
  sessions   eight sessions of twenty turns that edit their history, one and eight at a time
  logs       real agent logs, 1, 4, 8, 16 and 32 at a time
  pressure   sessions of all logs that come and go, four calls at a time, in a pool of a quarter of what they hold

Two servers of 31 GB and up to 900,000 slots (28 GB) each need a GPU of 140 GB. On an H200 the servers start in 90 s;
then patterns take about 11 minutes, markers 6, sessions 3, logs 18, pressure 8.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import serve_results
from irminsul.bench.pace import parse_paces
from irminsul.bench.results import BLOCKS, read_blocks
from irminsul.errors import InputError
from irminsul.trace.lines import LineError, parse_object
from sglang_ttft import DUMMY, LITE
from steps import end

START_LIMIT_S, END_LIMIT_S = 300, 30
SERVERS = {"stock": {"SGLANG_PLUGINS": "none"}, "live": {}}
"""Variables of each."""
FLAGS = {
    **DUMMY,
    "enable_metrics": True,
    "enable_cache_report": True,
    # SGLang's CUDA graphs for fewer sizes: captured in seconds.
    "cuda_graph_max_bs_decode": 32,
    "cuda_graph_max_bs_prefill": 2048,
    "log_level": "warning",
}
ROOM = 900_000
"""Slots of a pool in which nothing is evicted."""
LONGEST = 33_000
"""Slots that a request of a log may take, answer included."""
LOGS = ("rag-storm", "lmcache-miniswe", "tau-bench", "moatless", "mini-swe-agent")


@dataclass(frozen=True)
class Study:
    """Blocks that run on the same two servers."""

    loads: tuple[str, ...]
    concurrency: str = "1"
    repeats: int = 1
    share_of_working_set: float | None = None
    """Slots of the pool by tokens of the working set; None for a pool that holds everything."""


PATTERN_LOADS = tuple(
    f"{pattern}-{length}"
    for length in ("8K", "17K", "32K", "64K")
    for pattern in ("agent_meta", "sysvar", "compact", "rerank", "tool_variants")
)
STUDIES = {
    "patterns": Study(PATTERN_LOADS, repeats=2),
    "markers": Study(tuple(f"{load}-markers" for load in PATTERN_LOADS)),
    "sessions": Study(("edited-20",), "1,8", repeats=2),
    "logs": Study(LOGS, "1,4,8,16,32", repeats=2),
    "pressure": Study(("logs-together",), "4", repeats=4, share_of_working_set=0.25),
}


def main() -> int:
    """Run the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loads", type=Path, required=True)
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=STUDIES, metavar="NAME")
    parser.add_argument("--only", nargs="+", metavar="LOAD", help="of a study's loads")
    parser.add_argument("--concurrency", help="instead of the study's own")
    parser.add_argument("--repeats", type=at_least_one, help="instead of the study's own")
    parser.add_argument(
        "--flags", type=flags_of_servers, default={}, help="more flags of both servers, as a JSON object"
    )
    parser.add_argument("--port", type=at_least_one, default=31000, help="of stock; live has the one 100 above (31000)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for everything")
    arguments = parser.parse_args()
    if not (arguments.loads / "loads.json").is_file():
        parser.error(f"{arguments.loads} has no loads.json; benchmarks/serve_loads.py makes it")
    known = {load for name in arguments.studies for load in STUDIES[name].loads}
    if unknown := set(arguments.only or ()) - known:
        parser.error(f"no load {min(unknown)!r} in these studies; there are {', '.join(sorted(known))}")
    try:
        parse_paces(arguments.concurrency, None)
    except InputError as error:
        parser.error(f"--concurrency: {error}")
    # As Ctrl-C: the servers are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ends = time.monotonic() + arguments.limit
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = json.loads((arguments.loads / "loads.json").read_text())
    failed: list[str] = []
    for slots, names in by_pool(arguments.studies, facts).items():
        failed += run(slots, names, arguments, ends)
    if failed:
        print(f"not complete: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def at_least_one(text: str) -> int:
    """Read a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def flags_of_servers(text: str) -> dict[str, str | int | float | bool]:
    """Read flags for ``sglang serve``: names with underscores, and text, numbers or true."""
    try:
        flags = parse_object(text)
    except LineError as reason:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {reason}") from None
    for name, value in flags.items():
        if name in ("port", "model_path", "radix_cache_backend"):
            raise argparse.ArgumentTypeError(f"{name} is not to be chosen: this program sets it")
        if value is False or not isinstance(value, str | int | float):
            raise argparse.ArgumentTypeError(f"{name} must be text, a number or true, got {json.dumps(value)[:80]}")
    return flags


def by_pool(names: list[str], facts: dict[str, dict[str, int]]) -> dict[int, list[str]]:
    """Return which studies run on a pool of how many slots.

    Args:
        names: of studies.
        facts: of loads, by name.
    """
    pools: dict[int, list[str]] = {}
    for name in names:
        study, slots = STUDIES[name], ROOM
        if study.share_of_working_set is not None:
            held = max(facts[load]["working_set"] for load in study.loads)
            slots = max(2 * LONGEST, int(study.share_of_working_set * held))
        pools.setdefault(slots, []).append(name)
    return pools


def run(slots: int, names: list[str], arguments: argparse.Namespace, ends: float) -> list[str]:
    """Run studies on one pair of servers; return those that are not complete."""
    failed = []
    flags = {**FLAGS, "max_total_tokens": slots, **arguments.flags}
    with servers(flags, arguments.out, arguments.port, ends) as urls:
        # Kernels are compiled for the first prompts; what this measures is thrown away.
        with tempfile.TemporaryDirectory() as folder:
            bench(urls, [arguments.loads / "agent_meta-8K.jsonl.zst"], Path(folder), ends, "--concurrency", "1,4")
        for name in names:
            study, out = STUDIES[name], arguments.out / name
            loads = [load for load in study.loads if arguments.only is None or load in arguments.only]
            complete = not loads or bench(
                urls,
                [arguments.loads / f"{load}.jsonl.zst" for load in loads],
                out,
                ends,
                *("--concurrency", study.concurrency if arguments.concurrency is None else arguments.concurrency),
                *("--repeats", str(arguments.repeats or study.repeats), "--keep-requests"),
            )
            if not complete:
                failed.append(name)
            # A study that was cut short before its first block has an empty file.
            if (out / BLOCKS).exists() and read_blocks(out):
                serve_results.write(out, arguments.out / f"{name}.json")
    return failed


def bench(urls: dict[str, str], loads: list[Path], out: Path, ends: float, *options: str) -> bool:
    """Call ``irminsul bench serve``; say whether it measured everything."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "irminsul", "bench", "serve", "--protocol", "sglang-ids", "--warm-up", "0"]
    command += ["--max-tokens", "16", "--out", str(out), "--repeats", "1"]
    command += [part for name, url in urls.items() for part in ("--server", f"{name}={url}")]
    command += [part for load in loads for part in ("--load", str(load))]
    try:
        left_s = max(1.0, ends - time.monotonic())
        return subprocess.run([*command, *options], timeout=left_s, check=False).returncode == 0  # noqa: S603
    except subprocess.TimeoutExpired:
        return False


@contextlib.contextmanager
def servers(flags: dict[str, Any], logs: Path, port: int, ends: float) -> Iterator[dict[str, str]]:
    """Start both servers, and end them; yields their addresses."""
    # Always the same path: it is the model's name, and blocks of a model of another name are not measured already.
    model = logs / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(LITE))
    with contextlib.ExitStack() as stack:
        urls, started = {}, {}
        for number, (name, variables) in enumerate(SERVERS.items()):
            own = {**flags, "model_path": model, "port": port + 100 * number}
            if name == "live":
                own["radix_cache_backend"] = "irminsul"
            log = stack.enter_context((logs / f"{name}.log").open("a"))
            started[name] = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "sglang.launch_server", *command_line(own)],
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(end, started[name], END_LIMIT_S)
            urls[name] = f"http://127.0.0.1:{own['port']}"
        for name, process in started.items():
            wait(urls[name], process, logs / f"{name}.log", min(ends, time.monotonic() + START_LIMIT_S))
        yield urls


def command_line(flags: dict[str, Any]) -> list[str]:
    """Write flags as SGLang's command line has them."""
    written = []
    for name, value in flags.items():
        option = f"--{name.replace('_', '-')}"
        written += [option] if value is True else [option, str(value)]
    return written


def wait(url: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    """Return when a server is healthy; SystemExit with the end of its log if it is not in time."""
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=10):  # noqa: S310
            return
        time.sleep(1)
    sys.exit(
        f"{url} did not start; the end of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    )


if __name__ == "__main__":
    sys.exit(main())
