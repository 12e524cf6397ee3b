"""The routes that the service adds to vLLM's application.

`attach` and `init_state` are the two halves in which vLLM itself adds routes: before an application
is finished, and once its engine answers.
"""

from typing import Any

from fastapi import FastAPI

from magi_serve.server.metrics import Figures
from magi_serve.server.routes import playground, status, topology


def attach(app: FastAPI) -> None:
    """Put our routes in front of those that `app` has: ours win where paths are the same."""
    routes = app.router.routes
    before = len(routes)
    for part in (status, topology, playground):
        app.include_router(part.router)
    ours = routes[before:]
    del routes[before:]
    routes[:0] = ours


def init_state(state: Any, figures: Figures, parallel_config: Any) -> None:
    """Give the routes what they answer from; `parallel_config` is vLLM's."""
    state.magi_serve_figures = figures
    state.magi_serve_attention = figures.attention
    state.magi_serve_parallel = topology.parallel_sizes(parallel_config)
