"""The server as a whole: the app, its socket, and an orderly end."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any

import typer
import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from irminsul.api_key import check_api_key
from irminsul.errors import InputError
from irminsul.server.asgi import CountAnswers, LimitBody, RequireKey
from irminsul.server.detokenize import Tokenizer
from irminsul.server.protocol import ChatCompletion, Completion, ErrorBody
from irminsul.server.refusals import register_error_handlers, wrong_key
from irminsul.server.runner import Engine, EngineRunner
from irminsul.server.service import Service

DEFAULT_MAX_TOKENS = 1024
MAX_BODY_BYTES = 2 * 2**20
"""A prompt of a quarter of a million tokens fits. Reading JSON holds up other requests, up to half a second a MiB."""
MAX_TOTAL_BODY_BYTES = 16 * 2**20
"""Of all requests together; what is made of them takes up to 30 times as much memory."""
BODY_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75
_LAST_PORT = 65535


def create_app(
    runner: EngineRunner,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    api_key: str | None = None,
    require_tenant: bool = False,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    max_body_bytes: int = MAX_BODY_BYTES,
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """Build the server's app; its lifespan starts and closes ``runner``.

    Args:
        runner: the engine, not started yet.
        tokenizer: the model's.
        model_name: the one name that requests may use.
        api_key: if given, everything under /v1/ needs it; health and metrics stay open.
        require_tenant: refuse requests that name no tenant, instead of letting them share rows with each other.
        default_max_tokens: longest chat answer where the client names no limit.
        max_body_bytes: longer bodies are refused.
        body_seconds: a client that sends nothing of an unfinished body for so long is told that it took too long.

    Returns:
        The app.

    Raises:
        InputError: a value above makes no sense.
    """
    if default_max_tokens < 1 or max_body_bytes < 1:
        raise InputError("default_max_tokens and max_body_bytes must be >= 1")
    if api_key is not None:
        check_api_key(api_key)
    service = Service(runner, tokenizer, model_name, default_max_tokens, require_tenant=require_tenant)
    app = FastAPI(title="irminsul", lifespan=service.lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    max_total = max(MAX_TOTAL_BODY_BYTES, max_body_bytes)
    app.add_middleware(LimitBody, max_bytes=max_body_bytes, max_total_bytes=max_total, seconds=body_seconds)
    if api_key is not None:
        app.add_middleware(RequireKey, key=api_key, refusal=wrong_key())
    # The outermost: it sees refusals, too.
    app.add_middleware(CountAnswers, count=service.counters.answered)
    register_error_handlers(app)
    # Named in the schema; FastAPI would promise a 422 of its own.
    errors: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in ("4XX", "5XX")}
    for path, endpoint, answer in (
        ("/v1/chat/completions", service.chat_completions, ChatCompletion),
        ("/v1/completions", service.completions, Completion),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=answer, responses=errors)
    app.add_api_route("/v1/models", service.models, responses=errors)
    app.add_api_route("/v1/models/{name:path}", service.model, responses=errors)
    app.add_api_route("/health", service.health)
    app.add_api_route("/metrics", service.metrics, response_class=Response)
    return app


def serve(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    require_tenant: bool = False,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    max_body_bytes: int = MAX_BODY_BYTES,
    drain_seconds: int = 60,
) -> None:
    """Serve until SIGTERM or SIGINT, then let accepted requests finish, and return. For the main thread.

    Prints one line with the URL once requests are taken. From the signal on the port is closed. A second signal waits
    for no request, only for the step that the engine is in.

    Args:
        engine: handed over: its thread is ended on return.
        tokenizer: the model's.
        model_name: the one name that requests may use.
        host: address to listen at; by default no other machine can connect.
        port: 0 takes any free port.
        api_key: if given, everything under /v1/ needs it.
        require_tenant: refuse requests that name no tenant.
        default_max_tokens: longest chat answer where the client names no limit.
        max_body_bytes: longer bodies are refused.
        drain_seconds: requests that take longer than this to finish are aborted; their streams break off.

    Raises:
        InputError: the address cannot be listened at, or a value makes no sense.
    """
    runner = EngineRunner(engine)
    app = create_app(
        runner,
        tokenizer,
        model_name=model_name,
        api_key=api_key,
        require_tenant=require_tenant,
        default_max_tokens=default_max_tokens,
        max_body_bytes=max_body_bytes,
    )
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        http="h11",  # bounds the headers of a request (64 KiB); httptools, which uvicorn prefers, does not
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )
    url = _url(listener)
    server = _AnnouncedServer(config, f"irminsul serves {model_name} at {url}/v1")
    try:
        with listener, _quiet_about(server):
            server.run(sockets=[listener])
    finally:
        runner.close()


class _AnnouncedServer(uvicorn.Server):
    """Says when it takes requests, and when it ends."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self._announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        typer.echo(self._announcement)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second one: uvicorn's own takes two SIGTERM for one.

        It also raises them again when it is done, which would end the process in the middle of our caller.
        """
        del sig, frame
        if self.should_exit and self.started:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._break_off)
        elif self.started:
            self._loop.call_soon_threadsafe(self._say_what_goes_on)
        self.should_exit = True

    def _say_what_goes_on(self) -> None:
        if (running := len(self.server_state.tasks)) > 0:
            seconds = self.config.timeout_graceful_shutdown
            typer.echo(f"irminsul ends: {running} requests may go on for {seconds} s; a second signal ends at once")

    def _break_off(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


@contextlib.contextmanager
def _quiet_about(server: uvicorn.Server) -> Iterator[None]:
    """Keep out of the log that requests were cancelled which were broken off on purpose."""

    def is_news(record: logging.LogRecord) -> bool:
        cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return not (server.should_exit and (cancelled or "CancelledError" in record.getMessage()))

    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= _LAST_PORT:
        # getaddrinfo would take it modulo 65536.
        raise InputError(f"port must be between 0 (any free one) and {_LAST_PORT}, got {port}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise InputError(f"cannot listen at {host}:{port}: {error}") from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
