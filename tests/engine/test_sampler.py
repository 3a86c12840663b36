import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from irminsul.engine.sampler import Sampler, SamplingState, _invert, _most_likely
from irminsul.engine.types import SamplingParams

logit_rows = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, 1.0, -1.0])), min_size=1, max_size=40
)


def draw(logits, params, n=1):
    """Draw n tokens from the same logits by one request."""
    state = SamplingState(params)
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    return [Sampler().draw(row, [state])[0] for _ in range(n)]


def token_ids(drawn):
    return [one.token_id for one in drawn]


def allowed_tokens(logits, params):
    """Plain reference of what top_k and top_p leave, in plain Python."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: params.top_k or None]
    weights = [np.exp((np.float64(logits[t]) - np.float64(max(logits))) / params.temperature) for t in order]
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass >= params.top_p and kept:
            break
        kept.append(token)
        mass += weight / sum(weights)
    return kept


def test_greedy_takes_the_lowest_of_equals():
    assert token_ids(draw([0.0, 3.0, 3.0, -1.0, 3.0], SamplingParams(temperature=0))) == [1]
    assert token_ids(draw(torch.zeros(50_000), SamplingParams(temperature=0))) == [0]


@given(logit_rows)
@example(logits=[0.0, 1e-38, 0.125, 0.125 + 2**-20])
def test_top_k_1_is_greedy(logits):
    greedy = token_ids(draw(logits, SamplingParams(temperature=0)))
    assert token_ids(draw(logits, SamplingParams(top_k=1))) == greedy
    assert token_ids(draw(logits, SamplingParams(top_p=1e-9))) == greedy


@given(
    logit_rows,
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 10),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.integers(-5, 5),
)
def test_drawn_tokens_are_among_the_allowed(logits, temperature, top_k, top_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # A hair more probability allows for sums that end on either side of top_p.
    roomier = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-9))
    assert set(token_ids(draw(logits, params, n=5))) <= set(allowed_tokens(logits, roomier))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, seed=2),
        SamplingParams(temperature=2.0, top_k=3, seed=3),
        SamplingParams(top_p=0.7, seed=4),
        SamplingParams(temperature=1.5, top_k=4, top_p=0.8, seed=5),
    ],
)
def test_tokens_come_with_their_probability(params):
    logits = [1.0, 0.0, 2.0, 1.5, -1.0, 0.5]
    n = 4000
    counts = np.bincount(token_ids(draw(logits, params, n)), minlength=len(logits))
    kept = allowed_tokens(logits, params)
    weights = np.zeros(len(logits))
    weights[kept] = np.exp(np.array(logits)[kept] / params.temperature)
    expected = weights / weights.sum()
    # Five standard deviations of a binomial count.
    assert (np.abs(counts - n * expected) <= 5 * np.sqrt(n * expected * (1 - expected))).all()


def test_same_seed_same_tokens_whatever_else_is_in_the_batch():
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(4, 1000, generator=generator) for _ in range(20)]
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=7)
    alone, among, elsewhere = SamplingState(params), SamplingState(params), SamplingState(params)
    others = [SamplingState(SamplingParams(seed=seed)) for seed in (1, 2)]
    greedy = SamplingState(SamplingParams(temperature=0))
    sampler = Sampler()
    for logits in steps:
        expected = sampler.draw(logits[2:3], [alone])[0]
        assert sampler.draw(logits, [others[0], greedy, among, others[1]])[2] == expected
        assert sampler.draw(logits[[2, 0]], [elsewhere, greedy])[0] == expected


def test_other_seeds_and_no_seed_differ():
    logits = torch.zeros(10_000)
    runs = [tuple(token_ids(draw(logits, SamplingParams(seed=seed), 4))) for seed in (0, 1, -1, 2**40, None, None)]
    assert len(set(runs)) == len(runs)


def test_greedy_requests_use_no_random_numbers():
    state = SamplingState(SamplingParams(temperature=0, seed=3))
    Sampler().draw(torch.zeros(1, 8), [state])
    assert state.random.random() == SamplingState(SamplingParams(seed=3)).random.random()


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_smallest_temperatures_are_greedy(temperature):
    assert set(token_ids(draw([1e4, -1e4, 9.9e3], SamplingParams(temperature=temperature), 20))) == {0}


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((100,), float("-inf"))
    logits[[3, 99]] = 0.0
    assert set(token_ids(draw(logits, SamplingParams(seed=0), 200))) == {3, 99}
    logits[99] = float("-inf")
    assert set(token_ids(draw(logits, SamplingParams(seed=0), 20))) == {3}


def test_log_probabilities_are_those_of_the_model():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    expected = logits.double().log_softmax(-1)
    drawn = draw(logits, SamplingParams(temperature=0.1, top_k=1, top_logprobs=3))[0]
    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in drawn.top_logprobs] == [1, 3, 2]
    assert [value for _, value in drawn.top_logprobs] == pytest.approx(expected[[1, 3, 2]].tolist())


def test_log_probabilities_only_when_asked_for():
    assert draw([0.0, 1.0], SamplingParams(temperature=0))[0].logprob is None
    drawn = draw([0.0, 1.0], SamplingParams(temperature=0, top_logprobs=0))[0]
    assert drawn.logprob == pytest.approx(-0.3132617)
    assert drawn.top_logprobs == ()


@given(logit_rows, st.integers(0, 45))
def test_most_likely_is_a_stable_sort(values, count):
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
    assert _most_likely(torch.tensor(values, dtype=torch.float64), count).tolist() == expected


@given(st.lists(st.sampled_from([0.0, 0.25, 1e-17, 3.0]), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
@example(shares=[1 / 3, 0.1, 0.0], uniform=1 - 2**-53)
def test_inverse_never_picks_an_empty_share(shares, uniform):
    if sum(shares) == 0:
        shares[-1] = 1.0
    cumulative = torch.tensor(shares, dtype=torch.float64).cumsum(0)
    index = _invert(cumulative, uniform)
    before = float(cumulative[index - 1]) if index else 0.0
    assert float(cumulative[index]) > before
    assert before <= uniform * float(cumulative[-1])


def test_nan_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="NaN"):
        draw([float("nan"), 0.0], SamplingParams())
