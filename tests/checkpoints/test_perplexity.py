"""Perplexity of functions whose perplexity is known."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_llama import tiny_tokenizer

from irminsul.checkpoints.perplexity import perplexity, token_sequences, whole_sequence_logits
from irminsul.engine.model import MlaModel
from irminsul.testing.tiny import write_tiny_checkpoint


def test_no_idea_at_all_is_the_size_of_the_vocabulary():
    assert perplexity(lambda ids: torch.zeros(len(ids), 37), [torch.arange(30)]) == pytest.approx(37)


def test_knowing_everything_is_one():
    def knows_next(ids):
        return torch.nn.functional.one_hot(ids.roll(-1), 700).float() * 100

    assert perplexity(knows_next, [torch.arange(600)]) == pytest.approx(1)


@given(lengths=st.lists(st.integers(2, 600), min_size=1, max_size=4), seed=st.integers(0, 100))
def test_tokens_weigh_alike_whatever_sequence_they_are_in(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(11, 11, generator=generator)
    sequences = [torch.randint(0, 11, (length,), generator=generator) for length in lengths]
    loss, n_tokens = 0.0, 0
    for sequence in sequences:
        for previous, token in pairwise(sequence):
            loss -= float(table[previous].log_softmax(dim=0)[token])
            n_tokens += 1
    assert perplexity(lambda ids: table[ids], sequences) == pytest.approx(math.exp(loss / n_tokens), rel=1e-4)


def test_a_model_is_run_on_each_whole_sequence(tmp_path):
    model = MlaModel.load(write_tiny_checkpoint(tmp_path, "v2", moe=False))
    sequences = [torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (30, 7)]
    expected = perplexity(whole_sequence_logits(model), sequences)
    assert perplexity(model, sequences) == expected
    assert expected != pytest.approx(perplexity(model, sequences[:1]))


def test_token_sequences_are_cut_and_have_no_special_tokens():
    tokenizer = tiny_tokenizer()
    sequences = token_sequences(tokenizer, ["the water", "the lock and the keeper"], limit=3)
    assert [len(sequence) for sequence in sequences] == [len(tokenizer.encode("the water")[:3]), 3]
    assert all(sequence.dtype == torch.int64 for sequence in sequences)
    assert tokenizer.decode(sequences[1]) in "the lock and the keeper"
