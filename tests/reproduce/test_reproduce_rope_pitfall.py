"""Wrong rotations."""

import math
from dataclasses import replace

import pytest
import torch

from irminsul.reproduce import rope_pitfall
from irminsul.reproduce.cases import mean_case
from irminsul.reproduce.rope_pitfall import NAIVE, RIGHT, Fidelity, Sizes, compare_logits, is_plain, movers
from irminsul.rope import Pairing, RopeSpec

SMALL = Sizes(2, 120, 40, 12, (1, 16, 120))
ROPE = RopeSpec((1.0, 0.05, 0.002), Pairing.INTERLEAVED)


def test_movers_are_wrong_in_one_way_each():
    chosen = movers(ROPE)
    assert chosen[RIGHT].rope == ROPE
    assert chosen["wrong pairing"].rope == replace(ROPE, pairing=Pairing.HALF_SPLIT)
    assert chosen["plain base 10000"].rope.inv_freq == pytest.approx((1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3)))
    assert chosen["double mscale"].rope == ROPE
    assert chosen["double mscale"].scale == pytest.approx(0.1 * math.log(40) + 1)
    assert movers(replace(ROPE, mscale=0.7))["double mscale"].scale == 0.7
    assert [name for name, mover in chosen.items() if not mover.turns] == [NAIVE]
    half = replace(ROPE, pairing=Pairing.HALF_SPLIT)
    assert movers(half)["wrong pairing"].rope.pairing is Pairing.INTERLEAVED


def test_kl_and_match_by_hand():
    full_TV = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]]).log()
    path_TV = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.75, 0.25]]).log()
    kl_T, match_T = compare_logits(full_TV, path_TV).unbind(dim=1)
    expected = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.0, 0.25 * math.log(1 / 3) + 0.75 * math.log(3)]
    assert kl_T.tolist() == pytest.approx(expected)
    assert match_T.tolist() == [1.0, 1.0, 0.0]


def means(results):
    return {
        name: {delta: mean_case(prompts) for delta, prompts in by_delta.items()} for name, by_delta in results.items()
    }


def test_the_right_rotation_is_the_best(subject):
    results = means(rope_pitfall.measure(subject, SMALL, movers(subject.model.config.rope)))
    right = results[RIGHT]
    for name in ("wrong pairing", "double mscale", NAIVE):
        for delta in (16, 120):
            assert results[name][delta].kl > right[delta].kl, (name, delta)
    assert right[1].kl < right[120].kl
    # The tiny model's frequencies are those of base 10000.
    assert is_plain(subject.model.config.rope)
    assert results["plain base 10000"][120].kl == pytest.approx(right[120].kl, rel=0.01)


def test_reuse_of_the_prompts_own_rows_is_the_full_computation(subject):
    """At distance 0 the donor is the prompt itself."""
    sizes = replace(SMALL, deltas=(0,))
    results = means(rope_pitfall.measure(subject, sizes, movers(subject.model.config.rope)))
    assert results[RIGHT][0].kl < 1e-6
    assert results[NAIVE][0].kl < 1e-6
    assert results["wrong pairing"][0].kl < 1e-6
    assert results["double mscale"][0].kl > 1e-4


def fidelities(*kls, n=6):
    """Of n prompts, some harder than others."""
    return {
        delta: [Fidelity(kl * (1 + at / 10), 1.0) for at in range(n)]
        for delta, kl in zip(SMALL.deltas, kls, strict=True)
    }


def compare(pairing, plain, mscale, *, plain_is_right=False, n=6):
    results = {
        RIGHT: fidelities(0.01, 0.1, 0.2, n=n),
        "wrong pairing": fidelities(*pairing, n=n),
        "plain base 10000": fidelities(*plain, n=n),
        "double mscale": fidelities(*mscale, n=n),
    }
    return [compared.agrees for compared in rope_pitfall._comparisons(SMALL, results, plain_is_right)]


def test_directions_follow_the_numbers():
    good, bad = (0.01, 0.05, 0.1), (0.02, 0.4, 0.9)
    assert compare(bad, bad, bad) == [True] * 4
    assert compare(good, good, good)[1:] == [False] * 3
    assert compare(bad, good, bad, plain_is_right=True) == [True, True, True]


def test_a_pairing_that_shows_everywhere_does_not_hide():
    assert compare((0.5, 0.7, 0.9), (1, 1, 1), (1, 1, 1))[:2] == [False, True]


def test_a_pairing_that_never_shows_is_seen():
    assert compare((0.01, 0.05, 0.1), (1, 1, 1), (1, 1, 1))[1] is False


def test_few_prompts_decide_nothing():
    assert compare((0.02, 0.4, 0.9), (1, 1, 1), (1, 1, 1), n=2) == [None] * 4


def test_notes_say_what_stands_in():
    assert "this model has no factor" in rope_pitfall._notes(SMALL, ROPE)[0]
    assert "the model's own factor" in rope_pitfall._notes(SMALL, replace(ROPE, mscale=0.7))[0]
    assert "lost context, not rotation" in rope_pitfall._notes(SMALL, ROPE)[1]
    plain = RopeSpec((1.0, 0.01), Pairing.INTERLEAVED)
    assert "that mover is right here" in rope_pitfall._notes(SMALL, plain)[2]
