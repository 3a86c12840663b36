"""What happens to files: fields of other types, broken bytes, cut archives."""

import gzip
import json
from collections.abc import Callable
from typing import Any

import zstandard
from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]

# JSON that Python's encoder would not write stands behind a name until the text is made.
_RAW = {
    "@infinite@": "1e999",
    "@digits@": "9" * 5000,
    "@long@": "9" * 400,
    "@deep@": "[" * 100_000,
    "@nested@": "[" * 900 + "]" * 900,
    "@twice@": '{"role": "user", "role": 5, "content": 1, "content": "x"}',
    "@half@": '"\\ud83d"',
    "@nul@": '"\0"',
    "@escaped_nul@": '"\\u0000"',
}
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, -0.0, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "x" * 3000,
        "\x1b[31m",
        "\r\n",
        "a\u2028b",
        "\U0001f600",
        "\ufdd00\ufdd1",
        "<|im_end|>",
        "{{ 7 * 7 }}",
    ),
    *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-02-30", "1e400", "-5", "[/]", "[red]"),
    *([], {}, [[]], [{}], [None], ["x"], [-1], [0.5], {"": ""}, {"type": "text"}, {"type": []}, {"role": "user"}),
    *({"content": [5]}, {"function": 5}, {"name": None}, {"text": 5}, *_RAW),
]
hostile_values = st.sampled_from(HOSTILE)


def damaged(value: Any, draw: Draw) -> Any:
    """Replace, drop, rename or repeat something inside a JSON value."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        choice = draw(st.integers(0, 9))
        if choice == 0:
            return {name: kept for name, kept in value.items() if name != key}
        if choice == 1:
            return value | {draw(st.sampled_from(NAMES)): draw(hostile_values)}
        return value | {key: damaged(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], damaged(value[place], draw), *value[place + draw(st.integers(0, 1)) :]]
    return draw(hostile_values)


NAMES = (
    *(
        "messages",
        "role",
        "content",
        "tools",
        "functions",
        "tool_calls",
        "function_call",
        "reasoning_content",
        "system",
    ),
    *("input", "instructions", "previous_response_id", "prompt", "input_ids", "text", "response", "output", "metadata"),
    *("ts", "timestamp", "session", "agent", "tenant", "model", "event", "obj", "rid", "out", "uuid", "parentUuid"),
    *("message", "keep", "append", "request", "type", "id", "name", "arguments", "choices"),
)
"""Fields that some reader knows."""


def json_bytes(value: Any, draw: Draw) -> bytes:
    """Write JSON, now and then with what only a foreign writer writes."""
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode("utf-8", "surrogatepass")


_STRAY = (
    b"\0",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\n",
    b"\x1a",
    b'"',
    b"{",
    b"}",
    b"\\",
    b",",
)


def damaged_bytes(data: bytes, draw: Draw) -> bytes:
    """Flip, cut, insert or repeat bytes."""
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "head", "insert", "drop", "repeat"]))
        if kind == "flip" and data:
            data = data[:place] + bytes([data[place] ^ draw(st.integers(1, 255))]) + data[place + 1 :]
        elif kind == "cut":
            data = data[:place]
        elif kind == "head":
            data = draw(st.sampled_from(_STRAY)) + data
        elif kind == "insert":
            data = data[:place] + draw(st.sampled_from(_STRAY)) + data[place:]
        elif kind == "drop":
            data = data[:place] + data[place + draw(st.integers(1, 20)) :]
        else:
            data += data[place:]
    return data


def packed(data: bytes, draw: Draw) -> bytes:
    """Compress, in one member or in two; then damage what came out."""
    pack = draw(st.sampled_from([None, None, gzip.compress, zstandard.compress]))
    if pack is None:
        return data
    place = draw(st.integers(0, len(data)))
    members = pack(data[:place]) + pack(data[place:]) if draw(st.booleans()) else pack(data)
    return damaged_bytes(members, draw)
