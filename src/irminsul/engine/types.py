"""What goes into the engine and what comes out."""

from dataclasses import dataclass, field
from enum import StrEnum

from irminsul.errors import InputError
from irminsul.plan import Mode


class FinishReason(StrEnum):
    """Why a request ended (OpenAI's words, and ``abort`` for a client that went away; the server counts those)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; ranges are checked at construction (InputError)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_tokens: int = 256
    seed: int | None = None
    """Same seed, prompt and parameters on the same machine: same tokens."""
    top_logprobs: int | None = None
    """None: no log probabilities; n: that of the drawn token and of the n most likely."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise InputError(f"temperature must be between 0 and 2, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.top_k < 0:
            raise InputError(f"top_k must be >= 0 (0 means no limit), got {self.top_k!r}")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be >= 1, got {self.max_tokens!r}")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise InputError(f"top_logprobs must be between 0 and 20, got {self.top_logprobs!r}")


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    cache_salt: str = ""
    mode: Mode | None = None
    """Overrides the server's mode downwards or sideways; None keeps it."""


@dataclass(frozen=True)
class Usage:
    """Where the rows of a request's prompt came from, in tokens.

    ``prefix`` is lossless, ``approximate_prefix`` and ``shifted`` are approximate, ``computed`` is the rest; the
    four add up to ``prompt_tokens``. ``planned_shifted`` is what ``observe`` would have reused.
    """

    prompt_tokens: int
    prefix: int
    approximate_prefix: int
    shifted: int
    computed: int
    gaps: int
    planned_shifted: int
    match_seconds: float
    queue_seconds: float
    """From submission until the request was first scheduled."""
    prefill_seconds: float
    """From first being scheduled until the first token was drawn."""


@dataclass(frozen=True)
class StepOutput:
    """One new token of one request.

    ``usage`` is set on the first output of a request; ``finish_reason`` on its last. An aborted or stopped request has
    no further output.
    """

    request_id: str
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
