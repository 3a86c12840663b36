"""The model against transformers, and against itself however its work is cut up."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from irminsul.engine import attention as attention_module
from irminsul.engine.attention import (
    AttentionForm,
    AttentionPlan,
    LatentAttention,
    _blocks,
    absorbed_flops,
    materialised_flops,
)
from irminsul.engine.config import ModelConfig
from irminsul.engine.model import ForwardBatch, MlaModel, Span
from irminsul.errors import InputError, UnsupportedModelError
from irminsul.testing.tiny import write_tiny_checkpoint

FORMS = ["auto", "absorbed", "materialised"]
TOLERANCE = 1e-4
N_SLOTS = 400

CHECKPOINTS = {
    "v2-dense": {"family": "v2", "moe": False},
    "v2-yarn": {"family": "v2", "moe": False, "q_lora": True, "yarn": True},
    "v2-greedy": {"family": "v2"},
    "v2-group-limited": {"family": "v2", "topk_method": "group_limited_greedy", "yarn": True},
    "v2-biases": {"family": "v2", "attention_bias": True, "mlp_bias": True},
    "v2-biases-q-lora": {"family": "v2", "attention_bias": True, "q_lora": True, "tie_word_embeddings": True},
    "v3-dense": {"family": "v3", "moe": False},
    "v3-noaux": {"family": "v3", "q_lora": True},
    "v3-yarn": {"family": "v3", "q_lora": True, "yarn": True},
    "v3-not-normalised": {"family": "v3", "norm_topk_prob": False},
    "v3-half-split": {"family": "v3", "rope_interleave": False, "yarn": True},
    "v3-norm-eps": {"family": "v3", "rms_norm_eps": 0.1},
    "v3-no-nope": {"family": "v3", "moe": False, "qk_nope_head_dim": 0},
}


@dataclass(frozen=True)
class Work:
    """Positions of one prompt to compute in a forward, the prompt's rows lying at ``slots``."""

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


def batch_of(works):
    """Join works to a batch that wants the logits of every token."""
    spans, cursor = [], 0
    for work in works:
        end = cursor + len(work.positions)
        spans.append(Span(cursor, end, work.slots[: int(work.positions[-1]) + 1]))
        cursor = end
    return ForwardBatch(
        token_ids_T=torch.cat([work.tokens[work.positions] for work in works]),
        positions_T=torch.cat([work.positions for work in works]),
        out_slots_T=torch.cat([work.slots[work.positions] for work in works]),
        spans=tuple(spans),
        logit_rows_N=torch.arange(cursor),
    )


def poisoned_pool(model, n_slots=N_SLOTS):
    """Return a pool in which reading a row that nobody wrote shows."""
    return model.new_pool(n_slots).fill_(float("nan"))


def prompt(n, seed=0):
    return torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(seed))


def scattered_slots(*lengths, seed=0):
    slots = torch.randperm(N_SLOTS, generator=torch.Generator().manual_seed(seed))
    return slots[: sum(lengths)].split(lengths)


def compute(model, tokens, **options):
    """Logits [T, vocabulary] of a prompt computed at once."""
    n = len(tokens)
    return model.forward(batch_of([Work(tokens, torch.arange(n), torch.arange(n))]), poisoned_pool(model, n), **options)


def assert_logits_agree(ours, reference):
    torch.testing.assert_close(ours, reference, rtol=0, atol=TOLERANCE)


@dataclass(frozen=True)
class Pair:
    ours: MlaModel
    reference: torch.nn.Module

    @torch.no_grad()
    def expected(self, tokens):
        return self.reference(tokens[None]).logits[0]


@pytest.fixture(scope="module")
def load_pair(tmp_path_factory):
    """Load a checkpoint by its name, once."""
    loaded = {}

    def load(name):
        if name not in loaded:
            path = write_tiny_checkpoint(tmp_path_factory.mktemp(name), **CHECKPOINTS[name])
            reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            loaded[name] = Pair(MlaModel.load(path), reference)
        return loaded[name]

    return load


@pytest.fixture
def pair(load_pair):
    return load_pair("v3-yarn")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prompt_agrees_with_transformers(load_pair, name, form):
    pair = load_pair(name)
    # Longer than a block, so that blocks with and without earlier keys occur.
    tokens = prompt(200)
    assert_logits_agree(compute(pair.ours, tokens, attention=form), pair.expected(tokens))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["v2-group-limited", "v3-yarn", "v3-half-split", "v3-no-nope"])
def test_chunks_behind_a_cached_prefix_agree_with_transformers(load_pair, name, form):
    pair = load_pair(name)
    tokens, (slots,), pool = prompt(180), scattered_slots(180), poisoned_pool(pair.ours)
    logits = [
        pair.ours.forward(batch_of([Work(tokens, slots, chunk)]), pool, attention=form)
        for chunk in torch.arange(180).split([1, 70, 1, 100, 8])
    ]
    assert_logits_agree(torch.cat(logits), pair.expected(tokens))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["v2-biases", "v3-noaux"])
def test_requests_of_different_lengths_share_a_forward(load_pair, name, form):
    pair = load_pair(name)
    lengths = (5, 140, 33, 1, 60)
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    slots, pool = scattered_slots(*lengths), poisoned_pool(pair.ours)
    works = [Work(t, s, torch.arange(len(t))) for t, s in zip(prompts, slots, strict=True)]
    # Prefill of two, then a forward of decode steps, a chunk behind a prefix, and whole prompts.
    first = [Work(w.tokens, w.slots, w.positions[:-1]) for w in works[:2]]
    pair.ours.forward(batch_of(first), pool, attention=form)
    rest = [Work(w.tokens, w.slots, w.positions[-1:]) for w in works[:2]] + works[2:]
    logits = pair.ours.forward(batch_of(rest), pool, attention=form).split([len(w.positions) for w in rest])
    for work, ours in zip(rest, logits, strict=True):
        assert_logits_agree(ours, pair.expected(work.tokens)[work.positions])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["v2-yarn", "v3-noaux"])
def test_several_gaps_in_one_forward_agree_with_computing_all(load_pair, name, form):
    pair = load_pair(name)
    tokens, (slots,) = prompt(190), scattered_slots(190)
    pool = poisoned_pool(pair.ours)
    everything = pair.ours.forward(batch_of([Work(tokens, slots, torch.arange(190))]), pool, attention=form)
    gaps = torch.cat([torch.arange(30, 34), torch.arange(50, 51), torch.arange(90, 100), torch.arange(185, 190)])
    complete = pool.clone()
    pool[:, slots[gaps]] = float("nan")
    logits = pair.ours.forward(batch_of([Work(tokens, slots, gaps)]), pool, attention=form)
    assert_logits_agree(logits, everything[gaps])
    assert_logits_agree(logits, pair.expected(tokens)[gaps])
    torch.testing.assert_close(pool, complete, rtol=0, atol=TOLERANCE, equal_nan=True)


# The next two are on dense models: at random prompts a router would now and then meet a tie within rounding.


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    steps=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 100),
)
def test_any_schedule_gives_the_same_logits(load_pair, lengths, steps, form, seed):
    """Each step computes so many next tokens of each of two prompts; a last step computes the rest."""
    model = load_pair("v3-dense").ours
    prompts = [prompt(n, seed + i) for i, n in enumerate(lengths)]
    slots, pool = scattered_slots(*lengths, seed=seed), poisoned_pool(model)
    positions = [torch.arange(n) for n in lengths]
    logits = [[], []]
    for step in [*steps, lengths]:
        counts = [min(taken, len(left)) for taken, left in zip(step, positions, strict=True)]
        active = [i for i in (0, 1) if counts[i]]
        if not active:
            continue
        works = [Work(prompts[i], slots[i], positions[i][: counts[i]]) for i in active]
        parts = model.forward(batch_of(works), pool, attention=form).split([counts[i] for i in active])
        for i, part in zip(active, parts, strict=True):
            logits[i].append(part)
            positions[i] = positions[i][counts[i] :]
    for tokens, parts in zip(prompts, logits, strict=True):
        assert_logits_agree(torch.cat(parts), compute(model, tokens))


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 59), min_size=1, max_size=59), st.sampled_from(FORMS))
def test_any_holes_give_the_same_logits(load_pair, computed, form):
    model = load_pair("v2-yarn").ours
    tokens, (slots,) = prompt(60), scattered_slots(60)
    pool = poisoned_pool(model)
    everything = model.forward(batch_of([Work(tokens, slots, torch.arange(60))]), pool)
    positions = torch.tensor(sorted(computed))
    pool[:, slots[positions]] = float("nan")
    assert_logits_agree(
        model.forward(batch_of([Work(tokens, slots, positions)]), pool, attention=form), everything[positions]
    )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_control_a_wrong_position_changes_the_logits(load_pair, name):
    """What the tolerance of these tests is worth: an error of one position is a thousand times larger."""
    model = load_pair(name).ours
    tokens, slots = prompt(60), torch.arange(100)
    pool = model.new_pool(100)
    right = model.forward(batch_of([Work(tokens, slots, torch.arange(60))]), pool)[-1]
    # The last token one position late; the row it leaves out is that of another token.
    late = Work(torch.cat([tokens[:-1], tokens[:1], tokens[-1:]]), slots, torch.tensor([60]))
    pool[:, 59] = pool[:, 0]
    wrong = model.forward(batch_of([late]), pool)[-1]
    assert (wrong - right).abs().max() > 1000 * TOLERANCE


def test_control_a_row_in_the_wrong_slot_changes_the_logits(pair):
    tokens, slots, pool = prompt(60), torch.arange(60), pair.ours.new_pool(60)
    right = pair.ours.forward(batch_of([Work(tokens, slots, torch.arange(60))]), pool)[-1]
    swapped = slots.clone()
    swapped[[20, 40]] = swapped[[40, 20]]
    # Rows know their position, so order alone changes nothing ...
    last = torch.tensor([59])
    same = pair.ours.forward(batch_of([Work(tokens, swapped, last)]), pool)[-1]
    assert_logits_agree(same, right)
    # ... but another row does.
    swapped[20] = swapped[21]
    wrong = pair.ours.forward(batch_of([Work(tokens, swapped, last)]), pool)[-1]
    assert (wrong - right).abs().max() > 100 * TOLERANCE


def test_only_the_rows_of_the_batch_are_written(pair):
    tokens, (slots,) = prompt(50), scattered_slots(50)
    pool = torch.randn_like(pair.ours.new_pool(N_SLOTS))
    before = pool.clone()
    computed = torch.arange(20, 50)
    pair.ours.forward(batch_of([Work(tokens, slots, computed)]), pool)
    written = torch.zeros(N_SLOTS, dtype=torch.bool)
    written[slots[computed]] = True
    assert torch.equal(pool[:, ~written], before[:, ~written])
    assert (pool[:, written] != before[:, written]).any(dim=-1).all()


def test_logits_only_of_the_rows_asked_for(pair):
    tokens, slots = prompt(30), torch.arange(30)
    whole = batch_of([Work(tokens, slots, torch.arange(30))])
    some = ForwardBatch(whole.token_ids_T, whole.positions_T, whole.out_slots_T, whole.spans, torch.tensor([29, 3]))
    none = ForwardBatch(
        whole.token_ids_T, whole.positions_T, whole.out_slots_T, whole.spans, torch.empty(0, dtype=torch.int64)
    )
    logits = pair.ours.forward(whole, pair.ours.new_pool(30))
    assert_logits_agree(pair.ours.forward(some, pair.ours.new_pool(30)), logits[[29, 3]])
    assert pair.ours.forward(none, pair.ours.new_pool(30)).shape == (0, 512)


@pytest.mark.parametrize("form", FORMS)
def test_contiguous_and_scattered_slots_give_the_same_bits(pair, form):
    tokens, positions = prompt(150), torch.arange(150)
    contiguous, *others = (
        pair.ours.forward(batch_of([Work(tokens, slots, positions)]), poisoned_pool(pair.ours), attention=form)
        for slots in (torch.arange(7, 157), *scattered_slots(150), torch.arange(0, 300, 2), torch.arange(149, -1, -1))
    )
    for logits in others:
        assert torch.equal(logits, contiguous)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["absorbed", "materialised"])
def test_narrow_dtypes_stay_close(load_pair, tmp_path, dtype, form):
    # Dense: a router may choose otherwise after rounding.
    path = write_tiny_checkpoint(tmp_path, **CHECKPOINTS["v3-dense"])
    model = MlaModel.load(path, dtype=dtype)
    tokens = prompt(80)
    pool = model.new_pool(80)
    assert pool.dtype == dtype
    logits = model.forward(batch_of([Work(tokens, torch.arange(80), torch.arange(80))]), pool, attention=form)
    assert logits.dtype == torch.float32
    expected = load_pair("v3-dense").expected(tokens)
    assert torch.cosine_similarity(logits, expected, dim=-1).min() > 0.99


def test_unknown_choices_are_refused(pair, tmp_path):
    with pytest.raises(InputError, match="'flash'; valid forms: auto, absorbed, materialised"):
        compute(pair.ours, prompt(3), attention="flash")
    with pytest.raises(UnsupportedModelError, match="float64"):
        MlaModel.load(write_tiny_checkpoint(tmp_path), dtype=torch.float64)


def test_pool_can_be_changed_outside_of_inference(pair):
    pool = pair.ours.new_pool(10)
    assert pool.shape == (3, 10, 48)
    assert not pool.is_inference()
    assert pair.ours.layout.width == 48


def test_a_malformed_batch_is_a_broken_invariant():
    one, two = torch.zeros(1, dtype=torch.int64), torch.arange(2)
    with pytest.raises(AssertionError):  # a span must tile the batch
        ForwardBatch(two, two, two, (Span(0, 1, one),), one)
    with pytest.raises(AssertionError):  # key slots must end at the last query
        ForwardBatch(two, two, two, (Span(0, 2, one),), one)
    with pytest.raises(AssertionError):
        ForwardBatch(two, two, two.to(torch.int32), (Span(0, 2, two),), one)


# -- the two forms of attention ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return ModelConfig.from_checkpoint(write_tiny_checkpoint(tmp_path_factory.mktemp("config")))


def attend(config, n_rows, positions, form):
    """Attend random queries at the positions; return (result, counted operations)."""
    generator = torch.Generator().manual_seed(0)
    kv_b = torch.randn(config.n_heads * (config.qk_nope_head_dim + config.v_head_dim), 32, generator=generator)
    rows = torch.randn(n_rows, 48, generator=generator)
    query = torch.randn(len(positions), config.n_heads, config.qk_head_dim, generator=generator) * 0.1
    tokens = torch.zeros(n_rows, dtype=torch.int64)
    batch = batch_of([Work(tokens, torch.arange(n_rows), positions)])
    plan = AttentionPlan.of(batch, config, form, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        out = LatentAttention(kv_b, config.n_heads, config.qk_nope_head_dim)(query, rows, plan)
    return out, counter.get_total_flops()


def test_forms_agree_and_cost_what_the_cost_functions_say(config):
    # One query: no masked pair is computed, so the count is exact.
    last = torch.tensor([199])
    absorbed, absorbed_count = attend(config, 200, last, AttentionForm.ABSORBED)
    materialised, materialised_count = attend(config, 200, last, AttentionForm.MATERIALISED)
    torch.testing.assert_close(absorbed, materialised, rtol=0, atol=1e-5)
    assert absorbed_count == absorbed_flops(config, 1, 200)
    assert materialised_count == materialised_flops(config, 200, 200)


@pytest.mark.parametrize(("n_queries", "expected"), [(1, "absorbed"), (8, "absorbed"), (200, "materialised")])
def test_auto_takes_the_cheaper_form(config, n_queries, expected):
    positions = torch.arange(200 - n_queries, 200)
    counts = {form: attend(config, 200, positions, form)[1] for form in AttentionForm}
    assert counts["auto"] == counts[expected] == min(counts.values())


def test_causal_work_is_about_halved(config):
    n = 8 * attention_module._BLOCK_QUERIES
    _, count = attend(config, n, torch.arange(n), AttentionForm.MATERIALISED)
    full, causal = (materialised_flops(config, n, pairs) for pairs in (n * n, n * (n + 1) // 2))
    assert causal < count < causal + 0.15 * full


def test_long_spans_get_smaller_blocks(config, monkeypatch):
    monkeypatch.setattr(attention_module, "_BLOCK_SCORES", config.n_heads * 1000 * 20)
    positions = torch.arange(900, 1000)
    batch = batch_of([Work(torch.zeros(1000, dtype=torch.int64), torch.arange(1000), positions)])
    plan = AttentionPlan.of(batch, config, AttentionForm.MATERIALISED, torch.device("cpu"), torch.float32)
    assert [block.n_queries for block in plan.materialised[0].blocks] == [20] * 5


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 50))
def test_blocks_tile_the_queries_with_contiguous_positions(positions, width):
    positions = sorted(positions)
    blocks = list(_blocks(torch.tensor(positions), width))
    assert [i for start, end in blocks for i in range(start, end)] == list(range(len(positions)))
    for start, end in blocks:
        assert 0 < end - start <= width
        assert positions[end - 1] - positions[start] == end - 1 - start
    # No cut without a reason.
    for (start, end), (_, next_end) in pairwise(blocks):
        assert positions[end] != positions[end - 1] + 1 or end - start == width or next_end - start > width
