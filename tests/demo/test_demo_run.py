import io
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

from irminsul.demo.prompts import Prompt
from irminsul.demo.run import MAX_TOKENS, compare, demo_command, kl_divergence, run_demo
from irminsul.errors import InputError
from irminsul.testing.tiny import write_tiny_checkpoint

BODY = tuple(range(100, 400))
ROLES = (tuple(range(1000, 1040)), tuple(range(2000, 2050)), tuple(range(3000, 3060)))
PROMPTS = [Prompt("roles", (*role, *BODY, 7)) for role in ROLES]


def play(pair, prompts=PROMPTS):
    return run_demo(pair.off, pair.live, prompts, lambda _: None)


def console():
    return Console(file=io.StringIO())


def test_usage_of_both_engines_and_the_oracle_are_collected(pair):
    first, second, third = play(pair)
    assert (first.live.computed, first.prefix_caching.computed, first.oracle) == (341, 341, 0)
    assert (second.number, second.scenario) == (2, "roles")
    # The fake engine has no carve-out; the oracle leaves out the 14 of 300 tokens that stand at positions 50 to 63.
    assert (second.prefix_caching.computed, second.live.shifted, second.oracle) == (351, 300, 286)
    assert (third.live.computed, third.recovered) == (61, 300)


def test_ttft_ends_at_the_first_token_not_the_last(pair):
    _, second, _ = play(pair)
    # A millisecond for each computed token and one to draw; the seven tokens after it do not count.
    assert second.ttft_prefix == pytest.approx(0.352)
    assert second.ttft_live == pytest.approx(0.052)


def test_engines_take_turns_in_going_first(pair):
    play(pair)
    order = [(mode, name) for mode, name in pair.log if name.startswith("demo")]
    assert order == [
        ("off", "demo-0"),
        ("live", "demo-0"),
        ("live", "demo-1"),
        ("off", "demo-1"),
        ("off", "demo-2"),
        ("live", "demo-2"),
    ]


def test_scenarios_and_the_warm_up_share_nothing(pair):
    _, elsewhere = play(pair, [PROMPTS[0], Prompt("other", PROMPTS[0].token_ids)])
    assert elsewhere.number == 1
    assert elsewhere.prefix_caching.prefix == elsewhere.live.shifted == elsewhere.oracle == 0


def test_the_warm_up_makes_a_shifted_hit(pair):
    play(pair)
    (texts,) = (texts for name, texts in pair.live.texts.items() if "demo" not in name)
    assert len(texts) == 2
    assert texts[1] in texts[0]
    assert not texts[0].startswith(texts[1])


def test_a_one_token_prompt_can_be_first(pair):
    (result,) = play(pair, [Prompt("short", (5,))])
    assert result.live.computed == 1


def test_first_tokens_and_distributions_are_compared(pair):
    pair.live.disturbance = torch.tensor([0.0, 5.0, 0, 0, 0, 0, 0, 0])
    first, second, _ = play(pair)
    assert (first.first_token_agrees, first.kl_first) == (True, 0.0)
    assert not second.first_token_agrees
    full = torch.nn.functional.one_hot(torch.tensor(351 % 8), 8).float()
    assert second.kl_first == pytest.approx(kl_divergence(full, full + pair.live.disturbance))
    assert second.kl_first > 1


def test_progress_hears_of_every_prompt_in_order(pair):
    heard = []
    results = run_demo(pair.off, pair.live, PROMPTS, heard.append)
    assert tuple(heard) == results


def test_outputs_count_as_text_that_was_seen(pair):
    # The fake engine answers with its first token and seven zeros: an output of eight makes runs of 64 with 56 before.
    (first,) = play(pair, PROMPTS[:1])
    answer = (341 % 8, *(0,) * (MAX_TOKENS - 1))
    follow_up = Prompt("roles", (*ROLES[1], *PROMPTS[0].token_ids[-60:], *answer, 9))
    _, second = play(pair, [PROMPTS[0], follow_up])
    assert first.oracle == 0
    assert second.oracle == 60 + MAX_TOKENS - 14


def test_prompts_too_long_for_the_engines_are_left_out_and_counted(pair):
    pair.live.max_prompt_tokens = 352 + MAX_TOKENS - 1
    out = console()
    report = compare(pair.off, pair.live, PROMPTS, device="cpu", dtype="float32", console=out)
    assert report.skipped == 1
    assert [result.live.prompt_tokens for result in report.results] == [341, 351]
    assert "Calls left out because their prompts are longer than this model takes: 1." in out.file.getvalue()


def test_only_prompts_that_are_too_long_are_an_input_error(pair):
    pair.off.max_prompt_tokens = 100
    with pytest.raises(InputError, match="none of the 3 prompts has at most 96 tokens"):
        compare(pair.off, pair.live, PROMPTS, device="cpu", dtype="float32", console=console())


logits = arrays("float32", 5, elements=st.floats(-30, 30, width=32)).map(torch.from_numpy)


@given(logits, logits)
def test_kl_is_the_sum_of_its_definition(full, live):
    p, q = full.double().softmax(0), live.double().softmax(0)
    assert kl_divergence(full, live) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-9)
    assert kl_divergence(full, full) == 0.0


def test_kl_of_impossible_tokens_is_a_number_if_both_exclude_them():
    full = torch.tensor([0.0, 0.0, -math.inf])
    live = torch.tensor([0.0, 1.0, -math.inf])
    assert 0 < kl_divergence(full, live) < 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer):
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "v2", moe=False, max_position_embeddings=2048)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def log(tmp_path):
    """Three calls that say the same under three roles, and one that is too long."""
    document = " ".join(f"Berth {number} holds the {name}." for number, name in enumerate("abcdefghijklmnopqrst"))
    lines = [
        {
            "session": "s",
            "agent": role,
            "turn": 0,
            "ts": None,
            "keep": 0,
            "tools": None,
            "append": [
                {"role": "system", "content": f"You are the {role} of this harbour."},
                {"role": "user", "content": document * repeats},
            ],
        }
        for role, repeats in (("pilot", 1), ("harbour master", 1), ("cook", 1), ("owl", 5))
    ]
    path = tmp_path / "harbour.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_command_replays_a_log_on_real_engines(checkpoint, log, tmp_path):
    out = console()
    report = demo_command(checkpoint=checkpoint, traces=[log], limit=4, json_path=tmp_path / "out.json", console=out)
    first, second, third = report.results
    assert report.skipped == 1
    assert first.live.shifted == first.oracle == 0
    assert first.kl_first == pytest.approx(0.0, abs=1e-6)
    for result in (second, third):
        assert result.prefix_caching.shifted == 0
        assert result.live.shifted >= 0.95 * result.oracle > 400
    assert json.loads((tmp_path / "out.json").read_text())["totals"]["shifted"] == report.totals.shifted
    assert "harbour" in out.file.getvalue()


def test_the_command_refuses_a_json_path_without_a_directory_before_it_runs(checkpoint, tmp_path):
    with pytest.raises(InputError, match="there is no directory"):
        demo_command(checkpoint=checkpoint, json_path=tmp_path / "absent" / "out.json")


def test_the_command_does_not_write_over_a_trace(checkpoint, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("{}\n")
    with pytest.raises(InputError, match=r"log.jsonl: it is an input of this command"):
        demo_command(checkpoint=checkpoint, traces=[log], json_path=log)
    assert log.read_text() == "{}\n"
