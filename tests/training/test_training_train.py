"""The loop: what it learns, that it can stop and go on, and what it refuses."""

import argparse
import json
import sys
from dataclasses import replace

import pytest
import torch
from tiny_run import TINY
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from irminsul.errors import InputError
from training.distillation import add_gradient, divergence, perplexity_ratios
from training.report import Log
from training.start import load_recipes
from training.state import STATE_FILE, load_weights
from training.text import TrainingText
from training.train import Trainer, distil, main, prepare, schedule


def trainer(original, text, run, config=TINY) -> Trainer:
    return Trainer(prepare(original, text, config, run), original, config, run)


def go_on(started: Trainer, text, run, *, seconds: float, clock) -> None:
    batches = text.batches(TINY.tokens_per_step, skip=started.progress.step)
    with Log(run / "log.jsonl") as log:
        started.run(batches, seconds / 60, log, clock)


def logged(run) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_the_loss_is_the_mean_divergence_however_it_is_cut(original, text, run):
    student = trainer(original, text, run).student
    ids = next(text.batches(96, 0))
    with torch.no_grad():
        wanted = original(input_ids=ids).logits.log_softmax(-1)
        expected = F.kl_div(student.logits(ids).log_softmax(-1), wanted, log_target=True, reduction="sum") / 96
    gradients = []
    for chunk in (40, 96):
        student.zero_grad()
        assert add_gradient(student, original, ids, chunk, divergence) == pytest.approx(float(expected), rel=1e-4)
        gradients.append(student.layers[1].o_proj.up.grad.clone())
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


def test_a_few_steps_lower_the_loss_and_are_logged(original, text, run, clock, capsys):
    started = trainer(original, text, run)
    before = perplexity_ratios(started.student, original, text.held_out, (16, 48))
    go_on(started, text, run, seconds=60, clock=clock)
    lines = logged(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 20]
    assert [line["tokens"] for line in lines] == [96, 96, 96, 17 * 96]
    assert lines[-1]["kl"] < 0.9 * lines[0]["kl"]
    assert (started.progress.step, started.progress.elapsed) == (30, 60.0)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    assert before.keys() == {"noise_16", "noise_16_original", "noise_48", "noise_48_original"}


def test_stopping_and_going_on_equals_running_straight_through(original, text, run, tmp_path, clock):
    other = tmp_path / "straight"
    straight = trainer(original, text, other)
    go_on(straight, text, other, seconds=40, clock=clock)
    for seconds in (14, 26):
        go_on(trainer(original, text, run), text, run, seconds=seconds, clock=clock)
    again = trainer(original, text, run)
    assert again.progress == straight.progress
    assert again.progress.step == 20
    for name, value in straight.student.state_dict().items():
        assert torch.equal(again.student.state_dict()[name], value), name
    at_20 = [lines[-1] for lines in (logged(run), logged(other))]
    assert at_20[0]["lr"] == at_20[1]["lr"]
    assert at_20[0]["norm"] == at_20[1]["norm"]


def test_training_ends_with_the_total(original, text, run, clock):
    started = trainer(original, text, run)
    go_on(started, text, run, seconds=600, clock=clock)
    go_on(started, text, run, seconds=600, clock=clock)
    assert started.progress.step == 30


def test_a_run_keeps_the_recipes_it_began_with(original, text, run):
    prepare(original, text, TINY, run)
    first = load_recipes(run)
    replaced = replace(text, long=text.long[::-1])
    prepare(original, replaced, TINY, run)
    assert all((a.recipe.turn_HZ == b.recipe.turn_HZ).all() for a, b in zip(first, load_recipes(run), strict=True))


def test_a_state_of_another_configuration_is_refused(original, text, run, clock):
    go_on(trainer(original, text, run), text, run, seconds=4, clock=clock)
    with pytest.raises(InputError, match=r"holds a run of theta 50\.0, not 60\.0"):
        trainer(original, text, run, replace(TINY, theta=60.0))


@pytest.mark.parametrize("damage", ["cut", "missing", "unknown", "shape"])
def test_a_state_that_is_not_whole_is_refused(original, text, run, clock, damage):
    go_on(trainer(original, text, run), text, run, seconds=4, clock=clock)
    path = run / STATE_FILE
    state = torch.load(path, weights_only=True)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        value = state["student"].pop("layers.0.q_proj.up")
        if damage == "unknown":
            state["student"] |= {"layers.0.q_proj.up": value, "layers.9.q_proj.up": value}
        elif damage == "shape":
            state["student"]["layers.0.q_proj.up"] = value[:, :-1]
        torch.save(state, path)
    with pytest.raises(InputError, match=r"state\.pt is not a state of this model"):
        trainer(original, text, run)


@pytest.mark.parametrize("content", [None, b"", b"PK not an archive"])
def test_recipes_that_cannot_be_read_are_refused(run, content):
    run.mkdir()
    if content is not None:
        (run / "recipes.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"recipes\.npz cannot be read"):
        load_recipes(run)


def test_weights_are_written_at_the_end_only(run):
    run.mkdir()
    with pytest.raises(InputError, match="a run writes them at its end"):
        load_weights(run)


def test_the_learning_rate_rises_and_falls():
    assert schedule(0, 0.0) == pytest.approx(1 / 20)
    assert schedule(19, 0.0) == 1.0
    assert schedule(99, 0.5) == pytest.approx(0.51)
    assert schedule(99, 1.0) == schedule(99, 1.2) == pytest.approx(0.02)


def test_a_run_leaves_a_log_and_weights_and_the_next_begins_where_it_ended(original, data, run):
    arguments = argparse.Namespace(data=data, state=run, minutes=0.005, first_documents=2, compile=False)
    for _ in range(2):
        distil(original, TINY, arguments)
    lines = logged(run)
    ready, done = ([line for line in lines if line["event"] == event] for event in ("ready", "done"))
    assert len(ready) == len(done) == 2
    assert ready[0]["noise_48"] != done[0]["noise_48"]
    assert ready[1].items() >= {name: value for name, value in done[0].items() if name != "event"}.items()
    restored = trainer(original, text=TrainingText.read(data, TINY, 320), run=run)
    assert restored.progress.elapsed >= 2 * 60 * 0.005
    weights = load_weights(run)
    assert weights["layers.1.o_proj.up"].dtype == torch.float16
    torch.testing.assert_close(weights["norm.weight"], restored.student.norm.weight.detach())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--minutes", "-1", "--total-minutes", "6"], "--minutes is -1.0, but must be positive and finite"),
        (["--minutes", "nan", "--total-minutes", "6"], "--minutes is nan, but must be positive and finite"),
        (["--minutes", "1", "--total-minutes", "0"], "total_minutes is 0.0, but must be positive and finite"),
        (["--minutes", "1", "--total-minutes", "nan"], "total_minutes is nan, but must be positive and finite"),
    ],
)
def test_impossible_minutes_are_refused_at_once(monkeypatch, capsys, tmp_path, options, told):
    given = ["train", "--data", str(tmp_path), "--state", str(tmp_path / "run"), "--device", "cpu", *options]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith(f"error: {told}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_the_command_line_refuses_in_a_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train", "--data", str(tmp_path), "--state", str(tmp_path), "--minutes", "1"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith("error: there is no CUDA device; --device cpu is slow but works\n")
