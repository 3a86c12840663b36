"""The tiny Llama, a folder of tokens by chance, and a clock that does not depend on the machine."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import tiny_llama
from tiny_run import N_LONG, N_SHORT, TINY, VOCABULARY

from irminsul.checkpoints import distilled
from training.text import TrainingText


@pytest.fixture
def original():
    return tiny_llama()


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, shape in (("train_8k", (N_LONG, 48)), ("train_2k", (N_SHORT, 16)), ("eval_noise", (2, 48))):
        rng.integers(0, VOCABULARY, shape).astype("<u2").tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture
def text(data) -> TrainingText:
    return TrainingText.read(data, TINY, VOCABULARY)


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run."""
    return tmp_path / "run"


@pytest.fixture
def clock():
    """Every look at it is two seconds after the last, so that a minute is thirty steps on every machine."""
    ticks = itertools.count(step=2)
    return lambda: float(next(ticks))


@pytest.fixture
def tiny_widths(monkeypatch):
    """Checkpoints of the tiny model's widths; values keep theirs."""
    monkeypatch.setattr(distilled, "SHAPE", TINY.shape)
    monkeypatch.setattr(distilled, "VALUE_DIM", 16)
