import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from word_log import prose

from irminsul.cli import app
from irminsul.errors import InputError
from irminsul.trace.command import analysis_config, parse_tokens

pytest.importorskip("tokenizers")


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    documents = [prose(i, 60) for i in range(3)]
    path = tmp_path / "log.jsonl"
    orders = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    path.write_text("".join(json.dumps({"prompt": " ".join(documents[at] for at in one)}) + "\n" for one in orders))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_log_becomes_three_reports(log_file: Path, bytes_directory: Path, tmp_path: Path) -> None:
    json_path, html_path = tmp_path / "out.json", tmp_path / "out.html"
    options = ("--tokenizer", bytes_directory, "--matchers", "cdc, winnow64", "--token-cache", tmp_path / "tokens")
    text = run(log_file, *options, "--json", json_path, "--html", html_path)
    report = json.loads(json_path.read_text())
    assert set(report["matchers"]) == {"cdc", "winnow64"}
    assert report["totals"]["calls"] == 3
    assert report["verdict"]["sentence"][:30] in text
    assert html_path.read_text().startswith("<!doctype html>")
    first = json_path.read_bytes()
    run(log_file, *options, "--json", json_path)
    assert json_path.read_bytes() == first, "the same input, cached tokens, the same bytes"


def test_a_bound_and_no_replies_reach_the_replay(log_file: Path, bytes_directory: Path, tmp_path: Path) -> None:
    options = ("--tokenizer", bytes_directory, "--matchers", "winnow64", "--json", tmp_path / "out.json")
    run(log_file, *options, "--no-replies", "--cache-tokens", "1.5K")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"] == {"replies": False, "cache_tokens": 1500}
    assert report["totals"]["evicted_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--matchers", "winnow65"], "valid matchers"),
        (["--cache-tokens", "lots"], "like 500000, 500K or 2M"),
        (["--format", "csv"], "valid formats"),
        (["--tokenizer", "nowhere"], "tokenizer.json"),
        (["--json", "nowhere/out.json"], "no directory"),
        (["--model-config", "nowhere.json"], "cannot read"),
        (["--cost-model", "nowhere.json"], "cannot read"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    log_file: Path, bytes_directory: Path, options: list[str], message: str
) -> None:
    tokenizer = [] if "--tokenizer" in options else ["--tokenizer", str(bytes_directory)]
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, ["analyze", str(log_file), *tokenizer, *options], catch_exceptions=False)


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_the_log_is_not_written_over(log_file: Path, bytes_directory: Path, tmp_path: Path, option: str) -> None:
    before = log_file.read_bytes()
    (tmp_path / "link").symlink_to(log_file)
    for path, message in ((log_file, "input"), (tmp_path / "link", "input"), (Path("-"), "standard output")):
        with pytest.raises(InputError, match=f"cannot write {path}: .*{message}"):
            run(log_file, "--tokenizer", bytes_directory, option, path)
    assert log_file.read_bytes() == before


@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        ('- --json "$LOG" < "$LOG"', "it is an input of this command"),
        ("- <&-", "cannot read the standard input: it is"),
    ],
)
def test_the_standard_input_is_an_input_and_may_be_closed(
    log_file: Path, bytes_directory: Path, redirection: str, message: str
) -> None:
    before = log_file.read_bytes()
    names = {"PYTHON": sys.executable, "TOKENIZER": str(bytes_directory), "LOG": str(log_file)}
    ended = subprocess.run(
        ["sh", "-c", f'"$PYTHON" -m irminsul analyze --tokenizer "$TOKENIZER" {redirection}'],
        env=os.environ | names | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert log_file.read_bytes() == before


def test_a_missing_log_is_refused(bytes_directory: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        CliRunner().invoke(app, ["analyze", "none", "--tokenizer", str(bytes_directory)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "tokens"), [("500000", 500_000), ("500K", 500_000), ("2m", 2_000_000), ("1.5G", 1_500_000_000)]
)
def test_sizes(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-5", "K", "1.5", "2T", "1e6", "nan"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="500K"):
        parse_tokens(text)


def test_the_default_compares_all_seven() -> None:
    assert len(analysis_config(None, None, replies=True).matchers) == 7
