"""Every route needs a key, where keys are configured, except those in `OPEN_PATHS`."""

from starlette.types import ASGIApp, Receive, Scope, Send

from magi_serve.server.middleware.errors import error_response
from magi_serve.server.middleware.keys import Key, KeyRing

OPEN_PATHS = frozenset({"/live", "/ready", "/startup", "/health", "/"})
"""Probes, and a page that asks for a key itself: they say nothing of models, prompts or clients.
Answered to GET and HEAD without a key, when the path is spelled exactly so."""

SCOPE_KEY = "magi_serve.key"
"""Where the scope of a request has its `Key`."""


class Authentication:
    """An ASGI application in front of `app` that asks for a key of `keys`.

    It comes as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``. The path is compared as the
    router will see it, and any other spelling is not open, whatever it leads to.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self.app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope):
            await self.app(scope, receive, send)
        elif key := self._key_of(scope):
            await self.app({**scope, SCOPE_KEY: key}, receive, send)
        elif scope["type"] == "http":
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            message = "no key that this service knows; send one as 'Authorization: Bearer KEY'"
            answer = error_response(scope["path"], 401, message, headers=headers)
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # before accepting: HTTP 403

    def _key_of(self, scope: Scope) -> Key | None:
        for name, value in scope.get("headers", ()):
            if name == b"authorization":
                scheme, _, sent = value.partition(b" ")
                return self._keys.find(sent.strip()) if scheme.lower() == b"bearer" else None
        for name, value in scope.get("headers", ()):
            if name == b"x-api-key":
                return self._keys.find(value)
        return None


def _is_open(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and scope["path"] in OPEN_PATHS
    )
