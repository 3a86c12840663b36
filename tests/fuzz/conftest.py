"""Shared by the fuzzers: a small tokenizer, and the line of figures at the end."""

import sys
from pathlib import Path

import pytest

# The server's stand-in engine and the tokenizers of its tests.
sys.path.append(str(Path(__file__).parents[1] / "server"))

from fuzzing import SOAK, figures, irminsul, write


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory):
    """A directory with a small byte-level tokenizer and a chat template, as analyze takes it."""
    from server_fakes import byte_level_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def compiled(tokenizer_directory, tmp_path_factory):
    """Analyse something once: the first run compiles the searches, which takes longer than an input may."""
    log = write(tmp_path_factory.mktemp("first") / "log", b'{"prompt": "abc abc abc"}\n' * 3)
    irminsul("analyze", log, "--tokenizer", tokenizer_directory, seconds=100)
    return tokenizer_directory


def pytest_terminal_summary(terminalreporter):
    if SOAK:
        terminalreporter.write_line(str(figures))
