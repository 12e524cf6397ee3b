"""The door between vLLM's handlers and its engine: last checks, and the queue of long prompts."""

import contextlib
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from magi_serve.server.middleware.admission import OpenRequest, Refusal, current
from magi_serve.server.middleware.lengths import refuse
from magi_serve.server.middleware.prefill_queue import PrefillQueue, QueueFull, Ticket
from magi_serve.settings import ServiceSettings

Stream = AsyncGenerator[Any, None]


def hang(client: Any, settings: ServiceSettings, queue: PrefillQueue) -> None:
    """Let whatever asks `client` for tokens or embeddings through the door first.

    vLLM's handlers call both before they begin to answer, so that an error raised here is one with
    a status, also for streams.
    """
    by_priority = client.vllm_config.scheduler_config.policy == "priority"
    for name in ("generate", "encode"):
        setattr(client, name, _door(getattr(client, name), settings, queue, by_priority))


def _door(
    start: Callable[..., Stream], settings: ServiceSettings, queue: PrefillQueue, by_priority: bool
) -> Callable[..., Stream]:
    def through(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Stream:
        request = current.get()
        tokens = prompt_tokens(prompt)
        _check_prompt_logprobs(tokens, params, settings.max_prompt_logprobs)
        priority = max(0, kwargs.get("priority", 0)) + (request.priority if request else 0)
        if by_priority:
            kwargs["priority"] = priority
        ticket = _ticket(queue, tokens, priority, request)
        if ticket is None:
            return start(prompt, params, *args, **kwargs)
        stream = _in_turn(ticket, lambda: start(prompt, params, *args, **kwargs), request)
        # A stream that is dropped before it has begun runs no `finally`.
        weakref.finalize(stream, ticket.release).atexit = False
        return stream

    return through


def _ticket(
    queue: PrefillQueue, tokens: int, priority: int, request: OpenRequest | None
) -> Ticket | None:
    if request is not None and request.has_output:
        return None  # the next step of a beam search or of a tool's loop
    try:
        ticket = queue.ticket(tokens, priority, refuse=request is not None)
    except QueueFull as full:
        assert request is not None
        if request.long_prompts >= queue.places:
            raise refuse(
                f"the request has more than {queue.places} long prompts, which is what the queue "
                "holds (--max-queue); send several requests",
                "prompt",
            ) from None
        message = (
            f"{full.waiting} long prompts are waiting already, which is the limit (--max-queue); "
            f"one is expected to be read in {full.retry_after_s} s, try again then"
        )
        error = refuse(message, "prompt")
        request.refusal = Refusal(429, message, retry_after_s=full.retry_after_s, limit="queue")
        raise error from None
    if request is not None and ticket is not None:
        request.long_prompts += 1
    return ticket


async def _in_turn(
    ticket: Ticket, start: Callable[[], Stream], request: OpenRequest | None
) -> Stream:
    try:
        await ticket.turn()
        async with contextlib.aclosing(start()) as outputs:
            async for output in outputs:
                ticket.release(read=True)
                if request is not None:
                    request.has_output = True
                yield output
    finally:
        ticket.release()


def prompt_tokens(prompt: Any) -> int:
    """How many tokens the engine will read; 0 for what comes in pieces."""
    if not isinstance(prompt, Mapping):
        return 0
    for part in (prompt, prompt.get("decoder_prompt"), prompt.get("decoder")):
        if isinstance(part, Mapping):
            for name in ("prompt_token_ids", "prompt_embeds"):
                if part.get(name) is not None:
                    return len(part[name])
    return 0


def _check_prompt_logprobs(tokens: int, params: Any, limit: int) -> None:
    each = getattr(params, "prompt_logprobs", None)
    if each is not None and tokens * (each + 1) > limit:
        raise refuse(
            f"{tokens} tokens of the prompt with {each} logprobs and their own are "
            f"{tokens * (each + 1)} logprobs, the limit is {limit} (--max-prompt-logprobs); ask "
            "for fewer, or about a shorter prompt",
            "prompt_logprobs",
        )
