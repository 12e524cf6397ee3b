"""One name for a request, in its logs and in vLLM: the client's ``X-Request-Id``, or a new one."""

import logging
import re
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = b"x-request-id"

_ACCEPTED = re.compile(rb"[\w.:/+=@-]{1,128}")
"""Anything else (a line break, a book) would do harm in logs."""

_current: ContextVar[str | None] = ContextVar("magi_serve_request_id", default=None)


class RequestIds:
    """An ASGI application in front of `app` that gives every HTTP request its name.

    vLLM makes its own names of it (``cmpl-...``), because it is put in place of what the client
    sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        others = [(name, value) for name, value in scope["headers"] if name.lower() != HEADER]
        given = [value for name, value in scope["headers"] if name.lower() == HEADER]
        name = uuid.uuid4().hex.encode()
        if len(given) == 1 and _ACCEPTED.fullmatch(given[0]):
            name = given[0]
        token = _current.set(name.decode())
        try:
            await self.app({**scope, "headers": [*others, (HEADER, name)]}, receive, send)
        finally:
            _current.reset(token)


def name_log_records() -> None:
    """From now on records that are logged for a request have it as ``request_id``.

    Formatters of text leave it out unless told to; vLLM's JSON has it as a field.
    """
    make = logging.getLogRecordFactory()
    if getattr(make, "names_requests", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        name = _current.get()
        if name is not None:
            made.request_id = name
        return made

    record.names_requests = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record)
