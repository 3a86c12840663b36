"""Documents are claims: what they name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    named = set(re.findall(r"(?:src|docs|tests|benchmarks|results)/[\w./-]*\w", text)) | set(
        re.findall(r"\]\((?!http|#)([^)#]+)\)", text)
    )
    missing = [name for name in named if not (ROOT / name).exists() and not (document.parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    for target in set(re.findall(r"`make ([a-z ]+)`", text)):
        for word in target.split():
            assert re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE), word
    known = "serve|demo|doctor|bench (?:serve|report)|fidelity|reproduce|analyze|patterns|model build|"
    known += "marker(?: generate| check)?"
    for words in set(re.findall(rf"irminsul ((?:{known})\b)", text)):
        done = subprocess.run(
            [sys.executable, "-m", "irminsul", *words.split(), "--help"], capture_output=True, check=False
        )
        assert done.returncode == 0, words


def test_options_that_the_readme_names_exist() -> None:
    help_texts = "".join(
        subprocess.run(
            [sys.executable, "-m", "irminsul", *command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "200"},
        ).stdout
        for command in (
            ["serve"],
            ["demo"],
            ["fidelity"],
            ["reproduce"],
            ["analyze"],
            ["patterns"],
            ["bench", "serve"],
            ["model", "build"],
            ["marker", "generate"],
        )
    )
    for line in (ROOT / "README.md").read_text().splitlines():
        if "irminsul " in line and not line.startswith("sglang "):
            for option in re.findall(r"(?<!\S)--[a-z-]+", line):
                assert option in help_texts, option


def test_the_readme_is_short_and_says_what_it_cannot_do() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert any(line.startswith("## Limits") for line in lines)


def test_every_test_file_collects_something() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert re.search(r"def test_|TestCase|class Test", path.read_text()), path


def test_tables_of_documents_are_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
