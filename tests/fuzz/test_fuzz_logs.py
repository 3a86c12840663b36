"""``irminsul analyze`` on damaged logs: tables or one sentence that names file and place, and never for long."""

import json

import pytest
from damage import damaged, damaged_bytes, json_bytes, packed
from fuzzing import fuzz, irminsul, write
from hypothesis import given
from hypothesis import strategies as st
from sample_logs import LOGS

from irminsul.trace.readers import FORMATS


def test_every_form_has_a_log_and_all_of_it_is_read(tmp_path, compiled):
    assert set(LOGS) == set(FORMATS)
    for form, lines in LOGS.items():
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        out = irminsul("analyze", write(tmp_path / form, text.encode()), "--tokenizer", compiled)
        assert out.status == 0, (form, out.stderr)
        assert "skipped" not in out.stdout


@st.composite
def damaged_logs(draw):
    """(form, bytes of a file)."""
    form = draw(st.sampled_from(sorted(LOGS)))
    lines = list(LOGS[form])
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        if isinstance(lines[place], str):
            lines[place] = damaged_line(lines[place], draw)
        elif not isinstance(lines[place], bytes):
            lines[place] = damaged(lines[place], draw)
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    data = b"".join(line + end for line in (encoded(line, draw) for line in lines))
    return form, packed(damaged_bytes(data, draw), draw)


def damaged_line(line, draw):
    """Damage the record inside a server's line, or else its characters."""
    start = line.find("{")
    if start >= 0 and draw(st.booleans()):
        return line[:start].encode() + json_bytes(damaged(json.loads(line[start:]), draw), draw)
    return damaged_bytes(line.encode(), draw)


def encoded(line, draw):
    if isinstance(line, bytes):
        return line
    return line.encode() if isinstance(line, str) else json_bytes(line, draw)


@fuzz
@given(damaged_logs(), st.booleans(), st.booleans(), st.booleans())
def test_a_damaged_log_is_read_or_refused(compiled, tmp_path_factory, form_and_data, told, skip_bad, cached):
    form, data = form_and_data
    folder = tmp_path_factory.mktemp("fuzz")
    path = write(folder / "log", data)
    options = ["--tokenizer", compiled, "--json", folder / "out.json", "--html", folder / "out.html"]
    options += ["--format", form] if told else []
    options += ["--skip-bad"] if skip_bad else []
    options += ["--token-cache", folder / "cache"] if cached else []
    out = irminsul("analyze", path, *options)
    if out.status:
        assert str(path) in out.sentence
        assert "line" in out.sentence or out.sentence.startswith("no calls in ")
    else:
        json.loads((folder / "out.json").read_text(), parse_constant=pytest.fail)
        assert (folder / "out.html").stat().st_size > 1000
