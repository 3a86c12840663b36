import json
import re
from collections import defaultdict
from itertools import pairwise

import pytest

from irminsul.demo.scenarios import SCENARIOS, demo_requests, parse_script

NAMES = ["changed_metadata", "swapped_role", "edited_history", "reordered_documents", "changed_tools"]
RUN = 12
"""Words; a dozen in a row do not meet by chance."""


@pytest.fixture(scope="module")
def by_scenario():
    requests = defaultdict(list)
    for request in demo_requests():
        requests[request.scenario].append(request)
    return requests


def text_of(request) -> str:
    calls = [call["function"] for message in request.messages for call in message.get("tool_calls", [])]
    contents = [message["content"] for message in request.messages if message["content"]]
    return "\n".join([*contents, *(call["arguments"] for call in calls)])


def runs(text: str, length: int = RUN) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", text)
    return [tuple(words[at : at + length]) for at in range(len(words) - length + 1)]


def shared(one, other) -> float:
    """Share of the runs of one that stand in the other."""
    known = set(runs(text_of(other)))
    mine = runs(text_of(one))
    return sum(run in known for run in mine) / len(mine)


def test_scenarios_come_in_order_with_three_or_four_requests_each(by_scenario):
    assert list(by_scenario) == list(SCENARIOS) == NAMES
    assert all(len(requests) == 3 for requests in by_scenario.values())


def test_requests_are_the_same_every_time():
    assert demo_requests() == demo_requests()


@pytest.mark.parametrize("request_", demo_requests(), ids=lambda request: request.scenario)
def test_conversations_are_well_formed(request_):
    roles = [message["role"] for message in request_.messages]
    assert roles[0] == "system"
    assert roles[-1] in ("user", "tool")
    known = {tool["function"]["name"] for tool in request_.tools or ()}
    waiting = set()
    for message in request_.messages:
        assert message["content"] or message.get("tool_calls")
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting, "a call is answered before the next turn"
        for call in message.get("tool_calls", []):
            assert call["type"] == "function"
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            waiting.add(call["id"])
            # A dropped tool may have been called before; every other call is to a tool that is there.
            assert call["function"]["name"] in known or request_.scenario == "changed_tools"
    assert not waiting


def test_calls_follow_their_schemas(by_scenario):
    for request in (requests[0] for requests in by_scenario.values()):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools or ()}
        for message in request.messages:
            for call in message.get("tool_calls", []):
                schema = schemas[call["function"]["name"]]
                given = json.loads(call["function"]["arguments"])
                assert set(schema["required"]) <= set(given) <= set(schema["properties"])


def test_no_text_is_repeated_within_a_request():
    for request in demo_requests():
        # Longer than the keys that rows of one JSON table share.
        mine = runs(text_of(request), 2 * RUN)
        assert len(mine) == len(set(mine)), request.scenario


def test_scenarios_share_no_text(by_scenario):
    seen = {}
    for name, requests in by_scenario.items():
        for run in {run for request in requests for run in runs(text_of(request))}:
            assert seen.setdefault(run, name) == name, " ".join(run)


def test_requests_of_a_scenario_share_most_of_their_text(by_scenario):
    for requests in by_scenario.values():
        for later in requests[1:]:
            assert shared(later, requests[0]) > 0.7, later.scenario


def test_metadata_changes_in_the_first_line_only(by_scenario):
    requests = by_scenario["changed_metadata"]
    lines, rests = zip(*(request.messages[0]["content"].split("\n", 1) for request in requests), strict=True)
    assert len(set(lines)) == len(requests)
    assert len(set(rests)) == 1
    assert "$" not in "".join(lines)
    for earlier, later in pairwise(requests):
        assert later.messages[1 : len(earlier.messages)] == earlier.messages[1:]


def test_roles_change_and_nothing_else(by_scenario):
    requests = by_scenario["swapped_role"]
    assert len({request.messages[0]["content"] for request in requests}) == len(requests)
    assert all(request.messages[1:] == requests[0].messages[1:] for request in requests)


def test_history_is_edited_in_old_tool_results_while_later_turns_stay(by_scenario):
    first, *edited = by_scenario["edited_history"]
    for number, request in enumerate(edited, start=1):
        before = request.messages[: len(first.messages)]
        changed = [new for old, new in zip(first.messages, before, strict=True) if old != new]
        assert [message["role"] for message in changed] == ["tool"] * number
        assert len(request.messages) > len(first.messages)


def test_documents_are_reordered_and_one_is_exchanged(by_scenario):
    requests = by_scenario["reordered_documents"]
    orders = [re.findall(r"^Document (\w):", text_of(request), re.MULTILINE) for request in requests]
    assert all(one[0] != other[0] for one, other in pairwise(orders))
    assert all(len(set(order)) == len(orders[0]) for order in orders)
    assert sorted(len(set(orders[0]) - set(order)) for order in orders) == [0, 0, 1]
    questions = {text_of(request).rsplit("Question: ", 1)[1] for request in requests}
    assert len(questions) == len(requests)


def test_tools_are_added_dropped_moved_and_edited(by_scenario):
    requests = by_scenario["changed_tools"]
    tools = [{tool["function"]["name"]: tool for tool in request.tools} for request in requests]
    first = tools[0]
    assert any(set(other) - set(first) for other in tools), "added"
    assert any(set(first) - set(other) for other in tools), "dropped"
    assert any(
        [name for name in other if name in first] != [name for name in first if name in other] for other in tools
    )
    assert any(other[name] != first[name] for other in tools for name in set(other) & set(first)), "edited"
    assert all(request.messages[:-1] == requests[0].messages[:-1] for request in requests)


def test_scripts_are_read_section_by_section():
    script = parse_script(
        "=== system\nBe kind.\n\nAlways.\n=== user\nHi\n=== call look a1\n{}\n=== call look a2\n{}\n=== request 1\n"
        "=== tool a1\nx\n=== assistant\nSo.\n=== call look a3\n{}\n=== request 2\n=== part a part\nlater\n"
    )
    system, user, calls, result, last = script.messages
    assert system == {"role": "system", "content": "Be kind.\n\nAlways."}
    assert user == {"role": "user", "content": "Hi"}
    assert (calls["content"], [call["id"] for call in calls["tool_calls"]]) == (None, ["a1", "a2"])
    assert result == {"role": "tool", "tool_call_id": "a1", "content": "x"}
    assert (last["content"], last["tool_calls"][0]["function"]) == ("So.", {"name": "look", "arguments": "{}"})
    assert script.ends == (3, 5)
    assert script.parts == {"a part": "later"}


@pytest.mark.checkpoint
@pytest.mark.slow
def test_prompts_have_the_promised_lengths(smollm2_gguf):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    lengths = [len(tokenizer(written_out(request))["input_ids"]) for request in demo_requests()]
    assert all(2000 <= length <= 2600 for length in lengths), lengths
    assert sum(lengths) < 42_000


def written_out(request) -> str:
    """A prompt as chat templates write it, roughly: schemas and calls as JSON, a few tokens around each message."""
    lines = [json.dumps(request.tools or [])]
    for message in request.messages:
        lines += [f"<|im_start|>{message['role']}", message["content"] or ""]
        lines += [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
        lines += ["<|im_end|>"]
    return "\n".join(lines)
