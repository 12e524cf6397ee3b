"""vLLM as the engine of the service: its options, our backend chosen, or why it cannot be."""

import contextlib
import importlib
import logging
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from typing import Any

from magi_serve.errors import MagiServeError, SettingsError
from magi_serve.server.errors import ServeError

logger = logging.getLogger(__name__)

OUR_BACKEND = "CUSTOM"
"""The name under which vLLM knows our attention backend."""

WORKER_EXTENSION = "magi_serve.backends.vllm.worker.WorkerReport"
"""Mixed into vLLM's worker, so that it can be asked which attention classes run."""

LEAVE_TO_VLLM = "--attention-backend auto"
"""vLLM's own way to say that it chooses the backend itself."""

SHUTDOWN_TIMEOUT_S = 15
"""The default of ``--shutdown-timeout``, which is 0 in vLLM: how long open requests may go on.

With a preStop sleep of 5 s before it, and the final events and the engine's end after it, some 26 s
of the 30 s that Kubernetes leaves a pod to end.
"""

VLLM_SERVER_MODULES = (
    "vllm.entrypoints.common.cli_args",  # 0.33
    "vllm.entrypoints.common.startup",
    "vllm.entrypoints.launchers.app",  # 0.30
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.launchers.launcher",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.utils.server_utils",
    "vllm.entrypoints.serve.utils.api_utils",
    "vllm.entrypoints.serve.utils.server_utils",  # 0.26
    "vllm.entrypoints.openai.cli_args",
    "vllm.entrypoints.launcher",
    "vllm.entrypoints.openai.api_server",
)
"""Where the versions of vLLM keep the server code that we use, newest first; it moves often."""


def vllm_server(name: str) -> Any:
    """The function `name` of vLLM's server, from the first of `VLLM_SERVER_MODULES` that has it."""
    for module in VLLM_SERVER_MODULES:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "?"):
                raise  # something that vLLM itself needs
            continue
        if hasattr(found, name):
            return getattr(found, name)
    raise ServeError(f"this vLLM keeps {name} where we do not know it; install 0.26 to 0.33")


def parse_args(argv: Sequence[str]) -> Namespace:
    """The options of ``vllm serve``, read by vLLM's own parser and checked by its own rules.

    Where the user left it open, host is 127.0.0.1, the backend ours, and the worker's report on.

    Raises:
        ServeError: an option asks for what the service does not do; the message has the way out.
    """
    import vllm.logger
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from magi_serve.backends.vllm.compat import show_our_logs
    from magi_serve.server.middleware.options import add_options, settle

    vllm_server("cli_env_setup")()
    parser = FlexibleArgumentParser(prog="magi-serve")
    serve = parser.add_subparsers(dest="subparser").add_parser(
        "serve",
        usage="magi-serve serve [MODEL] [options]",
        description="An OpenAI-compatible service whose attention is computed by magi-serve. Takes "
        f"every option of `vllm serve`; {LEAVE_TO_VLLM} leaves the attention backend to vLLM.",
        epilog="--help=all prints every option, --help=GROUP a group, --help=WORD what matches it.",
    )
    vllm_server("make_arg_parser")(serve)
    add_options(serve)
    serve.set_defaults(shutdown_timeout=SHUTDOWN_TIMEOUT_S)
    args: Namespace = parser.parse_args(["serve", *argv])
    args.model = args.model_tag or args.model
    if configure := getattr(vllm.logger, "configure_logging_from_args", None):  # not in 0.26
        configure(args)
    show_our_logs()
    vllm_server("validate_parsed_serve_args")(args)
    if modes := refused_modes(args):
        raise ServeError(
            f"{', '.join(modes)}: magi-serve serve runs one API server on one engine; "
            f"`vllm serve ... --attention-backend {OUR_BACKEND}` does this, with the same attention"
        )
    args.host = args.host or "127.0.0.1"
    settle(args)
    if chosen_backend(args) is None:
        args.attention_backend = OUR_BACKEND
    args.worker_extension_cls = args.worker_extension_cls or WORKER_EXTENSION
    return args


def refused_modes(args: Namespace) -> list[str]:
    """The options of `args` that ask for several API servers, several engines, or no HTTP."""
    plain = {
        "headless": False,
        "grpc": False,
        "grpc_port": None,
        "api_server_count": 1,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_rank": None,
        "data_parallel_start_rank": None,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "data_parallel_multi_port_external_lb": False,
    }
    given = {name: getattr(args, name, default) for name, default in plain.items()}
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in given.items()
        if value not in (None, plain[name])
    ]


def logs_json(args: Namespace) -> bool:
    """Whether vLLM was told to log JSON, which it can from 0.32 on."""
    return getattr(getattr(args, "logging_config", None), "formatter", "text") == "json"


def chosen_backend(args: Namespace) -> str | None:
    """The attention backend asked for, by either of vLLM's options; None if that was left open."""
    chosen = args.attention_backend or getattr(args.attention_config, "backend", None)
    return None if chosen is None else str(getattr(chosen, "name", chosen)).upper()


def bind(args: Namespace) -> socket.socket:
    """The socket to serve on, bound and not yet listening."""
    try:
        sock: socket.socket = vllm_server("setup_server")(args, reuse_port=False)[1]
    except OSError as error:
        where = args.uds or f"{args.host}:{args.port}"
        raise ServeError(f"cannot listen on {where} ({error}): try --port or --host") from error
    return sock


def refuse_model(args: Namespace) -> None:
    """Ask vLLM's own selector whether our backend can serve the model, before an engine is started.

    Raises:
        ServeError: it cannot; the message has the reasons, and the option that lets vLLM choose.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.logger import suppress_logging
    from vllm.v1.attention.selector import get_attn_backend

    from magi_serve.backends.vllm.compat import WAY_OUT
    from magi_serve.server.middleware.options import leave_room

    try:
        with suppress_logging(logging.INFO):  # the engine says all of it again
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except (OSError, ValueError) as error:
        raise ServeError(f"vLLM refuses these options: {error}") from error
    leave_room(args, config)
    model = config.model_config
    if chosen_backend(args) != OUR_BACKEND or model.is_attention_free:
        return
    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(),
                model.dtype,
                config.cache_config.cache_dtype,
                use_mla=model.use_mla,
                use_mm_prefix=bool(getattr(model, "is_mm_prefix_lm", False)),
                attn_type=getattr(model, "attn_type", None),
            )
    except SettingsError:
        raise
    except (MagiServeError, ImportError, ValueError) as error:
        raise ServeError(f"{str(error).removesuffix(f'; {WAY_OUT}')}; {WAY_OUT}") from error
    if not backend.__module__.startswith("magi_serve."):
        raise ServeError(
            f"vLLM would run {backend.__qualname__}, for it has not loaded our plugin: install "
            "magi-serve (to have it on the path is not enough), and if VLLM_PLUGINS is set, name "
            f"magi_serve in it; {WAY_OUT}"
        )
    logger.info("attention by magi-serve (%s); %s lets vLLM choose", OUR_BACKEND, LEAVE_TO_VLLM)


@contextlib.asynccontextmanager
async def start(args: Namespace) -> AsyncIterator[Any]:
    """The client of a running engine, which ends with the context."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(vllm_server("build_async_engine_client")(args))
        except RuntimeError as error:
            raise ServeError(
                "the engine did not start, the log above says why; if it is the attention backend, "
                f"{LEAVE_TO_VLLM} leaves the choice to vLLM"
            ) from error
        yield client


async def attention_report(client: Any, args: Namespace) -> dict[str, Any]:
    """Which attention classes the engine's workers really run.

    Returns:
        ``device``, ``workers`` (their number) and ``groups``, as `WORKER_EXTENSION` describes them;
        where the workers cannot be asked, ``unknown`` has the reason.
    """
    module, _, name = args.worker_extension_cls.rpartition(".")
    if not hasattr(getattr(importlib.import_module(module), name), "magi_serve_report"):
        own = f"--worker-extension-cls {args.worker_extension_cls}"
        return {"unknown": f"{own} is in place of {WORKER_EXTENSION}: derive it from that class"}
    reports: list[dict[str, Any]] = await client.collective_rpc("magi_serve_report", timeout=60.0)
    groups: list[dict[str, Any]] = []
    for report in reports:
        groups.extend(group for group in report["groups"] if group not in groups)
    device = ", ".join(dict.fromkeys(report["device"] for report in reports))
    return {"device": device, "workers": len(reports), "groups": groups}
