"""Where the text comes from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.reproduce import material as module
from irminsul.reproduce.material import Material, python_material

COUNTED = Material(torch.arange(1000), torch.arange(5000, 5400))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@given(count=st.integers(1, 20), length=st.integers(1, 50), seed=st.integers(0, 99))
def test_passages_are_pieces_of_the_pages_and_do_not_overlap(count, length, seed):
    pieces = COUNTED.passages(count, length, seeded(seed))
    assert pieces.shape == (count, length)
    assert bool((pieces.diff(dim=1) == 1).all())
    assert len(pieces.unique()) == count * length


@given(length=st.integers(0, 400), seed=st.integers(0, 99))
def test_surroundings_are_a_piece_of_the_sources(length, seed):
    piece = COUNTED.surroundings(length, seeded(seed))
    assert len(piece) == length
    assert bool((piece.diff() == 1).all())
    assert bool((piece >= 5000).all())


def test_a_seed_decides():
    assert torch.equal(COUNTED.passages(5, 20, seeded(1)), COUNTED.passages(5, 20, seeded(1)))
    assert not torch.equal(COUNTED.passages(5, 20, seeded(1)), COUNTED.passages(5, 20, seeded(2)))


def test_more_than_there_is_is_refused():
    with pytest.raises(InputError, match=r"51 passages of 20 tokens .* hold 50"):
        COUNTED.passages(51, 20, seeded())
    with pytest.raises(InputError, match=r"401 tokens .* there are 400"):
        COUNTED.surroundings(401, seeded())


def test_python_has_enough_text_of_both_kinds(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "MODULES", ("csv", "asyncio.base_events"))
    texts = python_material(tokenizer)
    assert len(texts.pages_T) > 200 * 64
    sources = tokenizer.decode(texts.sources_T)
    assert "class DictReader" in sources
    assert "class BaseEventLoop" in sources
    assert "class DictReader" not in tokenizer.decode(texts.pages_T)


def test_every_module_has_a_source():
    for name in module.MODULES:
        assert len(module._source(name)) > 1000, name
