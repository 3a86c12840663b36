import json
import math

import pytest
import torch

from irminsul.demo.results import DemoReport, RequestResult, make_row, to_json, write_json
from irminsul.engine.types import Usage
from irminsul.errors import InputError
from irminsul.machine import Machine, cpu_name, describe_machine

MACHINE = Machine("Some CPU", 2, 2, "2.13.0", "float32")
ROW_KEYS = {
    "name",
    "requests",
    "prompt_tokens",
    "prefix",
    "shifted",
    "computed",
    "oracle",
    "ttft_prefix_ms",
    "ttft_live_ms",
    "first_token_agreement",
    "kl_first_mean",
}


def usage(prompt_tokens, prefix=0, approximate_prefix=0, shifted=0):
    computed = prompt_tokens - prefix - approximate_prefix - shifted
    return Usage(prompt_tokens, prefix, approximate_prefix, shifted, computed, 1, 0, 0.0, 0.0, 0.0)


def result(number, off, live, *, scenario="roles", oracle=0, times=(1.0, 1.0), agrees=True, kl=0.0):
    return RequestResult(scenario, number, off, live, oracle, *times, agrees, kl)


COLD = result(1, usage(1000), usage(1000), times=(9.0, 8.0))
SECOND = result(
    2, usage(1000, prefix=100), usage(1000, prefix=90, shifted=700), oracle=800, times=(2.0, 0.5), agrees=False, kl=0.3
)
THIRD = result(
    3,
    usage(1000, prefix=200),
    usage(1000, prefix=90, approximate_prefix=500, shifted=300),
    oracle=750,
    times=(4.0, 0.7),
)


def test_tokens_are_sums_of_all_requests():
    row = make_row("roles", [COLD, SECOND, THIRD])
    assert (row.requests, row.prompt_tokens) == (3, 3000)
    assert (row.prefix, row.approximate_prefix, row.shifted, row.computed) == (180, 500, 1000, 1320)
    assert row.prefix + row.approximate_prefix + row.shifted + row.computed == row.prompt_tokens
    assert (row.prefix_only, row.oracle) == (300, 1550)


def test_recovered_is_what_prefix_caching_would_have_computed_as_well():
    assert SECOND.recovered == 690
    row = make_row("roles", [COLD, SECOND, THIRD])
    assert row.recovered == 690 + 690
    assert row.share_of_oracle == 1380 / 1550


def test_quality_and_times_leave_the_first_request_of_each_scenario_out():
    other = result(1, usage(10), usage(10), scenario="tools", times=(70.0, 80.0))
    row = make_row("totals", [COLD, SECOND, THIRD, other])
    assert (row.ttft_prefix_ms, row.ttft_live_ms) == (3000.0, 600.0)
    assert row.speedup == 5.0
    assert row.first_token_agreement == 0.5
    assert row.kl_first_mean == 0.15


def test_what_cannot_be_measured_is_none():
    row = make_row("roles", [COLD])
    assert row.ttft_prefix_ms is row.ttft_live_ms is row.speedup is row.share_of_oracle is None
    assert row.first_token_agreement is row.kl_first_mean is None


def test_scenarios_keep_the_order_in_which_they_were_played():
    tools = result(1, usage(10), usage(10), scenario="tools")
    report = DemoReport((tools, COLD, SECOND), 0, MACHINE)
    assert [row.name for row in report.scenarios] == ["tools", "roles"]
    assert [row.requests for row in report.scenarios] == [1, 2]
    assert (report.totals.name, report.totals.requests) == ("totals", 3)


def test_json_has_the_promised_keys_and_no_nan(tmp_path):
    path = tmp_path / "demo.json"
    lone = result(1, usage(10), usage(10), scenario="tools")
    write_json(DemoReport((COLD, SECOND, THIRD, lone), 2, MACHINE), path)
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    for row in (*read["scenarios"], read["totals"]):
        assert set(row) >= ROW_KEYS
    assert read["scenarios"][0]["kl_first_mean"] == 0.15
    assert read["scenarios"][1]["kl_first_mean"] is None
    assert read["totals"]["shifted"] == 1000
    assert read["skipped"] == 2
    assert read["machine"]["dtype"] == "float32"
    assert read["requests_detail"][1]["live"]["shifted"] == 700
    assert read["requests_detail"][1]["recovered"] == 690


def test_a_divergence_that_is_no_number_is_never_written():
    broken = result(2, usage(10), usage(10), kl=math.nan)
    with pytest.raises(AssertionError):
        to_json(DemoReport((broken,), 0, MACHINE))


def test_a_json_file_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        write_json(DemoReport((COLD,), 0, MACHINE), tmp_path)


def test_the_machine_is_described():
    machine = describe_machine("cpu", "bfloat16")
    assert machine.processor
    assert machine.cores >= 1
    assert (machine.torch, machine.dtype) == (torch.__version__, "bfloat16")
    assert str(MACHINE) == "Some CPU, 2 cores, 2 torch threads, torch 2.13.0, float32"


def test_the_cpu_is_named_by_cpuinfo_where_there_is_one(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_name(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Abacus 5000: gold\nflags\t: add\n")
    assert cpu_name(cpuinfo) == "Abacus 5000: gold"
