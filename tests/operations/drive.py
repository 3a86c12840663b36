"""Random operations on the core and on the embedded engine, everything checked after each.

    python tests/operations/drive.py [--host H ...] [--operations N | --seconds S] [--seed N] [--bugs] [--json FILE]

A failure is reported with the command that repeats it, and the exit status is 1. The lines say how often each operation
and each case really occurred; the file is written again after every 20,000 operations. ``--bugs`` first plants bugs, to
show that each is found.
"""
# ruff: noqa: T201 -- what a command prints

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from planted_bugs import PLANTED, operations_until_found
from world import HOSTS, LIFE, Broken, done, drive

from irminsul.machine import cpu_name, usable_cores
from irminsul.output_files import replace_files, require_writable

ROUND = 10 * LIFE
"""Operations on one host before the next takes its turn."""


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
    hosts = {host: {"operations": 0, "seconds": 0.0, "counts": Counter()} for host in arguments.host}
    try:
        for host, counts, seconds in rounds(arguments):
            hosts[host]["operations"] += done(counts)
            hosts[host]["seconds"] += seconds
            hosts[host]["counts"] += counts
            if arguments.json is not None:
                result = {**described, "operations_until_planted_bugs_were_found": bugs, "hosts": hosts}
                replace_files({arguments.json: (json.dumps(result, indent=2, sort_keys=True) + "\n").encode()})
    except Broken as error:
        traceback.print_exception(error)
        sys.exit(1)
    for host, found in hosts.items():
        for name, count in sorted(found["counts"].items()):
            print(f"{host:6} {count:9,}  {name}")
        figures = f"{found['operations']:,} operations in {found['seconds']:.0f} s"
        print(f"{host}: {figures}, everything checked after each, nothing wrong")
    if None in bugs.values():
        sys.exit(1)


def rounds(arguments):
    """Drive the hosts, taking turns; yield host, counts and seconds, as often as there is something to save."""
    if arguments.operations is None:
        for host in arguments.host:
            yield host, *drive(host, arguments.seed, seconds=arguments.seconds)
        return
    for before in range(0, arguments.operations, ROUND):
        for host in arguments.host:
            operations = min(ROUND, arguments.operations - before)
            yield host, *drive(host, arguments.seed + before // LIFE, operations=operations)


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
