"""Claude Code's session files: trees of nodes. All of them are of our own writing."""

import itertools

import pytest

from irminsul.namespace import Namespace
from irminsul.trace.formats.claude_code import NOTE


class Session:
    """Writes nodes; each hangs on the node before it, unless told otherwise."""

    def __init__(self, session="s1"):
        self.session = session
        self.nodes = []
        self.last = None
        self.clock = itertools.count()

    def node(self, kind, uuid, message=None, parent=..., **further):
        record = {
            "type": kind,
            "uuid": uuid,
            "parentUuid": self.last if parent is ... else parent,
            "sessionId": self.session,
            "timestamp": f"2026-01-31T12:00:{next(self.clock):02}.000Z",
            "isSidechain": False,
        } | further
        if message is not None:
            record["message"] = message
        self.nodes.append(record)
        self.last = uuid
        return self

    def user(self, uuid, *blocks, **further):
        content = blocks[0] if isinstance(blocks[0], str) else list(blocks)
        return self.node("user", uuid, {"role": "user", "content": content}, **further)

    def answer(self, uuid, response, *blocks, **further):
        message = {"id": response, "model": "claude-x", "role": "assistant", "content": list(blocks)}
        return self.node("assistant", uuid, message, requestId=f"req_{response}", **further)


def text(value):
    return {"type": "text", "text": value}


def use(name):
    return {"type": "tool_use", "id": name, "name": "Read", "input": {"path": name}}


def result(name):
    return {"type": "tool_result", "tool_use_id": name, "content": f"content of {name}"}


def told(call):
    """A prompt as (role, text or names of the tools called)."""
    out = []
    for message in call.prompt.messages:
        out.append((message["role"], message["content"]))
        out += [("call", tool["id"]) for tool in message.get("tool_calls", [])]
    return out


def test_a_conversation_with_tools(log):
    session = Session()
    session.node("file-history-snapshot", None)
    session.user("u1", "Which berth is free?")
    session.answer("a1", "m1", {"type": "thinking", "thinking": "Hm.", "signature": "x"})
    session.answer("a2", "m1", text("Looking."))
    session.answer("a3", "m1", use("quay"))
    session.user("u2", result("quay"))
    session.node("progress", "p1")
    session.answer("a4", "m2", text("Berth 4."))
    first, second = log.calls(*session.nodes)
    assert told(first) == [("user", "Which berth is free?")]
    assert first.reply["content"] == "Looking."
    assert (first.reply["reasoning_content"], len(first.reply["tool_calls"])) == ("Hm.", 1)
    assert told(second) == [
        ("user", "Which berth is free?"),
        ("assistant", "Looking."),
        ("call", "quay"),
        ("tool", "content of quay"),
    ]
    assert (second.info.session, second.info.thread, second.info.line) == ("s1", "", 8)
    assert second.info.namespace == Namespace(model="claude-x")
    assert second.info.ts > first.info.ts
    assert log.notes.sentences() == [NOTE]


def test_parallel_tool_calls_have_all_their_results(log):
    """Each result hangs on the piece that asked for it, so the path to the next response passes only one."""
    session = Session()
    session.user("u1", "Compare.")
    session.answer("a1", "m1", use("x"))
    session.answer("a2", "m1", use("y"))
    session.user("u2", result("x"), parent="a1")
    session.user("u3", result("y"), parent="a2")
    session.answer("a3", "m2", text("Equal."))
    _, second = log.calls(*session.nodes)
    assert told(second)[1:] == [
        ("assistant", None),
        ("call", "x"),
        ("call", "y"),
        ("tool", "content of x"),
        ("tool", "content of y"),
    ]


def test_a_result_that_came_before_the_rest_of_a_response_is_no_part_of_its_own_prompt(log):
    session = Session()
    session.user("u1", "Compare.")
    session.answer("a1", "m1", use("x"))
    session.user("u2", result("x"))
    session.answer("a2", "m1", use("y"), parent="a1")
    session.user("u3", result("y"))
    session.answer("a3", "m2", text("Equal."))
    first, second = log.calls(*session.nodes)
    assert told(first) == [("user", "Compare.")]
    assert [role for role, _ in told(second)] == ["user", "assistant", "call", "call", "tool", "tool"]


def test_a_rewound_conversation_is_two_branches(log):
    session = Session()
    session.user("u1", "One.")
    session.answer("a1", "m1", text("1"))
    session.user("u2", "Two.")
    session.answer("a2", "m2", text("2"))
    session.user("u3", "Three.", parent="a1")
    session.answer("a3", "m3", text("3"))
    assert [told(call)[-1][1] for call in log.calls(*session.nodes)] == ["One.", "Two.", "Three."]
    assert ("user", "Two.") not in told(log.calls(*session.nodes)[-1])


def test_a_compaction_starts_over_with_its_summary(log):
    session = Session()
    session.user("u1", "Long story.")
    session.answer("a1", "m1", text("Yes."))
    session.node("system", "c1", subtype="compact_boundary", parent=None, logicalParentUuid="a1")
    session.user("u2", "Summary: a long story.", isCompactSummary=True)
    session.answer("a2", "m2", text("Go on."))
    assert told(log.calls(*session.nodes)[1]) == [("user", "Summary: a long story.")]


@pytest.mark.parametrize(("further", "thread"), [({"agentId": "ab12"}, "ab12"), ({}, "u5")])
def test_a_subagent_is_a_thread_of_its_own(log, further, thread):
    session = Session()
    session.user("u1", "Ask someone.")
    session.answer("a1", "m1", use("task"))
    session.user("u5", "You are someone.", parent=None, isSidechain=True, **further)
    session.answer("a5", "m5", text("Done."), isSidechain=True, **further)
    main, side = log.calls(*session.nodes)
    assert (main.info.thread, side.info.thread, side.info.session) == ("", thread, "s1")
    assert told(side) == [("user", "You are someone.")]


def test_messages_that_were_not_sent_are_left_out(log):
    session = Session()
    session.user("u1", "Hello.")
    session.node(
        "assistant", "e1", {"id": "x", "model": "<synthetic>", "content": [text("API error")]}, isApiErrorMessage=True
    )
    session.node("assistant", "e2", {"id": "y", "model": "<synthetic>", "content": [text("No response requested.")]})
    session.user("u2", "Again.")
    session.answer("a1", "m1", text("Hello."))
    assert told(log.call(*session.nodes)) == [("user", "Hello."), ("user", "Again.")]


def test_a_response_that_was_copied_into_another_file_is_one_call(log):
    from irminsul.trace.readers import read_calls

    session = Session()
    session.user("u1", "Hello.")
    session.answer("a1", "m1", text("Hello."))
    first = log.write(*session.nodes, name="one.jsonl")
    resumed = Session("s2")
    resumed.nodes = [node | {"sessionId": "s2"} for node in session.nodes]
    resumed.last = "a1"
    resumed.user("u2", "Again.")
    resumed.answer("a2", "m2", text("Yes."))
    second = log.write(*resumed.nodes, name="two.jsonl")
    calls = list(read_calls([first, second]))
    assert [(call.info.file, call.info.session) for call in calls] == [(str(first), "s1"), (str(second), "s2")]
    assert [text for _, text in told(calls[1])] == ["Hello.", "Hello.", "Again."]


def test_a_missing_parent_is_noted(log):
    session = Session()
    session.last = "gone"
    session.user("u1", "Hello.")
    session.answer("a1", "m1", text("Hello."))
    assert told(log.call(*session.nodes)) == [("user", "Hello.")]
    assert any("whose parent is not in the file" in note for note in log.notes.sentences())


def test_bad_nodes_have_reasons_and_the_rest_is_read(log):
    session = Session()
    session.user("u1", "Hello.", parent="u1")
    session.answer("a1", "m1", text("A circle."))
    session.answer("a2", "m2", text("No prompt."), parent=None)
    session.node("user", "u2", 5, parent=None)
    session.node("user", "u3", {"content": 5}, parent=None)
    session.node("user", "u4", {"content": "x"}, parent=7)
    session.user("u5", {"type": "hologram"}, parent=None)
    session.answer("a5", "m5", text("?"))
    session.user("u6", "Good.", parent=None)
    session.answer("a6", "m6", text("Good."))
    assert told(log.call(*session.nodes[-2:])) == [("user", "Good.")]
    reasons = log.reasons(*session.nodes)
    assert [reason.partition(";")[0] for reason in reasons] == [
        "4: 'message' must be an object, got int",
        "5: the content of 'message' must be a string or a list of blocks",
        "6: 'parentUuid' must be a string or null",
        "2: its parents form a circle",
        "3: a response without a prompt before it",
        "8: unknown content block 'hologram'",
    ]
