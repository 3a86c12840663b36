"""What is refused, and the document made from the same table."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from irminsul.errors import UnsupportedModelError
from irminsul.sglang.support import (
    ARCHITECTURES,
    OPTIONS,
    TESTED_VERSION,
    Option,
    Support,
    check_server,
    check_version,
    environment_problems,
    markdown,
    model_problems,
    option_problems,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "sglang-support.md"


def arguments(**changed):
    """Flags of a server that is supported."""
    return SimpleNamespace(**{option.name: option.allowed[0] for option in OPTIONS} | changed)


def config(**changed):
    """A model's config that is supported."""
    return SimpleNamespace(**{"architectures": ["DeepseekV2ForCausalLM"], "qk_rope_head_dim": 64} | changed)


def test_the_document_is_what_the_table_generates():
    assert DOCUMENT.read_text() == markdown(), "python -m irminsul.sglang.support > docs/sglang-support.md"


def test_the_document_names_every_option_and_class():
    text = markdown()
    for name in [option.flag for option in OPTIONS] + [row.name for row in ARCHITECTURES]:
        assert f"| `{name}` |" in text


def test_lines_of_the_document_fit():
    for line in markdown().splitlines():
        assert line.startswith("| ") or len(line) <= 120


def test_a_supported_server_has_no_problems():
    assert not list(option_problems(arguments()))
    assert not list(model_problems(config()))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_any_other_value_is_refused_with_flag_reason_and_choices(option):
    (problem,) = option_problems(arguments(**{option.name: "something else"}))
    assert problem.startswith(f"{option.flag} 'something else' is not supported: {option.reason}; supported: ")
    assert problem.endswith(", ".join(option.choices))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nnodes", 2),
        ("pp_size", 2),
        ("attn_dp_size", 2),
        ("enable_dp_attention", True),
        ("speculative_algorithm", "EAGLE"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("disaggregation_mode", "prefill"),
        ("attention_backend", "trtllm_mla"),
    ],
)
def test_values_that_were_never_shown_are_refused(name, value):
    assert len(list(option_problems(arguments(**{name: value})))) == 1


def test_one_and_true_are_different():
    assert not Option("pp_size", (1,), "").allows(True)
    assert not Option("enable_mis", (False,), "").allows(0)


def test_every_problem_is_told_and_the_first_raised():
    several = arguments(pp_size=2, nnodes=2)
    assert [problem.split()[0] for problem in option_problems(several)] == ["--pp-size", "--nnodes"]
    with pytest.raises(UnsupportedModelError, match="--pp-size 2 is not supported"):
        check_server(several, SimpleNamespace(hf_config=config()))


def test_a_flag_that_this_sglang_does_not_have_is_refused():
    without = arguments()
    del without.enable_mis
    (problem,) = option_problems(without)
    assert problem == f"this SGLang has no --enable-mis: its flags differ from those of {TESTED_VERSION}"


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_model_classes(row):
    problems = list(model_problems(config(architectures=[row.name])))
    assert bool(problems) == (row.support is Support.REFUSED)
    assert all(row.note in problem for problem in problems)


@pytest.mark.parametrize("names", [["LlamaForCausalLM"], [], None])
def test_another_model_class_is_refused_with_the_supported(names):
    (problem,) = model_problems(config(architectures=names))
    assert problem.startswith(f"model class {(names or ['(none)'])[0]} has not been shown to work; supported: Deepseek")
    assert "DeepseekV32" not in problem


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"index_topk": 2048}, "sparse attention (DSA)"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3'"),
        ({"qk_rope_head_dim": 0}, "NoPE"),
        ({"mla_use_nope": True}, "NoPE"),
    ],
)
def test_properties_of_a_model_are_refused(changed, told):
    (problem,) = model_problems(config(**changed))
    assert problem.startswith(told)


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"type": "yarn", "factor": 40}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_known_rotary_types_pass(changed):
    assert not list(model_problems(config(**changed)))


def test_another_release_needs_to_be_forced():
    check_version(TESTED_VERSION, force=False)
    check_version("0.6.0", force=True)
    with pytest.raises(UnsupportedModelError, match=r"SGLang 0.6.0 has not been tested, 0.5.23 has; force_version"):
        check_version("0.6.0", force=False)


@pytest.mark.parametrize(
    ("value", "refused"), [("1", True), ("True", True), ("maybe", True), ("0", False), ("", False)]
)
def test_a_front_end_without_hooks_is_refused(value, refused):
    told = list(environment_problems({"SGLANG_RUST_SERVER": value}))
    assert bool(told) is refused
    assert all("SGLANG_RUST_SERVER" in sentence for sentence in told)
    assert not list(environment_problems({}))
