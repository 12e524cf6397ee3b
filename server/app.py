"""``magi-serve serve``: vLLM's OpenAI application, with our routes, on our attention backend."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import shlex
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI

from magi_serve.errors import MagiServeError
from magi_serve.server import engine, middleware, routes

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop.

    Args:
        argv: the options of ``vllm serve``.

    Returns:
        0 when SIGTERM or SIGINT ended the service, 1 when it could not start or its engine died.
    """
    for sig in _SIGNALS:
        signal.signal(sig, _leave_start)
    try:
        args = engine.parse_args(argv)
        import uvloop

        return int(uvloop.run(serve(args)))
    except MagiServeError as error:
        print(f"magi-serve: {error}", file=sys.stderr)
        return 1


async def serve(args: Namespace) -> int:
    """Start the engine and answer requests until a signal comes or the engine dies.

    The socket is bound first, so that a port in use is known before a model is loaded.

    Returns:
        The exit code, as in `main`.

    Raises:
        MagiServeError: the service cannot start; nothing is left running.
    """
    with contextlib.closing(engine.bind(args)) as sock:
        engine.refuse_model(args)
        async with engine.start(args) as client:
            app = await create_app(client, args)
            server = app.state.server = Server(_uvicorn_config(app, args))
            loop = asyncio.get_running_loop()
            for sig in _SIGNALS:
                loop.add_signal_handler(sig, server.stop)
            background = [
                loop.create_task(_announce(app, sock, args)),
                loop.create_task(_watch(server, client)),
            ]
            try:
                await server.serve(sockets=[sock])
            finally:
                for task in background:
                    task.cancel()
            return 0 if server.started and not client.errored else 1


async def create_app(client: Any, args: Namespace) -> FastAPI:
    """vLLM's application over the engine `client`, with our routes in front of its own."""
    tasks = await client.get_supported_tasks()
    app: FastAPI = engine.vllm_server("build_app")(args, tasks, client.model_config)
    routes.attach(app)
    middleware.attach(app, args)
    middleware.guard_engine(client, args)
    await engine.vllm_server("init_app_state")(client, app.state, args, tasks)
    routes.init_state(app.state, await engine.attention_report(client, args))
    return app


class Server(uvicorn.Server):
    """uvicorn's server, told to stop by `serve` and not by handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """End when open requests have, within ``--shutdown-timeout``; at once the second time."""
        self.force_exit = self.should_exit
        self.should_exit = True


def curl_line(url: str, model: str, *, uds: str | None = None, needs_key: bool = False) -> str:
    """A shell command that gets a completion from the service at `url`."""
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    socket_words = ["--unix-socket", uds] if uds else []
    key_words = ["-H", "Authorization: Bearer YOUR_KEY"] if needs_key else []
    words = ["curl", "-s", *socket_words, f"{url}/v1/completions", *key_words]
    return shlex.join([*words, "-H", "Content-Type: application/json", "-d", json.dumps(body)])


def _leave_start(*_: object) -> None:
    """End the process while it starts, before `serve` takes the signals.

    Raising would not do: vLLM waits for its engine in pyzmq's poll, which drops what it raises.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def _uvicorn_config(app: FastAPI, args: Namespace) -> uvicorn.Config:
    from vllm import envs

    files = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    options = {name: getattr(args, name) for name in files if getattr(args, name)}
    if log_config := engine.vllm_server("get_uvicorn_log_config")(args):
        options["log_config"] = log_config
    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=args.shutdown_timeout or 1,  # 0 is an error in uvicorn's log
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        **options,
    )
    config.load()
    if args.enable_ssl_refresh and config.ssl:
        refresher = engine.vllm_server("SSLCertRefresher")
        app.state.ssl_refresher = refresher(
            config.ssl, args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs
        )
    return config


async def _announce(app: FastAPI, sock: socket.socket, args: Namespace) -> None:
    """Once requests are taken, say where, and how to try it."""
    while not app.state.server.started:
        await asyncio.sleep(0.05)
    model = app.state.openai_serving_models.base_model_paths[0].name
    url = "http://localhost" if args.uds else _url(sock, tls=bool(args.ssl_certfile))
    line = curl_line(url, model, uds=args.uds, needs_key=bool(args.api_key))
    print(f"\nmagi-serve is ready: {url}  (model {model})\n  {line}\n", flush=True)


def _url(sock: socket.socket, *, tls: bool) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


async def _watch(server: Server, client: Any) -> None:
    """Stop serving when the engine has died."""
    while True:
        await asyncio.sleep(1.0)
        engine.vllm_server("terminate_if_errored")(server, client)
