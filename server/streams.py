"""Event streams that show life: progress of the prompt where asked for, and a comment when idle.

A client, and every proxy on the way, takes a connection without bytes for a dead one; a long prompt
can take minutes to read.
"""

import asyncio
import contextlib
import json
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pydantic_core
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from magi_serve.server.middleware.errors import error_response
from magi_serve.server.progress import POLL_S, ProgressFeed, PromptProgress

HEARTBEAT_S = 10.0
"""After how long without bytes a comment is sent: never 15 s without, even on a busy machine."""

COMMENT = b": keep-alive\n\n"

_FIELD = b'"return_progress"'
_OPTION = b'"continuous_usage_stats"'
_USAGE = b'"usage":{'
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")

_CHUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat.completion.chunk", {"delta": {}}),
    "/v1/completions": ("text_completion", {"text": "", "logprobs": None}),
}
"""Of the paths that know ``return_progress``: a chunk's kind, and a choice without text in it.

llama.cpp repeats the role in each delta; clients that put deltas together would repeat it too.
"""


def attach(
    app: FastAPI,
    client: Any,
    args: Namespace,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    poll_s: float = POLL_S,
) -> None:
    """Put `EventStreams` in front of `app`, and have vLLM say in usage what was cached."""
    args.enable_prompt_tokens_details = True
    model = (args.served_model_name or [args.model])[0]
    feed = ProgressFeed(client, poll_s)
    ours = Middleware(EventStreams, feed=feed, model=model, heartbeat_s=heartbeat_s)
    app.user_middleware.insert(0, ours)
    app.middleware_stack = None  # vLLM may have built it; it is built again at the first request


class EventStreams:
    """An ASGI application in front of `app`; `model` is the name where a request has none."""

    def __init__(
        self, app: ASGIApp, feed: ProgressFeed, model: str, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self.app = app
        self._feed = feed
        self._model = model
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] in _CHUNKS:
            await self._complete(scope, receive, send)
        else:
            await self._stream(scope, receive, _EventStream(send, self._heartbeat_s))

    async def _stream(self, scope: Scope, receive: Receive, stream: "_EventStream") -> None:
        try:
            await self.app(scope, receive, stream.send)
        finally:
            await stream.close()

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, replay = await _read(receive)
        if _FIELD not in body and _OPTION not in body:
            await self._stream(scope, replay, _EventStream(send, self._heartbeat_s))
            return
        fields = _fields(body)
        asked = fields.get("return_progress") or False
        if not isinstance(asked, bool):
            given = type(asked).__name__
            message = (
                f"return_progress is of type {given}, which is not accepted: send true or false"
            )
            refusal = error_response(scope["path"], 400, message, param="return_progress")
            await refusal(scope, replay, send)
            return
        with self._feed.follow() as progress:
            model = str(fields.get("model") or self._model)
            kind, choice = _CHUNKS[scope["path"]]
            created = int(time.time())

            def event(figures: dict[str, int]) -> bytes:
                name = progress.request_id
                if kind == "text_completion":  # whose prompts are numbered: cmpl-x-0, cmpl-x-1
                    name = name.rpartition("-")[0]
                chunk = {
                    "id": name,
                    "object": kind,
                    "created": created,
                    "model": model,
                    "choices": [{"index": 0, **choice, "finish_reason": None}],
                    "prompt_progress": figures,
                }
                return _event(chunk)

            stream = _EventStream(send, self._heartbeat_s, progress, event if asked else None)
            await self._stream(scope, replay, stream)


class _EventStream:
    """One answer on its way out; anything but a plain event stream passes unchanged.

    Args:
        send: the way out.
        heartbeat_s: after how long a comment is sent.
        progress: of the request's prompts, if they are followed.
        event: makes a progress event, if those were asked for.
    """

    def __init__(
        self,
        send: Send,
        heartbeat_s: float,
        progress: PromptProgress | None = None,
        event: Callable[[dict[str, int]], bytes] | None = None,
    ) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._progress = progress
        self._event = event
        self._lock = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._tail = b"\n\n"
        self._sent_s = time.monotonic()
        self._processed = -1

    async def send(self, message: Message) -> None:
        """As an application sends."""
        if message["type"] == "http.response.start" and _is_event_stream(message):
            headers = [*message.get("headers", ()), (b"x-accel-buffering", b"no")]
            await self._send({**message, "headers": headers})
            self._sent_s = time.monotonic()
            self._beating = asyncio.create_task(self._beat())
        elif self._beating is None:
            await self._send(message)
        else:
            async with self._lock:
                await self._report()
                body = message.get("body", b"")
                if self._progress is not None and _USAGE in body:
                    message = {**message, "body": _with_cached(body, self._progress)}
                await self._write(message)
            if not message.get("more_body", False):
                await self.close()

    async def close(self) -> None:
        """No more comments and progress."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})

    async def _beat(self) -> None:
        while True:
            idle_s = self._sent_s + self._heartbeat_s - time.monotonic()
            if idle_s > 0:
                await self._change(idle_s)
            async with self._lock:
                await self._report()
                if time.monotonic() >= self._sent_s + self._heartbeat_s:
                    if self._is_between_events():
                        await self._write({"body": COMMENT, "more_body": True})
                    self._sent_s = time.monotonic()

    async def _change(self, timeout_s: float) -> None:
        """Wait until there is something to report, `timeout_s` at most."""
        if self._progress is None or self._event is None:
            await asyncio.sleep(timeout_s)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._progress.changed.wait(), timeout_s)

    async def _report(self) -> None:
        """Send a progress event if there is more than the last one said, and this is the place."""
        if self._progress is None or self._event is None:
            return
        self._progress.changed.clear()
        figures = self._progress.figures()
        if figures and figures["processed"] > self._processed and self._is_between_events():
            self._processed = figures["processed"]
            await self._write({"body": self._event(figures), "more_body": True})

    def _is_between_events(self) -> bool:
        return self._tail.endswith(_EVENT_ENDS)

    async def _write(self, message: Message) -> None:
        self._tail = (self._tail + message.get("body", b""))[-4:]
        await self._send({"type": "http.response.body", **message})
        self._sent_s = time.monotonic()


def _is_event_stream(head: Message) -> bool:
    headers = {name.lower(): value for name, value in head.get("headers", ())}
    plain = headers.get(b"content-encoding", b"identity") == b"identity"
    return bool(plain and headers.get(b"content-type", b"").startswith(b"text/event-stream"))


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The body of a request, and a `receive` that says all of it again."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)

    async def replay() -> Message:
        return messages.pop(0) if messages else await receive()

    return body, replay


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = pydantic_core.from_json(body)
    except ValueError:
        return {}  # the application says what is wrong with it
    return fields if isinstance(fields, dict) else {}


def _with_cached(body: bytes, progress: PromptProgress) -> bytes:
    """The event `body` with the cached tokens in its usage, which vLLM has in the last one only."""
    try:
        chunk = json.loads(body.removeprefix(b"data: "))
        usage = chunk["usage"]
    except (ValueError, LookupError, TypeError):
        return body  # not one whole chunk
    usage.setdefault("prompt_tokens_details", {"cached_tokens": progress.cached_tokens})
    return _event(chunk)


def _event(chunk: dict[str, Any]) -> bytes:
    text = json.dumps(chunk, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"
