"""Gate, heartbeat and probes during start, over fakes; then a real service that is stopped."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

import httpx
import uvicorn

from magi_serve.server.gate import Gate
from magi_serve.server.heartbeat import Heartbeat
from magi_serve.server.starting import StartProbes, answer_while_starting

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


class App:
    """An ASGI application whose answers wait: half of it at once, the rest when told to go on."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.cancelled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path in ("/live", "/ready"):
            await self.start(send, JSON)
            await send({"type": "http.response.body", "body": b"probe"})
            return
        try:
            if path != "/v1/embeddings":
                await self.start(send, JSON if path == "/export" else SSE)
                body = b'data: {"text": "Once"}\n\n'
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await self.go_on.wait()
            if path == "/v1/embeddings":
                await self.start(send, JSON)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def start(self, send: Any, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class Sent:
    """What a client would see of one request."""

    def __init__(self, gate: Gate, path: str, kind: str = "http") -> None:
        self.messages: list[dict[str, Any]] = []
        scope = {"type": kind, "path": path, "method": "POST", "headers": []}
        self.task = asyncio.ensure_future(gate(scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, message: Any) -> None:
        self.messages.append(dict(message))

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages[1:]).decode()

    @property
    def complete(self) -> bool:
        return len(self.messages) > 1 and not self.messages[-1].get("more_body", False)


def with_gate(check: Callable[[Gate, App], Awaitable[None]]) -> None:
    async def run() -> None:
        app = App()
        await check(Gate(app), app)

    asyncio.run(asyncio.wait_for(run(), timeout=10))


def test_a_gate_that_refuses_answers_503_and_says_when_to_come_again() -> None:
    async def check(gate: Gate, app: App) -> None:
        gate.refuse("draining")
        sent = Sent(gate, "/v1/completions")
        await sent.task
        assert sent.status == 503
        assert sent.headers["connection"] == "close"
        assert int(sent.headers["retry-after"]) > 0
        error = json.loads(sent.body)["error"]
        assert error["code"] == 503 and "draining" in error["message"]
        assert {"message", "type", "param", "code"} == set(error)

    with_gate(check)


def test_probes_are_answered_behind_a_gate_that_refuses() -> None:
    async def check(gate: Gate, app: App) -> None:
        gate.refuse("draining")
        for path in ("/live", "/ready"):
            sent = Sent(gate, path)
            await sent.task
            assert sent.body == "probe"

    with_gate(check)


def test_open_requests_go_on_behind_a_gate_that_refuses() -> None:
    async def check(gate: Gate, app: App) -> None:
        stream, plain = Sent(gate, "/v1/completions"), Sent(gate, "/v1/embeddings")
        await asyncio.sleep(0.01)
        gate.refuse("draining")
        assert gate.open == 2
        assert not await gate.wait_until_idle(0.05)
        app.go_on.set()
        assert await gate.wait_until_idle(5)
        assert stream.body.endswith("data: [DONE]\n\n") and app.cancelled == 0
        assert plain.headers["connection"] == "close"  # the client takes another server next

    with_gate(check)


def test_a_cut_stream_ends_with_an_error_event_and_done() -> None:
    async def check(gate: Gate, app: App) -> None:
        sent = Sent(gate, "/v1/chat/completions")
        await asyncio.sleep(0.01)
        await gate.cut("the grace time is over", 5)
        await sent.task
        once, error, done = sent.body.strip().split("\n\n")
        assert once == 'data: {"text": "Once"}' and done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert "the grace time is over" in error
        assert sent.complete and app.cancelled == 1 and gate.open == 0

    with_gate(check)


def test_a_cut_stream_of_messages_ends_in_the_form_of_that_api() -> None:
    async def check(gate: Gate, app: App) -> None:
        sent = Sent(gate, "/v1/messages")
        await asyncio.sleep(0.01)
        await gate.cut("over", 5)
        name, data = sent.body.strip().split("\n\n")[-1].split("\n")
        assert name == "event: error"
        said = json.loads(data.removeprefix("data: "))
        assert said["type"] == "error" and said["error"]["message"] == "over"

    with_gate(check)


def test_a_cut_request_without_an_answer_gets_503_and_another_body_stays_incomplete() -> None:
    async def check(gate: Gate, app: App) -> None:
        plain, export = Sent(gate, "/v1/embeddings"), Sent(gate, "/export")
        await asyncio.sleep(0.01)
        await gate.cut("over", 5)
        assert plain.status == 503 and json.loads(plain.body)["error"]["message"] == "over"
        assert plain.headers["retry-after"]
        assert not export.complete and "error" not in export.body

    with_gate(check)


def test_an_application_that_answers_its_own_cancellation_is_not_heard() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await send({"type": "http.response.start", "status": 400, "headers": JSON})
            await send({"type": "http.response.body", "body": b"Client disconnected"})

    async def run() -> None:
        gate = Gate(app)
        sent = Sent(gate, "/v1/completions")
        await asyncio.sleep(0.01)
        await gate.cut("over", 5)
        assert sent.status == 503 and sent.complete

    asyncio.run(run())


def test_errors_and_the_end_of_the_connection_pass_through_the_gate() -> None:
    cancelled = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/bad":
            raise ValueError("bad")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(scope["path"])
            raise

    async def run() -> None:
        gate = Gate(app)
        with pytest.raises(ValueError, match="bad"):
            await Sent(gate, "/bad").task
        sent = Sent(gate, "/slow")
        await asyncio.sleep(0.01)
        sent.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sent.task
        await asyncio.sleep(0.01)
        assert cancelled == ["/slow"] and gate.open == 0

    asyncio.run(run())


class FakeClient:
    """An engine that answers between two steps; a step can be made to last."""

    def __init__(self) -> None:
        self.stepping = asyncio.Event()
        self.stepping.set()
        self.asleep = False
        self.error: Exception | None = None

    async def is_sleeping(self) -> bool:
        await self.stepping.wait()
        if self.error:
            raise self.error
        return self.asleep


def with_heartbeat(check: Callable[[Heartbeat, FakeClient], Awaitable[None]]) -> None:
    async def run() -> None:
        client = FakeClient()
        heartbeat = Heartbeat(client, stuck_after_s=0.4, period_s=0.01)
        beating = asyncio.ensure_future(heartbeat.run())
        await asyncio.sleep(0.05)
        await check(heartbeat, client)
        assert not beating.done()
        beating.cancel()

    asyncio.run(asyncio.wait_for(run(), timeout=20))


async def until(true: Callable[[], Any], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_an_engine_that_answers_is_healthy() -> None:
    async def check(heartbeat: Heartbeat, client: FakeClient) -> None:
        before = heartbeat.beats
        await asyncio.sleep(0.3)
        assert heartbeat.why_not() is None
        assert heartbeat.beats > before

    with_heartbeat(check)


def test_an_engine_is_stuck_when_a_step_does_not_end_and_well_when_it_has() -> None:
    async def check(heartbeat: Heartbeat, client: FakeClient) -> None:
        client.stepping.clear()
        await asyncio.sleep(0.05)
        assert heartbeat.why_not() is None
        await until(heartbeat.why_not)
        assert "no step" in str(heartbeat.why_not())
        client.stepping.set()
        await until(lambda: heartbeat.why_not() is None)

    with_heartbeat(check)


def test_long_steps_make_the_heartbeat_patient() -> None:
    async def check(heartbeat: Heartbeat, client: FakeClient) -> None:
        client.stepping.clear()
        await asyncio.sleep(0.6)
        client.stepping.set()
        await until(lambda: heartbeat.why_not() is None)
        assert heartbeat.limit_s > 1.1  # twice as long as the longest step
        client.stepping.clear()
        await asyncio.sleep(0.6)
        assert heartbeat.why_not() is None

    with_heartbeat(check)


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    async def check(heartbeat: Heartbeat, client: FakeClient) -> None:
        client.stepping.clear()
        await asyncio.sleep(0.05)
        time.sleep(1.0)
        await asyncio.sleep(0.03)
        assert heartbeat.why_not() is None

    with_heartbeat(check)


def test_an_engine_that_sleeps_is_not_ready_and_one_that_fails_is_left_to_the_health_check() -> (
    None
):
    async def check(heartbeat: Heartbeat, client: FakeClient) -> None:
        client.asleep = True
        await until(heartbeat.why_not)
        assert "asleep" in str(heartbeat.why_not())
        client.asleep = False
        await until(lambda: heartbeat.why_not() is None)
        client.error = RuntimeError("dead")
        before = heartbeat.beats
        await asyncio.sleep(0.05)
        assert heartbeat.beats == before

    with_heartbeat(check)


def test_probes_answer_while_the_main_thread_is_busy() -> None:
    said: dict[str, httpx.Response] = {}
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    config = uvicorn.Config(answer_while_starting, lifespan="off", log_config=None)

    def ask() -> None:
        for path in ("/live", "/startup", "/ready", "/v1/models"):
            said[path] = httpx.get(url + path, timeout=10)

    with sock, contextlib.closing(StartProbes(sock, config)):
        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive():
            time.sleep(0.05)  # no event loop runs in this thread
    codes = {path: answer.status_code for path, answer in said.items()}
    assert codes == {"/live": 200, "/startup": 503, "/ready": 503, "/v1/models": 503}
    assert said["/live"].json() == {"status": "live"}
    assert said["/ready"].json() == {"status": "starting"}
    assert all(answer.headers["connection"] == "close" for answer in said.values())
    assert said["/v1/models"].json()["error"]["code"] == 503
    assert int(said["/v1/models"].headers["retry-after"]) > 0


def test_a_connection_made_between_two_servers_waits_for_the_second() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(answer_while_starting, lifespan="off", log_config=None)
    with sock:
        StartProbes(sock, config).close()
        early = socket.create_connection(sock.getsockname(), timeout=10)
        early.sendall(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
        with contextlib.closing(StartProbes(sock, config)):
            assert early.recv(100).startswith(b"HTTP/1.1 200")
        early.close()
