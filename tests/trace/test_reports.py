import io
import json
import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
from hostile_log import HOSTILE, hostile_log
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_analysis import analysed, rag_log
from word_log import WordLog, prose

from irminsul.errors import InputError
from irminsul.trace.analysis import COMPARED_MATCHERS, Analysis, AnalysisConfig
from irminsul.trace.records import SpanKind
from irminsul.trace.report_html import to_html, write_html
from irminsul.trace.report_json import to_json, write_json
from irminsul.trace.report_text import analysis_stages, print_report, savings, visible


@pytest.fixture(scope="module")
def hostile() -> Analysis:
    return analysed(hostile_log())


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


def test_the_json_has_what_the_schema_promises() -> None:
    report = json.loads(to_json(analysed(rag_log(), AnalysisConfig())))
    assert report["schema"] == 1
    assert {"calls", "prompt_tokens", "prefix_tokens", "tail_tokens"} <= set(report["totals"])
    assert set(report["oracle"]) == {"32", "64", "128"}
    assert tuple(sorted(report["matchers"])) == tuple(sorted(COMPARED_MATCHERS))
    assert all(matcher["recovered_tokens"] >= 0 for matcher in report["matchers"].values())
    assert report["shipped"]["matcher"] == "winnow64"
    assert all(map(math.isfinite, numbers(report)))
    assert report["verdict"]["worth"] in ("worth it", "borderline", "not worth it")


def test_equal_logs_give_equal_bytes() -> None:
    assert to_json(analysed(hostile_log())) == to_json(analysed(hostile_log()))
    assert to_html(analysed(hostile_log())) == to_html(analysed(hostile_log()))


def test_a_session_that_has_copied_is_shown_as_approximate() -> None:
    log, known, system = WordLog(), prose(1, 60), prose(2, 8)
    turns = [prose(3 + at, 20) for at in range(3)]
    log.add((SpanKind.SYSTEM, prose(50, 30)), (SpanKind.USER, known))
    for count in (1, 2, 3):
        said = [(SpanKind.USER, text) for text in turns[:count]]
        log.add((SpanKind.SYSTEM, system), (SpanKind.USER, known), *said, thread=1)
    analysis = analysed(log)
    shown = "".join(savings(analysis))
    assert "3 of 4 calls would be answered on approximate rows" in shown
    assert json.loads(to_json(analysis))["shipped"]["approximate_calls"] == 3
    kinds = [[segment[0] for segment in strip["segments"]] for strip in strips_of(to_html(analysis))]
    assert kinds == [[2], [2, 1, 2], [0, 3, 2], [0, 3, 2]]


def strips_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    strips: list[dict[str, Any]] = json.loads(found[1])
    return strips


def test_json_is_plain_ascii_with_sorted_keys(hostile: Analysis) -> None:
    text = to_json(hostile)
    assert text.isascii()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_hostile_text_stays_text(hostile: Analysis) -> None:
    page = to_html(hostile)
    assert "alert(1)" in page, "the text is shown"
    assert len(re.findall(r"<script", page)) == 2
    assert "<img" not in page
    assert "onerror=alert(2)&gt;" in page
    assert not set(page) & set("\u202e\u2066\x1b")
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert len(data) == 6
    assert data[0]["place"].startswith(visible(HOSTILE))


def test_the_page_reaches_for_nothing(hostile: Analysis) -> None:
    page = to_html(hostile)
    assert "default-src 'none'" in page.replace("&#39;", "'")
    assert not re.search(r"""(?:src|href|action)\s*=\s*["'](?!x)""", page)
    assert " style=" not in page, "the policy would drop it"
    assert "@import" not in page
    assert "url(" not in page


def test_a_terminal_gets_no_control_characters(hostile: Analysis) -> None:
    out = io.StringIO()
    print_report(Console(file=out, width=100), hostile)
    text = out.getvalue()
    assert "Shifted reuse is approximate" in text
    assert "promise nothing" in " ".join(text.split())
    assert hostile.verdict.split(";")[0][:40] in text
    assert all(char == "\n" or unicodedata.category(char) != "Cc" for char in text)
    assert "\u202e" not in text


@given(st.text())
def test_visible_text_is_harmless_and_keeps_the_rest(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in shown)
    plain = "".join(char for char in text if char.isalnum())
    assert plain == "".join(char for char in re.sub(r"<U\+[0-9A-F]{4,6}>", "", shown) if char.isalnum()) or "<" in text


def test_files_that_cannot_be_written_are_refused(tmp_path, hostile: Analysis) -> None:
    for write in (write_json, write_html):
        with pytest.raises(InputError, match="cannot write"):
            write(tmp_path / "missing" / "file", hostile)
        write(tmp_path / "file", hostile)
        assert (tmp_path / "file").stat().st_size > 1000


def test_the_bar_ends_full() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with analysis_stages(console, 100, 2) as stages:
        for name in ("one", "two"):
            with stages(name) as advance:
                advance(60)
                advance(40)
    assert "two" in out.getvalue()
    assert "100%" in out.getvalue()
