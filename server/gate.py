"""The gate in front of the application: counts open requests, refuses new ones, ends open ones.

It is the outermost ASGI application, so that it sees every request, and all that is sent.
"""

import asyncio
import contextlib
import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALWAYS_ANSWERED = frozenset({"/live", "/ready", "/startup", "/health", "/metrics", "/version"})
"""Paths that never reach the engine's queue: answered until the very end, and not counted."""

RETRY_AFTER_S = 1
"""Another replica can take the request at once."""


def refusal(message: str, *, retry_after_s: int = RETRY_AFTER_S) -> JSONResponse:
    """503 in OpenAI's form, after which the client is to open a new connection."""
    headers = {"Retry-After": str(retry_after_s), "Connection": "close"}
    return JSONResponse(_error(message), status_code=503, headers=headers)


class Gate:
    """An ASGI application in front of `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.refusing: str | None = None
        self._exchanges: set[_Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in ALWAYS_ANSWERED:
            await self.app(scope, receive, send)
        elif self.refusing is None:
            await self._exchange(_Exchange(self, scope, receive, send))
        elif scope["type"] == "http":
            await refusal(f"no new requests: {self.refusing}")(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1012})

    @property
    def open(self) -> int:
        """How many requests are being answered."""
        return len(self._exchanges)

    def refuse(self, reason: str) -> None:
        """From now on answer 503 to new requests; open ones go on."""
        self.refusing = reason

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether all open requests have ended within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    async def cut(self, message: str, timeout_s: float) -> bool:
        """End open requests, streams with a final error event that says `message`.

        The application's part of each is cancelled, so that the engine's pages are free.

        Returns:
            Whether all were told within `timeout_s`; a client that does not read is not.
        """
        for exchange in list(self._exchanges):
            exchange.cut(message)
        return await self.wait_until_idle(timeout_s)

    async def _exchange(self, exchange: "_Exchange") -> None:
        self._exchanges.add(exchange)
        self._idle.clear()
        try:
            await exchange.run(self.app)
        finally:
            self._exchanges.discard(exchange)
            if not self._exchanges:
                self._idle.set()


class _Exchange:
    """One open request, answered by the application until it is cut."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate, self._scope, self._receive, self._send = gate, scope, receive, send
        self._head: Message | None = None
        self._finished = False
        self._cut: str | None = None
        self._work: asyncio.Task[None] | None = None

    async def run(self, app: ASGIApp) -> None:
        async def work() -> None:
            await app(self._scope, self._receive, self._forward)

        self._work = asyncio.create_task(work())
        try:
            await asyncio.wait({self._work})
        except asyncio.CancelledError:
            self._work.cancel()
            raise
        if self._cut is None:
            self._work.result()
        elif not self._finished:
            await self._end(self._cut)

    def cut(self, message: str) -> None:
        self._cut = message
        if self._work is not None:
            self._work.cancel()

    async def _forward(self, message: Message) -> None:
        if self._cut is not None:
            return  # what the application says to its own cancellation
        if message["type"] == "http.response.start":
            self._head = message
            if self._gate.refusing is not None:
                close = (b"connection", b"close")
                message = {**message, "headers": [*message.get("headers", ()), close]}
        elif message["type"] == "http.response.body":
            self._finished = not message.get("more_body", False)
        await self._send(message)

    async def _end(self, message: str) -> None:
        if self._scope["type"] == "websocket":
            await self._send({"type": "websocket.close", "code": 1012})
        elif self._head is None:
            await refusal(message)(self._scope, self._receive, self._send)
        elif _is_event_stream(self._head):
            body = _final_events(self._scope["path"], message)
            await self._send({"type": "http.response.body", "body": body})
        # Any other body stays incomplete: the server closes the connection, which tells the client.


def _is_event_stream(head: Message) -> bool:
    headers = {name.lower(): value for name, value in head.get("headers", ())}
    plain = headers.get(b"content-encoding", b"identity") == b"identity"
    return plain and bytes(headers.get(b"content-type", b"")).startswith(b"text/event-stream")


def _final_events(path: str, message: str) -> bytes:
    """The end of a stream, as vLLM ends one on an error of its own."""
    if path == "/v1/messages":
        error = {"type": "error", "error": {"type": "api_error", "message": message}}
        return f"event: error\ndata: {json.dumps(error)}\n\n".encode()
    return f"data: {json.dumps(_error(message))}\n\ndata: [DONE]\n\n".encode()


def _error(message: str) -> dict[str, Any]:
    kind = "ServiceUnavailableError"
    return {"error": {"message": message, "type": kind, "param": None, "code": 503}}
