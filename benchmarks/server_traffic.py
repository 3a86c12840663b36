"""What the clients of server_load.py send: conversations, passages in another order, and requests that must be refused.

Nothing here talks to a server. The same seed and the same answers give the same requests.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

TENANTS = 8
PASSAGES = 6
"""Of a tenant; its clients share them."""
KEPT = 2
"""Conversations that a client may come back to."""
MESSAGES = 6
"""A conversation that has as many is not continued, but replaced by a new one."""
TENANT_HEADER = "X-Irminsul-Tenant"
TOO_LONG = 16 * 2**20 + 1
"""Bytes: one more than the server takes."""
_DRY_REQUESTS = 20

Messages = list[dict[str, str]]

_WORDS = (  # noqa: SIM905 -- a list would take a line for each word
    "river bridge stone market winter letter garden engine window number paper silver forest harbour morning "
    "people answer story music doctor village mountain record station teacher summer island question reason "
    "history captain kitchen weather picture friend journey minute castle machine student problem language colour "
    "evening corner field old new small large quiet early green heavy simple famous narrow distant warm careful "
    "broken empty finds keeps sends opens carries follows measures builds writes crosses leaves remembers counts "
    "answers holds"
).split()


@dataclass(frozen=True)
class Drawn:
    """One request; the fields that a client of HTTP needs, and what must come back."""

    kind: str
    body: bytes
    headers: dict[str, str]
    path: str = "/v1/completions"
    method: str = "POST"
    expected: int = 200
    stream: bool = False
    slow: bool = False
    """Whether the client reads slowly."""
    copies: int = 1
    """How often it is sent at once."""
    messages: Messages | None = None
    """The conversation that the answer continues."""
    place: int = 0
    """Where the client keeps that conversation."""


def text(rng: random.Random, n_words: int) -> str:
    """Return words as a sentence; more words give more than as many tokens."""
    return " ".join(rng.choice(_WORDS) for _ in range(n_words)).capitalize() + "."


@dataclass
class Client:
    """One client: its tenant, perhaps a salt of its own, and the conversations that it may come back to.

    Args:
        number: of the client; it decides on tenant and salt.
        seed: of everything drawn.
        model: the server's name for the model.
        key: the server's API key.
    """

    number: int
    seed: int
    model: str
    key: str
    conversations: list[Messages] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed} client {self.number}")
        self.tenant = f"tenant-{self.number % TENANTS}"
        self.salt = f"salt-{self.number}" if self.number % 4 == 3 else None
        shared = random.Random(f"{self.seed} {self.tenant}")
        self.system = text(shared, 24)
        self.passages = [text(shared, shared.randint(60, 90)) for _ in range(PASSAGES)]

    def draw(self) -> Drawn:
        """Draw the next request."""
        kinds: dict[Callable[[], Drawn], int] = {
            self._new: 4,
            self._turn: 8,
            self._edited: 4,
            self._reranked: 6,
            self._twice: 2,
            self._short: 3,
            self._refused: 3,
        }
        return self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def learn(self, drawn: Drawn, answer: str) -> None:
        """Take the answer to a conversation as its next message."""
        if drawn.messages is not None and answer:
            self.conversations[drawn.place : drawn.place + 1] = [
                [*drawn.messages, {"role": "assistant", "content": answer}]
            ]

    def _new(self) -> Drawn:
        n_words = self.rng.choice((10, 20, 90))
        messages = [{"role": "system", "content": self.system}, {"role": "user", "content": text(self.rng, n_words)}]
        place = len(self.conversations) if len(self.conversations) < KEPT else self.rng.randrange(KEPT)
        return self._chat("new conversation", messages, place)

    def _turn(self) -> Drawn:
        if not self.conversations:
            return self._new()
        place = self.rng.randrange(len(self.conversations))
        earlier = self.conversations[place]
        if len(earlier) >= MESSAGES:
            return self._new()
        return self._chat("next turn", [*earlier, {"role": "user", "content": text(self.rng, 12)}], place)

    def _edited(self) -> Drawn:
        if not self.conversations:
            return self._new()
        place = self.rng.randrange(len(self.conversations))
        system, first, *rest = self.conversations[place]
        changed = {"role": "user", "content": f"{text(self.rng, 5)} {first['content']}"}
        question = {"role": "user", "content": text(self.rng, 8)}
        return self._chat("edited history", [system, changed, *rest[: MESSAGES - 3], question], place)

    def _reranked(self, kind: str = "passages in another order", copies: int = 1) -> Drawn:
        # One in ten is long: most of the tenant's passages.
        n_passages = PASSAGES - 1 if self.rng.random() < 0.1 else self.rng.randint(2, 3)
        prompt = "\n\n".join([*self.rng.sample(self.passages, n_passages), f"Question: {text(self.rng, 8)}\nAnswer:"])
        return self._generation(kind, "/v1/completions", {"prompt": prompt}, copies=copies)

    def _twice(self) -> Drawn:
        return self._reranked("the same prompt twice", copies=2)

    def _short(self) -> Drawn:
        return self._generation("short", "/v1/completions", {"prompt": text(self.rng, self.rng.randint(1, 10))})

    def _refused(self) -> Drawn:
        """Draw one that must be refused."""
        good: dict[str, Any] = {"model": self.model, "prompt": "To be refused", "max_tokens": 2}
        headers = self._headers()
        other_key = headers | {"authorization": "Bearer wrong"}
        anonymous = {name: value for name, value in headers.items() if name != TENANT_HEADER}
        return self.rng.choice(
            (
                Drawn("wrong key", _json(good), other_key, expected=401),
                Drawn("no key", _json(good), {TENANT_HEADER: self.tenant}, expected=401),
                Drawn("no tenant", _json(good), anonymous, expected=400),
                Drawn("no such tenant", _json(good), headers | {TENANT_HEADER: "a b/../c"}, expected=400),
                Drawn("oversized body", b"x" * TOO_LONG, headers, expected=413),
                Drawn("not JSON", _json(good)[:-5], headers, expected=400),
                Drawn("unknown parameter", _json(good | {"temprature": 1}), headers, expected=400),
                Drawn("another model", _json(good | {"model": "another"}), headers, expected=404),
                Drawn("several answers", _json(good | {"n": 2}), headers, expected=400),
                Drawn("too many tokens wanted", _json(good | {"max_tokens": 10**6}), headers, expected=400),
                Drawn("no such token", _json(good | {"prompt": [1, 2**40]}), headers, expected=400),
                Drawn("empty prompt", _json(good | {"prompt": []}), headers, expected=400),
                Drawn("half a surrogate pair", _json(good | {"prompt": "\ud800"}), headers, expected=400),
                Drawn("wrong method", b"", headers, method="GET", expected=405),
                Drawn("wrong path", _json(good), headers, path="/v1/complete", expected=404),
            )
        )

    def _chat(self, kind: str, messages: Messages, place: int) -> Drawn:
        path = "/v1/chat/completions"
        return self._generation(kind, path, {"messages": messages}, messages=messages, place=place)

    def _generation(self, kind: str, path: str, prompt: dict[str, Any], **fields: Any) -> Drawn:  # noqa: ANN401
        stream = self.rng.random() < 0.6
        body = {"model": self.model, **prompt, "max_tokens": self.rng.randint(2, 16), "stream": stream}
        body |= (
            {"temperature": 0} if self.rng.random() < 0.5 else {"temperature": 0.8, "seed": self.rng.getrandbits(32)}
        )
        if self.salt is not None:
            body["cache_salt"] = self.salt
        if stream and self.rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if self.rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 5} if path.endswith("chat/completions") else {"logprobs": 5}
        if self.rng.random() < 0.05:
            body["irminsul"] = self.rng.choice(("off", "observe"))
        slow = stream and self.rng.random() < 0.15
        return Drawn(kind, _json(body), self._headers(), path=path, stream=stream, slow=slow, **fields)

    def _headers(self) -> dict[str, str]:
        return {
            "authorization": f"Bearer {self.key}",
            "content-type": "application/json",
            TENANT_HEADER: self.tenant,
        }


def working_set(clients: Sequence[Client], encode: Callable[[str | Messages], Sequence[int]]) -> int:
    """Count the rows that the clients' later requests may come back to, once each namespace.

    These are the rows of the conversations that clients keep, and of the passages of their tenants. Conversations are
    drawn with random words for answers until clients have as many as they keep; ``clients`` are used up by it.

    Args:
        clients: fresh ones.
        encode: makes token ids of a text or of a conversation.
    """
    rows: set[int] = set()
    for client in clients:
        for _ in range(_DRY_REQUESTS):
            client.learn(client.draw(), text(client.rng, 8))
        for kept in (*client.conversations, *client.passages):
            # Stands for all tokens up to a row: rows with the same prefix are the same row.
            prefix = hash((client.tenant, client.salt))
            for token in encode(kept):
                prefix = hash((prefix, token))
                rows.add(prefix)
    return len(rows)


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
