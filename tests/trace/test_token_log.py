"""The log as tokens: order, threads, replies, and the cache on disk."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated

from irminsul.errors import InputError
from irminsul.namespace import Namespace
from irminsul.trace import token_cache, token_log_builder
from irminsul.trace.deepseek_template import ASSISTANT, BOS, EOS, USER
from irminsul.trace.lines import BadLines, Notes
from irminsul.trace.readers import read_calls
from irminsul.trace.records import CallInfo, Chat, LoggedCall, ReplySource, TokenLog
from irminsul.trace.token_cache import read_token_log
from irminsul.trace.token_log_builder import build_token_log, encode_call


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(*messages, reply=None, line=1, **info):
    return LoggedCall(CallInfo("log", line, **info), Chat(messages), reply)


def replies(log, tokeniser):
    return [None if one.reply is None else tokeniser.decode(one.reply) for one in log]


def test_a_log_is_a_token_log(deepseek):
    log: TokenLog = build_token_log([call(user("a")), call(user("b"), line=2)], deepseek)
    assert len(log) == 2
    assert [deepseek.decode(one.tokens) for one in log] == [f"{BOS}{USER}{name}{ASSISTANT}" for name in "ab"]
    assert log.prompt_tokens() == sum(len(one.tokens) for one in log) == 8
    assert log[1].tokens.dtype == np.int32
    assert log[1].info == CallInfo("log", 2)
    assert log.decode(log[0].tokens[2:3]) == "a"
    assert log.special_ids.tolist() == deepseek.special_ids.tolist()
    for index in (-1, 2):
        with pytest.raises(IndexError):
            log[index]


def test_an_empty_log(deepseek):
    log = build_token_log([], deepseek)
    assert (len(log), list(log), log.prompt_tokens(), log.notes) == (0, [], 0, ())


def test_text_that_is_repeated_is_kept_once(deepseek):
    history = tuple(turn for number in range(20) for turn in (user(f"{number} " * 50), assistant(f"{number} no " * 50)))
    log = build_token_log([call(*history[: 2 * end + 1]) for end in range(20)], deepseek)
    assert log.prompt_tokens() > 5 * len(log.pieces.tokens)


def test_calls_are_replayed_by_time_if_all_have_one(deepseek):
    calls = [call(user(str(ts)), ts=float(ts), line=line) for line, ts in enumerate([5, 3, 3, 4])]
    assert [one.info.line for one in build_token_log(calls, deepseek)] == [1, 2, 3, 0]
    log = build_token_log([*calls, call(user("x"), line=9)], deepseek)
    assert [one.info.line for one in log] == [0, 1, 2, 3, 9]
    assert log.notes == (token_log_builder.ORDER_NOTE,)


# Replies


def test_the_next_call_of_a_thread_shows_the_reply(deepseek):
    first, answer, second = user("Which berth?"), assistant("Berth 4."), user("Sure?")
    log = build_token_log(
        [
            call(first, session="s"),
            call(first, session="other"),
            call(first, answer, second, session="s", thread="critic"),
            call(first, answer, second, session="s"),
            call(first, assistant("None."), second, session="other"),
        ],
        deepseek,
    )
    assert replies(log, deepseek) == ["Berth 4.", "None.", None, None, None]
    assert log[0].reply_source is ReplySource.NEXT_CALL
    assert [one.thread for one in log] == [0, 1, 2, 0, 1]
    whole = [*log[0].tokens, *log[0].reply]
    assert log[3].tokens[: len(whole)].tolist() == whole
    assert deepseek.decode(log[3].tokens[len(whole) : len(whole) + 1]) == EOS


@pytest.mark.parametrize(
    "later",
    [
        (user("Which berth?"), user("Sure?")),
        (user("Another."), assistant("Berth 4.")),
        (user("Which berth?"),),
        (),
        (user("Which berth?"), assistant("")),
    ],
)
def test_a_next_call_that_does_not_show_a_reply(deepseek, later):
    log = build_token_log([call(user("Which berth?"), session="s"), call(*later, session="s")], deepseek)
    assert replies(log, deepseek)[0] is None
    assert log[0].reply_source is None
    assert log[0].thread == log[1].thread


def test_only_the_assistants_own_text_is_the_reply(deepseek):
    later = (user("a"), assistant("b"), assistant("c"), user("d"))
    log = build_token_log([call(user("a"), session="s"), call(*later, session="s")], deepseek)
    assert replies(log, deepseek) == ["b", None]


def test_without_sessions_a_call_continues_the_longest_that_it_begins_with(deepseek):
    a, b, c = user("a"), assistant("b"), user("c")
    log = build_token_log([call(a), call(a), call(a, b, c), call(a, b, c, assistant("d"), a), call(a, b, c)], deepseek)
    # The third continues the second, which is the latest; the fourth the third; the fifth the first, which is left.
    assert replies(log, deepseek) == ["b", "b", "d", None, None]
    assert [one.thread for one in log] == [0, 1, 1, 1, 0]


def test_calls_of_other_namespaces_continue_nothing(deepseek):
    a, b = user("a"), assistant("b")
    other = Namespace(tenant="t")
    log = build_token_log([call(a), call(a, namespace=other), call(a, b, a, namespace=other)], deepseek)
    assert replies(log, deepseek) == [None, "b", None]
    assert [one.info.namespace for one in log] == [Namespace(), other, other]


def test_a_logged_response_is_the_reply_where_no_call_shows_one(deepseek):
    log = build_token_log(
        [
            call(user("a"), reply=assistant("logged"), session="s"),
            call(user("a"), assistant("shown"), user("c"), reply=assistant("logged, too"), session="s"),
            call(user("x"), reply={"role": "assistant", "tool_calls": 5}, session="t"),
        ],
        deepseek,
    )
    assert replies(log, deepseek) == ["shown", "logged, too", None]
    assert [one.reply_source for one in log] == [ReplySource.NEXT_CALL, ReplySource.LOGGED, None]


def test_logged_responses_of_rendered_prompts(deepseek):
    ids = np.array([5, 6, 7], dtype=np.int32)
    log = build_token_log(
        [
            LoggedCall(CallInfo("log", 1), "Which berth?", " Berth 4."),
            LoggedCall(CallInfo("log", 2), ids, ids),
            LoggedCall(CallInfo("log", 3), ids, ids[:1]),
            LoggedCall(CallInfo("log", 4), "x", ""),
        ],
        deepseek,
    )
    # The row of the last id was never computed.
    assert [None if one.reply is None else one.reply.tolist() for one in log] == [
        encode_call(LoggedCall(CallInfo("log", 1), " Berth 4."), deepseek).tokens.tolist(),
        [5, 6],
        None,
        None,
    ]


texts = st.sampled_from(["", "a", "b", " a\n"])
histories = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts)
)


@settings(deadline=None)
@given(st.lists(st.tuples(histories.map(tuple), st.sampled_from([None, "s", "t"])), max_size=8))
def test_a_shown_reply_is_what_some_later_call_says(deepseek, given_calls):
    calls = [call(*messages, session=session, line=line) for line, (messages, session) in enumerate(given_calls)]
    log = build_token_log(calls, deepseek)
    for index, one in enumerate(log):
        alone = encode_call(calls[index], deepseek)
        assert one.tokens.tolist() == alone.tokens.tolist()
        assert list(one.spans) == list(alone.spans)
        if one.reply is None:
            continue
        whole = [*one.tokens.tolist(), *one.reply.tolist()]
        later = [other for other in list(log)[index + 1 :] if other.info.session == one.info.session]
        assert any(other.tokens[: len(whole)].tolist() == whole and other.thread == one.thread for other in later)


def test_calls_that_cannot_be_rendered_are_bad_lines(deepseek):
    bad = BadLines()
    good, wrong = call(user("a")), call({"role": "user", "content": 5}, line=7)
    log = build_token_log([good, wrong, LoggedCall(CallInfo("f", 8), ""), good], deepseek, on_bad=bad)
    assert len(log) == 2
    assert [str(line) for line in bad.first] == [
        "log, line 7: 'content' must be a string, null or a list of parts, got int",
        "f, line 8: the prompt has no token",
    ]
    with pytest.raises(InputError, match="log, line 7"):
        encode_call(wrong, deepseek)


def test_small_batches_give_the_same_log(deepseek, monkeypatch):
    calls = [call(*(user(f"{number} {end}") for number in range(end))) for end in range(1, 12)]
    whole = [one.tokens.tolist() for one in build_token_log(calls, deepseek)]
    monkeypatch.setattr(token_log_builder, "_BATCH_CHARS", 1)
    assert [one.tokens.tolist() for one in build_token_log(calls, deepseek)] == whole


# The cache


@pytest.fixture
def chat_log(log):
    lines = [
        {"ts": 1, "session": "s", "tenant": "t", "messages": [user("a")]},
        {"ts": 2, "session": "s", "tenant": "t", "messages": [user("a"), assistant("b"), user("c")]},
        {"ts": 0, "prompt": "x"},
    ]
    return log.write(*lines)


def as_plain(log):
    return [
        (one.info, one.tokens.tolist(), list(one.spans), one.thread, one.reply_source, str(one.reply)) for one in log
    ], log.notes


def test_a_cached_log_is_the_log(chat_log, tmp_path, deepseek, monkeypatch):
    options = {"form": "openai-chat", "skip_bad": True, "cache": tmp_path / "cache" / "tokens"}
    first, again = [], []
    fresh = as_plain(read_token_log([chat_log], deepseek, progress=first.append, **options))
    assert len(fresh[0]) == 2
    assert "1 bad line skipped" in fresh[1][0]
    monkeypatch.setattr(token_cache, "build_token_log", None)
    assert as_plain(read_token_log([chat_log], deepseek, progress=again.append, **options)) == fresh
    assert sum(first) == sum(again) == chat_log.stat().st_size


def test_an_entry_holds_plain_arrays(chat_log, tmp_path, deepseek):
    read_token_log([chat_log], deepseek, form="openai-chat", skip_bad=True, cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    with np.load(entry, allow_pickle=False) as stored:
        assert all(not stored[name].dtype.hasobject for name in stored)


def test_what_an_entry_depends_on_makes_another_entry(chat_log, tmp_path, deepseek, chatml, monkeypatch):
    cache = tmp_path / "cache"
    good = chat_log.read_bytes().splitlines(keepends=True)[:2]
    chat_log.write_bytes(b"".join(good))

    def entries(path=chat_log, tokeniser=deepseek, form="auto", skip_bad=False):
        read_token_log([path], tokeniser, form=form, skip_bad=skip_bad, cache=cache)
        return len(list(cache.iterdir()))

    assert [entries(), entries(), entries(tokeniser=chatml), entries(form="openai-chat"), entries(skip_bad=True)] == [
        1,
        1,
        2,
        3,
        4,
    ]
    chat_log.write_bytes(good[0])
    assert entries() == 5
    monkeypatch.setattr(token_cache, "READER_VERSION", 99)
    assert entries() == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-100],
        lambda data: b"",
        lambda data: b"PK\x03\x04" + data[4:200],
        lambda data: data.replace(b"\x93NUMPY", b"\x93NUMPI", 1),
        lambda data: data.replace(b"log.jsonl", b"log.jsonx", 1),
    ],
)
def test_a_damaged_entry_is_made_again_and_noted(chat_log, tmp_path, deepseek, damage):
    options = {"form": "openai-chat", "skip_bad": True, "cache": tmp_path / "cache"}
    calls, notes = as_plain(read_token_log([chat_log], deepseek, **options))
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    again, more = as_plain(read_token_log([chat_log], deepseek, **options))
    assert again == calls
    assert more == (*notes, f"the cached tokens in {entry} were damaged and have been made again")
    assert as_plain(read_token_log([chat_log], deepseek, **options)) == (calls, notes)


def test_an_entry_with_another_content_than_its_digest_is_damaged(chat_log, tmp_path, deepseek):
    options = {"form": "openai-chat", "skip_bad": True, "cache": tmp_path / "cache"}
    read_token_log([chat_log], deepseek, **options)
    (entry,) = (tmp_path / "cache").iterdir()
    with np.load(entry, allow_pickle=False) as stored:
        arrays = dict(stored)
    arrays["pieces.tokens"] = arrays["pieces.tokens"] + 1
    with entry.open("wb") as file:
        np.savez(file, **arrays)
    assert "were damaged" in read_token_log([chat_log], deepseek, **options).notes[-1]


def test_a_write_that_fails_leaves_nothing(chat_log, tmp_path, deepseek, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(InputError, match=r"cannot store tokens in .*: No space left on device"):
        read_token_log([chat_log], deepseek, form="openai-chat", skip_bad=True, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_is_no_directory_and_a_log_that_is_none(chat_log, tmp_path, deepseek):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot use .*file for cached tokens"):
        read_token_log([chat_log], deepseek, cache=tmp_path / "file")
    with pytest.raises(InputError, match=r"cannot read .*absent: No such file"):
        read_token_log([tmp_path / "absent"], deepseek, cache=tmp_path / "cache")


def test_the_standard_input_is_not_cached(tmp_path, deepseek, monkeypatch):
    import io

    data = json.dumps({"messages": [user("a")]}).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    log = read_token_log(["-"], deepseek, cache=tmp_path / "cache")
    assert [one.info.place for one in log] == ["-:1"]
    assert not (tmp_path / "cache").exists()


def test_a_bad_line_is_fatal_unless_skipped(chat_log, deepseek):
    with pytest.raises(InputError, match="line 3: 'messages' must be a list, got null"):
        read_token_log([chat_log], deepseek, form="openai-chat")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_mutated_conversations_never_crash_a_template(deepseek, chatml, tmp_path_factory, data):
    line = {
        "messages": [
            user("a"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "b"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    path = tmp_path_factory.mktemp("fuzz") / "log"
    path.write_text(json.dumps(mutated(mutated(line, data.draw), data.draw)) + "\n")
    for tokeniser in (deepseek, chatml):
        bad = BadLines(keep=10)
        calls = read_calls([path], "openai-chat", on_bad=bad)
        log = build_token_log(calls, tokeniser, on_bad=bad, notes=Notes())
        assert len(log) + bad.count == 1


def test_replacing_a_reply_changes_nothing_else(deepseek):
    """The reply's pieces stand behind those of the prompts."""
    one = call(user("a"), session="s")
    with_reply = build_token_log([replace(one, reply=assistant("b"))], deepseek)
    without = build_token_log([one], deepseek)
    assert with_reply[0].tokens.tolist() == without[0].tokens.tolist()
