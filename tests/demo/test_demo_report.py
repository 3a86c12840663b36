import io

import pytest
from rich.console import Console

from irminsul.demo.report import cells, live_progress, notes, print_report
from irminsul.demo.results import DemoReport, RequestResult, Row
from irminsul.engine.types import Usage
from irminsul.machine import Machine

MACHINE = Machine("Some CPU", 2, 2, "2.13.0", "float32")
ROW = Row("changed_tools", 4, 9347, 1041, 12, 6123, 2171, 1500, 6300, 6100, 4123.4, 812.3, 2 / 3, 0.01234)


def result(number=1, scenario="changed_metadata"):
    usage = Usage(2000, 0, 0, 0, 2000, 1, 0, 0.0, 0.0, 0.0)
    return RequestResult(scenario, number, usage, usage, 0, 4.5678, 0.3214, True, 0.0)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=80)


def printed(console) -> str:
    return console.file.getvalue()


def test_a_row_is_written_with_units():
    assert cells(ROW) == (
        "changed_tools",
        "4",
        "9,347",
        "1,041",
        "12",
        "6,123",
        "2,171",
        "96.8%",
        "4,123",
        "812",
        "5.1x",
        "67%",
        "0.0123",
    )


def test_what_was_not_measured_is_a_dash():
    row = Row("one", 1, 10, 0, 0, 0, 10, 0, 0, 0, None, None, None, None)
    assert cells(row)[7:] == ("-",) * 6


def test_the_table_has_a_row_for_each_scenario_and_one_for_all(console):
    report = DemoReport((result(1), result(2), result(1, "swapped_role")), 0, MACHINE)
    print_report(console, report)
    text = printed(console)
    rows = [line.split() for line in text.splitlines() if line.lstrip().startswith(("changed", "swapped", "totals"))]
    assert [row[:3] for row in rows] == [
        ["changed_metadata", "2", "4,000"],
        ["swapped_role", "1", "2,000"],
        ["totals", "3", "6,000"],
    ]
    assert "…" not in text, "nothing is cut off, however narrow the terminal"
    assert max(map(len, text.splitlines())) <= 120


def test_the_notes_say_approximate_cold_and_which_machine():
    report = DemoReport((result(),), 0, MACHINE)
    text = "\n".join(notes(report))
    assert "Shifted reuse is approximate" in text
    assert "first of each scenario, which is cold in both" in text
    assert text.endswith(f"Machine: {MACHINE}.")
    assert "left out" not in text


def test_left_out_calls_are_said(console):
    print_report(console, DemoReport((result(),), 7, MACHINE))
    assert "Calls left out because their prompts are longer than this model takes: 7." in printed(console)


def test_the_prefix_tokens_of_both_engines_are_said(console):
    caching = Usage(2000, 900, 0, 0, 1100, 1, 0, 0.0, 0.0, 0.0)
    live = Usage(2000, 700, 200, 800, 300, 1, 0, 0.0, 0.0, 0.0)
    report = DemoReport((RequestResult("turns", 2, caching, live, 1000, 2.0, 1.0, True, 0.0),), 0, MACHINE)
    said = "Prefix caching alone had 900 tokens of prefix, all lossless; irminsul 700 lossless and 200 approximate."
    assert said in notes(report)


def test_a_terminal_shows_a_bar_with_the_latest_result():
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with live_progress(terminal, 2) as progress:
        progress(result(1))
        progress(result(2))
    text = printed(terminal)
    assert "changed_metadata 2: prefix caching 4,568 ms, irminsul 321 ms" in text
    assert "2/2" in text


def test_a_file_gets_a_line_for_each_result_at_once(console):
    with live_progress(console, 2) as progress:
        progress(result(1))
        assert printed(console) == "changed_metadata 1: prefix caching 4,568 ms, irminsul 321 ms (cold)\n"
        progress(result(2))
    assert len(printed(console).splitlines()) == 2
