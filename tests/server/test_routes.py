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


class FakeEngine:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def check_health(self) -> None:
        if self.error:
            raise self.error


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


def serving(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"started": True, "should_exit": False} | changes))


def test_live_answers_before_there_is_an_engine() -> None:
    assert get(app_of(), "/live").json() == {"status": "live"}


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, "starting"),
        ({"server": serving(started=False)}, "starting"),
        ({"server": serving(should_exit=True)}, "stopping"),
        (
            {"server": serving(), "engine_client": FakeEngine(RuntimeError("secret"))},
            "the engine is not healthy (RuntimeError)",
        ),
    ],
)
def test_not_ready_says_why(state: dict[str, Any], reason: str) -> None:
    answer = get(app_of(**state), "/ready")
    assert answer.status_code == 503
    assert answer.json() == {"status": reason}


def test_ready_once_the_engine_is_healthy() -> None:
    answer = get(app_of(server=serving(), engine_client=FakeEngine()), "/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


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
