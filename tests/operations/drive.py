"""Random operations on the core and on the embedded engine, everything checked after each.

    python tests/operations/drive.py [--host H ...] [--operations N | --seconds S] [--seed N] [--bugs] [--json FILE]

A failure is reported with the command that repeats it, and the exit status is 1. The lines say how often each operation
and each case really occurred. ``--bugs`` first plants bugs, to show that each is found.
"""
# ruff: noqa: T201 -- what a command prints

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from planted_bugs import PLANTED, operations_until_found
from world import HOSTS, Broken, done, drive

from irminsul.machine import cpu_name, usable_cores
from irminsul.output_files import require_writable


def main():
    """Drive, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", nargs="+", choices=HOSTS, default=list(HOSTS))
    parser.add_argument("--operations", type=int, help="on each host")
    parser.add_argument("--seconds", type=float, default=30, help="on each host, unless --operations is given")
    parser.add_argument("--seed", type=int, default=0, help="of the first life")
    parser.add_argument("--bugs", action="store_true", help="plant bugs first; not to find one of them is a failure")
    parser.add_argument("--json", type=Path, help="write the counts here")
    arguments = parser.parse_args()
    if arguments.json is not None:
        require_writable(arguments.json)
    described = describe()
    bugs = {}
    for host, bug in PLANTED if arguments.bugs else ():
        found = operations_until_found(host, bug)
        print(f"{host}, {bug.__name__}: {found if found is not None else 'not found'}")
        bugs[f"{host}, {bug.__name__}"] = found
    hosts = {}
    for host in arguments.host:
        try:
            counts, seconds = drive(host, arguments.seed, operations=arguments.operations, seconds=arguments.seconds)
        except Broken as error:
            traceback.print_exception(error)
            sys.exit(1)
        hosts[host] = {
            "operations": done(counts),
            "seconds": round(seconds, 1),
            "first_seed": arguments.seed,
            "wrong": 0,
            "counts": dict(sorted(counts.items())),
        }
        for name, count in sorted(counts.items()):
            print(f"{host:6} {count:9,}  {name}")
        print(f"{host}: {done(counts):,} operations in {seconds:.0f} s, everything checked after each, nothing wrong")
    if arguments.json is not None:
        result = {**described, "operations_until_planted_bugs_were_found": bugs, "hosts": hosts}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if None in bugs.values():
        sys.exit(1)


def describe():
    """Say what this was measured with."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "benchmark": "operations",
        "command": " ".join(["python", *sys.argv]),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "machine": {"processor": cpu_name(), "cores": usable_cores()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
    }


if __name__ == "__main__":
    main()
