"""How many requests are open at a time, in all and by key; and what is known of each while it is.

Later parts that see a request without its HTTP, as the engine does, find it by `current`.
"""

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from magi_serve.server.middleware.auth import SCOPE_KEY
from magi_serve.server.middleware.errors import error_response
from magi_serve.server.middleware.keys import Key
from magi_serve.settings import ServiceSettings

RETRY_AFTER_S = 2
"""When to come again after a refusal for open requests: one may end at any time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a client is told instead of what vLLM makes of the error."""

    status: int
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    limit: str | None = None
    """Which limit it is about, where it is one of `Tally`'s."""


@dataclass(slots=True)
class OpenRequest:
    """A request that is being answered."""

    path: str
    key: Key | None = None
    refusal: Refusal | None = None
    long_prompts: int = 0
    """How many of its prompts have been given a place in the queue."""
    has_output: bool = False
    """The engine has begun to answer it: it is not made to wait, or refused, any more."""

    @property
    def priority(self) -> int:
        return self.key.priority if self.key else 0


@dataclass(slots=True)
class Tally:
    """What is shown of the requests: those that are open, and those refused with 429 by limit."""

    open: int = 0
    refused: Counter[str] = field(
        default_factory=lambda: Counter({"requests": 0, "requests of a key": 0, "queue": 0})
    )


current: ContextVar[OpenRequest | None] = ContextVar("magi_serve_open_request", default=None)


class Admission:
    """An ASGI application in front of `app` that bounds how many requests it answers at a time.

    What only asks (GET, HEAD, OPTIONS) is neither counted nor refused.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings, tally: Tally | None = None) -> None:
        self.app = app
        self._settings = settings
        self._tally = tally or Tally()
        self._open: Counter[Key | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        key: Key | None = scope.get(SCOPE_KEY)
        request = OpenRequest(scope["path"], key, self._why_not(key))
        if request.refusal is not None:
            await _refuse(request, self._tally, scope, receive, send)
            return
        self._open[key] += 1
        self._tally.open += 1
        token = current.set(request)
        try:
            await self.app(scope, receive, _refusing(request, self._tally, scope, receive, send))
        finally:
            current.reset(token)
            self._open[key] -= 1
            self._tally.open -= 1

    def _why_not(self, key: Key | None) -> Refusal | None:
        if self._open.total() >= self._settings.max_requests:
            kind = "requests"
            limit, option = self._settings.max_requests, "--max-requests"
        elif key is None:
            return None
        else:
            kind = "requests of a key"
            limit, option = self._settings.max_requests_per_key, "--max-requests-per-key"
            if key.max_requests is not None:
                limit, option = key.max_requests, "max-requests of the key"
            if self._open[key] < limit:
                return None
        return Refusal(
            429,
            f"{limit} requests are open already, which is the limit ({option}); try again later",
            retry_after_s=RETRY_AFTER_S,
            limit=kind,
        )


async def _refuse(
    request: OpenRequest, tally: Tally, scope: Scope, receive: Receive, send: Send
) -> None:
    refusal = request.refusal
    assert refusal is not None
    if refusal.limit is not None:
        tally.refused[refusal.limit] += 1
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1013})  # before accepting: HTTP 403
        return
    headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else None
    answer = error_response(
        request.path, refusal.status, refusal.message, param=refusal.param, headers=headers
    )
    await answer(scope, receive, send)


def _refusing(
    request: OpenRequest, tally: Tally, scope: Scope, receive: Receive, send: Send
) -> Send:
    """`send`, with an error in answer to a refused request replaced by the refusal."""
    replaced = False

    async def refuse_or_send(message: Message) -> None:
        nonlocal replaced
        if message["type"] == "http.response.start" and message["status"] >= 400:
            replaced = request.refusal is not None
            if replaced:
                await _refuse(request, tally, scope, receive, send)
        if not replaced:
            await send(message)

    return refuse_or_send
