"""How the service starts, announces itself and ends, over a fake engine and without vLLM's."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
import uvicorn
from fastapi import FastAPI

from magi_serve.server import app, engine


class FakeClient:
    errored = False
    closed = False


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """Stands in for a running engine; the application is an empty one that it can break."""
    client = FakeClient()

    @contextlib.asynccontextmanager
    async def start(args: Namespace) -> AsyncIterator[FakeClient]:
        yield client
        client.closed = True

    async def create_app(client: FakeClient, args: Namespace) -> FastAPI:
        made = FastAPI()

        @made.get("/slow")
        async def slow() -> str:
            await asyncio.sleep(60)
            return "late"

        return made

    async def announce(made: FastAPI, sock: socket.socket, args: Namespace) -> None:
        while not made.state.server.started:
            await asyncio.sleep(0.01)
        await args.when_ready(app._url(sock, tls=False))

    def terminate_if_errored(server: uvicorn.Server, client: FakeClient) -> None:
        server.should_exit = server.should_exit or client.errored

    def bind(args: Namespace) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    monkeypatch.setattr(engine, "bind", bind)
    monkeypatch.setattr(engine, "refuse_model", lambda args: None)
    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "vllm_server", lambda name: terminate_if_errored)
    monkeypatch.setattr(app, "create_app", create_app)
    monkeypatch.setattr(app, "_announce", announce)
    monkeypatch.setattr(
        app,
        "_uvicorn_config",
        lambda made, args: uvicorn.Config(
            made, log_config=None, timeout_graceful_shutdown=args.shutdown_timeout
        ),
    )
    return client


def serve(when_ready: Any, shutdown_timeout: float = 0) -> int:
    args = Namespace(when_ready=when_ready, shutdown_timeout=shutdown_timeout)
    return asyncio.run(asyncio.wait_for(app.serve(args), timeout=30))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_with_0(client: FakeClient, sig: signal.Signals) -> None:
    async def when_ready(url: str) -> None:
        os.kill(os.getpid(), sig)

    assert serve(when_ready) == 0
    assert client.closed


def test_a_dead_engine_ends_the_service_with_1(client: FakeClient) -> None:
    async def when_ready(url: str) -> None:
        client.errored = True

    assert serve(when_ready) == 1
    assert client.closed


def test_a_second_signal_does_not_wait_for_open_requests(client: FakeClient) -> None:
    async def when_ready(url: str) -> None:
        async with httpx.AsyncClient() as http:
            request = asyncio.ensure_future(http.get(f"{url}/slow", timeout=60))
            await asyncio.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert not request.done()
            os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                await request

    assert serve(when_ready, shutdown_timeout=60) == 0


def test_a_port_in_use_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(args: Namespace, reuse_port: bool) -> tuple[str, socket.socket]:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(engine, "vllm_server", lambda name: taken)
    args = Namespace(uds=None, host="127.0.0.1", port=8000)
    with pytest.raises(engine.ServeError, match=r"127\.0\.0\.1:8000 .*in use.*--port"):
        asyncio.run(app.serve(args))


def test_the_curl_line_survives_a_shell() -> None:
    model = """it's a "model" $HOME"""
    words = shlex.split(app.curl_line("http://h:1", model, uds="/tmp/a b", needs_key=True))
    assert words[:4] == ["curl", "-s", "--unix-socket", "/tmp/a b"]
    assert "http://h:1/v1/completions" in words
    assert "Authorization: Bearer YOUR_KEY" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == model


@pytest.mark.parametrize(
    ("family", "host", "expected"),
    [
        (socket.AF_INET, "127.0.0.1", "http://127.0.0.1:"),
        (socket.AF_INET, "0.0.0.0", "http://127.0.0.1:"),
        (socket.AF_INET6, "::", "http://[::1]:"),
    ],
)
def test_the_url_is_one_that_can_be_opened(
    family: socket.AddressFamily, host: str, expected: str
) -> None:
    try:
        sock = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no address family {family.name} here")
    with sock:
        assert app._url(sock, tls=False).startswith(expected)
        assert app._url(sock, tls=True).startswith("https://")
