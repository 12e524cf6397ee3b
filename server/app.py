"""``magi-serve serve``: vLLM's OpenAI application, with our routes, on our attention backend."""

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import shlex
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from magi_serve.errors import MagiServeError
from magi_serve.server import engine, middleware, routes, streams
from magi_serve.server.errors import ServeError
from magi_serve.server.gate import Gate
from magi_serve.server.lifecycle import Lifecycle, warm_up
from magi_serve.server.metrics import EngineFigures, Figures
from magi_serve.server.middleware.admission import Tally
from magi_serve.server.request_ids import RequestIds, name_log_records
from magi_serve.server.starting import Server, StartProbes, answer_while_starting

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: Sequence[str]) -> int:
    """Serve until told to stop.

    Args:
        argv: the options of ``vllm serve``.

    Returns:
        0 when SIGTERM or SIGINT ended the service, 1 when it could not start or its engine died;
        docs/operations.md has the table.
    """
    for sig in _SIGNALS:
        signal.signal(sig, _leave)
    try:
        args = engine.parse_args(argv)
        import uvloop

        return int(uvloop.run(serve(args)))
    except MagiServeError as error:
        print(f"magi-serve: {error}", file=sys.stderr)
        return 1


async def serve(args: Namespace) -> int:
    """Start the engine and answer requests until a signal comes or the engine dies.

    The socket is bound first, so that a port in use is known before a model is loaded, and so that
    probes are answered from then on.

    Returns:
        The exit code, as in `main`.

    Raises:
        MagiServeError: the service cannot start; nothing is left running.
    """
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(engine.bind(args)))
        config = _uvicorn_config(answer_while_starting, args, log_level="warning")
        probes = stack.enter_context(contextlib.closing(StartProbes(sock, config)))
        engine.refuse_model(args)
        async with engine.start(args) as client:
            app = await create_app(client, args)
            await warm_up(client)
            await asyncio.to_thread(probes.close)
            return await _serve(app, client, sock, args)


async def _serve(app: FastAPI, client: Any, sock: socket.socket, args: Namespace) -> int:
    """Answer requests on `sock` until it is time to end, and return the exit code."""
    name_log_records()
    gate = Gate(RequestIds(app))
    server = Server(_uvicorn_config(gate, args))
    lifecycle = Lifecycle(server, gate, client, grace_s=args.shutdown_timeout)
    app.state.magi_serve_lifecycle = lifecycle
    app.state.server = lifecycle.verdict
    loop = asyncio.get_running_loop()
    for sig in _SIGNALS:
        loop.add_signal_handler(sig, lifecycle.stop)
    if args.enable_ssl_refresh and server.config.ssl:
        app.state.ssl_refresher = engine.vllm_server("SSLCertRefresher")(
            server.config.ssl, args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs
        )
    living = loop.create_task(lifecycle.run())
    announcing = loop.create_task(_announce(server, app, sock, args))
    try:
        await server.serve(sockets=[sock])
        for sig in _SIGNALS:
            loop.remove_signal_handler(sig)
            signal.signal(sig, _leave)  # the engine's end is not waited for twice
        return await living if server.started else 1
    finally:
        for task in (living, announcing):
            task.cancel()


async def create_app(client: Any, args: Namespace) -> FastAPI:
    """vLLM's application over the engine `client`, with our routes in front of its own."""
    tasks = await client.get_supported_tasks()
    app: FastAPI = engine.vllm_server("build_app")(args, tasks, client.model_config)
    routes.attach(app)
    streams.attach(app, client, args)
    tally = Tally()
    middleware.attach(app, args, tally)
    queue = middleware.guard_engine(client, args)
    await engine.vllm_server("init_app_state")(client, app.state, args, tasks)
    attention = await engine.attention_report(client, args)
    said = EngineFigures(client, plans="unknown" not in attention)
    await said.ask()
    figures = Figures(attention, tally, queue, said)
    figures.register()
    routes.init_state(app.state, figures, client.vllm_config.parallel_config)
    return app


def curl_line(url: str, model: str, *, uds: str | None = None, needs_key: bool = False) -> str:
    """A shell command that gets a completion from the service at `url`."""
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    socket_words = ["--unix-socket", uds] if uds else []
    key_words = ["-H", "Authorization: Bearer YOUR_KEY"] if needs_key else []
    words = ["curl", "-s", *socket_words, f"{url}/v1/completions", *key_words]
    return shlex.join([*words, "-H", "Content-Type: application/json", "-d", json.dumps(body)])


def _leave(*_: object) -> None:
    """End the process at once, while it starts or once it has nothing left but to end.

    Raising would not do: vLLM waits for its engine in pyzmq's poll, which drops what it raises.
    """
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def _uvicorn_config(app: ASGIApp, args: Namespace, log_level: str | None = None) -> uvicorn.Config:
    from vllm import envs

    files = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    options = {name: getattr(args, name) for name in files if getattr(args, name)}
    if log_config := engine.vllm_server("get_uvicorn_log_config")(args):
        options["log_config"] = log_config
    config = uvicorn.Config(
        app,
        log_level=log_level or args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        timeout_graceful_shutdown=1,  # the gate has drained before
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        **options,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ServeError(f"cannot use the --ssl-... files ({error})") from error
    return config


async def _announce(server: Server, app: FastAPI, sock: socket.socket, args: Namespace) -> None:
    """Once requests are taken, say where, and how to try it."""
    while not server.started:
        await asyncio.sleep(0.05)
    model = app.state.openai_serving_models.base_model_paths[0].name
    url = "http://localhost" if args.uds else _url(sock, tls=bool(args.ssl_certfile))
    line = curl_line(url, model, uds=args.uds, needs_key=bool(args.api_key))
    ready = f"magi-serve is ready: {url}  (model {model})"
    if engine.logs_json(args):
        logger.info("%s", ready)
    else:
        print(f"\n{ready}\n  {line}\n", flush=True)


def _url(sock: socket.socket, *, tls: bool) -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
