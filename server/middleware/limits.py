"""Limits of what a request may carry, checked before anything else reads its body."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic_core
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from magi_serve.server.middleware.errors import error_response
from magi_serve.settings import ServiceSettings

MAX_CONTAINERS = 100_000
"""Arrays and objects in one body: each takes some 60 bytes of memory, and 2 bytes on the wire."""

MAX_STOP_CHARS = 1024
"""Characters of one stop string or bad word: each is searched for after every token."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_REST = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request is refused; it never has the request's own text in it."""

    message: str
    param: str | None = None
    status: int = 400


class Limits:
    """An ASGI application in front of `app` that reads bodies, checks them and hands them on.

    A body is read whole, and no further than its limit, whatever Content-Length says. It has to be
    JSON in UTF-8, unless it is a multipart form (an upload), of which only the bytes are counted.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self.app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope.get("headers", ())}
        body = await self._read(headers.get(b"content-length", b""), receive)
        if body is None:
            return  # the client has gone
        problem = body if isinstance(body, Problem) else self._problem(body, headers)
        if isinstance(body, bytes) and problem is None:
            await self.app(scope, _replay(body, receive), send)
        elif problem is not None:
            answer = error_response(
                scope["path"],
                problem.status,
                problem.message,
                param=problem.param,
                headers={"Connection": "close"} if problem.status == 413 else None,
            )
            await answer(scope, receive, send)

    def _problem(self, body: bytes, headers: dict[bytes, bytes]) -> Problem | None:
        if not body or _is_form(headers.get(b"content-type", b""), body):
            return None
        return problem_of(body, self._settings)

    async def _read(self, said: bytes, receive: Receive) -> bytes | Problem | None:
        limit = self._settings.max_body_bytes
        too_large = Problem(
            f"the body has more than {limit} bytes (--max-body-bytes); send less", status=413
        )
        if said.isdigit() and int(said[:20]) > limit:
            return too_large
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > limit:
                return too_large
            if not message.get("more_body", False):
                return bytes(body)


def problem_of(body: bytes, settings: ServiceSettings) -> Problem | None:
    """What is wrong with the JSON `body`; None if it is within the limits."""
    brackets = _STRING.sub(b"", body).translate(_BRACKETS, _REST)
    if brackets.count(b"[") > MAX_CONTAINERS:
        return Problem(f"the body has more than {MAX_CONTAINERS} arrays and objects; send fewer")
    if _is_deeper(brackets, settings.max_json_depth):
        return Problem(
            f"the body is nested more than {settings.max_json_depth} levels deep "
            "(--max-json-depth); flatten it"
        )
    try:
        said = pydantic_core.from_json(body)
    except ValueError:
        return Problem("the body is not JSON in UTF-8; correct it")
    for fields in _groups(said):
        for problem in _problems(fields, settings):
            return problem
    return None


def _is_deeper(brackets: bytes, levels: int) -> bool:
    """Whether pairs of `brackets` are nested more than `levels` deep; each round takes off one."""
    for _ in range(levels):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            return False  # empty, or not balanced: the parser says so
        brackets = outer
    return b"[]" in brackets


def _groups(said: Any) -> Iterator[dict[str, Any]]:
    """The objects that may hold sampling parameters: the body, and what vLLM nests in it."""
    if isinstance(said, dict):
        yield said
        nested = said.get("sampling_params")
        if isinstance(nested, dict):
            yield nested


def _problems(fields: dict[str, Any], settings: ServiceSettings) -> Iterator[Problem]:
    n = max(_number(fields.get("n")), _number(fields.get("best_of")), 1)
    for name in ("prompt", "prompt_embeds", "input", "messages", *_LISTS):
        prompts = _count(name, fields.get(name))
        if prompts * n > settings.max_sequences:
            yield Problem(
                f"{name} asks for {prompts} x n={n} = {prompts * n} sequences, the limit is "
                f"{settings.max_sequences} (--max-sequences); send several requests",
                "n" if n > 1 else name,
            )
    if n > settings.max_sequences:
        yield Problem(
            f"n={n} asks for more sequences than the limit of {settings.max_sequences} "
            "(--max-sequences); send several requests",
            "n",
        )
    for name in ("stop", "stop_sequences", "stop_token_ids", "bad_words"):
        yield from _stop_problems(name, fields.get(name), settings.max_stop)
    for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
        value = fields.get(name)
        if isinstance(value, dict | list) and len(value) > settings.max_logit_bias:
            yield Problem(
                f"{name} has {len(value)} tokens, the limit is {settings.max_logit_bias} "
                "(--max-logit-bias); name fewer",
                name,
            )


def _stop_problems(name: str, value: Any, limit: int) -> Iterator[Problem]:
    items = value if isinstance(value, list) else [value]
    if value is not None and len(items) > limit:
        yield Problem(
            f"{name} has {len(items)} entries, the limit is {limit} (--max-stop); give fewer", name
        )
    longest = max((len(item) for item in items if isinstance(item, str)), default=0)
    if longest > MAX_STOP_CHARS:
        yield Problem(
            f"{name} has an entry of {longest} characters, the limit is {MAX_STOP_CHARS}; shorten "
            "it",
            name,
        )


_LISTS = ("documents", "queries", "items", "text_1", "text_2", "data_1", "data_2")
"""Lists of what is read on its own, whatever the type of their entries."""


def _count(name: str, value: Any) -> int:
    """How many prompts are in `value`: tokens, and the messages of one conversation, are one."""
    if not isinstance(value, list):
        return 0 if value is None else 1
    if name in _LISTS:
        return len(value)
    return max(1, sum(isinstance(entry, str | list) for entry in value))


def _number(value: Any) -> int:
    """`value` as the model of the request will read it, which takes text and floats too."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return int(number) if math.isfinite(number) else 0


def _is_form(content_type: bytes, body: bytes) -> bool:
    return content_type.lower().lstrip().startswith(b"multipart/") and body.startswith(b"--")


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive`, with the `body` that was read from it in front."""
    replayed = False

    async def again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
