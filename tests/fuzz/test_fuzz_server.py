"""The HTTP surface: requests made from its OpenAPI schema, damaged ones, and broken ones on a raw socket."""

import contextlib
import re
import time

import pytest
import schemathesis
from damage import damaged, damaged_bytes, json_bytes
from fuzzing import EXAMPLES, SECONDS, SOAK, figures, fuzz, in_time
from hostile_clients import BODY_SECONDS, CLIENT_SECONDS, judge, target_server
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from irminsul.engine.model import MlaModel
from irminsul.server.app import MAX_BODY_BYTES
from irminsul.testing.tiny import write_tiny_checkpoint

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = MlaModel.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", family="v2", moe=False))
    with target_server(model) as target:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "top_k": 5}
        assert target.http.post("/v1/chat/completions", json=body).status_code == 200
        yield target


def test_the_operations_are_those_of_the_schema(target):
    found = {(method.upper(), path) for path, methods in target.schema["paths"].items() for method in methods}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_requests_made_from_the_schema(target, method, path, mode):
    operation = schemathesis.openapi.from_dict(target.schema)[path][method]
    if method == "GET" and ("{" not in path or mode is GenerationMode.NEGATIVE):
        # Nothing to vary, or nothing that would be wrong.
        response = target.http.get(path)
        judge(response.status_code, response.content, response.headers.get("content-type"))
        return

    @settings(fuzz, max_examples=max(1, EXAMPLES // 2))
    @given(operation.as_strategy(generation_mode=mode))
    def send(case):
        with in_time():
            response = case.call(base_url=target.url, timeout=CLIENT_SECONDS)
        judge(response.status_code, response.content, response.headers.get("content-type", [None])[0])
        figures.refused += response.status_code >= 400

    send()


CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "one"},
    ],
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}],
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "stop": ["x"],
    "max_tokens": 4,
    "logprobs": True,
    "top_logprobs": 2,
    "cache_salt": "s",
    "irminsul": "live",
    "tool_choice": "auto",
    "n": 1,
}
TEXT = {
    "model": "tiny",
    "prompt": "Look.",
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "logprobs": 2,
    "max_tokens": 4,
    "ignore_eos": True,
    "stop": "x",
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
HEADERS = ("application/json", "text/plain", "application/json; charset=utf-16", "a/b+json", "", "\xff", "json" * 200)


@fuzz
@given(st.sampled_from(sorted(BODIES)), st.sampled_from((*["live"] * 9, "x", "", "\xe9")), st.data())
def test_damaged_requests(target, path, mode, data):
    body = BODIES[path]
    for _ in range(data.draw(st.integers(0, 2))):
        body = damaged(body, data.draw)
    content = damaged_bytes(json_bytes(body, data.draw), data.draw)
    content_type = data.draw(st.sampled_from((*["application/json"] * 20, *HEADERS)))
    headers = [(b"content-type", content_type.encode("latin-1")), (b"x-irminsul-mode", mode.encode("latin-1"))]
    with in_time():
        response = target.http.post(path, content=content, headers=headers)
    judge(response.status_code, response.content, response.headers.get("content-type"))
    figures.refused += response.status_code >= 400


def request(path="/v1/completions", body=b'{"model": "tiny", "prompt": "hi", "max_tokens": 1}', **headers):
    """A request on the wire; a header that is None is left out."""
    lines = {"Host": "h", "Content-Type": "application/json", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def chunked(*chunks, end=b"0\r\n\r\n"):
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end
    return request(body=body, Content_Length=None, Transfer_Encoding="chunked")


def exchange(target, data, *, answers=1):
    """Send bytes; return what comes back until the connection ends or there are so many answers."""
    with target.connect() as connection:
        # It may be refused before all of it was sent.
        with contextlib.suppress(OSError):
            connection.sendall(data)
        received = b""
        while len(statuses(received)) < answers or not complete(received):
            try:
                more = connection.recv(65536)
            except ConnectionResetError:
                break
            if not more:
                break
            received += more
    return received


def statuses(received):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


def complete(received):
    """Whether the last answer has its whole body."""
    head, _, body = received[received.rfind(b"HTTP/1.1") :].partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return bool(body or length is None or length[1] == b"0") and (length is None or len(body) >= int(length[1]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (request(), [200]),
        (b"\0" * 100 + b"\r\n\r\n", [400]),
        (b"GET / HTTP/9.9\r\nHost: h\r\n\r\n", [404]),
        (b"GET\r\n\r\n", [400]),
        (request(X_Null="a\0b"), [400]),
        (request(X_Long="a" * 2**20), [400]),
        (request(Content_Length="-1"), [400]),
        (request(Content_Length="x"), [400]),
        (request(Content_Length="9" * 5000), [400]),
        (request(Content_Length="5, 6"), [400]),
        (request(Content_Length=str(2**40)), [413]),
        (request(Content_Length="10"), [400]),
        (chunked(b'{"model": "tiny", ', b'"prompt": "hi"}'), [200]),
        (chunked(b"{", end=b"zz\r\n\r\n"), [400]),
        (chunked(*[b"x" * 2**16] * 33), [413]),
        (request(Transfer_Encoding="gzip"), [400]),
        (request(body=b""), [400]),
        (request(path="/v1/" + "%00" * 100), [404]),
        (request(path="/../../etc/passwd"), [404]),
        (request(path="/" + "a" * 10_000), [404]),
    ],
)
def test_requests_that_are_wrong_on_the_wire(target, data, expected):
    with in_time():
        assert statuses(exchange(target, data))[:1] == expected
    target.is_well()


def test_several_requests_at_once_are_answered_in_order(target):
    received = exchange(target, request() + request(body=b"{}") + request(), answers=3)
    assert statuses(received) == [200, 400, 200]


def test_a_client_that_asks_before_it_sends_is_told_to_go_on(target):
    body = b'{"model": "tiny", "prompt": "hi", "max_tokens": 1}'
    with target.connect() as connection:
        connection.sendall(request(body=b"", Content_Length=str(len(body)), Expect="100-continue"))
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        request(Content_Length="1000"),
        request(body=b"", Content_Length="10"),
        chunked(b'{"model": ', end=b""),
        chunked(b"{", end=b"5\r\nab"),
    ],
)
def test_a_body_that_never_ends_is_given_up(target, data):
    with in_time():
        received = exchange(target, data)
    assert statuses(received) == [408]
    assert f"nothing came of the body for {BODY_SECONDS:g} seconds".encode() in received


def test_a_request_whose_head_never_ends_holds_up_nobody(target):
    with target.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n")
        target.is_well()
        assert statuses(exchange(target, request())) == [200]


@fuzz
@given(st.sampled_from([request(), request(stream="x"), chunked(b"{", b"}"), request() * 2]), st.data())
def test_broken_bytes_on_the_wire(target, data, draws):
    data = damaged_bytes(data, draws.draw)
    with in_time(), target.connect() as connection:
        connection.sendall(data)
        connection.shutdown(1)
        received = b""
        while more := connection.recv(65536):
            received += more
    assert all(status < 500 for status in statuses(received)), received


def listed(item, room):
    return f"[{','.join([item] * (room // (len(item) + 1)))}]"


SLOW = {
    "characters": ("prompt", lambda room: f'"{"a" * room}"'),
    "token ids": ("prompt", lambda room: listed("1", room)),
    "messages": ("messages", lambda room: listed('{"role": "user", "content": "a"}', room)),
    "wrong messages": ("messages", lambda room: listed("1", room)),
    "tools": ("tools", lambda room: listed('{"type": "function", "function": {"name": "f"}}', room)),
    "wrong tools": ("tools", lambda room: listed("{}", room)),
    "lists": ("metadata", lambda room: listed("[]", room)),
    "names": ("x", lambda room: "0, " + ", ".join(f'"{number:x}": 0' for number in range(room // 13))),
}
"""Values that are slow to read, by what is many in them: the field, and its JSON of so many bytes."""


@pytest.mark.parametrize("what", SLOW)
def test_a_body_of_the_greatest_length_is_answered_in_time(target, what):
    name, value = SLOW[what]
    fields = {"model": '"tiny"', "max_tokens": "1", "messages": '[{"role": "user", "content": "a"}]'}
    if name == "prompt":
        del fields["messages"]
    size = MAX_BODY_BYTES if SOAK else MAX_BODY_BYTES // 16
    fields[name] = value(size - 200)
    content = "{" + ", ".join(f'"{key}": {text}' for key, text in fields.items()) + "}"
    started = time.process_time()
    with in_time(3 * SECONDS):
        path = "/v1/completions" if name == "prompt" else "/v1/chat/completions"
        response = target.http.post(path, content=content, headers={"content-type": "application/json"})
    figures.named.append(f"a body of {size / 2**20:g} MiB of {what}: {time.process_time() - started:.1f} s")
    judge(response.status_code, response.content, response.headers.get("content-type"))
    assert len(response.content) < 2000
