"""Shared by the faults: what each test tells of itself, and the table of all that was tried.

    python -m pytest tests/faults --faults-table FILE

With SGLang installed, as `make test-sglang` does, what is done to the plugin belongs to it:

    python -m pytest tests/faults tests/sglang/test_server.py -k 'faults or loaded' --faults-table results/faults.md

Each test tells what was done, what the program did and what was lost (``fault``); a failed test counts as lost. The
table is written from these at the end of the run.
"""

import datetime as dt
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from irminsul.machine import cpu_name, usable_cores
from irminsul.markdown import markdown_table

# The stand-in server, small logs, and the command line in this process.
sys.path += [str(Path(__file__).parents[1] / area) for area in ("server", "fuzz", "bench")]

NOTHING = "nothing"
_NAME = "fault"


@pytest.fixture
def fault(record_property, tmp_path_factory):
    """Tell what was done, what the program did, and what was lost by it; once or more a test."""
    folder = re.compile(rf"{re.escape(str(tmp_path_factory.getbasetemp()))}/[^/\s:]+")

    def tell(done, did, lost=NOTHING):
        record_property(_NAME, (done, folder.sub("DIR", did), lost))

    return tell


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A small random checkpoint with a tokenizer and a chat template."""
    from server_fakes import byte_level_tokenizer

    from irminsul.testing.tiny import write_tiny_checkpoint

    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "m", moe=False)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_log(tmp_path_factory, tiny):
    """A request log for which no vocabulary must be loaded, and the flags that say so."""
    log = tmp_path_factory.mktemp("log") / "log.jsonl"
    log.write_text('{"prompt": "a passage of a log that is read twice"}\n' * 3)
    return [log, "--tokenizer", tiny]


def pytest_collection_modifyitems(config, items):
    """Leave slow faults to whoever asks for faults: the whole suite has minutes for everything."""
    here = Path(__file__).parent
    if any(
        here == path or here in path.parents for path in (Path(name.split("::")[0]).absolute() for name in config.args)
    ):
        return
    for item in items:
        if here in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="run `python -m pytest tests/faults`"))


def pytest_addoption(parser):
    parser.addoption("--faults-table", type=Path, help="write what was tried, survived and lost, as Markdown")


def pytest_terminal_summary(terminalreporter, config):
    passed, failed, broken = (terminalreporter.stats.get(outcome, []) for outcome in ("passed", "failed", "error"))
    # The rest of a suite tells of its own failures.
    failed = [report for report in (*failed, *broken) if "tests/faults/" in report.nodeid]
    rows = [row for report in passed for row in _told(report)]
    if not rows:
        return
    rows += [(report.nodeid, "**the test failed**", "**unknown**") for report in failed]
    nothing = sum(lost == NOTHING for _, _, lost in rows)
    line = (
        f"faults: {len(rows)} tried, {len(rows) - len(failed)} survived; nothing lost in {nothing}, only what was "
        f"being sent, measured or logged in {len(rows) - nothing - len(failed)}, failed tests: {len(failed)}"
    )
    terminalreporter.write_line(line)
    if config.option.faults_table is not None:
        config.option.faults_table.write_text(_table(line, rows), encoding="utf-8")


def _told(report):
    return [value for name, value in report.user_properties if name == _NAME]


def _table(line, rows):
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    about = (
        f"{dt.datetime.now(tz=dt.UTC).date()}, commit {git.stdout.strip()[:12] or 'unknown'}, {cpu_name()}, "
        f"{usable_cores()} cores, Python {platform.python_version()}; "
        f"`python -m pytest {shlex.join(sys.argv[1:])}`."
    )
    rows = [tuple(" ".join(cell.split()).replace("|", "\\|") for cell in row) for row in rows]
    table = markdown_table(("what was done", "what irminsul did", "lost"), rows, numbers=False)
    return f"# Faults tried, survived and lost\n\n{line}. {about}\n\n{table}\n"
