"""Errors as clients see them: in OpenAI's form or Anthropic's, short, and without their input."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_MESSAGE_CHARS = 500

_TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    413: ("RequestTooLargeError", "request_too_large"),
    429: ("RateLimitError", "rate_limit_error"),
}
_FIELD = re.compile(r"[A-Za-z_]\w{0,40}")
_VALUE = re.compile(r", (input_)?value=.*", re.DOTALL)


def error_response(
    path: str,
    status: int,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer to a request for `path` that is refused."""
    openai, anthropic = _TYPES[status]
    body: dict[str, Any] = {
        "error": {"message": message, "type": openai, "param": param, "code": status}
    }
    if path.startswith("/v1/messages"):
        body = {"type": "error", "error": {"type": anthropic, "message": message}}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))


async def invalid_request(request: Request, error: Exception) -> Response:
    """400 for a body that does not fit the route, with the fields and what they should be."""
    assert isinstance(error, RequestValidationError)
    problems: dict[str, str] = {}
    for found in error.errors():
        problems.setdefault(_param(found["loc"]), str(found["msg"]))
    told = [f"{param}: {text}" for param, text in list(problems.items())[:5]]
    if len(problems) > len(told):
        told.append(f"and {len(problems) - len(told)} more")
    param = next(iter(problems), None)
    return error_response(request.url.path, 400, _short("; ".join(told)), param=param)


class ShortErrors:
    """An ASGI application in front of `app` that shortens the errors of vLLM's own handlers.

    They may quote what was sent, once for each of many mistakes. Streams are not touched.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head: Message | None = None
        body = bytearray()

        async def shorten(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start" and _is_error(message):
                head = message
            elif head is None or message["type"] != "http.response.body":
                await send(message)
            else:
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    short = _shortened(bytes(body))
                    headers = [h for h in head["headers"] if h[0].lower() != b"content-length"]
                    headers.append((b"content-length", b"%d" % len(short)))
                    await send({**head, "headers": headers})
                    await send({"type": "http.response.body", "body": short})

        await self.app(scope, receive, shorten)


def _is_error(head: Message) -> bool:
    headers = {name.lower(): value for name, value in head.get("headers", ())}
    is_json = headers.get(b"content-type", b"").startswith(b"application/json")
    return bool(head["status"] >= 400 and is_json)


def _shortened(body: bytes) -> bytes:
    try:
        said = json.loads(body)
    except ValueError:
        return body[:MAX_MESSAGE_CHARS]
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        error["message"] = _short(error["message"])
        if isinstance(error.get("param"), str):
            error["param"] = error["param"][:MAX_MESSAGE_CHARS]
    elif len(body) > 2 * MAX_MESSAGE_CHARS:
        said = {"error": {"message": "the request was refused", "type": "Error"}}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()


def _short(message: str) -> str:
    message = _VALUE.sub(")" if message.endswith(")") else "", message)
    if len(message) > MAX_MESSAGE_CHARS:
        return message[:MAX_MESSAGE_CHARS] + "..."
    return message


def _param(loc: tuple[Any, ...]) -> str:
    """The field at `loc`, without pydantic's words for a union's branches or a client's keys."""
    parts = [str(part) for part in loc if isinstance(part, int) or _FIELD.fullmatch(str(part))]
    return ".".join(part for part in parts[:4] if part != "body") or "body"
