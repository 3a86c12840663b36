"""Anchors of derived rows."""

import random
from array import array

import numpy as np
import pytest

from irminsul.namespace import Namespace
from irminsul.sglang.histories import MARK, MAX_CANDIDATES, Histories, holds_marks, mark_tokens

HERE = Namespace()
OTHER = Namespace(tenant="other")


def tokens(seed, length=100):
    return np.random.default_rng(seed).integers(0, 50_000, length)


def candidates(histories, prompt, exact=None, namespace=HERE):
    return list(histories.candidates(namespace, prompt, len(prompt) if exact is None else exact))


@pytest.mark.parametrize("start", [0, 2, 4])
def test_tokens_from_a_position_on_are_marked_in_a_copy(start):
    plain = array("q", [7, 0, 150_000, 9])
    marked = mark_tokens(plain, start)
    assert list(marked) == [token + MARK * (at >= start) for at, token in enumerate([7, 0, 150_000, 9])]
    assert list(plain) == [7, 0, 150_000, 9]
    assert marked.typecode == "q"


def test_marked_tokens_fit_in_32_bits_and_are_no_tokens():
    assert MARK > 1_000_000
    assert MARK + 1_000_000 < 2**31


def test_an_anchor_is_found_by_what_stands_before_it():
    histories = Histories()
    histories.add(HERE, tokens(1), 40)
    changed = tokens(1)
    changed[40:] = 3
    assert candidates(histories, changed) == [40]
    changed[39] = 3
    assert candidates(histories, changed) == []


def test_anchors_beyond_what_the_tree_holds_are_not_offered():
    histories = Histories()
    for anchor in (10, 40, 70):
        histories.add(HERE, tokens(1), anchor)
    assert candidates(histories, tokens(1), exact=69) == [40, 10]
    assert candidates(histories, tokens(1), exact=70) == [70, 40, 10]
    assert candidates(histories, tokens(1), exact=9) == []


def test_an_anchor_at_the_beginning():
    histories = Histories()
    histories.add(HERE, tokens(1), 0)
    assert candidates(histories, tokens(2), exact=0) == [0]


def test_only_the_deepest_are_offered():
    histories = Histories()
    for anchor in range(20):
        histories.add(HERE, tokens(1), anchor)
    assert candidates(histories, tokens(1)) == list(range(19, 19 - MAX_CANDIDATES, -1))


def test_namespaces_share_nothing():
    histories = Histories()
    histories.add(HERE, tokens(1), 40)
    assert candidates(histories, tokens(1), namespace=OTHER) == []


def test_adding_twice_counts_once():
    histories = Histories()
    histories.add(HERE, tokens(1), 40)
    histories.add(HERE, tokens(1), 40)
    assert len(histories) == 1


def test_the_least_recently_added_is_forgotten():
    histories = Histories(capacity=2)
    histories.add(HERE, tokens(1), 40)
    histories.add(HERE, tokens(2), 40)
    histories.add(HERE, tokens(1), 40)
    histories.add(HERE, tokens(3), 40)
    assert len(histories) == 2
    assert [bool(candidates(histories, tokens(seed))) for seed in (1, 2, 3)] == [True, False, True]


def test_clear():
    histories = Histories()
    histories.add(HERE, tokens(1), 40)
    histories.clear()
    assert len(histories) == 0
    assert candidates(histories, tokens(1)) == []


def test_any_order_of_additions_agrees_with_a_plain_list():
    rng = random.Random(0)
    capacity = 7
    histories, held = Histories(capacity), []
    for _ in range(2_000):
        namespace, seed, anchor = rng.choice([HERE, OTHER]), rng.randrange(3), rng.randrange(6)
        key = (namespace, seed if anchor else None, anchor)
        histories.add(namespace, tokens(seed), anchor)
        held = [*(other for other in held if other != key), key][-capacity:]
        assert len(histories) == len(held)
        expected = [at for at in range(5, -1, -1) if (namespace, seed if at else None, at) in held]
        assert candidates(histories, tokens(seed), namespace=namespace) == expected


def test_marks_of_a_client_are_seen():
    assert not holds_marks(array("q"))
    assert not holds_marks(array("q", [1, MARK - 1]))
    assert holds_marks(array("q", [1, MARK, 2]))
