"""What FastAPI leaves open: hang-ups are noticed at once, bodies are bounded, and the key is asked for first."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEYED_PATHS = "/v1/"

_Result = TypeVar("_Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run ``work`` to its end, or cancel it as soon as the client hangs up.

    Args:
        receive: of a request whose body has been read.
        work: to run.

    Returns:
        What ``work`` returns.

    Raises:
        ClientDisconnect: the client hung up first.
    """
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one ``data:`` line each.

    Starlette's own streaming response notices a hang-up, on newer ASGI servers, only at the next write; before the
    first token of a long prompt that is too late.

    Args:
        events: JSON texts.
        close: called however the stream ends, even if it never began.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they or the client end."""
        del scope
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            pass  # no one is left to tell
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_LARGE_BODY = 64 * 2**10
_PAUSE_SECONDS = 0.02
_SOON = {"retry-after": "1"}


class LimitBody:
    """Middleware: bounds bodies, one by one and together.

    A body longer than ``max_bytes`` is 413, whether its length is declared or not. One of which nothing comes for
    ``seconds`` is 408. While the bodies of all requests hold more than ``max_total_bytes``, further large ones are 429:
    what is made of a body takes many times its length. Large ones are handed on one at a time, so that the others are
    served in between: while one is read, which is up to a second, nobody is.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_total_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._seconds = seconds
        self._held = 0
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a counting ``receive``."""
        declared = _header(scope, b"content-length") or b"0"
        read, whole = 0, False

        async def counted() -> Message:
            nonlocal read, whole
            # The server has checked that a declared length is a number.
            if int(declared) > self._max_bytes:
                raise self._too_long()
            # Behind the body comes the hang-up, which may take its time.
            if whole:
                return await receive()
            try:
                async with asyncio.timeout(self._seconds):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"nothing came of the body for {self._seconds:g} seconds") from None
            whole = not message.get("more_body", False)
            length = len(message.get("body", b""))
            read, self._held = read + length, self._held + length
            if read > self._max_bytes:
                raise self._too_long()
            if read > _LARGE_BODY:
                if self._held > self._max_total_bytes:
                    raise HTTPException(429, "too many large bodies at once", headers=_SOON)
                if whole:
                    async with self._turn:
                        await asyncio.sleep(_PAUSE_SECONDS)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= read

    def _too_long(self) -> HTTPException:
        return HTTPException(413, f"the body is longer than {self._max_bytes} bytes")


class RequireKey:
    """Middleware: without ``Authorization: Bearer <key>``, paths under /v1/ are answered by ``refusal``."""

    def __init__(self, app: ASGIApp, key: str, refusal: Response) -> None:
        self._app = app
        self._expected = b"Bearer " + key.encode()
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        guarded = scope["type"] == "http" and scope["path"].startswith(KEYED_PATHS)
        given = _header(scope, b"authorization") or b""
        if guarded and not secrets.compare_digest(given, self._expected):
            await self._refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class CountAnswers:
    """Middleware: tells the status of every answer that begins."""

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a ``send`` that looks."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(message["status"])
            await send(message)

        await self._app(scope, receive, counted)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope.get("headers", ()) if key == name), None)
