"""Rows, slots and locks, in SGLang's own tree, allocator and pool."""

import os
import random
from itertools import chain

import numpy as np
import pytest

pytestmark = pytest.mark.sglang


@pytest.fixture(params=["python", "rust"])
def core(request, published):
    """Both cores of SGLang's tree."""
    del published
    return request.param


@pytest.fixture
def make(core):
    """Make a server."""
    from mini_server import MiniServer

    return lambda **arguments: MiniServer(core=core, **arguments)


def text(seed, length):
    """Tokens of a passage."""
    rng = random.Random(seed)
    return [rng.randrange(3, 997) for _ in range(length)]


def report(req):
    """A request's counters, as the client sees them."""
    return req.customized_info["irminsul"][0]


def test_a_moved_passage_is_copied_and_turned(make):
    server = make()
    server.serve(text(1, 100) + text(2, 400) + text(3, 20))
    req = server.serve(text(4, 130) + text(2, 400) + text(5, 20))
    assert report(req)["shifted_tokens"] == 400
    assert report(req)["gaps"] == 2
    server.check_identity()


def test_prefix_hit_and_shifted_hit_in_one_request(make):
    server = make()
    server.serve(text(1, 100) + text(2, 300) + text(3, 20))
    server.serve(text(6, 80) + text(7, 200) + text(8, 20))
    req = server.serve(text(1, 100) + text(7, 200) + text(2, 300) + text(5, 20))
    assert report(req) | {"mode": "live"} == {
        "mode": "live",
        "prefix_tokens": 100,
        "approximate_prefix_tokens": 0,
        "shifted_tokens": 500,
        "computed_tokens": 20,
        "gaps": 1,
        "runs": 2,
        "declined_plans": 0,
    }
    server.check_identity()


def test_a_session_finds_its_history_and_it_is_no_donor(make):
    server = make()
    passage = text(2, 300)
    server.serve(text(1, 100) + passage + text(3, 20))
    prompt = text(4, 130) + passage + text(5, 40)
    for turn in range(20):
        req = server.serve(prompt)
        assert report(req)["prefix_tokens"] + report(req)["approximate_prefix_tokens"] == (
            0 if turn == 0 else len(prompt) - 30 - 2 + 1
        ), (turn, report(req))
        prompt = [*req.full_untruncated_fill_ids, *text(100 + turn, 30)]
        server.check_identity()
    # The turns' own text was computed behind shifted rows: nobody may copy it.
    stranger = server.serve(text(50, 90) + prompt[430:])
    assert report(stranger)["shifted_tokens"] == 0


def test_a_session_of_twenty_turns_computes_only_what_is_new(make):
    server = make(slots=4096)
    server.serve(text(1, 100) + text(2, 400))
    tokens = text(3, 130) + text(2, 400) + text(4, 20)
    req = server.serve(tokens)
    assert report(req)["shifted_tokens"] == 400
    for turn in range(20):
        held = len(req.full_untruncated_fill_ids) - 1  # the last token drawn has no row yet
        tokens = [*req.full_untruncated_fill_ids, *text(100 + turn, 15)]
        req = server.serve(tokens)
        found = report(req)
        assert found["prefix_tokens"] == 130, turn
        assert found["approximate_prefix_tokens"] == held - 130, turn
        assert found["computed_tokens"] == len(tokens) - held, turn
    server.check_identity()


def test_a_session_whose_head_changes_every_turn_copies_what_was_once_computed_exactly(make):
    """Rows computed behind a shifted hit are no donors: what later turns add is computed whenever the head changes.

    When that is more than half, everything is computed once, and copied from then on.
    """
    server = make(slots=8192)
    added = text(2, 400)
    server.serve(text(0, 100) + added)
    for turn in range(1, 22):
        head, new = text(1000 + turn, 130), text(100 + turn, 15)
        added = added + new
        found = report(server.serve(head + added))
        copied = 400 if turn < 19 else 0 if turn == 19 else 400 + 15 * 19
        assert found["shifted_tokens"] == copied, turn
        assert found["computed_tokens"] == 130 + 400 + 15 * turn - copied, turn
    server.check_identity()


def test_a_prompt_longer_than_a_chunk_is_decided_as_a_whole(make):
    """Of 1,630 tokens 600 are known: too few. Of what is left behind the first chunk they would be more than half."""
    server = make(slots=8192, chunk=512)
    server.serve(text(1, 100) + text(2, 600))
    found = report(server.serve(text(3, 530) + text(2, 600) + text(4, 500)))
    assert (found["shifted_tokens"], found["computed_tokens"]) == (0, 1630)
    found = report(server.serve(text(5, 30) + text(2, 600) + text(4, 500)))
    assert found["shifted_tokens"] == 1130 - 64 - 1, "all of it is a donor now"
    server.check_identity()


def test_a_session_that_reads_much_new_text_is_exact_again_and_a_donor(make):
    server = make(slots=8192)
    known, new = text(1, 400), text(2, 1200)
    server.serve(text(3, 100) + known)
    session = text(4, 130) + known + text(5, 20)
    assert report(server.serve(session))["shifted_tokens"] == 400
    assert report(server.serve(session + text(6, 30)))["approximate_prefix_tokens"] == 420
    found = report(server.serve(session + new))
    assert (found["prefix_tokens"], found["approximate_prefix_tokens"], found["computed_tokens"]) == (130, 0, 1620)
    assert report(server.serve(text(7, 70) + new + text(8, 10)))["shifted_tokens"] == 1200
    server.check_identity()


def test_what_was_decided_holds_for_later_chunks(make):
    """Of 1,670 tokens 1,100 are known; of those behind the first chunk, which copies 900, less than half."""
    for mode, copied in (("live", 1100), ("observe", 1100)):
        server = make(slots=8192, chunk=1024)
        first, second = text(1, 900), text(2, 200)
        server.serve(text(3, 100) + first)
        server.serve(text(4, 100) + second)
        prompt = text(5, 70) + first + text(6, 300) + second + text(7, 400)
        assert report(server.serve(prompt, options={"mode": mode}))["shifted_tokens"] == copied, mode


def test_derived_rows_are_not_met_as_exact(make):
    server = make()
    passage = text(2, 300)
    server.serve(text(1, 100) + passage + text(3, 20))
    prompt = text(4, 130) + passage + text(5, 40)
    server.serve(prompt)
    req = server.serve(prompt + text(6, 30), options={"mode": "observe"})
    assert report(req)["prefix_tokens"] == 130
    assert report(req)["approximate_prefix_tokens"] == 0
    assert report(req)["shifted_tokens"] == 300, "planned, not done"
    req = server.serve(prompt + text(7, 30), options={"mode": "off"})
    assert req.customized_info is None


def test_namespaces_share_nothing(make):
    server = make(slots=8192)
    passage = text(2, 300)
    server.serve(text(1, 100) + passage, cache_salt="a")
    others = [{}, {"cache_salt": "b"}, {"extra_key": "a"}, {"lora_id": "a"}, {"cache_salt": "a", "extra_key": "x"}]
    for scope in (*others, {"cache_salt": "a", "options": {"tenant": "t"}}):
        assert report(server.serve(text(4, 130) + passage, **scope))["shifted_tokens"] == 0, scope
    assert report(server.serve(text(5, 130) + passage, cache_salt="a"))["shifted_tokens"] == 299


def test_a_tenant_has_a_tree_of_its_own(make):
    server = make(slots=8192)
    prompt = text(1, 130) + text(2, 300) + text(3, 20)
    server.serve(text(4, 100) + text(2, 300), options={"tenant": "a"})
    assert report(server.serve(prompt, options={"tenant": "a"}))["shifted_tokens"] == 300
    for other in ({"tenant": "b"}, None):
        found = report(server.serve(prompt, options=other))
        assert found["computed_tokens"] == len(prompt), other
    again = report(server.serve(prompt + text(5, 10), options={"tenant": "a"}))
    assert (again["prefix_tokens"], again["approximate_prefix_tokens"]) == (130, 320)


def test_chunks_count_computed_tokens_only(make):
    server = make(chunk=64)
    server.serve(text(1, 100) + text(2, 900))
    req = server.submit(text(3, 20) + text(2, 900) + text(4, 20))
    server.step()
    # 64 positions are computed for the carve-out, so the budget of the first step ends there.
    while req is server.chunked:
        server.step()
    assert req.extend_batch_idx <= 3
    server.finish(req)
    assert report(req)["shifted_tokens"] >= 850


def test_one_prompt_a_batch_is_cut(make):
    """SGLang keeps one request that was cut; a budget raised for a second one must not cut that, too."""
    server = make(slots=16_384, page_size=64, chunk=256)
    shared, first, second = text(1, 128), text(2, 300), text(3, 300)
    server.serve(shared + text(4, 77) + first + second + text(5, 64))
    for passage in (first, second):
        server.submit(shared + passage + text(6, 1000))
    while server.waiting or server.chunked is not None:
        cut = [req for req in server.step() if req.extend_end < len(req.full_untruncated_fill_ids)]
        assert cut in ([], [server.chunked])
    for req in list(server.running):
        server.finish(req)
    server.check_identity()


def test_batch_rows_fit_the_request_slots(make):
    server = make(slots=16_384, chunk=8192)
    passages = [text(seed, 100) for seed in range(30)]
    server.serve([*text(50, 80), *chain(*passages)])
    for at in range(8):
        server.submit([*text(60 + at, 80), *chain(*(part + text(70 + at, 40) for part in passages[at : at + 14]))])
    rows = []
    made = server.splitter.make
    server.splitter.make = lambda batch, make: rows.append(made(batch, make)) or rows[-1]
    server.table.size = 40
    while server.waiting or server.chunked is not None:
        server.step()
        for req in list(server.running):
            server.finish(req)
    assert max(len(batch.reqs) for batch in rows) > 20
    assert all(len(batch.reqs) <= 40 for batch in rows)
    server.check_identity()


@pytest.mark.parametrize(("slots", "copied"), [(18, 17), (12, 0)])
def test_a_plan_with_more_gaps_than_request_slots_is_cut_unless_less_than_half_would_be_left(make, slots, copied):
    server = make(slots=16_384, chunk=8192)
    passages = [text(seed, 100 + seed) for seed in range(20)]
    server.serve([*text(50, 80), *chain(*passages)])
    server.table.size = slots
    moved = server.serve([*text(60, 120), *chain(*(part + text(70, 40) for part in passages))])
    assert report(moved)["runs"] == copied
    assert report(moved)["gaps"] == copied + 1
    assert report(moved)["shifted_tokens"] == sum(map(len, passages[20 - copied :]))
    server.check_identity()


@pytest.mark.parametrize("slots", [3, 12, 33])
def test_a_prompt_that_goes_on_leaves_no_row_to_others(make, slots):
    """Its gaps may take every row of a batch; what waits behind it waits for the next."""
    server = make(slots=16_384, chunk=512, context=8192)
    passages = [text(seed, 100) for seed in range(30)]
    server.serve([*text(50, 80), *chain(*passages)])
    rows = []
    made = server.splitter.make
    server.splitter.make = lambda batch, make: rows.append(made(batch, make)) or rows[-1]
    server.table.size = slots
    server.submit([*text(60, 80), *chain(*(part + text(70, 40) for part in passages))])
    for seed in range(3):
        server.submit(text(80 + seed, 30))
    while server.waiting or server.chunked is not None:
        server.step()
        for req in list(server.running):
            server.finish(req)
    assert max(len(batch.reqs) for batch in rows) <= slots
    server.check_identity()


def test_a_plan_waits_for_a_batch_with_rows_for_all_its_gaps(make):
    server = make(slots=16_384, chunk=8192)
    passages = [text(seed, 100) for seed in range(14)]
    server.serve([*text(50, 80), *chain(*passages)])
    server.table.size = 20
    asked = [
        server.submit([*text(60 + at, 80), *chain(*(part + text(70 + at, 40) for part in passages))]) for at in range(3)
    ]
    assert [len(server.step()) for _ in asked] == [1, 1, 1]
    assert {report(req)["runs"] for req in asked} == {14}


def test_token_ids_above_any_vocabulary_meet_nothing(make):
    from irminsul.sglang.histories import MARK

    server = make()
    passage = text(2, 300)
    server.serve(text(1, 100) + passage)
    prompt = text(4, 130) + passage + text(5, 40)
    server.serve(prompt)
    forged = prompt[:130] + [token + MARK for token in prompt[130:]]
    for _ in range(2):
        found = report(server.serve([*forged, 5], output=1))
        assert found["computed_tokens"] == len(forged) + 1
        assert found["refusal"] == "token ids: one is far above any vocabulary"
    server.check_identity()


def test_another_prompt_behind_the_same_anchor_leaves_it(make):
    server = make(slots=8192)
    system, one, two = text(1, 100), text(2, 300), text(3, 300)
    server.serve(text(9, 70) + one + two)
    prompt = system + two + text(4, 20)
    server.serve(prompt)
    server.serve(system + text(5, 200))
    again = report(server.serve(prompt + text(6, 20)))
    assert again["approximate_prefix_tokens"] == len(prompt) - 100


def test_log_probabilities_of_the_prompt_are_computed(make):
    server = make()
    server.serve(text(1, 100) + text(2, 400))
    assert report(server.serve(text(3, 130) + text(2, 400), return_logprob=True))["shifted_tokens"] == 399
    from_200 = server.serve(text(4, 130) + text(2, 400), return_logprob=True, logprob_start_len=200)
    assert report(from_200)["shifted_tokens"] == 70


def test_a_full_pool_serves_without_a_plan(make):
    server = make(slots=1024, chunk=1024)
    server.serve(text(1, 100) + text(2, 600))
    req = server.serve(text(3, 130) + text(2, 600) + text(4, 10))
    assert report(req)["declined_plans"] == 1
    assert report(req)["shifted_tokens"] == 0
    server.check_identity()


def test_a_retracted_request_reports_its_first_prefill(make):
    from sglang.srt.mem_cache.common import release_kv_cache

    server = make()
    req = server.submit(text(1, 300), output=30)
    server.step()
    first, steps = report(req), len(server.counted)
    req.output_ids.extend(text(2, 30))
    req.refresh_fill_ids()
    server.running.remove(req)
    release_kv_cache(req, server.cache, checkpoint=False)
    req.reset_for_retract()
    server.waiting.append(req)
    server.step()
    assert report(req) == first
    assert (first["computed_tokens"], len(server.counted)) == (300, steps)
    server.check_identity()


def test_a_wrong_setting_ends_the_server_with_a_sentence(published, monkeypatch):
    from irminsul.sglang.plugin import build_cache

    monkeypatch.setenv("IRMINSUL_SGLANG_MIN_RUNS", "64")
    with pytest.raises(RuntimeError, match="irminsul: IRMINSUL_SGLANG_MIN_RUNS: unknown setting 'min_runs'; valid"):
        build_cache(None)


def test_flush_forgets_donors(make):
    server = make()
    server.serve(text(1, 100) + text(2, 400))
    server.flush()
    assert report(server.serve(text(3, 130) + text(2, 400)))["shifted_tokens"] == 0
    server.check_identity()


def test_a_search_while_a_batch_runs_does_not_wait_for_it(make):
    server = make(overlap=True)
    donor, moved = text(1, 100) + text(2, 400), text(2, 400)
    server.serve(donor)
    assert server.in_flight
    # Announced since the last batch was launched: found once that has ended.
    assert report(server.serve(text(3, 130) + moved))["shifted_tokens"] == 0
    assert report(server.serve(text(4, 150) + moved))["shifted_tokens"] == 400 - 1
    server.end_flights()
    server.check_identity()


def test_a_donor_that_was_evicted_meanwhile_is_not_copied(make):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    server = make(overlap=True)
    donor = server.serve(text(1, 100) + text(2, 400))
    for seed in (5, 6):
        server.serve(text(seed, 50))
    server.cache.evict(EvictParams(num_tokens=700))
    namespace = server.cache.state_of(donor).namespace
    assert server.cache.donors.find(namespace, np.array(text(2, 400), dtype=np.int32), 0), "the index has heard of it"
    assert report(server.serve(text(3, 130) + text(2, 400)))["shifted_tokens"] == 0
    server.end_flights()
    server.check_identity()


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_ten_thousand_random_operations(make, page_size, overlap):
    """2,500 for each core and page size: serve, hang up, evict under an open plan, publish, flush.

    IRMINSUL_TEST_OPERATIONS asks for another number.
    """
    rng = random.Random(page_size)
    server = make(slots=3072, page_size=page_size, chunk=192, overlap=overlap)
    passages = [text(seed, rng.randrange(70, 300)) for seed in range(12)]
    histories = []
    for _ in range(int(os.environ.get("IRMINSUL_TEST_OPERATIONS", "2500"))):
        choice = rng.choices(["submit", "step", "finish", "abort", "flush"], [35, 35, 20, 7, 3])[0]
        if choice == "submit" and len(server.waiting) < 4:
            submit(server, rng, passages, histories)
        elif choice == "step":
            server.table.size = rng.choice([2, 3, 5, 64, 64])
            server.step()
        elif choice == "finish" and server.running:
            req = rng.choice(server.running)
            server.finish(req)
            histories = [*histories, list(req.full_untruncated_fill_ids)][-8:]
        elif choice == "abort":
            everyone = [*server.waiting, *server.running, *([server.chunked] if server.chunked else [])]
            if everyone:
                server.abort(rng.choice(everyone))
        elif choice == "flush" and not server.running and server.chunked is None:
            server.flush()
        if rng.random() < 0.1:
            server.end_flights()
        server.check_identity()
        if len(server.running) > 4:
            server.finish(server.running[0])
    assert sum(step.shifted for step in server.counted) > 10_000
    assert sum(step.history for step in server.counted) > 1000


def submit(server, rng, passages, histories):
    """Send a session's next turn, or passages in some order."""
    if histories and rng.random() < 0.4:
        tokens = rng.choice(histories) + text(rng.random(), rng.randrange(1, 30))
    else:
        tokens = text(rng.random(), rng.randrange(1, 90))
        for passage in rng.sample(passages, rng.randrange(1, 4)):
            tokens = tokens + passage + text(rng.random(), rng.randrange(0, 20))
    scope = rng.choice([{}, {}, {}, {"cache_salt": "s"}, {"extra_key": "k"}])
    server.submit(tokens[:1000], output=rng.randrange(1, 12), **scope)
