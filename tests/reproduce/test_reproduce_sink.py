"""Attention sinks."""

from dataclasses import replace

import pytest
import torch

from irminsul.errors import InputError
from irminsul.reproduce import sink
from irminsul.reproduce.cases import mean_case
from irminsul.reproduce.sink import PATHS, SINK, Drift, Share, Sizes, uniform_share

SMALL = Sizes(2, 40, (0, 32, 90), 2, 48, (40, 100), 33, 6)


def test_shares_by_hand():
    """A query that rests half on the prompt's start and half, evenly, on a chunk of 64 tokens."""
    weights_QHS = torch.zeros(1, 1, 100 + 64)
    weights_QHS[..., :SINK] = 0.5 / SINK
    weights_QHS[..., 100:] = 0.5 / 64
    within, absolute = sink._share(weights_QHS, chunk_start=100).tolist()
    assert within == pytest.approx(0.5)
    assert absolute == pytest.approx(0.5)


def test_even_attention_has_the_uniform_share():
    queries = torch.arange(SINK, 128)
    weights_QHS = (torch.arange(128) <= queries[:, None]).float()[:, None]
    weights_QHS /= weights_QHS.sum(dim=-1, keepdim=True)
    assert float(sink._share(weights_QHS, chunk_start=0)[0]) == pytest.approx(uniform_share(128), rel=1e-5)
    assert uniform_share(34) == pytest.approx((32 / 33 + 32 / 34) / 2)


def test_at_the_start_of_the_prompt_both_shares_are_one(subject):
    by_chunk = sink.measure_shares(subject, SMALL)
    assert list(by_chunk) == [0, 32, 90]
    assert all(len(chunks) == 2 for chunks in by_chunk.values())
    shares = {start: mean_case(chunks) for start, chunks in by_chunk.items()}
    assert shares[0].within == pytest.approx(shares[0].absolute)
    assert shares[90].within > shares[90].absolute
    assert all(0.0 < value < 1.0 for share in shares.values() for value in share)


def test_only_reuse_drifts_and_moving_less_drifts_less(subject):
    drifts = sink.measure_drift(subject, SMALL)
    assert list(drifts) == [40, 100]
    for paths in drifts.values():
        assert set(paths) == set(PATHS)
        for prompt in range(2):
            assert paths["full"][prompt].mad == 0.0
            assert paths["shifted"][prompt].mad > 0.0
            assert paths["naive"][prompt].mad > 0.0


def test_a_donor_in_the_same_place_behind_the_same_text_drifts_by_nothing(model, material):
    before, text = material.sources_T[:33], material.pages_T[:54]
    masses = sink._masses(model, SMALL, before, before, text)
    for path in PATHS:
        torch.testing.assert_close(masses[path], masses["full"], rtol=1e-4, atol=1e-5)
        assert masses[path].shape == (3, 6, 4)


def report(near, far, shifted, naive, n=6):
    shares = {0: [Share(0.9, 0.9)] * n, 32: [near] * n, 3584: [far] * n}
    drifts = {512: {"full": [Drift(0.4, 0.0)] * n, "shifted": [shifted] * n, "naive": [naive] * n}}
    return [compared.agrees for compared in sink._comparisons(shares, drifts)]


def test_directions_follow_the_numbers():
    low, high = Share(0.2, 0.3), Share(0.3, 0.4)
    near, off = Drift(0.402, 0.001), Drift(0.45, 0.06)
    assert report(high, low, near, off) == [True] * 5
    assert report(low, high, off, near) == [False] * 5


def test_few_cases_decide_nothing():
    low, high = Share(0.2, 0.3), Share(0.3, 0.4)
    assert report(high, low, Drift(0.402, 0.001), Drift(0.45, 0.06), n=2) == [None] * 5


def test_each_metric_has_a_verdict_of_its_own():
    """Naive is further off head by head, but not in the mean."""
    high = Share(0.3, 0.4)
    assert report(high, high, Drift(0.41, 0.01), Drift(0.4, 0.06))[2:] == [False, False, True]


def test_a_model_that_reads_less_is_refused(subject):
    with pytest.raises(InputError, match="3904 tokens, but the model reads 1024"):
        sink.run(replace(subject, quick=False))
