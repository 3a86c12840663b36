"""The error of moving a key."""

from dataclasses import replace

import pytest
import torch

from irminsul.reproduce import rotation
from irminsul.reproduce.rotation import (
    errors_by_delta,
    errors_of_repeated_moves,
    moved_by_irminsul,
    moved_narrowly,
    relative_error,
    turned_exactly,
)
from irminsul.rope import Pairing, RopeSpec, rotate

FREQUENCIES = tuple(10000.0 ** (-at / 16) for at in range(16))
SPECS = [RopeSpec(FREQUENCIES, pairing) for pairing in Pairing]
SOURCES = torch.arange(0, 4000, 40)
UNIT = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}
"""Largest relative error of rounding once: half a step of the mantissa, which has 7, 10 and 23 bits, of 1 to 2."""


def keys():
    return torch.randn(2, len(SOURCES), 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.pairing)
def test_the_truth_agrees_with_the_code_it_judges(spec):
    expected = rotate(keys().float(), spec.angles(SOURCES), spec.pairing)
    torch.testing.assert_close(turned_exactly(keys(), spec, SOURCES).float(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.pairing)
def test_turning_by_hand(spec):
    quarter = replace(spec, inv_freq=(torch.pi / 2, torch.pi))
    turned = turned_exactly(torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64), quarter, torch.tensor([1]))
    expected = [-2.0, 1.0, -3.0, -4.0] if spec.pairing is Pairing.INTERLEAVED else [-3.0, -2.0, 1.0, -4.0]
    torch.testing.assert_close(turned[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.pairing)
@pytest.mark.parametrize("dtype", UNIT)
def test_a_move_costs_two_roundings_at_any_distance(spec, dtype):
    errors = errors_by_delta(keys(), spec, dtype, SOURCES, (1, 1000, 100_000))
    for fresh, moved in zip(errors["fresh"], errors["moved"], strict=True):
        assert 0.3 * UNIT[dtype] < fresh < UNIT[dtype]
        assert fresh < moved < 2 * UNIT[dtype] + 1e-7


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.pairing)
def test_turning_in_the_dtype_of_the_row_costs_more(spec):
    errors = errors_by_delta(keys(), spec, "bfloat16", SOURCES, (1000, 100_000))
    assert all(narrow > 1.1 * moved for narrow, moved in zip(errors["narrow"], errors["moved"], strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.pairing)
def test_movers_agree_where_rounding_does_not_matter(spec):
    stored = turned_exactly(keys(), spec, SOURCES).float()
    for mover in (moved_by_irminsul(spec), moved_narrowly(spec)):
        moved = mover(stored, SOURCES, SOURCES + 777)
        assert relative_error(moved, turned_exactly(keys(), spec, SOURCES + 777)) < 1e-6


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.pairing)
def test_a_wrong_mover_is_seen(spec):
    other = next(other for other in SPECS if other is not spec)
    stored = turned_exactly(keys(), spec, SOURCES).float()
    moved = moved_by_irminsul(other)(stored, SOURCES, SOURCES + 777)
    assert relative_error(moved, turned_exactly(keys(), spec, SOURCES + 777)) > 0.5


def test_only_chained_moves_accumulate():
    generator = torch.Generator().manual_seed(1)
    path = [torch.randint(30_000, (len(SOURCES),), generator=generator) for _ in range(33)]
    errors = errors_of_repeated_moves(keys(), SPECS[0], "bfloat16", path, (1, 4, 32))
    base, chained = errors["from the stored base"], errors["from the last result"]
    assert chained[0] == base[0]
    assert max(base) < 1.1 * base[0]
    assert chained[0] < chained[1] < chained[2]
    assert chained[2] > 3 * base[2]


def test_movers_and_truth_stay_on_the_device_of_the_keys():
    """On the device that computes nothing: whatever was taken to the CPU would be refused beside it."""
    spec = SPECS[0]
    stored = keys().to("meta")
    sources = SOURCES.to("meta")
    assert turned_exactly(stored, spec, sources).is_meta
    assert moved_narrowly(spec)(stored.bfloat16(), sources, sources).is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_errors_on_a_gpu_are_those_on_a_cpu():
    path = [SOURCES, SOURCES + 5, SOURCES + 777]
    here, there = (
        [
            errors_by_delta(keys().to(device), SPECS[0], "bfloat16", SOURCES.to(device), (1, 1000)),
            errors_of_repeated_moves(keys().to(device), SPECS[0], "bfloat16", [at.to(device) for at in path], (1, 2)),
        ]
        for device in ("cpu", "cuda")
    )
    for cpu, gpu in zip(here, there, strict=True):
        for kind, errors in cpu.items():
            assert gpu[kind] == pytest.approx(errors, rel=0.01), kind


def test_base_keys_do_not_know_where_they_stood(subject, model):
    """Of one token repeated, the first layer's keys are all the same once turned back."""
    own = replace(subject, material=replace(subject.material, sources_T=torch.full((40,), 7)))
    keys_LTR = rotation.base_keys(own, 40, own.generator())
    assert keys_LTR.dtype == torch.float64
    torch.testing.assert_close(keys_LTR[0], keys_LTR[0, :1].expand(40, -1), rtol=1e-4, atol=1e-4)


def compare(moved, base, chained):
    by_delta = {"fresh": [1e-3], "moved": [moved], "narrow": [4e-3]}
    repeated = {"from the stored base": base, "from the last result": chained}
    return [compared.agrees for compared in rotation._comparisons(by_delta, repeated)]


def test_directions_follow_the_numbers():
    assert compare(2e-3, [2e-3, 2.1e-3], [2e-3, 9e-3]) == [True, True]
    assert compare(5e-3, [2e-3, 4e-3], [2e-3, 9e-3]) == [False, False]
