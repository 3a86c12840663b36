"""Mechanics on a tiny random model, and that the harness reuses what the engine reuses."""

import ast
import inspect
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from irminsul.checkpoints.perplexity import whole_sequence_logits
from irminsul.demo.run import kl_divergence
from irminsul.engine.engine import Engine, EngineConfig
from irminsul.engine.types import Request, SamplingParams
from irminsul.errors import InputError
from irminsul.fidelity import paths as paths_module
from irminsul.fidelity.measure import Harness, holds, token_kl
from irminsul.fidelity.paths import FULL, PATHS, QUICK_PATHS, SHIFTED, shipped_path
from irminsul.fidelity.rows import RowCache
from irminsul.fidelity.tasks import Case
from irminsul.plan import ReusePolicy

ALL = list(PATHS.values())
TOKENS = 12


@pytest.fixture(scope="module")
def cases(make_words) -> list[Case]:
    """A passage of 200 tokens behind other text, moved by -30, +10 and +50."""
    made = []
    for at, length in enumerate((40, 80, 120)):
        passage, question = make_words(100 + at, 200), make_words(200 + at, 9)
        prompt = (*make_words(300 + at, length), *passage, *question)
        donor = (*make_words(400 + at, 70), *passage, *make_words(500 + at, 5))
        middle = (*make_words(600 + at, 90), *passage, *make_words(700 + at, 3))
        made.append(Case((donor,), prompt, len(prompt) - 9, middle, "no such text", "moved"))
    return made


@pytest.fixture(scope="module")
def harness(model) -> Harness:
    return Harness(model, lambda tokens: " ".join(map(str, tokens)))


@pytest.fixture(scope="module")
def results(harness, cases):
    return [harness.measure("words", at, case, ALL, TOKENS) for at, case in enumerate(cases)]


def mean_kl(results, name: str) -> float:
    return float(np.mean([result.paths[name].kl for result in results]))


def test_every_path_is_measured_beside_the_reference(results):
    for result in results:
        assert set(result.paths) == {FULL, *PATHS}
        full = result.paths[FULL]
        assert (full.kl, full.argmax_match, full.first_divergence) == (0.0, 1.0, full.tokens)
        assert full.computed == full.prompt_tokens


def test_the_prefix_cache_changes_nothing_but_rounding(results):
    for result in results:
        prefix = result.paths["prefix"]
        assert prefix.kl < 1e-6
        assert (prefix.first_divergence, prefix.computed) == (prefix.tokens, 1)


def test_a_passage_that_was_moved_is_a_shifted_run(results):
    for result, delta in zip(results, (-30, 10, 50), strict=True):
        assert result.paths["shifted"].runs == ((200, delta),)
        assert result.paths["naive"].runs == ((200, delta),)
        assert result.paths["chained"].runs[0][0] == 200


def test_shifted_is_better_than_naive_and_the_control_is_worst(results):
    shifted, naive, control = (mean_kl(results, name) for name in ("shifted", "naive", "control"))
    assert 0 < shifted < naive
    assert shifted < control


def test_recomputing_buys_fidelity_at_its_price(results):
    assert mean_kl(results, "shifted-w64") < mean_kl(results, "shifted")
    for result in results:
        computed = [result.paths[f"shifted-w{w}"].computed for w in (8, 16, 32, 64)]
        assert computed == [result.paths["shifted"].computed + w for w in (8, 16, 32, 64)]


def test_a_minimum_run_beyond_the_passage_computes_everything(results):
    for result in results:
        longer = result.paths["shifted-run256"]
        assert longer.shifted == 0
        assert longer.kl < 1e-6


def test_the_carve_out_cuts_runs_that_begin_before_it(results):
    first = results[0].paths
    assert first["shifted-carve128"].runs == ((200 - (128 - 40), -30),)
    assert first["shifted-carve0"].runs == first["shifted"].runs


def test_the_next_turn_computes_what_was_added_and_the_row_before_it(results):
    for result in results:
        derived = result.paths["derived"]
        assert (derived.shifted, derived.computed) == (0, 9)
        # The same rows stand before the question as in `shifted`.
        assert derived.kl == pytest.approx(result.paths["shifted"].kl, rel=1e-2)


def test_rows_shifted_by_zero_behind_the_same_text_are_the_prefix(harness, make_words):
    prompt = make_words(1, 240)
    case = Case((make_words(2, 50),), prompt, 230, prompt, None, "the middle prompt is the prompt")
    result = harness.measure("words", 0, case, [PATHS["chained"], PATHS["naive"]], TOKENS)
    chained = result.paths["chained"]
    assert chained.runs == ((207, 0),)
    assert chained.kl < 1e-6
    assert chained.first_divergence == chained.tokens
    assert result.paths["naive"].shifted == 0


def test_paths_in_one_forward_and_one_by_one_agree(model, cases, results):
    one_by_one = Harness(model, str, pool_bytes=0).measure("words", 0, cases[0], ALL, TOKENS)
    for name, result in one_by_one.paths.items():
        together = results[0].paths[name]
        assert result.kl == pytest.approx(together.kl, abs=1e-5), name
        assert (result.runs, result.computed) == (together.runs, together.computed)


def test_what_is_computed_together_does_not_depend_on_earlier_cases(model, cases, make_words, monkeypatch):
    """A larger case makes the pool larger, but not the groups of paths."""
    forward = RowCache.forward
    sizes = []
    monkeypatch.setattr(RowCache, "forward", lambda rows, parts: sizes.append(len(parts)) or forward(rows, parts))
    long = make_words(9, 600)
    larger = Case((long[:300],), (*make_words(8, 20), *long), 600, (*make_words(7, 20), *long), None, "")
    harness = Harness(model, str, pool_bytes=0)
    first = harness.measure("words", 0, cases[0], ALL, TOKENS)
    alone = sizes.copy()
    harness.measure("words", 1, larger, ALL, TOKENS)
    sizes.clear()
    assert harness.measure("words", 0, cases[0], ALL, TOKENS) == first
    assert sizes == alone


def test_the_reference_is_greedy_decoding_of_the_whole_prompt(model, cases):
    texts = []
    harness = Harness(model, lambda tokens: texts.append(tokens) or "")
    harness.measure("words", 0, cases[0], [], TOKENS)
    (text,) = texts
    logits = whole_sequence_logits(model)(torch.tensor([*cases[0].prompt, *text]))
    assert logits[len(cases[0].prompt) - 1 : -1].argmax(dim=-1).tolist() == text


def test_a_path_writes_the_text_that_the_engine_writes(model, cases):
    """The plan, the rows and the decoded text are those of a live engine that was sent the same prompts."""
    assert ReusePolicy(carve_out=32, min_run=64, recompute=0, min_known=0) == SHIFTED
    for case in cases:
        texts = []
        harness = Harness(model, lambda tokens, texts=texts: texts.append(tokens) or "")
        result = harness.measure("words", 0, case, [PATHS["shifted"]], TOKENS)
        engine = Engine(model, EngineConfig(pool_slots=2048, policy=SHIFTED))
        outputs = []
        for name, tokens, length in (("donor", case.donors[0], 1), ("prompt", case.prompt, TOKENS)):
            engine.submit(Request(name, tokens, SamplingParams(temperature=0.0, max_tokens=length)))
            while engine.has_work:
                outputs += [output for output in engine.step() if output.request_id == "prompt"]
        usage = outputs[0].usage
        measured = result.paths["shifted"]
        assert (usage.shifted, usage.computed) == (measured.shifted, measured.computed)
        assert texts[1] == [output.token_id for output in outputs][: len(texts[1])]
        assert len(texts[1]) == len(texts[0]) or texts[1][-1] in model.config.eos_token_ids


def test_a_right_answer_is_found_in_the_paths_own_text(model, cases):
    texts = []
    Harness(model, lambda tokens: texts.append(tokens) or "").measure("w", 0, cases[0], [], TOKENS)
    answer = " ".join(map(str, texts[0][-2:]))
    case = Case(cases[0].donors, cases[0].prompt, cases[0].session_end, cases[0].middle, answer, "")
    harness = Harness(model, lambda tokens: " ".join(map(str, tokens)))
    paths = harness.measure("w", 0, case, [PATHS["prefix"], PATHS["control"]], TOKENS).paths
    assert (paths[FULL].score, paths["prefix"].score) == (True, True)
    assert paths["control"].first_divergence == paths["control"].tokens or not paths["control"].score


def test_a_prompt_beyond_the_context_is_refused(harness, make_words):
    case = Case((make_words(1, 4090),), make_words(2, 10), 5, make_words(3, 10), None, "")
    with pytest.raises(InputError, match="task long needs a context of 4102 tokens, and this model has 4096"):
        harness.measure("long", 0, case, [], TOKENS)


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("It is 48213.", "48213", True),
        ("It is 482137.", "48213", False),
        ("the ATTIC is", "the attic", True),
        ("atticus", "attic", False),
        ("", "x", False),
    ],
)
def test_an_answer_is_found_as_words_of_its_own(text, answer, found):
    assert holds(text, answer) is found


logits = arrays("float32", (3, 5), elements=st.floats(-30, 30, width=32)).map(torch.from_numpy)


@given(logits, logits)
def test_token_kl_is_the_demos_row_by_row_and_zero_of_itself(full, path):
    expected = [kl_divergence(a, b) for a, b in zip(full, path, strict=True)]
    assert token_kl(full, path).tolist() == pytest.approx(expected, abs=1e-9)
    assert token_kl(full, full).tolist() == [0.0, 0.0, 0.0]


def test_token_kl_by_hand():
    full = torch.tensor([[math.log(0.5), math.log(0.5)]])
    path = torch.tensor([[math.log(0.25), math.log(0.75)]])
    assert token_kl(full, path).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


def test_the_shipped_policy_is_that_of_a_path_that_is_always_measured():
    assert PATHS[shipped_path()].policy == ReusePolicy(min_known=0)
    assert shipped_path() in QUICK_PATHS


def test_paths_name_every_field_of_their_policy():
    """A default of the engine that changes must not change what a path means."""
    tree = ast.parse(inspect.getsource(paths_module))
    (call,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "SHIFTED"]
    assert {keyword.arg for keyword in call.keywords} == {field.name for field in fields(ReusePolicy)}


def test_a_path_is_decoded_beyond_the_end_of_the_reference(model, cases):
    """The reference ends early; the answer stands where only the path's own text reaches."""
    texts = []
    harness = Harness(model, lambda tokens: texts.append(tokens) or "")
    harness.measure("words", 0, cases[0], [PATHS["control"]], TOKENS)
    reference, own = texts
    divergence = next(at for at, (a, b) in enumerate(zip(reference, own, strict=False)) if a != b)
    ended = replace(model, config=replace(model.config, eos_token_ids=(reference[divergence],)))
    texts.clear()
    Harness(ended, lambda tokens: texts.append(tokens) or "").measure("words", 0, cases[0], [PATHS["control"]], TOKENS)
    assert len(texts[0]) == divergence + 1
    assert len(texts[1]) > len(texts[0])
    assert texts[1] == own[: len(texts[1])]


def test_logits_that_are_no_numbers_are_refused(model, cases):
    damaged = replace(model, final_norm_E=torch.full_like(model.final_norm_E, math.nan))
    with pytest.raises(InputError, match="logits are not finite"):
        Harness(damaged, str).measure("words", 0, cases[0], [], TOKENS)
