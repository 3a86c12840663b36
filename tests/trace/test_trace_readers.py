"""Finding out the form of a log, and that no input crashes a reader."""

import importlib
import json
import pkgutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated

import irminsul.trace.formats
from irminsul.errors import InputError
from irminsul.trace import readers
from irminsul.trace.formats.log_file import Format
from irminsul.trace.lines import BadLines, Notes
from irminsul.trace.readers import FORMATS, read_calls

USER = {"role": "user", "content": "Which berth is free?"}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "4"}]}
NODE = {"uuid": "u", "parentUuid": None, "sessionId": "s", "timestamp": "2026-01-31T12:00:00Z"}
SGLANG = {"timestamp": "2026-01-31T12:00:00", "event": "request.received", "rid": "a", "obj": {"text": "x"}}

# One line of each form, twice where a form may show itself in two ways.
EXAMPLES = [
    ("openai-chat", {"model": "m", "messages": [USER]}),
    ("openai-chat", {"request": {"messages": [USER]}, "response": None}),
    ("openai-responses", {"model": "m", "input": [USER]}),
    ("openai-responses", {"model": "m", "input": "Which berth is free?", "max_output_tokens": 5}),
    ("anthropic", {"model": "m", "system": "x", "messages": [USER]}),
    ("anthropic", {"model": "m", "messages": [RESULT]}),
    ("anthropic", {"messages": [USER], "tools": [{"name": "f", "input_schema": {}}]}),
    ("sglang", f"[2026-01-31 12:00:00] {json.dumps(SGLANG)}"),
    (
        "vllm",
        "INFO 07-01 12:00:00 [logger.py:40] Received request a: prompt: 'x', params: P(), prompt_token_ids: None.",
    ),
    ("vllm", {"message": "Request a details: prompt: 'x', prompt_token_ids: [1]."}),
    ("claude-code", NODE | {"type": "user", "message": USER}),
    ("claude-code", {"type": "summary", "summary": "Berths", "leafUuid": "u"}),
    ("delta", {"session": "s", "agent": "a", "turn": 0, "ts": 1, "keep": 0, "append": [USER], "tools": None}),
    ("plain", {"prompt": "x"}),
    ("plain", {"input_ids": [1, 2]}),
    ("plain", {"text": "x"}),
]
ANSWER = NODE | {"type": "assistant", "uuid": "v", "parentUuid": "u", "message": {"content": "4", "id": "m"}}


def told_form(line, monkeypatch, log):
    """The form that a file with one line is read as."""
    told = []
    for make in readers._FORMATS:
        monkeypatch.setattr(make, "read", lambda self, file: (told.append(self.name), iter(()))[1])
    assert log.calls(line) == []
    return told


@pytest.mark.parametrize(("form", "line"), EXAMPLES)
def test_a_form_is_told_from_one_line(monkeypatch, log, form, line):
    assert told_form(line, monkeypatch, log) == [form]


@pytest.mark.parametrize(("form", "line"), EXAMPLES)
def test_a_form_that_is_named_is_read_the_same(log, form, line):
    lines = [line, ANSWER] if form == "claude-code" and "uuid" in line else [line]
    by_itself = [(call.info, str(call.prompt)) for call in log.calls(*lines)]
    named = [(call.info, str(call.prompt)) for call in log.calls(*lines, form=form)]
    assert [info for info, _ in by_itself] == [info for info, _ in named]
    assert len(named) == (0 if "leafUuid" in line else 1)
    assert log.bad.count == 0


def test_a_surer_line_decides_over_an_earlier_one(log):
    calls = log.calls("# a comment", {"messages": [USER]}, {"messages": [USER, RESULT]}, form="auto")
    assert [len(call.prompt.messages) for call in calls] == [1, 2]
    assert [bad.line for bad in log.bad.first] == [1]
    assert calls[1].prompt.messages[1]["role"] == "tool"


def test_each_file_has_a_form_of_its_own(log):
    paths = [log.write(line, name=f"{number}.jsonl") for number, (_, line) in enumerate(EXAMPLES)]
    assert len(list(read_calls(paths))) == len(EXAMPLES) - 2


def test_a_server_log_may_begin_with_other_lines(log):
    start = [f"[2026-01-31 12:00:00] loading shard {number}" for number in range(500)]
    assert len(log.calls(*start, EXAMPLES[7][1])) == 1
    assert log.bad.count == 0


def test_an_empty_file_has_no_calls(log):
    assert log.calls() == []


@pytest.mark.parametrize("line", ["hello", "[1]", {"a": 1}, {"input": [0.5]}])
def test_a_form_that_cannot_be_told_is_an_input_error(log, line):
    with pytest.raises(
        InputError, match=r"cannot tell the format from its first 1 lines; name it with --format, one of"
    ):
        log.calls(line)


def test_looking_for_the_form_ends(log, monkeypatch):
    monkeypatch.setattr(readers, "_MAX_HEAD_LINES", 3)
    with pytest.raises(InputError, match="from its first 3 lines"):
        log.calls(*["hello"] * 10, EXAMPLES[0][1])
    assert len(log.calls(EXAMPLES[0][1], *["hello"] * 10)) == 1


def test_an_unknown_form_lists_the_valid_ones(log):
    with pytest.raises(
        InputError, match="unknown log format 'csv'; valid formats: auto, sglang, vllm, delta, claude-code"
    ):
        read_calls([log.write()], "csv")


def test_a_bad_line_is_fatal_unless_it_is_taken(log):
    path = log.write({"prompt": "x"}, {"prompt": 5})
    reader = read_calls([path], "plain")
    assert next(reader).prompt == "x"
    with pytest.raises(InputError, match=r"log.jsonl, line 2: holds no prompt"):
        next(reader)


def test_every_format_has_an_example_and_a_module():
    assert set(FORMATS) == {form for form, _ in EXAMPLES}
    modules = [module.name for module in pkgutil.iter_modules(irminsul.trace.formats.__path__)]
    found = set()
    for name in modules:
        module = importlib.import_module(f"irminsul.trace.formats.{name}")
        found |= {
            value.name
            for value in vars(module).values()
            if isinstance(value, type)
            and value is not Format
            and value.__module__ == module.__name__
            and hasattr(value, "recognises")
        }
    assert found == set(FORMATS)


# No input crashes a reader: there are calls and bad lines, and one InputError at most.


def survives(path, form):
    bad, notes = BadLines(keep=10**6), Notes()
    try:
        calls = list(read_calls([path], form, on_bad=bad, notes=notes))
    except InputError as error:
        # A log of no format, or an archive, whatever its format was said to be.
        if form == "auto" or "archive" in str(error):
            return
        raise
    assert all(call.info.line >= 1 for call in calls)
    assert all(line.reason and "\n" not in line.reason.partition("'")[0] for line in bad.first)


@settings(deadline=None)
@given(st.binary(max_size=400), st.sampled_from(["auto", *FORMATS]))
def test_random_bytes_never_crash(tmp_path_factory, data, form):
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes(data)
    survives(path, form)


@st.composite
def mutated_lines(draw):
    form, line = draw(st.sampled_from(EXAMPLES))
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        if isinstance(line, dict):
            lines.append(json.dumps(mutated(line, draw)))
            continue
        place, end = draw(st.integers(0, len(line))), draw(st.integers(0, len(line)))
        lines.append(line[:place] + draw(st.text(max_size=5)) + line[max(place, end) :])
    return form, "\n".join(lines).encode("utf-8", "surrogatepass")


@settings(deadline=None, max_examples=300)
@given(mutated_lines(), st.booleans())
def test_mutated_lines_never_crash(tmp_path_factory, form_and_data, told):
    form, data = form_and_data
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_bytes(data)
    survives(path, form if told else "auto")


@pytest.mark.parametrize("form", FORMATS)
def test_deep_nesting_never_crashes(log, form):
    for depth in (400, 900, 5000):
        nested = "[" * depth + "]" * depth
        for _, line in EXAMPLES:
            text = line if isinstance(line, str) else json.dumps(line)
            for place in ('"x"', "null", "[1, 2]", '"f"', '"4"', "{}"):
                survives(log.write(text.replace(place, nested)), form)
