"""Streams that show life during a long prompt: over fakes, and over one real service."""

import asyncio
import contextlib
import itertools
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Message

from magi_serve.server import progress, streams

PROMPT = 1000


class FakeEngine:
    """An engine's client: prompts of `PROMPT` tokens are computed as a test says.

    `figures` are what the engine core answers, one after the other: cached and computed tokens.
    """

    def __init__(self, *figures: tuple[int, int]) -> None:
        self.engine_core = self
        self.figures = list(figures)
        self.asked: list[list[str]] = []
        self.closed = 0
        self.fails = False
        self.read = asyncio.Event()
        self._numbers = itertools.count()

    async def add_request_async(self, request: Any) -> None:
        await asyncio.sleep(0)

    async def call_utility_async(self, method: str, ids: list[str]) -> dict[str, list[float]]:
        assert method == "magi_serve_prompt_progress"
        self.asked.append(ids)
        if self.fails:
            raise RuntimeError("no such method")
        if not self.figures:
            self.read.set()
            return {}
        cached, computed = self.figures.pop(0)
        return {id: [PROMPT, cached, computed, 0.5] for id in ids}

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        request = SimpleNamespace(
            request_id=f"{request_id}-{next(self._numbers)}",
            external_req_id=request_id,
            prompt_token_ids=[0] * PROMPT,
        )
        await self.engine_core.add_request_async(request)
        try:
            await self.read.wait()
            for token in range(3):
                yield SimpleNamespace(
                    request_id=request_id,
                    num_cached_tokens=256,
                    metrics=SimpleNamespace(scheduled_ts=100.0, first_token_ts=100.5),
                    token=token,
                )
        finally:
            self.closed += 1


def application(engine: FakeEngine, **options: Any) -> FastAPI:
    """vLLM's two routes, as far as a stream shows them, behind our middleware."""
    app = FastAPI()
    args = Namespace(enable_prompt_tokens_details=False, served_model_name=["m"], model="path")
    streams.attach(app, engine, args, **options)
    assert args.enable_prompt_tokens_details is True

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Any:
        body = await request.json()
        if not body.get("stream"):
            return JSONResponse({"usage": None})
        ids = [f"cmpl-x-{i}" for i in range(len(body.get("prompt", "p")))]
        if request.url.path.startswith("/v1/chat"):
            ids = ["chatcmpl-x"]
        usage = '{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001}'

        async def events() -> AsyncIterator[str]:
            for id in ids:
                async for output in engine.generate(None, None, id):
                    end = f',"usage":{usage}' if "stream_options" in body else ""
                    yield f'data: {{"choices":[{{"text":"{output.token}"}}]{end}}}\n\n'
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


async def ask(app: FastAPI, path: str = "/v1/completions", **body: Any) -> tuple[Any, list[str]]:
    """The head of the answer and its events, comments included."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await asyncio.wait_for(client.post(path, json={"model": "m", **body}), 20)
    assert not answer.text or not answer.text.startswith("data") or answer.text.endswith("\n\n")
    return answer, answer.text.split("\n\n")[:-1]


def chunks(events: list[str]) -> list[dict[str, Any]]:
    texts = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def figures(events: list[str]) -> list[tuple[int, int, int]]:
    """Total, cache and processed of each progress event."""
    found = [c["prompt_progress"] for c in chunks(events) if "prompt_progress" in c]
    assert all(set(f) == {"total", "cache", "processed", "time_ms"} for f in found)
    times = [f["time_ms"] for f in found]
    assert times == sorted(times) and all(500 <= time < 5000 for time in times)
    return [(f["total"], f["cache"], f["processed"]) for f in found]


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


STEPS = ((256, 256), (256, 512), (256, 512), (256, 300), (256, 900))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_progress_is_monotone_and_ends_at_the_total_before_the_first_token(path: str) -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        answer, events = await ask(
            application(engine, poll_s=0.01), path, stream=True, return_progress=True
        )
        assert figures(events) == [(1000, 256, p) for p in (256, 512, 900, 1000)]
        assert ["prompt_progress" in chunk for chunk in chunks(events)] == [True] * 4 + [False] * 3
        assert events[-1] == "data: [DONE]"
        assert answer.headers["x-accel-buffering"] == "no"
        assert engine.closed == 1

    run(work())


def test_a_progress_event_is_a_chunk_without_text() -> None:
    async def work() -> None:
        for path, kind, id, choice in (
            ("/v1/completions", "text_completion", "cmpl-x", {"text": "", "logprobs": None}),
            ("/v1/chat/completions", "chat.completion.chunk", "chatcmpl-x", {"delta": {}}),
        ):
            app = application(FakeEngine(*STEPS), poll_s=0.01)
            chunk = chunks((await ask(app, path, stream=True, return_progress=True))[1])[0]
            assert (chunk["object"], chunk["id"], chunk["model"]) == (kind, id, "m")
            assert chunk["choices"] == [{"index": 0, "finish_reason": None, **choice}]
            assert chunk["created"] > 0 and "usage" not in chunk

    run(work())


def test_several_prompts_are_counted_together() -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        app = application(engine, poll_s=0.01)
        _, events = await ask(app, prompt=["a", "b"], stream=True, return_progress=True)
        said = figures(events)
        assert said[-1] == (2000, 512, 2000)
        assert [p for _, _, p in said] == sorted(p for _, _, p in said)

    run(work())


@pytest.mark.parametrize("body", [{}, {"return_progress": False}, {"stream": False}])
def test_unasked_nothing_is_added_and_the_engine_is_not_asked(body: dict[str, Any]) -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        engine.read.set()
        app = application(engine, poll_s=0.01)
        answer, events = await ask(app, **{"stream": True, **body})
        assert figures(events) == [] and engine.asked == []
        assert "usage" not in answer.text or body == {"stream": False}

    run(work())


def test_the_words_in_a_prompt_ask_for_nothing() -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        engine.read.set()
        text = '{"stream": true, "return_progress": true}'
        nested = {"return_progress": True}
        _, events = await ask(
            application(engine), prompt=[text], chat_template_kwargs=nested, stream=True
        )
        assert figures(events) == [] and engine.asked == []

    run(work())


def test_a_value_that_is_no_boolean_is_refused() -> None:
    async def work() -> None:
        answer, _ = await ask(application(FakeEngine()), stream=True, return_progress="yes")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "return_progress")
        assert "type str" in error["message"] and "true or false" in error["message"]

    run(work())


def test_nobody_is_asked_after_the_last_prompt() -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        await ask(application(engine, poll_s=0.01), stream=True, return_progress=True)
        asked = len(engine.asked)
        await asyncio.sleep(0.1)
        assert len(engine.asked) <= asked + 1
        engine.read.clear()
        engine.figures = list(STEPS)
        await ask(application(engine, poll_s=0.01), stream=True, return_progress=True)
        assert len(engine.asked) > asked + 3

    run(work())


def test_an_engine_without_the_method_is_said_once_and_does_not_hurt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.fails = True
        app = application(engine, poll_s=0.01)
        for _ in range(2):
            engine.read.clear()
            asyncio.get_running_loop().call_later(0.05, engine.read.set)
            _, events = await ask(app, stream=True, return_progress=True)
            assert figures(events) == [(1000, 256, 1000)]
        assert len(engine.asked) == 1

    with caplog.at_level("WARNING"):
        run(work())
    assert caplog.text.count("prompt_progress") == 1


def test_several_requests_at_once_are_one_question() -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        app = application(engine, poll_s=0.01)
        asked = [ask(app, stream=True, return_progress=True) for _ in range(3)]
        for _, events in await asyncio.gather(*asked):
            assert figures(events)[-1] == (1000, 256, 1000)
        assert len(engine.asked) <= len(STEPS) + 2
        assert max(len(ids) for ids in engine.asked) == 3

    run(work())


def test_a_comment_is_sent_while_nothing_else_is() -> None:
    async def work() -> None:
        engine = FakeEngine()
        asyncio.get_running_loop().call_later(0.5, engine.read.set)
        _, events = await ask(application(engine, heartbeat_s=0.1), stream=True)
        assert events[:4] == [": keep-alive"] * 4
        assert [event for event in events[5:] if event.startswith(":")] == []

    run(work())


def test_usage_of_every_chunk_has_cached_tokens() -> None:
    async def work() -> None:
        engine = FakeEngine()
        engine.read.set()
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, events = await ask(application(engine), stream=True, stream_options=options)
        found = [chunk["usage"] for chunk in chunks(events)]
        assert [usage["prompt_tokens_details"] for usage in found] == [{"cached_tokens": 256}] * 3
        assert all(usage["prompt_tokens"] == 1000 for usage in found)

    run(work())


class Wire:
    """An ASGI server's side: what was sent, and a client that may be slow."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.sending = 0

    async def receive(self) -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(self, message: Message) -> None:
        self.sending += 1
        assert self.sending == 1, "two at a time"
        await asyncio.sleep(0.001)
        self.sending -= 1
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def of(*parts: bytes, pause_s: float, kind: bytes = b"text/event-stream", **headers: bytes) -> Any:
    """An application that sends a body in `parts`, with pauses."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        head = [(b"content-type", kind), *((k.encode(), v) for k, v in headers.items())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(pause_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def through(app: Any) -> Wire:
    wire = Wire()
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
    feed = progress.ProgressFeed(FakeEngine())
    middleware = streams.EventStreams(app, feed=feed, model="m", heartbeat_s=0.05)
    await middleware(scope, wire.receive, wire.send)
    return wire


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_comments_come_between_events_and_never_inside_one(end: bytes) -> None:
    async def work() -> None:
        parts = [b"data: a", end[:1], end[1:], b"event: b\ndata: ", b"c" + end]
        body = (await through(of(*parts, pause_s=0.12))).body
        assert b": keep-alive" in body
        assert body.replace(b": keep-alive\n\n", b"") == b"".join(parts)
        assert body.startswith(b"data: a" + end + b": keep-alive\n\n")

    run(work())


@pytest.mark.parametrize("headers", [{"kind": b"application/json"}, {"content-encoding": b"gzip"}])
def test_other_bodies_are_left_alone(headers: dict[str, bytes]) -> None:
    async def work() -> None:
        wire = await through(of(b"{", b"}", pause_s=0.12, **headers))
        assert wire.body == b"{}"
        assert b"x-accel-buffering" not in dict(wire.sent[0]["headers"])

    run(work())


def test_nothing_is_sent_after_the_end_and_no_task_is_left() -> None:
    async def work() -> None:
        async def fails(scope: Any, receive: Any, send: Any) -> None:
            await of(b"data: a\n\n", pause_s=0)(scope, receive, send)
            raise RuntimeError("after the end")

        before = asyncio.all_tasks()
        with pytest.raises(RuntimeError, match="after the end"):
            await through(fails)
        assert asyncio.all_tasks() == before
        wire = await through(of(b"data: a\n\n", pause_s=0))
        await asyncio.sleep(0.2)
        assert wire.body == b"data: a\n\n" and not wire.sent[-1]["more_body"]
        assert asyncio.all_tasks() == before

    run(work())


def test_a_client_that_goes_ends_the_engines_request() -> None:
    async def work() -> None:
        engine = FakeEngine(*STEPS)
        app = application(engine, poll_s=0.01)
        engine.figures = [(0, 1)] * 1000
        task = asyncio.create_task(ask(app, stream=True, return_progress=True))
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        asked = len(engine.asked)
        await asyncio.sleep(0.1)
        assert engine.closed == 1 and len(engine.asked) == asked > 1

    run(work())
