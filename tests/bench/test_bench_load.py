"""Loads: logs and patterns as request bodies, in order, cut to what was asked for."""

import json
import os

import numpy as np
import pytest
from server_fakes import byte_level_tokenizer

from irminsul.bench.load import NAMESPACES_NOTE, LoadOptions, Protocol, read_load
from irminsul.errors import InputError


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return str(folder)


def options(tokenizer="deepseek", protocol=Protocol.OPENAI, **more):
    return LoadOptions(protocol, tokenizer, **more)


def members(call):
    return json.loads(b"{" + call.prompt + b"}")


def test_calls_of_a_session_follow_each_other_and_others_are_their_own(log):
    load = read_load(
        str(log([("a", "x", "1"), ("b", "x", "2"), ("a", "x", "3"), ("a", "y", "4"), (None, None, "5")])), options()
    )
    assert load.predecessors == (None, None, 0, None, None)
    assert members(load.calls[2]) == {"messages": [{"role": "user", "content": "3"}]}
    assert [call.place for call in load.calls] == [f"log.jsonl:{line}" for line in range(1, 6)]
    assert load.describe() == {
        "name": "log.jsonl",
        "fingerprint": load.fingerprint,
        "calls": 5,
        "sessions": 4,
        "left_out": 0,
    }


def test_the_log_is_replayed_in_time_order(tmp_path):
    path = tmp_path / "late.jsonl"
    lines = [
        {
            "session": "a",
            "agent": "",
            "ts": ts,
            "keep": 0,
            "append": [{"role": "user", "content": str(ts)}],
            "tools": None,
        }
        for ts in (3.0, 1.0, 2.0)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = read_load(str(path), options())
    assert [members(call)["messages"][0]["content"] for call in load.calls] == ["1.0", "2.0", "3.0"]


def test_longer_prompts_are_left_out_and_the_rest_is_counted(log, tokenizer_folder):
    path = log([("a", "", "x" * 10), ("a", "", "y" * 500), ("a", "", "z" * 20), ("a", "", "w")])
    load = read_load(str(path), options(tokenizer_folder, max_prompt_tokens=100, calls=2))
    assert [members(call)["messages"][0]["content"][0] for call in load.calls] == ["x", "z"]
    assert (load.left_out, load.predecessors) == (1, (None, 0))
    assert load.describe()["prompt_tokens_max"] == load.calls[1].prompt_tokens < 100
    with pytest.raises(InputError, match=r"no calls to send: 4 have more than 3 tokens"):
        read_load(str(path), options(tokenizer_folder, max_prompt_tokens=3))


def test_ids_are_those_of_the_chat_template(log, tokenizer_folder):
    load = read_load(str(log([("a", "", "hello"), ("a", "", "hello")])), options(tokenizer_folder, Protocol.SGLANG_IDS))
    rendered = byte_level_tokenizer().apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=False
    )
    assert [members(call) for call in load.calls] == [{"input_ids": rendered}] * 2
    assert load.calls[0].prompt_tokens == len(rendered)


def test_logged_ids_are_sent_as_they_are_and_only_as_ids(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [5, 6, 7]}) + "\n")
    load = read_load(str(path), options(protocol=Protocol.SGLANG_IDS, form="plain"))
    assert members(load.calls[0]) == {"input_ids": [5, 6, 7]}
    with pytest.raises(InputError, match=r"ids.jsonl:1 logs a prompt as token ids; send it with --protocol sglang-ids"):
        read_load(str(path), options(form="plain"))


def test_a_pattern_has_the_length_and_the_markers_that_its_name_says():
    plain = read_load("rerank:8K", options(calls=3))
    marked = read_load("rerank:8K:markers", options(calls=3, max_prompt_tokens=20_000))
    assert len(plain.calls) == len(marked.calls) == 3
    assert plain.calls[0].prompt_tokens is None, "nothing needs them counted"
    assert np.isclose(marked.describe()["prompt_tokens_median"], 9_000, rtol=0.15)
    assert len({load.fingerprint for load in (plain, marked, read_load("rerank:8K", options(calls=3, seed=1)))}) == 3
    assert read_load("rerank:8K", options(calls=3)).fingerprint == plain.fingerprint
    # Its agents are not made to wait for each other, though they share a body.
    assert plain.predecessors == (None, None, None)
    assert read_load("compact:8K", options(calls=8)).predecessors == (None, None, None, None, 0, 1, 2, 3)


def test_what_is_no_load_is_refused(log):
    with pytest.raises(InputError, match=r"neither a file nor a pattern; .* with one of agent_meta, sysvar"):
        read_load("missing.jsonl", options())
    with pytest.raises(InputError, match="takes a length and the word 'markers', in this order"):
        read_load("rerank:markers:8K", options())
    with pytest.raises(InputError, match="written like 500000, 500K or 2M, got 'long'"):
        read_load("rerank:long", options())
    with pytest.raises(InputError, match="has no calls to send"):
        read_load(str(log([])), options())


def test_a_prompt_that_the_template_refuses_is_named(tmp_path, tokenizer_folder):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "developer", "content": "x"}]}) + "\n")
    with pytest.raises(InputError, match=r"log.jsonl, line 1: .*developers are not known here"):
        read_load(str(path), options(tokenizer_folder, Protocol.SGLANG_IDS))


@pytest.mark.parametrize("member", ["messages", "tools"])
def test_a_number_that_json_has_not_is_named_by_its_line(tmp_path, member):
    path = tmp_path / "log.jsonl"
    text = json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": []})
    huge = '[{"role": "user", "content": "x", "weight": 1e999}]' if member == "messages" else '[{"minimum": 1e999}]'
    path.write_text(
        f"{text}\n" + json.dumps(json.loads(text) | {member: 0}).replace(f'"{member}": 0', f'"{member}": {huge}')
    )
    with pytest.raises(InputError, match=r"log\.jsonl:2 cannot be sent as JSON: Out of range float values"):
        read_load(str(path), options(form="openai-chat"))


def test_names_of_files_that_are_no_text(log):
    load = read_load(str(log([("a", "", "x")], os.fsdecode(b"log\xff.jsonl"))), options())
    assert (load.name, load.calls[0].place) == ("log?.jsonl", "log?.jsonl:1")


def test_tenants_that_are_not_sent_are_noted(tmp_path):
    path = tmp_path / "log.jsonl"
    body = {"messages": [{"role": "user", "content": "x"}], "cache_salt": "s"}
    path.write_text(json.dumps(body) + "\n")
    assert read_load(str(path), options(form="openai-chat")).notes == (NAMESPACES_NOTE,)
