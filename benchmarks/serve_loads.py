"""Make the loads of benchmarks/serve_on_gpu.py: token ids, so that a GPU host needs no tokenizer and no time.

    python benchmarks/serve_loads.py OUT --tokenizer DIR [--logs FILE...] [--only NAME...]

Writes OUT/NAME.jsonl.zst, one call a line (``session``, ``input_ids``), and OUT/loads.json: for each load its calls,
sessions, prompt tokens, and the tokens of its working set, that is of a tree that holds every prompt once.

``PATTERN-LENGTH`` and ``PATTERN-LENGTH-markers``: the five patterns (docs/patterns.md) with two bodies, or for rerank
its own number of documents. ``edited-20``: eight sessions of twenty turns whose prompts keep the newest five tool
results and a placeholder for each older one, so that nearly every turn edits its history. A log: of its first 32
sessions (one agent's) with four calls or more of at most --max-prompt-tokens the last four of these calls, in turn; of
a log with fewer sessions more calls each, about 128 in all. ``logs-together``: of each of these loads the first half of
its sessions, which come and go: a session begins at a random moment, and its next call follows at random.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from irminsul.trace.lines import Notes
from irminsul.trace.pattern_text.conversation import question, turn
from irminsul.trace.pattern_text.library import standard_library
from irminsul.trace.patterns import CLEARED, PATTERNS, generate, marker_line
from irminsul.trace.readers import AUTO, read_calls
from irminsul.trace.records import Chat, Message, Prompt, Tokens
from irminsul.trace.tokenise import Tokeniser, load_tokeniser

LENGTHS = {"8K": 8_000, "17K": 17_000, "32K": 32_000, "64K": 64_000}
BODIES, CALLS = 2, 12
KEPT_RESULTS, TURNS, SESSIONS = 5, 20, 8
"""Of ``edited-20``."""
LONGEST_RESULT = 8_000
"""Characters."""
LOG_SESSIONS, LOG_CALLS = 32, 128
PAUSE = 8.0
"""Of ``logs-together``: mean time between two calls of a session, where one session begins in each unit of it."""

Calls = Iterable[tuple[str, Prompt]]
"""Session and prompt of each."""


def main() -> None:
    """Make loads, and list them beside those that were made before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    vocabulary = "a directory with tokenizer.json, of ids that the model has (benchmarks/results: that of smollm2-mla)"
    parser.add_argument("--tokenizer", required=True, help=vocabulary)
    parser.add_argument("--logs", type=Path, nargs="*", default=[])
    parser.add_argument("--max-prompt-tokens", type=int, default=30_000, help="of calls of logs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of loads")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokeniser = load_tokeniser(arguments.tokenizer)
    makers = {
        **{
            f"{pattern}-{length}{suffix}": lambda pattern=pattern, length=length, suffix=suffix: pattern_calls(
                pattern, LENGTHS[length], marker_line(tokeniser) if suffix else None
            )
            for length in LENGTHS
            for pattern in PATTERNS
            for suffix in ("", "-markers")
        },
        "edited-20": edited_sessions,
        **{
            path.name.split(".")[0]: lambda path=path: log_calls(path, tokeniser, arguments.max_prompt_tokens)
            for path in arguments.logs
        },
        **(
            {"logs-together": lambda: calls_together(arguments.logs, tokeniser, arguments.max_prompt_tokens)}
            if arguments.logs
            else {}
        ),
    }
    if unknown := set(arguments.only or ()) - set(makers):
        parser.error(f"no load {min(unknown)!r}; there are {', '.join(makers)}")
    listed = arguments.out / "loads.json"
    facts = json.loads(listed.read_text()) if listed.exists() else {}
    for name in arguments.only or makers:
        encoded = [(session, encode(prompt, tokeniser)) for session, prompt in makers[name]()]
        if not encoded:
            sys.exit(f"{name} has no call of at most {arguments.max_prompt_tokens:,} tokens")
        write(arguments.out / f"{name}.jsonl.zst", encoded)
        lengths = [len(tokens) for _, tokens in encoded]
        facts[name] = {
            "calls": len(encoded),
            "sessions": len({session for session, _ in encoded}),
            "prompt_tokens": sum(lengths),
            "longest": max(lengths),
            "working_set": working_set([tokens for _, tokens in encoded]),
        }
        print(name, json.dumps(facts[name]), flush=True)
        listed.write_text(json.dumps(facts, indent=1) + "\n")


def pattern_calls(pattern: str, prompt_tokens: int, marker: str | None) -> Calls:
    """Make a pattern's calls, each body met several times."""
    bodies = None if PATTERNS[pattern].bodies_are == "documents" else BODIES
    made = generate(pattern, calls=CALLS, bodies=bodies, marker=marker, prompt_tokens=prompt_tokens)
    return ((call.session, Chat(call.messages, call.tools)) for call in made)


def edited_sessions() -> Iterator[tuple[str, Prompt]]:
    """Make sessions that see their last tool results only; one turn of each after the other."""
    # A coding agent's system prompt and tools, of our own writing.
    frame = next(iter(generate("compact", calls=1, bodies=1)))
    library, rng = standard_library(), random.Random("edited-20")
    histories: list[list[Message]] = [[frame.messages[0]] for _ in range(SESSIONS)]
    for number in range(TURNS):
        for session, history in enumerate(histories):
            asked = {"role": "user", "content": question(library, rng)}
            yield f"session-{session}", Chat((*without_old_results(history), asked), frame.tools)
            history.extend(turn(library, rng, number, LONGEST_RESULT))


def without_old_results(history: list[Message]) -> list[Message]:
    """Replace all tool results but the newest by a placeholder."""
    results = [at for at, message in enumerate(history) if message["role"] == "tool"]
    old = set(results[:-KEPT_RESULTS])
    return [message | {"content": CLEARED} if at in old else message for at, message in enumerate(history)]


def log_calls(path: Path, tokeniser: Tokeniser, max_prompt_tokens: int) -> Calls:
    """Return the calls of a log that its load takes."""
    known: dict[str, list[Prompt]] = {}
    for call in read_calls([str(path)], AUTO, notes=Notes()):
        known.setdefault(f"{call.info.session} {call.info.thread}", []).append(call.prompt)
    each = -(-LOG_CALLS // max(1, min(LOG_SESSIONS, len(known))))
    taken = []
    for session, prompts in known.items():
        fitting = (prompt for prompt in prompts[::-1] if len(encode(prompt, tokeniser)) <= max_prompt_tokens)
        last = list(islice(fitting, each))[::-1]
        if len(last) == each or len(known) <= LOG_SESSIONS:
            taken.append([(session, prompt) for prompt in last])
        if len(taken) == LOG_SESSIONS:
            break
    return [call for call in chain.from_iterable(zip_longest(*taken)) if call is not None]


def calls_together(paths: list[Path], tokeniser: Tokeniser, max_prompt_tokens: int) -> Calls:
    """Return calls of all logs, as if their sessions came to one server."""
    sessions: list[list[tuple[str, Prompt]]] = []
    for path in paths:
        of_log: dict[str, list[tuple[str, Prompt]]] = {}
        for session, prompt in log_calls(path, tokeniser, max_prompt_tokens):
            of_log.setdefault(session, []).append((f"{path.name} {session}", prompt))
        sessions += list(of_log.values())[: -(-len(of_log) // 2)]
    rng = random.Random("logs-together")
    timed = []
    for calls in sessions:
        at = rng.uniform(0, len(sessions))
        for call in calls:
            timed.append((at, call))
            at += rng.expovariate(1 / PAUSE)
    return [call for _, call in sorted(timed, key=lambda one: one[0])]


_ENCODED: dict[str, NDArray[np.int32]] = {}


def encode(prompt: Prompt, tokeniser: Tokeniser) -> Tokens:
    """Return the token ids of a prompt; pieces that recur are encoded once."""
    if not isinstance(prompt, Chat | str):
        return prompt
    parts = []
    for piece in tokeniser.pieces(prompt, None):
        key = repr(piece)
        if key not in _ENCODED:
            _ENCODED[key] = tokeniser.encode([piece])[0].tokens
        parts.append(_ENCODED[key])
    return np.concatenate(parts)


def working_set(prompts: list[Tokens]) -> int:
    """Return the tokens of a tree that holds every prompt."""
    ordered = sorted(tokens.astype(">i4").tobytes() for tokens in prompts)
    total, before = 0, b""
    for one in ordered:
        length = min(len(one), len(before))
        a, b = np.frombuffer(one[:length], ">i4"), np.frombuffer(before[:length], ">i4")
        differ = np.flatnonzero(a != b)
        total += len(one) // 4 - (int(differ[0]) if len(differ) else length // 4)
        before = one
    return total


def write(path: Path, calls: list[tuple[str, Tokens]]) -> None:
    """Write a load; prompts of a session repeat each other far back, which a wide window finds."""
    parameters = zstandard.ZstdCompressionParameters.from_level(12, window_log=25, enable_ldm=True)
    with zstandard.open(path, "wt", cctx=zstandard.ZstdCompressor(compression_params=parameters)) as file:
        for session, tokens in calls:
            file.write(json.dumps({"session": session, "input_ids": tokens.tolist()}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
