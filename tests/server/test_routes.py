"""Our routes over a fake engine: what they answer while starting, serving, stopping and broken."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
from fastapi import FastAPI

from magi_serve import __version__
from magi_serve.server import routes
from magi_serve.server.metrics import Figures
from magi_serve.server.middleware.admission import Tally
from magi_serve.server.middleware.prefill_queue import PrefillQueue


class FakeLifecycle:
    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    async def why_not_ready(self) -> str | None:
        return self.reason


def app_of(**state: Any) -> FastAPI:
    app = FastAPI()

    @app.get("/version")
    async def of_vllm() -> dict[str, str]:
        return {"version": "the other one"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"from": "vllm"}

    routes.attach(app)
    for name, value in state.items():
        setattr(app.state, name, value)
    return app


def get(app: FastAPI, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_live_answers_before_there_is_an_engine() -> None:
    assert get(app_of(), "/live").json() == {"status": "live"}


@pytest.mark.parametrize("path", ["/ready", "/startup"])
def test_an_application_without_a_life_is_starting(path: str) -> None:
    answer = get(app_of(), path)
    assert (answer.status_code, answer.json()) == (503, {"status": "starting"})


def test_not_ready_says_why() -> None:
    answer = get(app_of(magi_serve_lifecycle=FakeLifecycle("draining")), "/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})


def test_ready_and_started() -> None:
    app = app_of(magi_serve_lifecycle=FakeLifecycle())
    for path, status in (("/ready", "ready"), ("/startup", "started")):
        answer = get(app, path)
        assert (answer.status_code, answer.json()) == (200, {"status": status})


def test_a_service_that_is_not_ready_has_still_started() -> None:
    app = app_of(magi_serve_lifecycle=FakeLifecycle("draining"))
    assert get(app, "/startup").status_code == 200


def init(app: FastAPI, attention: dict[str, Any], **parallel: int) -> None:
    queue = PrefillQueue(long_tokens=100, max_running=1, max_running_tokens=1000, max_waiting=1)
    figures = Figures(attention, Tally(open=3), queue)
    routes.init_state(app.state, figures, SimpleNamespace(**parallel))


def test_topology_says_what_runs_and_how_full_it_is() -> None:
    app = app_of()
    attention = {"device": "some GPU", "groups": [{"kernel": "hopper"}], "workers": 2}
    init(app, attention, tensor_parallel_size=2)
    said = get(app, "/magi/v1/topology").json()
    assert said["parallel"]["tensor"] == 2 and said["parallel"]["decode_context"] == 1
    assert said["groups"] == [{"kernel": "hopper"}] and said["workers"] == 2
    assert said["requests"]["open"] == 3 and said["kv"] is None
    assert said["long_prompts"] == {"reading": 0, "waiting": 0}


def test_the_playground_is_a_page_that_may_load_nothing() -> None:
    answer = get(app_of(), "/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_our_version_wins_and_other_routes_stay() -> None:
    app = app_of()
    init(app, {"device": "some GPU", "groups": [], "workers": 1})
    said = get(app, "/version").json()
    assert said["magi_serve"] == __version__
    assert said["version"] == said["vllm"]
    assert said["device"] == "some GPU"
    assert said["attention"] == {"groups": [], "workers": 1}
    assert get(app, "/health").json() == {"from": "vllm"}


def test_version_says_why_the_attention_is_unknown() -> None:
    app = app_of()
    init(app, {"unknown": "because"})
    said = get(app, "/version").json()
    assert said["attention"] == {"unknown": "because"} and said["device"] is None
