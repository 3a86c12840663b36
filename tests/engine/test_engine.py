"""The engine keeps its promises: lossless reuse changes no token, derived rows stay apart, no slot is ever lost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul.engine.batch import ForwardBatch, Span
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.model import MlaModel
from irminsul.engine.types import FinishReason, Request, SamplingParams, StepOutput, Usage
from irminsul.errors import InputError, OverloadedError
from irminsul.plan import Mode, ReusePolicy
from irminsul.testing.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
POLICY = ReusePolicy(carve_out=32)
CONFIG = EngineConfig(pool_slots=1024, page_size=4, prefill_chunk=64, policy=POLICY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MlaModel:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", family="v2", moe=False)
    return MlaModel.load(Path(path))


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def run(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_ownership()
    return outputs


def serve(
    engine: Engine, tokens: Sequence[int], name: str = "r", sampling: SamplingParams = GREEDY, **fields: object
) -> tuple[list[int], Usage]:
    engine.submit(Request(name, tuple(tokens), sampling, **fields))  # type: ignore[arg-type]
    outputs = run(engine)[name]
    assert outputs[0].usage is not None
    return [output.token_id for output in outputs], outputs[0].usage


def parts(usage: Usage) -> tuple[int, int, int, int]:
    return (usage.prefix, usage.approximate_prefix, usage.shifted, usage.computed)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefill_chunk", [7, 1024])
def test_prefix_reuse_changes_no_token(model: MlaModel, page_size: int, prefill_chunk: int) -> None:
    config = replace(CONFIG, page_size=page_size, prefill_chunk=prefill_chunk, mode=Mode.OFF)
    engine = Engine(model, config)
    conversation = text(1, 90)
    for turn in range(6):
        conversation += text(10 + turn, 30)
        cold, _ = serve(Engine(model, config), conversation)
        warm, usage = serve(engine, conversation)
        assert warm == cold
        assert usage.prefix == (0 if turn == 0 else (len(conversation) - 31) // page_size * page_size)
        assert usage.prefix + usage.computed == usage.prompt_tokens == len(conversation)
        conversation += warm


def test_prefix_reuse_gives_the_logits_of_no_cache(model: MlaModel) -> None:
    seen: list[torch.Tensor] = []
    for engine in (Engine(model, CONFIG), Engine(model, CONFIG)):
        engine.on_first_logits = lambda _, logits: seen.append(logits)
        if not seen:
            serve(engine, text(1, 200))
            seen.clear()
        serve(engine, text(1, 200) + text(2, 50))
    assert torch.allclose(seen[0], seen[1], atol=1e-4)


def test_all_gaps_run_in_one_forward(model: MlaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, CONFIG)
    first, second = text(1, 100), text(2, 100)
    serve(engine, text(3, 40) + first, "a")
    serve(engine, text(4, 40) + second, "b")
    forwards: list[int] = []
    plain = MlaModel.forward

    def counting(self: MlaModel, batch: object, *args: object, **kwargs: object) -> torch.Tensor:
        forwards.append(len(batch.token_ids_T))  # type: ignore[attr-defined]
        return plain(self, batch, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(MlaModel, "forward", counting)
    once = replace(GREEDY, max_tokens=1)
    _, usage = serve(engine, text(5, 35) + first + text(6, 9) + second + text(7, 5), "c", once)
    assert (usage.shifted, usage.gaps) == (200, 3)
    assert forwards == [49]


def test_a_shifted_row_is_the_row_that_would_have_been_computed_where_context_cannot_matter(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    body = text(1, 120)
    serve(engine, text(2, 50) + body)
    live = serve(engine, text(3, 77) + body + [7])[1]
    assert live.shifted == 120
    off = Engine(model, replace(CONFIG, mode=Mode.OFF))
    serve(off, text(3, 77) + body + [7])

    def rows(one: Engine) -> torch.Tensor:
        match = one._cache.match(_namespace(one), np.array(text(3, 77) + body, dtype=np.int32), derived=True)
        slots = np.concatenate([match.slots, match.derived_slots])[77:196]
        return one._rows_LSW[:, slots.astype(np.int64)]

    shifted, fresh = rows(engine), rows(off)
    assert torch.allclose(shifted[0], fresh[0], atol=1e-5), "layer 0 knows no context"
    assert not torch.allclose(shifted[1], fresh[1], atol=1e-2), "above it the context shows: reuse is approximate"


def _namespace(engine: Engine):
    (namespace,) = engine._cache._roots
    return namespace


def test_rows_behind_a_shifted_hit_are_found_by_their_session_only_and_never_as_exact(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, page_size=1))
    body, question = text(1, 150), text(2, 80)
    serve(engine, text(3, 40) + body)
    turn = text(4, 64) + body + question
    output, usage = serve(engine, turn)
    assert parts(usage) == (0, 0, 150, 144)
    follow_up = turn + output + text(5, 20)
    _, usage = serve(engine, follow_up, mode=Mode.OFF)
    assert usage.approximate_prefix == usage.shifted == 0
    assert usage.prefix == 64, "only what stands before the shifted rows is exact"
    engine = Engine(model, replace(CONFIG, page_size=1))
    serve(engine, text(3, 40) + body)
    output, _ = serve(engine, turn)
    _, usage = serve(engine, follow_up)
    assert parts(usage) == (64, 150 + 80 + 5, 0, 21)


def test_derived_rows_are_no_donors(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    body, only_derived = text(1, 150), text(2, 80)
    serve(engine, text(3, 40) + body)
    assert serve(engine, text(4, 64) + body + only_derived)[1].shifted == 150
    _, usage = serve(engine, text(5, 70) + only_derived + [9])
    assert usage.shifted == 0
    _, usage = serve(engine, text(6, 70) + body + [9])
    assert usage.shifted == 150, "the exact copy still is one"


def test_a_text_of_which_less_than_half_is_known_is_computed_once_and_known_from_then_on(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    known, new = text(1, 100), text(2, 160)
    serve(engine, text(3, 40) + known)
    assert parts(serve(engine, text(4, 64) + known + new)[1]) == (0, 0, 0, 324)
    assert serve(engine, text(5, 70) + known + new + [9])[1].shifted == 260


def test_a_session_that_reads_much_new_text_is_exact_again_and_a_donor(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    known, new = text(1, 100), text(2, 300)
    serve(engine, text(3, 40) + known)
    session = text(4, 64) + known
    assert serve(engine, session)[1].shifted == 99
    assert parts(serve(engine, session + text(7, 20))[1])[1] == 100, "it goes on from its derived rows"
    # (Pages of four: the exact rows of its beginning.)
    assert parts(serve(engine, session + new)[1]) == (64, 0, 0, 400)
    assert serve(engine, text(5, 70) + known + new + [9])[1].shifted == 400


def test_a_session_keeps_its_history_over_many_turns(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    body = text(1, 100)
    serve(engine, text(2, 40) + body)
    conversation = text(3, 50) + body
    for turn in range(8):
        conversation = conversation + text(20 + turn, 15)
        output, usage = serve(engine, conversation)
        assert usage.computed < 50 + 15 + 8 if turn == 0 else usage.computed <= 15 + 1 + 4
        conversation += output


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_a_request_reads_are_not_evicted_when_its_history_was_also_computed_exactly(
    model: MlaModel, page_size: int
) -> None:
    """A session's derived rows hang at 40; a request in mode off then computes its text exactly up to 100."""
    engine = Engine(model, replace(CONFIG, page_size=page_size, pool_slots=400, policy=ReusePolicy(carve_out=0)))
    body = text(1, 110)
    serve(engine, text(2, 36) + body)
    prompt = text(3, 40) + body
    output, _ = serve(engine, prompt)
    serve(engine, prompt[:100], mode=Mode.OFF)
    engine.submit(Request("long", tuple(prompt + output + text(4, 5)), replace(GREEDY, max_tokens=100)))
    engine.step()
    others = [Request(f"other{i}", tuple(text(50 + i, 100)), GREEDY, tenant="b") for i in range(4)]
    for other in others:
        engine.submit(other)
    while engine.has_work:
        engine.step()
        engine.check_ownership()
        for sequence in engine._running():
            rows = engine._rows_LSW[0, sequence.slots[: sequence.n_rows].astype(np.int64)]
            fresh = model.new_pool(512)
            tokens = torch.from_numpy(sequence.tokens[: sequence.n_rows].astype(np.int64))
            positions = torch.arange(len(tokens))
            if len(sequence.pending) == 0:
                span = Span(0, len(tokens), positions)
                model.forward(ForwardBatch(tokens, positions, positions, (span,), positions[-1:]), fresh)
                assert torch.allclose(rows, fresh[0, : len(tokens)], atol=1e-4), "a row of another token"


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("approximate_prefix", [True, False])
def test_rows_the_tree_had_already_cost_a_request_nothing_that_was_not_promised(
    model: MlaModel, page_size: int, approximate_prefix: bool
) -> None:
    policy = replace(POLICY, approximate_prefix=approximate_prefix)
    engine = Engine(model, replace(CONFIG, page_size=page_size, pool_slots=256, policy=policy))
    prompt = text(1, 128)
    serve(engine, prompt, "a", replace(GREEDY, max_tokens=1))
    serve(engine, prompt, "b", replace(GREEDY, max_tokens=128))
    shifted = text(2, 40) + prompt[:80]
    for name in ("c", "d", "e"):
        serve(engine, shifted, name, replace(GREEDY, max_tokens=100))


def test_a_request_as_long_as_the_pool_is_admitted_whatever_branches_its_history_has(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, page_size=1, pool_slots=400))
    body = text(1, 110)
    serve(engine, text(2, 36) + body)
    prompt = text(3, 40) + body
    output, _ = serve(engine, prompt)
    serve(engine, prompt[:100], mode=Mode.OFF)
    follow_up = prompt + output
    assert len(serve(engine, follow_up, "x", replace(GREEDY, max_tokens=400 - len(follow_up)))[0]) == 400 - len(
        follow_up
    )


def test_observe_plans_and_touches_nothing(model: MlaModel) -> None:
    body = text(1, 150)
    prompts = [text(3, 40) + body, text(4, 64) + body + text(5, 9)]
    off = Engine(model, replace(CONFIG, mode=Mode.OFF))
    observe = Engine(model, replace(CONFIG, mode=Mode.OBSERVE))
    for prompt in prompts:
        expected, _ = serve(off, prompt)
        seen, usage = serve(observe, prompt)
        assert seen == expected
        assert usage.shifted == usage.approximate_prefix == 0
    assert usage.planned_shifted == 150
    assert observe.stats().derived_slots == 0


def test_off_has_no_registry(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, mode=Mode.OFF))
    serve(engine, text(1, 200))
    assert engine.stats().registry_entries == engine.stats().registry_bytes == 0


def test_a_request_may_lower_its_mode_but_not_raise_it(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, mode=Mode.OBSERVE))
    with pytest.raises(InputError, match="'live' was asked for, but the server runs in 'observe'"):
        serve(engine, text(1, 10), mode=Mode.LIVE)
    assert serve(engine, text(1, 10), mode=Mode.OFF)[1].planned_shifted == 0


def test_tenants_and_salts_share_nothing(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, pool_slots=4096))
    body = text(1, 200)
    serve(engine, body, tenant="a", cache_salt="x")
    for scope in (
        {"tenant": "b", "cache_salt": "x"},
        {"tenant": "a", "cache_salt": ""},
        {"tenant": "x", "cache_salt": "a"},
    ):
        assert parts(serve(engine, body, **scope)[1]) == (0, 0, 0, 200)
        assert (
            parts(serve(engine, text(2, 64) + body, mode=None, tenant=scope["tenant"], cache_salt="new")[1])[3] == 264
        )
    assert serve(engine, body, tenant="a", cache_salt="x")[1].prefix == 196


def test_a_passage_twice_in_one_prompt_is_computed_twice_and_then_has_donors(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    body = text(1, 100)
    doubled = text(2, 40) + body + text(3, 10) + body + [5]
    assert parts(serve(engine, doubled)[1]) == (0, 0, 0, 251)
    assert serve(engine, text(4, 50) + doubled)[1].shifted == 250


def test_a_request_can_copy_from_its_own_prefix(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, page_size=1))
    history = text(1, 200)
    output, _ = serve(engine, history)
    _, usage = serve(engine, history + output + history[20:150] + [4])
    assert (usage.prefix, usage.shifted) == (205, 130)


def test_recomputed_heads_cost_what_they_say(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, policy=replace(POLICY, recompute=16)))
    body = text(1, 150)
    serve(engine, text(2, 40) + body)
    assert serve(engine, text(3, 50) + body + [7])[1].shifted == 134


def test_a_full_pool_evicts_and_then_queues(model: MlaModel) -> None:
    config = replace(CONFIG, pool_slots=256)
    engine = Engine(model, config)
    for i in range(12):
        engine.submit(Request(f"r{i}", tuple(text(i, 90)), GREEDY))
    outputs = run(engine)
    assert len(outputs) == 12
    assert all(len(one) == 6 for one in outputs.values())
    assert engine.stats().evicted_slots > 0
    for i in range(12):
        assert [o.token_id for o in outputs[f"r{i}"]] == serve(Engine(model, config), text(i, 90))[0]


def test_donors_that_do_not_fit_beside_the_request_are_declined(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, pool_slots=256))
    body = text(1, 160)
    serve(engine, text(2, 32) + body)
    _, usage = serve(engine, text(3, 40) + body + [7])
    assert (usage.shifted, usage.planned_shifted) == (0, 160)
    assert engine.stats().declined_plans == 1


def test_what_can_never_fit_is_refused(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, pool_slots=256))
    with pytest.raises(InputError, match="context is 256 tokens"):
        engine.submit(Request("a", tuple(text(1, 251)), GREEDY))
    engine = Engine(model, replace(CONFIG, pool_slots=4096))
    with pytest.raises(InputError, match="context is 1024 tokens"):
        engine.submit(Request("a", tuple(text(1, 1020)), GREEDY))


@pytest.mark.parametrize(("tokens", "message"), [((), "empty"), ((5, 512), "outside"), ((-1,), "outside")])
def test_bad_prompts_are_refused(model: MlaModel, tokens: tuple[int, ...], message: str) -> None:
    engine = Engine(model, CONFIG)
    with pytest.raises(InputError, match=message):
        engine.submit(Request("a", tokens, GREEDY))
    assert not engine.has_work


def test_a_request_id_in_use_is_refused(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    engine.submit(Request("a", (5, 6), GREEDY))
    with pytest.raises(InputError, match="in use"):
        engine.submit(Request("a", (5, 6), GREEDY))


def test_a_full_queue_says_so(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, max_waiting=2))
    for name in ("a", "b"):
        engine.submit(Request(name, (5, 6), GREEDY))
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        engine.submit(Request("c", (5, 6), GREEDY))


def test_abort_gives_everything_back_at_any_moment(model: MlaModel) -> None:
    for steps in range(8):
        engine = Engine(model, replace(CONFIG, prefill_chunk=40))
        for name in ("a", "b", "c"):
            engine.submit(Request(name, tuple(text(1, 60) + text(ord(name), 60)), GREEDY))
        for _ in range(steps):
            engine.step()
        for name in ("b", "a", "c", "unknown"):
            engine.abort(name)
            engine.check_ownership()
        assert not engine.has_work
        engine.flush()
        assert engine.stats().free_slots == 1024


def test_stop_publishes_like_a_normal_end(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, page_size=1))
    prompt = text(1, 50)
    engine.submit(Request("a", tuple(prompt), replace(GREEDY, max_tokens=50)))
    outputs = [output for _ in range(5) for output in engine.step()]
    engine.stop("a")
    engine.check_ownership()
    assert not engine.has_work
    assert serve(engine, prompt + [o.token_id for o in outputs] + [9])[1].prefix == 50 + 4


def test_cached_rows_are_locked_while_a_request_reads_them(model: MlaModel) -> None:
    engine = Engine(model, replace(CONFIG, page_size=1))
    prompt = text(1, 50)
    serve(engine, prompt)
    engine.submit(Request("b", (*prompt, 9), GREEDY))
    engine.step()
    assert engine.stats().locked_slots >= 50
    engine.abort("b")
    assert engine.stats().locked_slots == 0


def test_an_end_token_ends_unless_it_is_to_be_ignored(model: MlaModel) -> None:
    engine = Engine(model, CONFIG)
    tokens, _ = serve(engine, text(1, 50))
    engine.eos_token_ids = frozenset({tokens[2]})
    engine.submit(Request("a", tuple(text(1, 50)), replace(GREEDY, ignore_eos=False)))
    last = run(engine)["a"][-1]
    assert (last.finish_reason, last.token_id) == (FinishReason.STOP, tokens[2])
    assert len(serve(engine, text(1, 50))[0]) == 6


def test_what_else_runs_changes_no_token(model: MlaModel) -> None:
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True)
    alone, _ = serve(Engine(model, CONFIG), text(1, 70), "x", seeded)
    crowd = Engine(model, CONFIG)
    for i in range(5):
        crowd.submit(Request(f"o{i}", tuple(text(50 + i, 30 + 7 * i)), replace(seeded, seed=i)))
    crowd.submit(Request("x", tuple(text(1, 70)), seeded))
    assert [o.token_id for o in run(crowd)["x"]] == alone


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_workloads_lose_no_slot(model: MlaModel, data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([1, 8]))
    mode = data.draw(st.sampled_from(list(Mode)))
    engine = Engine(model, replace(CONFIG, pool_slots=320, page_size=page, mode=mode, prefill_chunk=48, max_running=3))
    pieces = [text(i, 70) for i in range(4)]
    alive: list[str] = []
    for i in range(data.draw(st.integers(5, 20))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "step", "abort", "stop", "flush"]))
        if action == "submit":
            chosen = data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=3))
            head = text(100 + data.draw(st.integers(0, 3)), data.draw(st.integers(0, 40)))
            prompt = head + [token for piece in chosen for token in piece]
            engine.submit(Request(str(i), tuple(prompt), GREEDY, tenant=data.draw(st.sampled_from(["", "t"]))))
            alive.append(str(i))
        elif action == "step":
            engine.step()
        elif action == "flush":
            engine.flush()
        elif alive:
            getattr(engine, action)(data.draw(st.sampled_from(alive)))
        engine.check_ownership()
    run(engine)
    engine.flush()
    assert engine.stats().free_slots == 320
    assert engine.stats().registry_entries == 0
