"""What clients send and receive: OpenAI's request and response bodies, as pydantic models.

How fields are treated that we do not implement, for every endpoint:

* A field that cannot change which tokens come back (``user``, ``metadata``, ...) is accepted and ignored.
* A field of OpenAI's or of other servers that would change them is accepted at the value that means "not used"
  (``n: 1``, ``frequency_penalty: 0``, ...) and refused by name at any other.
* A field that nobody has heard of is refused by name: it is more often a typing error than a wish.

Extensions: ``top_k``, ``ignore_eos``, ``cache_salt`` (requests with different salts share nothing) and ``irminsul``
(the mode for this request: off, observe or live).
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from irminsul.engine.types import SamplingParams
from irminsul.engine.types import Usage as EngineUsage
from irminsul.errors import InputError


class RequestError(InputError):
    """A request that is refused: ``param`` names the field at fault, ``code`` is OpenAI's word for the reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


# ---------------------------------------------------------------- requests

_IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that no token depends on."""

_UNUSED_VALUES: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""Known fields that we do not implement, and the values (besides null) at which they ask for nothing."""


def _one_or_several(value: Any) -> Any:  # noqa: ANN401 -- unchecked JSON
    return [value] if isinstance(value, str) else value


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=4), BeforeValidator(_one_or_several)
]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted for OpenAI's clients; nothing is obfuscated."""


class GenerationBody(BaseModel):
    """What both endpoints take. Absent and null mean the same."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """0 or -1: no limit."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopStrings = None
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    irminsul: str | None = None

    def refuse_what_is_not_implemented(self) -> None:
        """Raise RequestError for the first field that would be silently dropped otherwise."""
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value is None:
                continue
            if name not in _UNUSED_VALUES:
                raise RequestError(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
            if not any(_same(value, unused) for unused in _UNUSED_VALUES[name]):
                raise RequestError(_unsupported(name), param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed when stream is true", param="stream_options")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, perhaps none."""
        return tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted_tokens(self) -> int | None:
        """Longest output the client asks for; None if it does not say."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives a token's log probability comes with; None for no log probabilities."""
        raise NotImplementedError

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return the engine's parameters for an output of at most ``max_tokens``."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            max_tokens=max_tokens,
            seed=self.seed,
            top_logprobs=self.wanted_logprobs,
            ignore_eos=bool(self.ignore_eos),
        )


def _same(value: object, unused: object) -> bool:
    # JSON's true is not its 1, though Python's is.
    return value == unused and isinstance(value, bool) == isinstance(unused, bool)


def _unsupported(name: str) -> str:
    unused = _UNUSED_VALUES[name]
    if not unused:
        return f"{name} is not supported; leave it out"
    return f"{name} is not supported; leave it out or set it to {unused[0]!r}"


def _joined_text(value: Any) -> str | None:  # noqa: ANN401 -- unchecked JSON
    """Content as one string; text parts are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "content must be a string or a list of text parts")
    texts = []
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise PydanticCustomError("content_part", 'each part of content must be {"type": "text", "text": "..."}')
        texts.append(part["text"])
    return "\n".join(texts)


class FunctionCall(BaseModel):
    """The function an assistant called; ``arguments`` is JSON text."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: str


class ToolCall(BaseModel):
    """One tool call in an assistant's message."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn. Further fields (``name``, ``reasoning_content``, ...) reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_text)] = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content_missing", "content is required unless an assistant calls tools")
        return self


def _checked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if tool.get("type") != "function" or not named:
        raise PydanticCustomError("tool", 'a tool must be {"type": "function", "function": {"name": "...", ...}}')
    return tool


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    # Fail fast: one error is told, and a body of a megabyte can have half a million of them.
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    tools: Annotated[list[Annotated[dict[str, Any], AfterValidator(_checked_tool)]], Field(fail_fast=True)] | None = (
        None
    )
    """Kept exactly as sent: the template shows them to the model."""
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def refuse_what_is_not_implemented(self) -> None:
        """Raise RequestError for the first field that would be silently dropped otherwise."""
        super().refuse_what_is_not_implemented()
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestError(
                "tool_choice can be 'auto' or 'none': a tool call cannot be forced, because output is not constrained",
                param="tool_choice",
                code="unsupported_parameter",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools the template gets: none if the model must not call any."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    @property
    def wanted_tokens(self) -> int | None:
        """Longest output the client asks for; None if it does not say."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives a token's log probability comes with; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _one_prompt(value: Any) -> str | tuple[int, ...]:  # noqa: ANN401 -- unchecked JSON
    """Text or token ids; a list of exactly one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token_id) is int for token_id in value):
        return tuple(value)
    if isinstance(value, list) and all(isinstance(item, (str, list)) for item in value):
        raise PydanticCustomError("several_prompts", "only one prompt a request is supported; send one request each")
    raise PydanticCustomError("prompt_type", "prompt must be a string or a list of token ids")


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions. The prompt is text or token ids; several prompts are refused."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_one_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives a token's log probability comes with; None for no log probabilities."""
        return self.logprobs


# ---------------------------------------------------------------- responses


class PromptTokensDetails(BaseModel):
    """OpenAI's account of cached tokens: lossless prefix hits only."""

    cached_tokens: int


class ReuseUsage(BaseModel):
    """Where the rows of the prompt came from, in tokens; the first four add up to ``prompt_tokens``.

    ``prefix`` is lossless; ``approximate_prefix`` and ``shifted`` are approximate. ``planned_shifted`` is what mode
    observe would have reused.
    """

    prefix: int
    approximate_prefix: int
    shifted: int
    computed: int
    gaps: int
    planned_shifted: int
    match_ms: float


class Usage(BaseModel):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    irminsul: ReuseUsage

    @classmethod
    def of(cls, usage: EngineUsage, completion_tokens: int) -> Self:
        """Translate the engine's account."""
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=usage.prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.prefix),
            irminsul=ReuseUsage(
                prefix=usage.prefix,
                approximate_prefix=usage.approximate_prefix,
                shifted=usage.shifted,
                computed=usage.computed,
                gaps=usage.gaps,
                planned_shifted=usage.planned_shifted,
                match_ms=round(usage.match_seconds * 1e3, 3),
            ),
        )


class Alternative(BaseModel):
    """A token that could have been drawn; ``bytes`` is null where they are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Alternative):
    """A drawn token with its alternatives, most likely first."""

    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    """Log probabilities of the tokens of a piece of content."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(BaseModel):
    """Log probabilities in the form of /v1/completions; offsets are characters of the output text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AssistantMessage(BaseModel):
    """The answer; tool calls, if the model wrote any, are in the text."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The one choice of an answer."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(BaseModel):
    """The one choice of a chunk."""

    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """One event of a chat stream; ``usage`` is in it only if asked for, and set only in the last, without choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    """The one choice of an answer or of a chunk."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    """Answer of /v1/completions, and one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["irminsul"] = "irminsul"
    max_model_len: int
    """Longest prompt and output together, in tokens."""


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail
