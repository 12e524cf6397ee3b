"""Our routes over a fake engine: what they answer while starting, serving, stopping and broken."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
from fastapi import FastAPI

from magi_serve import __version__
from magi_serve.server import routes


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


def test_our_version_wins_and_other_routes_stay() -> None:
    app = app_of()
    routes.init_state(app.state, {"device": "some GPU", "groups": [], "workers": 1})
    said = get(app, "/version").json()
    assert said["magi_serve"] == __version__
    assert said["version"] == said["vllm"]
    assert said["device"] == "some GPU"
    assert said["attention"] == {"groups": [], "workers": 1}
    assert get(app, "/health").json() == {"from": "vllm"}


def test_version_says_why_the_attention_is_unknown() -> None:
    app = app_of()
    routes.init_state(app.state, {"unknown": "because"})
    said = get(app, "/version").json()
    assert said["attention"] == {"unknown": "because"} and said["device"] is None
