"""What is shown of blocks: medians, spread, pairs; and a page that needs nothing else."""

import re
import sys

import pytest
from measured_blocks import block

from irminsul.bench.report import make_report, markdown, to_html
from irminsul.cli import main

BLOCKS = [
    *(block("stock", 0, 0.1), block("live", 0, 0.05), block("live", 1, 0.08), block("stock", 1, 0.2)),
    *(block("stock", 2, 0.3), block("live", 2, 0.3), block("stock", 0, 1.0, "8 at once", succeeded=8)),
]


def row(text, *cells):
    (line,) = [line for line in text.splitlines() if line.startswith("| " + " | ".join(cells))]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_medians_spread_and_ratios_of_the_same_repeat():
    text = markdown(BLOCKS)
    load = "<b>log/"
    assert row(text.split("## Ratios")[0], load, "1 at once", "stock")[3:7] == [
        *("3", "200 [100, 300]", "400 [200, 600]", "600 [300, 900]"),
    ]
    ratios = text.split("## Ratios")[1].split("## Prompt")[0]
    assert row(ratios, load, "1 at once", "live / stock")[3] == "0.50 [0.40, 1.00]"
    assert "8 at once" not in ratios, "only one server was measured there"
    tokens = row(text.split("## Prompt")[1], load, "8 at once", "stock")
    assert tokens[4:] == ["1,000", "25.0%", "-", "-", "75.0%", "-", "-", "-", "2 of 10"]


def test_what_must_be_known_is_said_once():
    facts = make_report(BLOCKS).facts
    assert facts == (
        "All servers: version 0.5.23.",
        "Server stock: sglang, model m. Cache at the start of a block: flushed. Output length fixed.",
        "Server live: sglang, model m, mode live. Cache at the start of a block: flushed. Output length fixed.",
        "Load <b>log|: 10 calls in 2 sessions, 3 longer calls left out; mind this.",
        "Protocol openai, 16 output tokens, think time 0 s, 2 warm-up requests, seed 0.",
        "Client: irminsul 0.1.0, Abacus, 2 cores; GPUs there: H200, 1. 2026-11-30.",
    )
    busy = make_report([block(client_cpu_share=0.95)]).facts[-1]
    assert busy.startswith("Beware: the load generator itself was busy for up to 95%")


def test_of_a_server_that_has_changed_the_newest_blocks_count():
    changed = block("stock", 0, 9.0)
    changed["server"]["facts"] = {"version": "0.5.24"}
    report = make_report([*BLOCKS, changed])
    assert [len(group.blocks) for group in report.groups] == [4, 1]
    assert report.facts[-1] == "3 older blocks of servers that have changed since are left out."


def test_what_a_terminal_would_obey_is_written_out():
    hostile = block()
    hostile["server"] |= {"model": "m\x1b[2J\nServer b", "facts": {"version": "1\r2"}}
    hostile["load"] |= {"name": "log\x07", "notes": ["a\u202eb"]}
    text = markdown([hostile])
    assert all(line.isprintable() for line in text.splitlines())
    assert r"model m\x1b[2J\nServer b, version 1\r2." in text
    assert r"Load log\x07: 10 calls" in text
    assert r"; a\u202eb." in text
    assert row(text.split("## Prompt")[1], r"log\x07", "1 at once", "stock")
    assert "m\x1b[2J\nServer b" in to_html([hostile])


def test_an_empty_folder_has_no_tables():
    assert markdown([]) == "No block has been measured.\n"


def test_the_page_escapes_plots_and_reaches_nowhere():
    page = to_html(BLOCKS)
    assert "<b>log" not in page
    assert "&lt;b&gt;log|: TTFT p50, ms" in page
    assert not re.search(r"(src|href)=|url\(|https?://(?!127)", page)
    assert page.count("<svg") == 2
    points = re.findall(r'<circle class="series-(\w+)" cx="([\d.]+)" cy="([\d.]+)"', page)
    assert [colour for colour, *_ in points] == ["prefix", "prefix", "shifted"] * 2
    stock_one, stock_eight, live_one = [(float(x), float(y)) for _, x, y in points[:3]]
    assert stock_one[0] == live_one[0] < stock_eight[0]
    # 200 ms, 1,000 ms and 80 ms on an axis from 0 (186) to 1,000 (14).
    assert [stock_one[1], stock_eight[1], live_one[1]] == pytest.approx([151.6, 14, 172.2], abs=0.1)
    assert to_html([]).count("<svg") == 0


def test_the_command_prints_and_writes(tmp_path, monkeypatch, capsys):
    import json

    (tmp_path / "blocks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in BLOCKS))
    monkeypatch.setattr(
        sys, "argv", ["irminsul", "bench", "report", str(tmp_path), "--html", str(tmp_path / "page.html")]
    )
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out == markdown(BLOCKS)
    assert (tmp_path / "page.html").read_text() == to_html(BLOCKS)
    monkeypatch.setattr(sys, "argv", ["irminsul", "bench", "report", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["blocks.jsonl", "requests.jsonl.gz"])
def test_the_page_is_not_written_over_the_results(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "blocks.jsonl").write_text("")
    monkeypatch.setattr(sys, "argv", ["irminsul", "bench", "report", str(tmp_path), "--html", str(tmp_path / name)])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert f"{name}: it is an input of this command" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["blocks.jsonl"]
