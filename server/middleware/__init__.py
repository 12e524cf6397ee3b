"""What stands between a client and vLLM's application, outermost first.

1. CORS, only where origins are given: it answers browsers before they can send a key.
2. `ShortErrors` shortens what the rest says.
3. `Authentication` asks for a key.
4. `Admission` bounds how many requests are open, in all and by key.
5. `Limits` bounds what a request may carry, and reads its body for the rest.

Behind vLLM's handlers, in front of its engine:

6. `check_lengths` refuses what can never fit, with the sums.
7. `guard_engine` has long prompts wait for their turn.

The first five are plain ASGI applications: streams and the end of a connection pass through them
unchanged.
"""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.middleware import Middleware

from magi_serve.server.middleware import engine_door
from magi_serve.server.middleware.admission import Admission, Tally
from magi_serve.server.middleware.auth import Authentication
from magi_serve.server.middleware.errors import ShortErrors, invalid_request
from magi_serve.server.middleware.lengths import capacity_of, check_lengths
from magi_serve.server.middleware.limits import Limits
from magi_serve.server.middleware.prefill_queue import PrefillQueue

_REPLACED = ("CORSMiddleware", "AuthenticationMiddleware")


def attach(app: FastAPI, args: Namespace, tally: Tally | None = None) -> None:
    """Put the middlewares in front of those of `app`, vLLM's application, before it is used.

    Two of vLLM's own give way: its key check, which knows some paths only, and its CORS.
    """
    cors = [m for m in app.user_middleware if _name(m) == "CORSMiddleware"]
    theirs = [m for m in app.user_middleware if _name(m) not in _REPLACED]
    ours = [Middleware(ShortErrors)]
    if args.magi_serve_keys:
        ours.append(Middleware(Authentication, keys=args.magi_serve_keys))
    ours.append(Middleware(Admission, settings=args.magi_serve, tally=tally))
    ours.append(Middleware(Limits, settings=args.magi_serve))
    app.user_middleware = [*(cors if args.allowed_origins else []), *ours, *theirs]
    app.middleware_stack = None  # vLLM may have built it; it is built again at the first request
    app.add_exception_handler(RequestValidationError, invalid_request)


def guard_engine(client: Any, args: Namespace) -> PrefillQueue:
    """Check the lengths of what the engine behind `client` is asked for, and queue long prompts."""
    settings, cache = args.magi_serve, client.vllm_config.cache_config
    check_lengths(capacity_of(client))
    kv_tokens = (cache.num_gpu_blocks or 0) * (cache.block_size or 1)
    queue = PrefillQueue(
        long_tokens=settings.long_prompt_tokens,
        max_running=settings.max_long_prefills,
        max_running_tokens=settings.max_long_prefill_tokens or kv_tokens,
        max_waiting=settings.max_queue,
    )
    engine_door.hang(client, settings, queue)
    return queue


def _name(middleware: Middleware) -> str:
    return getattr(middleware.cls, "__name__", "")
