"""Namespace confusion: no two different scopes are one, whatever is written into their names, by whatever way."""

import itertools
import json
import socket
import unicodedata
from dataclasses import fields, replace
from http import HTTPStatus

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import byte_level_tokenizer, running

from irminsul.namespace import Namespace
from irminsul.radix_cache import RadixCache
from irminsul.registry import Registry
from irminsul.server.app import create_app
from irminsul.server.runner import EngineRunner

FIELDS = [field.name for field in fields(Namespace)]
NAMES = ["", "a", "b", "ab", "a:b", "a\0b", "\0", "a|b", '"', "tenant=a", "None", "0", "A", " a", "a ", "\u0430"]
"""The last one is Cyrillic."""
ACCENTED = [unicodedata.normalize(form, "\u212bngstr\u00f6m \ufb01") for form in ("NFC", "NFD", "NFKC", "NFKD")]

namespaces = st.builds(Namespace, **{name: st.sampled_from(NAMES) | st.text(max_size=8) for name in FIELDS})
TEXT = np.arange(100, dtype=np.int32)


class Core:
    """Tree and registry, and one text of 100 tokens that scopes publish."""

    def __init__(self):
        self.registry = Registry(1000, seed=1)
        self.cache = RadixCache(1000, listener=self.registry)
        self.free = itertools.count(0, 100)

    def publish(self, namespace):
        first = next(self.free)
        slots = np.arange(first, first + 100, dtype=np.int32)
        self.cache.insert(namespace, TEXT, slots, exact_end=100)
        return slots.tolist()

    def found(self, namespace):
        """Slots of the text by prefix, and by content behind one other token."""
        prefix = self.cache.match(namespace, TEXT, derived=True).slots.tolist()
        runs = self.registry.find(namespace, np.concatenate([[999], TEXT]).astype(np.int32), 0)
        return prefix, [slot for run in runs for slot in run.slots.tolist()]


@given(namespaces, namespaces)
def test_scopes_share_only_if_every_field_is_equal(one, other):
    core = Core()
    slots = core.publish(one)
    expected = (slots, slots) if [getattr(one, f) for f in FIELDS] == [getattr(other, f) for f in FIELDS] else ([], [])
    assert core.found(other) == expected


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(FIELDS, 2)])
def test_the_same_name_in_another_field_is_another_scope(one, other):
    """LoRA against salt (vLLM issue 44701), tenant against salt, and so on."""
    core = Core()
    core.publish(Namespace(**{one: "x"}))
    for scope in (Namespace(**{other: "x"}), Namespace(), Namespace(**{one: "x", other: "x"})):
        assert core.found(scope) == ([], [])


def test_separators_inside_values_join_nothing():
    core = Core()
    core.publish(Namespace(tenant="a", cache_salt="b:c"))
    for tenant, salt in (("a:b", "c"), ("a", "b"), ("a:b:c", ""), ("", "a:b:c")):
        assert core.found(Namespace(tenant=tenant, cache_salt=salt)) == ([], [])


def test_forms_of_unicode_are_different_names():
    assert len(set(ACCENTED)) == 4
    core = Core()
    own = {salt: core.publish(Namespace(cache_salt=salt)) for salt in ACCENTED}
    for salt, slots in own.items():
        assert core.found(Namespace(cache_salt=salt)) == (slots, slots)


def test_scopes_whose_hashes_collide_stay_apart(monkeypatch):
    """Python's string hash is no boundary: with every hash equal, values decide."""
    monkeypatch.setattr(Namespace, "__hash__", lambda self: 1)
    core = Core()
    own = {name: core.publish(Namespace(tenant=name)) for name in ("a", "b", "c")}
    for name, slots in own.items():
        assert core.found(Namespace(tenant=name)) == (slots, slots)
    assert core.found(Namespace(tenant="d")) == ([], [])


def test_a_scope_that_takes_over_a_dead_ones_number_finds_nothing_of_it():
    core = Core()
    core.publish(Namespace(tenant="a"))
    number = core.registry.store.namespace_id(Namespace(tenant="a"))
    core.cache.flush()
    assert core.registry.store.namespaces == 0
    other = Namespace(tenant="b")
    first = next(core.free)
    core.cache.insert(other, TEXT[:50], np.arange(first, first + 50, dtype=np.int32), exact_end=50)
    assert core.registry.store.namespace_id(other) == number
    assert core.registry.find(other, TEXT[40:], 0) == []


def test_a_million_characters_of_tenant_are_one_name():
    core = Core()
    long = "x" * 1_000_000
    slots = core.publish(Namespace(tenant=long))
    assert core.found(Namespace(tenant=long[:-1])) == ([], [])
    assert core.found(replace(Namespace(), tenant=long)) == (slots, slots)


def test_scopes_that_come_and_go_leave_nothing(clients, words):
    """Prompts of 100 tokens, each with a salt of its own, through a pool of 1,024."""
    world = clients(pool_slots=1024)
    for i in range(40):
        world.ask(words(1, 100), cache_salt=f"salt {i}")
    assert world.engine._registry.store.namespaces <= 11
    assert len(world.engine._cache._roots) <= 11
    world.engine.flush()
    assert world.engine._registry.store.namespaces == len(world.engine._cache._roots) == 0


# -- over HTTP: what reaches the engine --

TENANT = b"X-Irminsul-Tenant"


@pytest.fixture(scope="module")
def served():
    """A server's port, and the requests that its engine was given."""
    tokenizer = byte_level_tokenizer()
    engine = FakeEngine(lambda request: [tokenizer.eos_token_id], eos=tokenizer.eos_token_id)
    with running(create_app(EngineRunner(engine), tokenizer, model_name="tiny")) as url:
        yield int(url.rsplit(":", 1)[1]), engine.submitted


@pytest.fixture(scope="module")
def strict():
    """The same, of a server that needs a tenant."""
    tokenizer = byte_level_tokenizer()
    engine = FakeEngine(lambda request: [tokenizer.eos_token_id], eos=tokenizer.eos_token_id)
    with running(create_app(EngineRunner(engine), tokenizer, model_name="tiny", require_tenant=True)) as url:
        yield int(url.rsplit(":", 1)[1]), engine.submitted


def test_nobody_is_nameless_where_a_tenant_is_required(strict):
    assert send(strict) == (HTTPStatus.BAD_REQUEST, [])
    assert send(strict, b"X-Irminsul-Tenant: ") == (HTTPStatus.BAD_REQUEST, [])
    assert send(strict, b"X-Irminsul-Tenant: a") == (HTTPStatus.OK, [("a", "")])


def send(served, *headers, body=None, **fields):
    """Write a request byte by byte as it is given; return the status, and the (tenant, salt) that reached the engine.

    No client library would send most of these headers.
    """
    port, submitted = served
    submitted.clear()
    body = json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode() if body is None else body
    head = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", b"Connection: close"]
    head += [b"Content-Length: %d" % len(body), *headers]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"\r\n".join(head) + b"\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    status = int(answer.split(b" ", 2)[1])
    assert len(submitted) == (status == HTTPStatus.OK)
    return status, [(request.tenant, request.cache_salt) for request in submitted]


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ((), ""),
        ((b"X-Irminsul-Tenant: a",), "a"),
        ((b"x-irminsul-tenant: a",), "a"),
        ((b"X-Irminsul-Tenant:    a\t ",), "a"),
        ((b"X-Irminsul-Tenant: A",), "A"),
        ((b"X-Irminsul-Tenant: " + b"x" * 64,), "x" * 64),
        # A proxy that does not know this spelling lets it through, and it must not count.
        ((b"X_Irminsul_Tenant: b", b"X-Irminsul-Tenant: a"), "a"),
        ((b"X-Irminsul-Tenant-: b",), ""),
        ((b"Cookie: X-Irminsul-Tenant=b",), ""),
    ],
)
def test_one_plain_header_names_the_tenant_and_nothing_else_does(served, headers, tenant):
    assert send(served, *headers) == (200, [(tenant, "")])


@pytest.mark.parametrize(
    "headers",
    [
        (TENANT + b": a", TENANT + b": b"),
        (TENANT + b": a", TENANT + b": a"),
        (TENANT + b": a", TENANT.lower() + b": b"),
        (TENANT + b": a, b",),
        (TENANT + b": ",),
        (TENANT + b": a b",),
        (TENANT + b": a/b",),
        (TENANT + b": a:b",),
        (TENANT + b": a%0d%0aX-Irminsul-Tenant: b",),
        (TENANT + b": a\0",),
        (TENANT + b": a\rX-Irminsul-Tenant: b",),
        (TENANT + b": a\nX-Irminsul-Tenant: b",),
        (TENANT + b": a", b" b"),
        (TENANT + b" : a",),
        (TENANT + b": caf\xe9",),
        (TENANT + b": cafe\xcc\x81",),
        (TENANT + b": " + b"x" * 65,),
        (TENANT + b": " + b"x" * 70_000,),
        (TENANT + b": -a",),
        (TENANT + b": ../a",),
    ],
    ids=lambda headers: repr(headers)[:60],
)
def test_anything_else_in_the_header_is_refused_and_never_cut_down_to_a_name(served, headers):
    status, reached = send(served, *headers)
    assert 400 <= status < 500
    assert reached == []


def test_a_tenant_cannot_be_smuggled_into_a_trailer(served):
    port, submitted = served
    submitted.clear()
    body = b'{"model": "tiny", "prompt": "hi"}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Trailer: X-Irminsul-Tenant\r\nTransfer-Encoding: chunked\r\nX-Irminsul-Tenant: a\r\n\r\n"
        b"%x\r\n%s\r\n0\r\nX-Irminsul-Tenant: b\r\n\r\n" % (len(body), body)
    )
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        while connection.recv(65536):
            pass
    assert [request.tenant for request in submitted] in (["a"], [])


@pytest.mark.parametrize("name", ["tenant", "X-Irminsul-Tenant", "extra_key", "lora", "lora_path", "namespace", "salt"])
def test_no_field_of_the_body_names_a_scope_but_the_salt(served, name):
    assert send(served, **{name: "b"}) == (400, [])


def test_a_missing_salt_is_not_an_empty_one(served):
    assert send(served) == (200, [("", "")])
    assert send(served, cache_salt=None) == (200, [("", "")])
    assert send(served, cache_salt="") == (400, []), "an empty salt isolates nothing, so it is refused"
    assert send(served, cache_salt=" ") == (200, [("", " ")])
    for wrong in (0, False, [], ["a"], {"a": 1}):
        assert send(served, cache_salt=wrong) == (400, [])


@pytest.mark.parametrize("salt", [*ACCENTED, "\0", "a\0", "a\r\nX-Irminsul-Tenant: b", "\U0001f9c2", "x" * 256, "null"])
def test_a_salt_reaches_the_engine_as_it_was_sent(served, salt):
    assert send(served, cache_salt=salt) == (200, [("", salt)])


def test_salts_that_cannot_be_kept_as_they_are_are_refused(served):
    assert send(served, cache_salt="x" * 257) == (400, [])
    surrogate = b'{"model": "tiny", "prompt": "hi", "cache_salt": "\\ud800"}'
    assert send(served, body=surrogate) == (400, [])


def test_a_salt_given_twice_is_one_of_them_and_no_third(served):
    """JSON leaves open which; a proxy that checks bodies must read them as this server does (the last one counts)."""
    twice = b'{"model": "tiny", "prompt": "hi", "cache_salt": "a", "cache_salt": "b"}'
    assert send(served, body=twice) == (200, [("", "b")])
