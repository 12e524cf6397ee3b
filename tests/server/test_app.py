"""How the service starts, announces itself and ends, over a fake engine and without vLLM's."""

import asyncio
import contextlib
import functools
import json
import os
import shlex
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from magi_serve.server import app, engine, heartbeat, lifecycle, routes


class FakeClient:
    """Stands in for a running engine, which a test can break."""

    errored = False
    stuck = False
    closed = False
    stopped_in_s: float | None = None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ()

    async def check_health(self) -> None:
        if self.errored:
            raise RuntimeError("dead")

    async def is_sleeping(self) -> bool:
        while self.stuck:
            await asyncio.sleep(0.01)
        return False

    def shutdown(self, timeout: float) -> None:
        self.stopped_in_s = timeout


async def stream() -> AsyncIterator[str]:
    for i in range(600):
        yield f"data: {i}\n\n"
        await asyncio.sleep(0.1)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A fake engine, behind an application of two paths and our routes."""
    client = FakeClient()

    @contextlib.asynccontextmanager
    async def start(args: Namespace) -> AsyncIterator[FakeClient]:
        args.loaded.wait(60)  # as vLLM does: nothing else runs in this thread
        yield client
        client.closed = True

    async def create_app(client: FakeClient, args: Namespace) -> FastAPI:
        made = FastAPI()
        made.state.engine_client = client
        routes.attach(made)

        @made.get("/stream")
        async def of_events() -> StreamingResponse:
            return StreamingResponse(stream(), media_type="text/event-stream")

        @made.get("/short")
        async def short() -> str:
            await asyncio.sleep(0.6)
            return "done"

        return made

    async def announce(server: uvicorn.Server, made: FastAPI, sock: Any, args: Namespace) -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        if args.when_ready:
            await args.when_ready(app._url(sock, tls=False))

    def terminate_if_errored(server: Any, client: FakeClient) -> None:
        server.should_exit = server.should_exit or client.errored

    def bind(args: Namespace) -> socket.socket:
        sock = socket.create_server(("127.0.0.1", 0))
        args.url = app._url(sock, tls=False)
        args.bound.set()
        return sock

    def config(made: Any, args: Namespace, log_level: str | None = None) -> uvicorn.Config:
        return uvicorn.Config(made, log_config=None, timeout_graceful_shutdown=1)

    monkeypatch.setattr(engine, "bind", bind)
    monkeypatch.setattr(engine, "refuse_model", lambda args: None)
    monkeypatch.setattr(engine, "start", start)
    monkeypatch.setattr(engine, "vllm_server", lambda name: terminate_if_errored)
    monkeypatch.setattr(lifecycle, "LINGER_S", 1.5)
    monkeypatch.setattr(app, "create_app", create_app)
    monkeypatch.setattr(app, "_announce", announce)
    monkeypatch.setattr(app, "_uvicorn_config", config)
    return client


def arguments(**given: Any) -> Namespace:
    options = {"when_ready": None, "shutdown_timeout": 60, "enable_ssl_refresh": False}
    made = Namespace(**(options | given), bound=threading.Event(), loaded=threading.Event())
    made.loaded.set()
    return made


def serve(when_ready: Any, **given: Any) -> int:
    """The exit code of a service that `when_ready` ends; what that raises is raised."""
    raised: list[BaseException] = []

    async def checked(url: str) -> None:
        try:
            await when_ready(url)
        except BaseException as error:
            raised.append(error)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    args = arguments(when_ready=checked, **given)
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = asyncio.run(asyncio.wait_for(app.serve(args), timeout=30))
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
    for error in raised:
        raise error
    return code


@contextlib.asynccontextmanager
async def open_stream(url: str) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a stream that has begun."""
    async with httpx.AsyncClient() as http, http.stream("GET", f"{url}/stream") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "data: 0"
        yield lines


async def rest(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines if line]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_probes_are_answered_while_the_engine_is_loaded(client: FakeClient) -> None:
    said: list[tuple[str, int]] = []
    lost: list[str] = []

    def ask() -> None:
        args.bound.wait()
        while [code for _, code in said[-3:]] != [200] * 3 and len(lost) < 2:
            for path in ("/live", "/startup", "/ready"):
                try:
                    said.append((path, httpx.get(args.url + path, timeout=10).status_code))
                except httpx.TransportError as error:
                    lost.append(f"{path}: {error!r}")
            if len(said) >= 6:
                args.loaded.set()
        args.loaded.set()
        terminate()

    args = arguments()
    args.loaded.clear()
    asking = threading.Thread(target=ask)
    asking.start()
    assert asyncio.run(asyncio.wait_for(app.serve(args), timeout=30)) == 0
    asking.join()
    assert not lost
    assert {code for path, code in said if path == "/live"} == {200}
    for path in ("/startup", "/ready"):
        codes = [code for asked, code in said if asked == path]
        assert codes == sorted(codes, reverse=True) and set(codes) == {503, 200}
    assert said.count(("/ready", 503)) > 1


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_with_0(client: FakeClient, sig: signal.Signals) -> None:
    async def when_ready(url: str) -> None:
        os.kill(os.getpid(), sig)

    assert serve(when_ready) == 0
    assert client.closed and client.stopped_in_s == lifecycle.ENGINE_STOP_S


def test_a_draining_service_refuses_new_requests_and_ends_when_the_open_ones_have(
    client: FakeClient,
) -> None:
    async def when_ready(url: str) -> None:
        async with httpx.AsyncClient() as http, httpx.AsyncClient() as other:
            short = asyncio.ensure_future(http.get(f"{url}/short"))
            await asyncio.sleep(0.2)
            terminate()
            await asyncio.sleep(0.1)
            ready = await other.get(f"{url}/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
            assert (await other.get(f"{url}/live")).status_code == 200
            refused = await other.get(f"{url}/short")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == 503
            assert refused.headers["retry-after"] and refused.headers["connection"] == "close"
            assert (await short).json() == "done"

    start = time.monotonic()
    assert serve(when_ready) == 0
    assert time.monotonic() - start < 5


def test_streams_that_outlast_the_grace_time_end_with_an_error_event(client: FakeClient) -> None:
    async def when_ready(url: str) -> None:
        async with open_stream(url) as lines:
            terminate()
            *_, before, error, done = await rest(lines)
        assert int(before.removeprefix("data: ")) >= 5  # it went on for the grace time
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"

    start = time.monotonic()
    assert serve(when_ready, shutdown_timeout=1) == 0
    assert 1 < time.monotonic() - start < 4


def test_a_second_signal_does_not_wait_for_open_requests(client: FakeClient) -> None:
    async def when_ready(url: str) -> None:
        async with open_stream(url) as lines:
            terminate()
            await asyncio.sleep(0.3)
            assert await anext(lines) == ""
            terminate()
            assert (await rest(lines))[-1] == "data: [DONE]"

    start = time.monotonic()
    assert serve(when_ready) == 0
    assert time.monotonic() - start < 5
    assert client.stopped_in_s is not None and client.stopped_in_s < 1


def test_a_dead_engine_turns_ready_ends_streams_and_then_the_service_with_1(
    client: FakeClient,
) -> None:
    async def when_ready(url: str) -> None:
        async with open_stream(url) as lines, httpx.AsyncClient() as http:
            client.errored = True
            assert (await http.get(f"{url}/ready")).status_code == 503
            error, done = (await rest(lines))[-2:]
            assert "the engine has died" in error and done == "data: [DONE]"
            ready = await http.get(f"{url}/ready")  # still there for those who ask
            assert (ready.status_code, ready.json()) == (503, {"status": "the engine has died"})

    assert serve(when_ready) == 1
    assert client.closed


def test_an_engine_that_dies_while_draining_ends_open_streams_with_1(client: FakeClient) -> None:
    async def when_ready(url: str) -> None:
        async with open_stream(url) as lines:
            terminate()
            await asyncio.sleep(0.2)
            client.errored = True
            assert (await rest(lines))[-1] == "data: [DONE]"

    assert serve(when_ready) == 1


def test_an_engine_that_ends_with_its_last_request_while_draining_is_no_failure(
    client: FakeClient,
) -> None:
    async def when_ready(url: str) -> None:
        async with httpx.AsyncClient() as http:
            short = asyncio.ensure_future(http.get(f"{url}/short"))
            await asyncio.sleep(0.2)
            terminate()
            client.errored = True
            assert (await short).json() == "done"

    assert serve(when_ready) == 0


def test_a_stuck_engine_turns_ready_and_comes_back(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = functools.partial(heartbeat.Heartbeat, stuck_after_s=0.2, period_s=0.02)
    monkeypatch.setattr(lifecycle, "Heartbeat", quick)

    async def when_ready(url: str) -> None:
        async with httpx.AsyncClient() as http:

            async def ready() -> int:
                return (await http.get(f"{url}/ready")).status_code

            assert await ready() == 200
            client.stuck = True
            await asyncio.sleep(0.6)
            assert await ready() == 503
            assert (await http.get(f"{url}/live")).status_code == 200
            client.stuck = False
            await asyncio.sleep(0.3)
            assert await ready() == 200
        terminate()

    assert serve(when_ready) == 0


class WarmClient(FakeClient):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, *words: Any) -> AsyncIterator[None]:
        self.asked.append(words)
        if self.error:
            raise self.error
        yield


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))


def test_the_engine_computes_two_tokens_before_it_is_ready(sampling: None) -> None:
    client = WarmClient()
    asyncio.run(lifecycle.warm_up(client))
    ((prompt, params, _),) = client.asked
    assert prompt["prompt_token_ids"] == [0] and params["max_tokens"] == 2


def test_a_model_without_plain_prompts_is_served_cold_and_a_dead_engine_is_not(
    sampling: None,
) -> None:
    client = WarmClient(ValueError("needs an image"))
    asyncio.run(lifecycle.warm_up(client))
    client.errored = True
    with pytest.raises(engine.ServeError, match="died of its first request"):
        asyncio.run(lifecycle.warm_up(client))


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
