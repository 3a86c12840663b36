"""A run goes on only with the configuration it began with."""

from dataclasses import replace

import pytest
from tiny_run import TINY

from irminsul.checkpoints.deepseek_form import DeepseekShape
from irminsul.errors import InputError
from training.config import CONFIG_FILE, TrainingConfig


def test_the_defaults_are_those_of_the_checkpoint_that_ships():
    config = TrainingConfig()
    assert (config.theta, config.learning_rate, config.total_minutes) == (8000.0, 2e-3, 6.0)
    assert config.ranks["kv_b_proj"] == 32
    assert config.ranks["down_proj"] == 10
    assert len(config.ranks) == 7


def test_a_folder_is_claimed_once_and_again_by_the_same(run):
    TINY.claim(run)
    TINY.claim(run)
    assert TrainingConfig.read(run) == TINY


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"theta": 60.0}, "theta 50.0, not 60.0"),
        ({"attention_rank": 7}, "attention_rank 6, not 7"),
        ({"learning_rate": 1e-3}, r"learning_rate 0\.02, not 0\.001"),
        ({"total_minutes": 2.0}, r"total_minutes 1\.0, not 2\.0"),
        ({"tokens_per_step": 192}, "tokens_per_step 96, not 192"),
        ({"shape": DeepseekShape(44, 8, 24)}, "shape .*'latent': 40.*, not .*'latent': 44"),
    ],
)
def test_a_run_of_another_configuration_is_refused_by_what_differs(run, change, told):
    TINY.claim(run)
    with pytest.raises(InputError, match=f"holds a run of {told}"):
        replace(TINY, **change).claim(run)
    assert TrainingConfig.read(run) == TINY


def test_a_folder_of_unknown_files_is_refused(run):
    run.mkdir()
    (run / "state.pt").write_bytes(b"of whom?")
    with pytest.raises(InputError, match=r"has files but no config\.json"):
        TINY.claim(run)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"theta": 50.0}'])
def test_a_damaged_configuration_is_refused_with_its_name(run, content):
    run.mkdir()
    (run / CONFIG_FILE).write_text(content)
    with pytest.raises(InputError, match=r"config\.json (is not the configuration of a run|has other keys)"):
        TINY.claim(run)


@pytest.mark.parametrize("name", ["theta", "learning_rate", "total_minutes", "mlp_rank", "watched"])
def test_what_must_be_positive_is(name):
    with pytest.raises(InputError, match=f"{name} is 0, but must be positive"):
        replace(TINY, **{name: 0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_length_is_a_number_of_minutes(value):
    with pytest.raises(InputError, match=f"total_minutes is {value}, but must be positive and finite"):
        replace(TINY, total_minutes=value)


def test_a_file_is_not_the_directory_of_a_run(run):
    run.touch()
    with pytest.raises(InputError, match=r"run cannot be the directory of a run: .*File exists"):
        TINY.claim(run)


def test_a_step_has_room_for_a_sequence():
    with pytest.raises(InputError, match="a step of 40 tokens has no room for a sequence of 48"):
        replace(TINY, tokens_per_step=40)
