"""Keys: which routes need one, in every spelling; files of keys that change; what errors say."""

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx
from fastapi import FastAPI, WebSocket
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from magi_serve.errors import SettingsError
from magi_serve.server import middleware
from magi_serve.server.errors import ServeError
from magi_serve.server.middleware import options
from magi_serve.server.middleware.auth import OPEN_PATHS
from magi_serve.server.middleware.keys import LOOK_EVERY_S, KeyRing
from magi_serve.settings import ServiceSettings, load_service_settings

KEY = "sk-0123456789"


class Body(BaseModel):
    prompt: str
    n: int = 1


def app_of(keys: KeyRing | None = None, origins: list[str] | None = None) -> FastAPI:
    """Routes of every kind that vLLM has, behind our middlewares."""
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=origins or [], allow_methods=["*"])
    app.add_middleware(AuthenticationMiddleware)

    for path in (*OPEN_PATHS, "/v1/models", "/version", "/ping"):
        app.add_api_route(path, lambda: "ok")

    @app.post("/v1/completions")
    @app.post("/v1/messages")
    async def complete(body: Body) -> str:
        return "text"

    @app.get("/v1/files/{name:path}")
    async def file(name: str) -> str:
        return name

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await websocket.accept()

    async def metrics(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret 1"})

    app.mount("/metrics", metrics)
    app.middleware_stack = app.build_middleware_stack()  # as vLLM leaves it
    middleware.attach(app, arguments(keys=keys, origins=origins))
    return app


class AuthenticationMiddleware:
    """As vLLM's: its keys are those of the start."""

    def __init__(self, app: Any) -> None: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("vLLM's own check is replaced")


def arguments(
    keys: KeyRing | None = None, origins: list[str] | None = None, **settings: Any
) -> Namespace:
    return Namespace(
        magi_serve=ServiceSettings(**settings),
        magi_serve_keys=keys or KeyRing(),
        allowed_origins=origins or [],
    )


def ask(app: Any, method: str, path: str, key: str | None = None, **given: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return await client.request(
                method, path, headers=headers | given.pop("headers", {}), **given
            )

    return asyncio.run(run())


def spellings(path: str) -> list[str]:
    """Other ways to write `path` that a router, a proxy or a file system might take for it."""
    name = path.removeprefix("/") or "x"
    head, _, tail = path.rpartition("/")
    return [
        path, path + "/", "/" + path, path.upper(), path.title(), path + "?x=1", path + ";x=1",
        f"/%{ord(name[0]):02x}{name[1:]}", path.replace("/", "%2f"), "/" + path.replace("/", "%2F"),
        f"/./{name}", f"/live/../{name}", f"/live/..%2f{name}", f"/%2e/{name}", f"{head}//{tail}",
        path + "%00", path + "%20", path + "/.", path + "//", f"/live/{name}", f"/live%2f{name}",
        f"/live;/{name}", f"/live?/{name}", f"/live%3f/{name}", path + "%23", name,
    ]  # fmt: skip


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO")


async def status_of(app: Any, method: str, target: str) -> int:
    """As uvicorn would call `app` for a request line; no client's idea of paths in between."""
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    raw, _, query = target.partition("?")
    scope = {"type": "http", "method": method, "path": unquote(raw), "raw_path": raw.encode()}
    scope |= {"query_string": query.encode(), "headers": [], "root_path": "", "scheme": "http"}
    await app(scope | {"server": ("test", 80), "http_version": "1.1"}, receive, send)
    return status


def test_without_a_key_only_the_probes_answer_in_any_spelling_and_method() -> None:
    app = app_of(KeyRing([KEY]))
    paths = [getattr(route, "path", "") for route in app.routes]
    assert {"/docs", "/openapi.json", "/redoc", "/metrics", "/v1/realtime"} <= set(paths)

    async def walk() -> set[tuple[str, str]]:
        return {
            (unquote(spelling.split("?")[0]), method)
            for path in [*paths, "/", "/metrics/x", "/nowhere", "/v1", "/health/x"]
            for spelling in spellings(path)
            for method in METHODS
            if await status_of(app, method, spelling) != 401
        }

    # A query, or a percent-encoded letter, is the same path to every router.
    assert asyncio.run(walk()) == {
        (path, method) for path in OPEN_PATHS for method in ("GET", "HEAD")
    }


def test_a_web_socket_needs_a_key() -> None:
    app = app_of(KeyRing([KEY]))

    def open_with(headers: list[tuple[bytes, bytes]]) -> list[str]:
        sent: list[str] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])

        scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "headers": headers,
            "query_string": b"",
        }
        asyncio.run(app(scope, receive, send))
        return sent

    assert open_with([]) == ["websocket.close"]
    assert "websocket.accept" in open_with([(b"authorization", f"Bearer {KEY}".encode())])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer {KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer wrong", "x-api-key": KEY}, 401),
        ({"x-api-key": ""}, 401),
        ({"Cookie": f"key={KEY}"}, 401),
    ],
)
def test_how_a_key_is_sent(headers: dict[str, str], status: int) -> None:
    app = app_of(KeyRing([KEY, "another"]))
    assert ask(app, "GET", "/v1/models", headers=headers).status_code == status
    assert ask(app, "GET", f"/v1/models?api_key={KEY}").status_code == 401


def test_a_refusal_has_the_form_of_its_api_and_says_nothing_of_the_key() -> None:
    app = app_of(KeyRing([KEY]))
    answer = ask(app, "POST", "/v1/completions", "wrong-key", json={})
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (401, "AuthenticationError")
    assert answer.headers["www-authenticate"] == "Bearer" and "wrong-key" not in answer.text
    said = ask(app, "POST", "/v1/messages", json={}).json()
    assert said["type"] == "error" and said["error"]["type"] == "authentication_error"


def test_without_keys_every_route_answers() -> None:
    app = app_of()
    assert ask(app, "GET", "/v1/models").status_code == 200
    assert ask(app, "GET", "/metrics/").status_code == 200


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def later(self) -> None:
        self.now += LOOK_EVERY_S + 0.1


def test_a_file_of_keys_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("# team a\nalpha name=a priority=-5 max-requests=3\n\nbeta  # no options\n")
    ring = KeyRing(["single"], file, clock)
    assert ring.all() == ["single", "alpha", "beta"]
    alpha = ring.find(b"alpha")
    assert alpha and (alpha.name, alpha.priority, alpha.max_requests) == ("a", -5, 3)
    file.write_text("gamma\n")
    os.utime(file, ns=(1, 1))
    assert ring.find(b"alpha") and not ring.find(b"gamma")  # looked a moment ago
    clock.later()
    assert ring.find(b"gamma") and ring.find(b"single") and not ring.find(b"alpha")


@pytest.mark.parametrize("text", ["", "# all gone\n", "gamma priority=high", "a b", None])
def test_a_file_that_breaks_changes_nothing_and_is_never_an_open_door(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("alpha\n")
    ring = KeyRing([], file, clock)
    file.unlink() if text is None else file.write_text(text)
    clock.later()
    assert ring and ring.find(b"alpha") and not ring.find(b"") and not ring.find(b"gamma")
    assert "the keys of before stay" in caplog.text and "gamma" not in caplog.text
    with pytest.raises(ServeError, match="--api-key-file="):
        KeyRing([], file, clock)


def settled(*words: str) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--uds")
    parser.add_argument("--api-key", nargs="*")
    parser.add_argument("--allowed-origins", type=json.loads, default=["*"])
    parser.add_argument("--allow-credentials", action="store_true")
    parser.add_argument("--ssl-keyfile")
    parser.add_argument("--ssl-certfile")
    options.add_options(parser)
    args = parser.parse_args(words)
    options.settle(args)
    return args


@pytest.fixture(autouse=True)
def _no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "MAGI_SERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_keys_come_from_options_variables_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("d\n")
    monkeypatch.setenv("MAGI_SERVE_API_KEY", "b")
    monkeypatch.setenv("VLLM_API_KEY", "c")
    args = settled("--api-key", "a", "--api-key-file", str(tmp_path / "keys"))
    assert args.api_key == ["a", "b", "c", "d"]
    assert all(args.magi_serve_keys.find(key.encode()) for key in "abcd")
    assert "b" not in repr(args.magi_serve.api_key)


@pytest.mark.parametrize("name", ["MAGI_SERVE_API_KEY", "VLLM_API_KEY"])
def test_an_empty_key_is_a_mistake_and_not_an_open_door(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(ServeError, match=name):
        settled()
    monkeypatch.delenv(name)
    with pytest.raises(ServeError, match="--api-key"):
        settled("--api-key", " ")


def test_without_keys_a_public_address_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settled()
    settled("--host", "0.0.0.0", "--api-key", "k")
    assert not caplog.records
    settled("--host", "0.0.0.0")
    assert "without keys" in caplog.text and "--api-key-file" in caplog.text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--allowed-origins", '["*"]', "--allow-credentials"], "name the origins"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["--max-queue", "-1"], r"--max-queue = -1 is not accepted.*greater than or equal to 0"),
        (["--api-key-file", "/nowhere"], "--api-key-file=/nowhere"),
    ],
)
def test_what_is_refused_at_the_start(words: list[str], reason: str) -> None:
    with pytest.raises(ServeError, match=reason):
        settled(*words)


def test_options_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_SERVE_MAX_QUEUE", "7")
    monkeypatch.setenv("MAGI_SERVE_KERNEL", "cpu")  # the engine's
    assert settled().magi_serve.max_queue == 7
    assert settled("--max-queue", "9").magi_serve.max_queue == 9
    monkeypatch.setenv("MAGI_SERVE_MAX_QUEUE", "many")
    with pytest.raises(SettingsError, match=r"MAGI_SERVE_MAX_QUEUE = 'many' is not accepted"):
        load_service_settings({})


def test_the_engine_does_not_mind_the_service_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from magi_serve import settings

    monkeypatch.setenv("MAGI_SERVE_API_KEY", KEY)
    settings._load.cache_clear()
    assert KEY not in repr(settings.load_settings())
    with pytest.raises(SettingsError, match="max_queue is not a setting"):
        settings.load_settings({"max_queue": 1})
    settings._load.cache_clear()


ORIGIN = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def test_cors_is_off_until_origins_are_given() -> None:
    answer = ask(app_of(KeyRing([KEY])), "OPTIONS", "/v1/completions", headers=ORIGIN)
    assert answer.status_code == 401
    assert not [name for name in answer.headers if name.startswith("access-control")]
    answer = ask(app_of(), "GET", "/v1/models", headers=ORIGIN)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_with_origins_a_browser_may_ask_first_and_reads_refusals() -> None:
    app = app_of(KeyRing([KEY]), ["https://a.example"])
    answer = ask(app, "OPTIONS", "/v1/completions", headers=ORIGIN)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = ask(app, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_errors_are_small_and_do_not_repeat_what_was_sent() -> None:
    app = app_of()

    class Many(BaseModel):
        items: list[int | float]

    @app.post("/many")
    async def many(body: Many) -> str:
        return ""

    @app.post("/quoting")
    async def quoting() -> Any:
        from starlette.responses import JSONResponse

        message = "no. " + "x" * 100_000 + " (parameter=n, value=zebra)"
        return JSONResponse({"error": {"message": message, "code": 400}}, status_code=400)

    for answer in (
        ask(app, "POST", "/many", json={"items": ["zebra"] * 5000}),
        ask(app, "POST", "/v1/completions", json={"prompt": ["zebra"] * 500, "n": "zebra"}),
        ask(app, "POST", "/quoting", json={}),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 1024 and "zebra" not in answer.text
    said = ask(app, "POST", "/v1/completions", json={"prompt": "x", "n": "zebra"}).json()["error"]
    assert said["param"] == "n" and "valid integer" in said["message"]


WALK = """
import asyncio, json, sys
from urllib.parse import unquote
import httpx
from magi_serve.server import engine, middleware, routes
from magi_serve.server.middleware.auth import OPEN_PATHS

args = engine.parse_args(["m", "--api-key", "sk-0123456789", "--enable-tokenizer-info-endpoint"])
app = engine.vllm_server("build_app")(args, ("generate",), None)
routes.attach(app)
middleware.attach(app, args)
paths = {getattr(route, "path", "") for route in app.routes}
methods = {m for route in app.routes for m in getattr(route, "methods", None) or ()}
open_to_all = []

async def walk():
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport) as client:
        for path in sorted(paths):
            for spelling in (path, path + "/", "/" + path, path.upper(), path.replace("v", "%76")):
                for method in sorted(methods | {"OPTIONS", "HEAD", "TRACE", "PATCH"}):
                    if unquote(spelling) in OPEN_PATHS and method in ("GET", "HEAD"):
                        continue
                    # Whole: "//x" alone would be a host of that name.
                    answer = await client.request(method, "http://test" + spelling)
                    if answer.status_code != 401:
                        open_to_all.append([method, spelling])

asyncio.run(walk())
open(sys.argv[1], "w").write(json.dumps({"paths": sorted(paths), "open": open_to_all}))
"""


@pytest.mark.vllm
def test_no_route_of_vllm_answers_without_a_key(tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    done = subprocess.run(
        [sys.executable, "-c", WALK, str(file)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    said = json.loads(file.read_text())
    assert {"/v1/chat/completions", "/tokenize", "/metrics", "/docs", "/version"} <= {
        path.rstrip("/") for path in said["paths"]
    }
    assert said["open"] == []
