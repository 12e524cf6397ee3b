"""Probes while the engine is loaded, which keeps the main thread from answering for minutes."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from magi_serve.server.gate import refusal

RETRY_AFTER_S = 10

LAST_QUESTION_S = 1.0
"""How long the last clients of the probes have to ask what they connected for."""


async def answer_while_starting(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of the time before there is an engine."""
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1012})
        return
    answer: Response
    if scope["path"] == "/live":
        answer = JSONResponse({"status": "live"})
    elif scope["path"] in ("/ready", "/startup"):
        answer = JSONResponse({"status": "starting"}, status_code=503)
    else:
        answer = refusal("the engine is starting", retry_after_s=RETRY_AFTER_S)
    answer.headers["Connection"] = "close"  # the next request is for the real application
    await answer(scope, receive, send)


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ProbeServer(Server):
    """Ends without hanging up on a client that has connected and not asked yet."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        deadline = time.monotonic() + LAST_QUESTION_S
        await asyncio.sleep(0.05)  # what was accepted last becomes a connection
        while self.server_state.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


class StartProbes:
    """`answer_while_starting` in a thread, on a socket that another server takes over.

    The thread listens on a duplicate, so that the socket is listening without a gap: a connection
    made between the two servers waits in the kernel for the second.
    """

    def __init__(self, sock: socket.socket, config: uvicorn.Config) -> None:
        self._server = _ProbeServer(config)
        own = sock.dup()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(sockets=[own])),
            name="start-probes",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Answer what was asked and stop; a second time it does nothing."""
        self._server.should_exit = True
        self._thread.join()
