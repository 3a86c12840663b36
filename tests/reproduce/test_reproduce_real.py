"""The quick form on the real checkpoint, which is what CI runs.

Without consistency, which compares shifted and naive reuse as ``irminsul fidelity --quick`` does on the same checkpoint
(tests/fidelity/test_fidelity_command.py); its own form is tested on a small model.
"""

import json

import pytest

from irminsul.checkpoints.smollm2 import BuiltIn, build, find_gguf
from irminsul.errors import InputError
from irminsul.reproduce.command import reproduce_command

MEASURED = ("invariance", "sink", "rotation", "rope-pitfall")
pytestmark = [pytest.mark.checkpoint, pytest.mark.slow]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    try:
        gguf = find_gguf()
    except InputError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("quick")
    checkpoint = build(BuiltIn.MLA, gguf=gguf)
    for name in MEASURED:
        reproduce_command(name, checkpoint, out, quick=True, tell=lambda _: None)
    return {name: json.loads((out / f"{name}.json").read_text()) for name in MEASURED}


def test_parts_of_a_row_are_as_invariant_as_the_design_takes_them_to_be(results):
    mean = results["invariance"]["results"]["auc_mean_over_layers"]

    def block_mean(part, surroundings="other text"):
        return mean[f"{surroundings} / {part} / block mean"]

    assert block_mean("c_kv") > 0.9
    assert block_mean("k_rope") < 0.5 < block_mean("k_rope_base")
    assert block_mean("moved_row") > block_mean("row") + 0.2
    assert block_mean("V", "original") > 0.9
    assert block_mean("K", "original") < block_mean("K before RoPE", "original")


def test_naive_reuse_moves_attention_further_than_shifted_reuse(results):
    for paths in results["sink"]["results"]["by_passage_position"].values():
        assert paths["naive"]["mad"] > paths["shifted"]["mad"] > 0.0


def test_a_move_stays_under_the_papers_error_and_does_not_accumulate(results):
    assert max(results["rotation"]["results"]["by_delta"]["bfloat16"]["moved"]) < 4.7e-3
    repeated = results["rotation"]["results"]["repeated"]["bfloat16"]
    assert max(repeated["from the stored base"]) < 1.1 * repeated["from the stored base"][0]
    assert repeated["from the last result"][-1] > 3 * repeated["from the stored base"][-1]


def test_every_wrong_rotation_shows_at_a_large_distance(results):
    by_mover = results["rope-pitfall"]["results"]["by_mover_and_delta"]
    farthest = str(max(int(delta) for delta in by_mover["right"]))
    for name, by_delta in by_mover.items():
        if name != "right":
            assert by_delta[farthest]["kl"] > 2 * by_mover["right"][farthest]["kl"], name
