import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.trace.cost import MEASURED_H200, CostModel, ModelCost, Point, computed_pairs

V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "q_lora_rank": None, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_attention_heads": 16,
    "num_hidden_layers": 27, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_deepseek_v2_lite_has_its_active_parameters(tmp_path: Path) -> None:
    cost = ModelCost.from_config(written(tmp_path, V2_LITE))
    # By hand: 27 layers of attention; one dense MLP; 26 of 8 experts and a router.
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    expected = 27 * attention + 3 * 2048 * 10944 + 26 * (8 * 3 * 2048 * 1408 + 2048 * 64)
    assert cost.active_parameters == expected
    # The published 2.4 B active parameters hold the embedding and the head (0.42 B), too.
    assert cost.active_parameters + 2 * 102_400 * 2048 == pytest.approx(2.66e9, rel=0.02)
    assert cost.flops_per_pair == 2 * 27 * 16 * (128 + 64 + 128)
    assert cost.flops(10, 55) == 10 * 2 * expected + 55 * cost.flops_per_pair


def test_query_compression_and_dense_models(tmp_path: Path) -> None:
    compressed = ModelCost.from_config(written(tmp_path, V2_LITE | {"q_lora_rank": 1024}))
    plain = ModelCost.from_config(written(tmp_path, V2_LITE))
    assert compressed.active_parameters - plain.active_parameters == 27 * (1024 * (2048 + 3072) - 2048 * 3072)
    dense = ModelCost.from_config(written(tmp_path, {k: v for k, v in V2_LITE.items() if k != "n_routed_experts"}))
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert dense.active_parameters == 27 * (attention + 3 * 2048 * 10944)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "JSON object"),
        ("{", "not JSON"),
        ({"hidden_size": 4}, "no MLA model"),
        (V2_LITE | {"hidden_size": "big"}, "hidden_size must be a whole number"),
        (V2_LITE | {"num_hidden_layers": True}, "num_hidden_layers"),
        ({k: v for k, v in V2_LITE.items() if k != "v_head_dim"}, "v_head_dim"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelCost.from_config(written(tmp_path, content))


@given(st.integers(0, 60), st.integers(0, 60))
def test_pairs_are_sums_of_positions(start: int, length: int) -> None:
    assert computed_pairs(start, start + length) == sum(position + 1 for position in range(start, start + length))


@pytest.mark.parametrize(
    ("computed", "total", "ms"),
    [(4096, 4096, 72), (65536, 65536, 1852), (512, 32768, 66), (2048, 16384, 72), (2048, 65536, 110)],
)
def test_measured_points_are_given_back(computed: int, total: int, ms: float) -> None:
    estimate = MEASURED_H200.estimate(computed, total)
    assert estimate.ms == pytest.approx(ms)
    assert estimate.inside


def test_between_cold_points_a_cold_prompt_is_read() -> None:
    assert MEASURED_H200.estimate(24576, 24576).ms == pytest.approx((291 + 705) / 2)


@given(st.integers(1, 200_000), st.integers(1, 200_000))
def test_more_to_compute_never_takes_less_time(one: int, other: int) -> None:
    total = max(one, other)
    least = MEASURED_H200.estimate(min(one, other), total)
    most = MEASURED_H200.estimate(total, total)
    assert 61 <= least.ms <= most.ms <= 1852
    assert most.inside == (4096 <= total <= 65536)


@pytest.mark.parametrize(("computed", "total"), [(100, 8192), (100, 200), (70_000, 70_000), (512, 70_000)])
def test_beyond_the_table_the_edge_is_used_and_said(computed: int, total: int) -> None:
    estimate = MEASURED_H200.estimate(computed, total)
    assert not estimate.inside
    assert 61 <= estimate.ms <= 1852


def test_a_cost_model_from_a_file(tmp_path: Path) -> None:
    points = [
        {"total": 100, "computed": 100, "ms": 10}, {"total": 100, "computed": 10, "ms": 1},
        {"total": 200, "computed": 200, "ms": 30}, {"total": 200, "computed": 20, "ms": 2},
    ]  # fmt: skip
    model = CostModel.from_file(written(tmp_path, {"name": "mine", "source": "here", "points": points}))
    assert (model.name, model.source) == ("mine", "here")
    assert model.estimate(55, 100).ms == pytest.approx(5.5)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (None, "must be a list"),
        ([], "two prompt lengths"),
        ([{"total": 5, "computed": 9, "ms": 1}], "computed <= total"),
        ([{"total": 5, "computed": 5, "ms": 0}], "ms > 0"),
        (["x"], "whole numbers"),
        ([{"total": n, "computed": n, "ms": 1} for n in (5, 9)], "one where fewer are"),
    ],
)
def test_a_cost_model_that_makes_no_table_is_refused(tmp_path: Path, points: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        CostModel.from_file(written(tmp_path, {"points": points}))


def test_two_points_in_one_place_are_refused() -> None:
    with pytest.raises(InputError, match="two points"):
        CostModel("x", "y", (Point(5, 5, 1), Point(5, 5, 2), Point(9, 9, 1), Point(9, 1, 1)))
