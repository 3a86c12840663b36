"""The routes: OpenAI's completions and chat completions, models, health and metrics.

A request's way: ``asgi`` (key, size), ``protocol`` (is it well-formed?), ``chat`` (token ids), ``runner`` (engine),
``answer`` (text, stop strings), ``forms`` (one body, or a stream of events). Prompts and outputs are never logged.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from irminsul.choices import parse_choice
from irminsul.engine.types import Request as EngineRequest
from irminsul.errors import InputError, IrminsulError
from irminsul.plan import Mode
from irminsul.server.answer import Answer, AnswerText
from irminsul.server.asgi import EventStream, while_connected
from irminsul.server.chat import PromptEncoder
from irminsul.server.detokenize import Detokenizer, StopStrings, Tokenizer, TokenSpeller
from irminsul.server.forms import AnswerForm, ChatForm, CompletionForm
from irminsul.server.metrics import RequestTimer, ServerMetrics
from irminsul.server.protocol import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    ErrorBody,
    GenerationBody,
    ModelCard,
    ModelList,
    RequestError,
    Usage,
)
from irminsul.server.refusals import explain
from irminsul.server.runner import EngineRunner

TENANT_HEADER = "X-Irminsul-Tenant"
MODE_HEADER = "X-Irminsul-Mode"
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for /v1/completions."""

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REACH = {Mode.OFF: 0, Mode.OBSERVE: 1, Mode.LIVE: 2}


@dataclass(frozen=True)
class Wish:
    """A well-formed request, before it has met the engine."""

    body: GenerationBody
    http: Request
    form: AnswerForm
    encode: Callable[[], tuple[int, ...]]
    default_tokens: int
    arrived: float


class Service:
    """The routes of one server.

    Args:
        runner: the engine; started and closed by the app's lifespan.
        tokenizer: encodes prompts, decodes answers.
        model_name: the one name that requests may use.
        default_max_tokens: longest chat answer where the client names no limit, in tokens.
    """

    def __init__(
        self,
        runner: EngineRunner,
        tokenizer: Tokenizer,
        model_name: str,
        default_max_tokens: int,
        *,
        require_tenant: bool,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, runner.max_prompt_tokens)
        self._vocabulary = len(tokenizer)
        self._speller = TokenSpeller(tokenizer)
        # Tokenizers are not made for several threads; a long prompt must not hold up the event loop either.
        self._encoding = ThreadPoolExecutor(1, "irminsul-encode")
        self.counters = ServerMetrics(lambda: runner.stats)
        self._model_name = model_name
        self._default_max_tokens = default_max_tokens
        self._require_tenant = require_tenant
        self._card = ModelCard(id=model_name, created=int(time.time()), max_model_len=runner.max_prompt_tokens)

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the engine's thread while the app runs."""
        del app
        self._runner.start()
        yield
        await asyncio.to_thread(self._runner.close)
        self._encoding.shutdown()

    async def chat_completions(self, body: ChatBody, http: Request) -> Response | ChatCompletion:
        """Continue a conversation."""
        arrived = time.perf_counter()
        form = ChatForm(self._model_name, None if body.wanted_logprobs is None else self._speller)

        def encode() -> tuple[int, ...]:
            return self._encoder.chat(body.messages, body.shown_tools, body.tool_choice)

        answer = await self._respond(Wish(body, http, form, encode, self._default_max_tokens, arrived))
        assert isinstance(answer, (Response, ChatCompletion)), answer
        return answer

    async def completions(self, body: CompletionBody, http: Request) -> Response | Completion:
        """Continue a text."""
        arrived = time.perf_counter()
        form = CompletionForm(self._model_name, None if body.wanted_logprobs is None else self._speller)

        def encode() -> tuple[int, ...]:
            return self._encoder.text(body.prompt) if isinstance(body.prompt, str) else body.prompt

        answer = await self._respond(Wish(body, http, form, encode, DEFAULT_COMPLETION_TOKENS, arrived))
        assert isinstance(answer, (Response, Completion)), answer
        return answer

    async def models(self) -> ModelList:
        """List the one model."""
        return ModelList(data=[self._card])

    async def model(self, name: str) -> ModelCard:
        """Describe the one model."""
        self._check_model(name)
        return self._card

    async def health(self) -> Response:
        """Say whether requests can be answered: 200, or 503 with the reason."""
        failure = self._runner.failure
        if failure is not None:
            return JSONResponse({"status": "unhealthy", "message": failure}, 503)
        return JSONResponse({"status": "ok", "model": self._model_name, "mode": self._runner.mode.value})

    async def metrics(self) -> Response:
        """Return Prometheus metrics."""
        return Response(self.counters.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _respond(self, wish: Wish) -> Response | BaseModel:
        self._check_model(wish.body.model)
        wish.body.refuse_what_is_not_implemented()
        receive = wish.http.receive
        if not wish.body.stream:
            return await while_connected(receive, self._whole(wish))
        answer = await while_connected(receive, self._accept(wish))
        return EventStream(_events(answer, wish.form, include_usage=wish.body.include_usage), answer.close)

    async def _whole(self, wish: Wish) -> BaseModel:
        with closing(await self._accept(wish)) as answer:
            pieces = [piece async for piece in answer.pieces()]
            return wish.form.whole(pieces, Usage.of(answer.usage, answer.completion_tokens))

    async def _accept(self, wish: Wish) -> Answer:
        """Encode the prompt and hand it to the engine; every refusal comes from here, before a stream has begun."""
        tenant, mode = self._tenant(wish.http), _mode(wish.http, wish.body.irminsul, self._runner.mode)
        prompt = await asyncio.get_running_loop().run_in_executor(self._encoding, wish.encode)
        self._check_tokens(prompt)
        sampling = wish.body.sampling(self._output_limit(len(prompt), wish))
        request = EngineRequest(wish.form.request_id, prompt, sampling, tenant, wish.body.cache_salt or "", mode)
        text = AnswerText(
            Detokenizer(self._tokenizer, prompt), StopStrings(wish.body.stop_strings), self._runner.eos_token_ids
        )
        return Answer(await self._runner.generate(request), text, RequestTimer(self.counters, wish.arrived))

    def _tenant(self, http: Request) -> str:
        """Return the tenant a client claims to be; who may claim what, a proxy in front of the server decides."""
        tenant = _header(http, TENANT_HEADER)
        if tenant is None and self._require_tenant:
            raise RequestError(f"this server needs the header {TENANT_HEADER}", param=TENANT_HEADER)
        if tenant is not None and not _TENANT.fullmatch(tenant):
            raise RequestError(
                f"{TENANT_HEADER} must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
                param=TENANT_HEADER,
            )
        return tenant or ""

    def _check_tokens(self, prompt: tuple[int, ...]) -> None:
        # Token ids may come from the client, and the detokenizer reads them before the engine does.
        if not all(0 <= token < self._vocabulary for token in prompt):
            raise RequestError(f"prompt holds a token id outside [0, {self._vocabulary})", param="prompt")

    def _output_limit(self, prompt_tokens: int, wish: Wish) -> int:
        limit = self._runner.max_prompt_tokens
        wanted = wish.body.wanted_tokens
        room = limit - prompt_tokens
        if room >= max(1, wanted or 0):
            return min(wish.default_tokens, room) if wanted is None else wanted
        raise RequestError(
            f"this server takes {limit} tokens of prompt and output together; the prompt has {prompt_tokens} "
            f"and {wanted or 'at least 1'} more are wanted",
            code="context_length_exceeded",
        )

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {self._model_name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )


async def _events(answer: Answer, form: AnswerForm, *, include_usage: bool) -> AsyncGenerator[str]:
    unasked = None if include_usage else {"usage"}
    first = True
    try:
        async for piece in answer.pieces():
            yield form.chunk(piece, first=first).model_dump_json(exclude=unasked)
            first = False
    except IrminsulError as error:
        # The status line has been sent; OpenAI's clients raise on an event like this.
        yield ErrorBody(error=explain(error)[1]).model_dump_json()
        return
    if include_usage:
        yield form.usage_chunk(Usage.of(answer.usage, answer.completion_tokens)).model_dump_json()
    yield "[DONE]"


def _mode(http: Request, in_body: str | None, server_mode: Mode) -> Mode | None:
    """Return the mode a request asks for, which may not reach farther than the server's; None if it asks for none."""
    in_header = _header(http, MODE_HEADER)
    if None not in (in_body, in_header) and in_body != in_header:
        raise RequestError(f"the body asks for irminsul {in_body!r}, the header for {in_header!r}", param="irminsul")
    wanted = in_header if in_body is None else in_body
    if wanted is None:
        return None
    try:
        mode = parse_choice(Mode, wanted, "irminsul mode", "modes")
    except InputError as error:
        raise RequestError(str(error), param="irminsul") from error
    if _REACH[mode] > _REACH[server_mode]:
        raise RequestError(f"this server runs in mode {server_mode}; {mode} would go beyond it", param="irminsul")
    return mode


def _header(http: Request, name: str) -> str | None:
    """Return a header's value. Given twice it is refused: a proxy and its client must not disagree about a tenant."""
    values = http.headers.getlist(name)
    if len(values) > 1:
        raise RequestError(f"the header {name} is given more than once", param=name)
    return values[0] if values else None
