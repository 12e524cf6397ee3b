"""The service's own options: the fields of `ServiceSettings` on the command line."""

import logging
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from typing import Any

from magi_serve.errors import MagiServeError
from magi_serve.server.errors import ServeError
from magi_serve.server.middleware.keys import KeyRing
from magi_serve.settings import ENV_PREFIX, ServiceSettings, load_service_settings

logger = logging.getLogger(__name__)

GROUP = "magi-serve"

_LOCAL = ("127.", "::1", "localhost")


def add_options(parser: ArgumentParser) -> None:
    """A group of options on `parser`, one for each setting; and no origins for CORS by default."""
    group = parser.add_argument_group(
        GROUP, "Keys, limits and admission. Each is also a variable, as in MAGI_SERVE_MAX_QUEUE."
    )
    for name, field in ServiceSettings.model_fields.items():
        if name == "api_key":
            continue  # vLLM's own option
        number = field.annotation is int
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=int if number else str,
            default=SUPPRESS,  # what is not given may be a variable
            metavar="N" if number else "FILE",
            help=f"{field.description} (default: {field.default})",
        )
    parser.set_defaults(allowed_origins=[])  # in vLLM 0.26 to 0.30 every origin


def settle(args: Namespace) -> None:
    """Check what `args` says about keys, limits and origins, and keep it in ``args.magi_serve``.

    ``args.api_key`` becomes the list of all keys, so that vLLM knows that there are some.

    Raises:
        ServeError: an option is not accepted, or would serve other than was meant.
    """
    given = vars(args).keys() & ServiceSettings.model_fields.keys() - {"api_key"}
    options = {name: getattr(args, name) for name in given}
    try:
        settings = load_service_settings(options)
    except MagiServeError as error:
        raise ServeError(str(error)) from None
    keys = KeyRing(_single_keys(args, settings), settings.api_key_file)
    args.magi_serve = settings
    args.magi_serve_keys = keys
    args.api_key = keys.all() or None
    if "*" in args.allowed_origins and args.allow_credentials:
        raise ServeError(
            "--allowed-origins with '*' and --allow-credentials would lend every web page its "
            "visitors' credentials: name the origins"
        )
    if bool(args.ssl_keyfile) != bool(args.ssl_certfile):
        raise ServeError("--ssl-keyfile and --ssl-certfile belong together: give both or neither")
    if not keys and not args.uds and not args.host.startswith(_LOCAL):
        logger.warning(
            "listening on %s without keys: whoever reaches this port can use the model; "
            "--api-key-file or %sAPI_KEY asks for a key",
            args.host,
            ENV_PREFIX,
        )


def leave_room(args: Namespace, config: Any) -> None:
    """Keep a quarter of each of the engine's steps for other work than long prompts.

    Unless ``--long-prefill-token-threshold`` is given: without it a long prompt fills steps alone.

    Args:
        args: the options, changed here.
        config: the configuration that vLLM makes of them.
    """
    scheduler, model = config.scheduler_config, config.model_config
    if args.long_prefill_token_threshold or model.is_hybrid or not scheduler.enable_chunked_prefill:
        return
    share = scheduler.max_num_batched_tokens * 3 // 4 // args.magi_serve.max_long_prefills
    args.long_prefill_token_threshold = max(1, min(share, model.max_model_len))
    if hasattr(args, "long_prefill_token_threshold_adaptive"):  # vLLM 0.31
        args.long_prefill_token_threshold_adaptive = True  # all of a step while nothing else waits


def _single_keys(args: Namespace, settings: ServiceSettings) -> list[str]:
    """Keys that are not in a file; an empty one is a mistake, and would leave the door open."""
    keys: list[Any] = list(args.api_key or [])
    if settings.api_key:
        keys.append(settings.api_key.get_secret_value())
    if "VLLM_API_KEY" in os.environ:
        keys.append(os.environ["VLLM_API_KEY"])
    if any(not str(key).strip() for key in keys):
        raise ServeError(
            "a key of --api-key or VLLM_API_KEY is empty: give one, or leave it out for a service "
            "without keys"
        )
    return [str(key) for key in keys]
