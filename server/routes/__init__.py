"""The routes that the service adds to vLLM's application.

`attach` and `init_state` are the two halves in which vLLM itself adds routes: before an application
is finished, and once its engine answers.
"""

from typing import Any

from fastapi import FastAPI

from magi_serve.server.routes import status


def attach(app: FastAPI) -> None:
    """Put our routes in front of those that `app` has: ours win where paths are the same."""
    routes = app.router.routes
    before = len(routes)
    app.include_router(status.router)
    ours = routes[before:]
    del routes[before:]
    routes[:0] = ours


def init_state(state: Any, attention: dict[str, Any]) -> None:
    """Give the routes what they answer from; `attention` is `engine.attention_report`'s."""
    state.magi_serve_attention = attention
