"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from irminsul.errors import InputError, IrminsulError, OverloadedError
from irminsul.server.protocol import ErrorBody, ErrorDetail, RequestError
from irminsul.server.runner import ShuttingDownError

RETRY_AFTER_SECONDS = 1
MAX_TOLD = 400
"""Characters of an error's message, and of its ``param``: what repeats a client's value may not be as long as that."""
_CLIENT_CLOSED_REQUEST = 499


def error_response(status: int, error: ErrorDetail, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error; texts that are too long lose their middle."""
    param = None if error.param is None else _shortened(error.param)
    told = error.model_copy(update={"message": _shortened(error.message), "param": param})
    body = ErrorBody(error=told).model_dump_json()
    return Response(body, status, headers=headers, media_type="application/json")


def wrong_key() -> Response:
    """Return the response to a missing or wrong API key."""
    detail = ErrorDetail(
        message="send the server's API key as 'Authorization: Bearer KEY'",
        type="invalid_request_error",
        code="invalid_api_key",
    )
    return error_response(HTTPStatus.UNAUTHORIZED, detail, {"www-authenticate": "Bearer"})


def explain(error: IrminsulError) -> tuple[int, ErrorDetail]:
    """Return the status and the body of one of our own errors."""
    message = str(error)
    if isinstance(error, RequestError):
        detail = ErrorDetail(message=message, type="invalid_request_error", param=error.param, code=error.code)
        return error.status, detail
    if isinstance(error, InputError):
        return HTTPStatus.BAD_REQUEST, ErrorDetail(message=message, type="invalid_request_error")
    if isinstance(error, OverloadedError):
        return HTTPStatus.TOO_MANY_REQUESTS, ErrorDetail(message=message, type="overloaded_error", code="overloaded")
    if isinstance(error, ShuttingDownError):
        return HTTPStatus.SERVICE_UNAVAILABLE, ErrorDetail(message=message, type="server_error", code="shutting_down")
    return HTTPStatus.INTERNAL_SERVER_ERROR, ErrorDetail(message=message, type="server_error", code="engine_failed")


def register_error_handlers(app: FastAPI) -> None:
    """Give every error that leaves a route of ``app`` OpenAI's shape."""
    app.add_exception_handler(IrminsulError, _own_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _internal_error)


async def _own_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, IrminsulError), error
    status, detail = explain(error)
    passing = isinstance(error, OverloadedError | ShuttingDownError)
    return error_response(status, detail, {"retry-after": str(RETRY_AFTER_SECONDS)} if passing else None)


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    # The value at fault is left out: it may be a prompt.
    first = error.errors()[0]
    param = _path(first["loc"][1:]) if first["type"] != "json_invalid" else None
    if first["type"] == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}"
    elif param is not None:
        message = f"{param}: {first['msg']}"
    elif first["type"] == "string_unicode":
        message = "a field's name holds half of a surrogate pair, which is not text"
    elif "json" in request.headers.get("content-type", ""):
        message = "the body must be a JSON object"
    else:
        message = "send a JSON object with the header 'Content-Type: application/json'"
    detail = ErrorDetail(message=message, type="invalid_request_error", param=param)
    return error_response(HTTPStatus.BAD_REQUEST, detail)


def _shortened(text: str) -> str:
    half = MAX_TOLD // 2
    return text if len(text) <= MAX_TOLD else f"{text[: half - 2]} ... {text[-half + 3 :]}"


def _path(location: tuple[Any, ...]) -> str | None:
    """``("messages", 0, "content")`` as ``messages[0].content``; None for the body as a whole."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".") or None


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    message = str(error.detail)
    if isinstance(error.__cause__, RecursionError):
        message = "the body is nested too deeply"
    elif isinstance(error.__cause__, UnicodeDecodeError):
        message = f"the body is not UTF-8: {error.__cause__.reason} at byte {error.__cause__.start}"
    elif isinstance(error.__cause__, ValueError):
        # Python refuses to read integers of thousands of digits.
        message = "a number in the body is out of range"
    elif error.status_code == HTTPStatus.NOT_FOUND:
        message = f"there is no {request.url.path} here"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}"
    detail = ErrorDetail(message=message, type="invalid_request_error")
    if error.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        detail = ErrorDetail(message=message, type="overloaded_error", code="overloaded")
    return error_response(error.status_code, detail, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    del request, error
    detail = ErrorDetail(message="an internal error; the server's log says more", type="server_error")
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, detail)
