"""How far the engine is with the prompts of a request, in llama.cpp's words."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from magi_serve.backends.vllm.progress import METHOD

logger = logging.getLogger(__name__)

POLL_S = 0.25
"""How often the engine is asked while some prompt that is followed has not been read."""

_following: ContextVar["PromptProgress | None"] = ContextVar("prompt_progress", default=None)


@dataclass(slots=True)
class _Prompt:
    total: int
    cache: int | None = None
    processed: int = 0
    added_s: float = field(default_factory=time.monotonic)


class PromptProgress:
    """The prompts of one HTTP request; several (a list in ``prompt``) are counted together.

    `changed` is set whenever `figures` may have changed.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._prompts: dict[str, _Prompt] = {}
        self._begun_s: float | None = None

    @property
    def request_id(self) -> str:
        """vLLM's name for the (first) request; empty before it has one."""
        return next(iter(self._prompts), "")

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompts were found in a cache."""
        return sum(prompt.cache or 0 for prompt in self._prompts.values())

    def figures(self) -> dict[str, int] | None:
        """llama.cpp's four figures, ``processed`` with ``cache`` in it; None before it begins."""
        if self._begun_s is None:
            return None
        prompts = self._prompts.values()
        return {
            "total": sum(prompt.total for prompt in prompts),
            "cache": self.cached_tokens,
            "processed": sum(prompt.processed for prompt in prompts),
            "time_ms": round((time.monotonic() - self._begun_s) * 1e3),
        }

    def add(self, request_id: str, total: int) -> bool:
        """A prompt of `total` tokens is on its way; False for another choice (n) of the same."""
        if request_id in self._prompts:
            return False
        self._prompts[request_id] = _Prompt(total)
        return True

    def is_read(self, request_id: str) -> bool:
        """Whether the prompt has been read to its end."""
        prompt = self._prompts[request_id]
        return prompt.processed == prompt.total

    def update(self, request_id: str, cache: int, processed: int, elapsed_s: float) -> None:
        """So much is computed, `elapsed_s` after the first step began (negative: not known).

        Less than before (a request that was preempted) changes nothing, nor does another figure for
        ``cache`` (another choice of the same prompt).
        """
        prompt = self._prompts[request_id]
        if self._begun_s is None:
            now = time.monotonic()
            self._begun_s = prompt.added_s if elapsed_s < 0 else now - elapsed_s
        if prompt.cache is None:
            prompt.cache = cache
        prompt.processed = max(prompt.processed, min(processed, prompt.total))
        self.changed.set()

    def answered(self, output: Any) -> None:
        """The engine's `output` says that its prompt has been read."""
        prompt = self._prompts.get(output.request_id)
        if prompt is not None and prompt.processed < prompt.total:
            cache, stats = output.num_cached_tokens or 0, output.metrics  # None without statistics
            begun_s = stats.scheduled_ts if stats else 0
            elapsed_s = stats.first_token_ts - begun_s if begun_s else -1
            self.update(output.request_id, cache, prompt.total, elapsed_s)


class ProgressFeed:
    """Follows requests through the engine behind `client`, and asks it how far it is.

    A request is followed from where its HTTP request is handled, by context: the two methods of
    `client` through which every request passes look there who wants to know.
    """

    def __init__(self, client: Any, poll_s: float = POLL_S) -> None:
        self._core = client.engine_core
        self._poll_s = poll_s
        self._unread: dict[str, tuple[PromptProgress, str]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._works = True
        self._add_request = self._core.add_request_async
        self._generate = client.generate
        self._core.add_request_async = self._add
        client.generate = self._outputs

    @contextlib.contextmanager
    def follow(self) -> Iterator[PromptProgress]:
        """What comes of the requests that are made within this context."""
        progress = PromptProgress()
        token = _following.set(progress)
        try:
            yield progress
        finally:
            _following.reset(token)
            left = [engine_id for engine_id, (of, _) in self._unread.items() if of is progress]
            for engine_id in left:
                del self._unread[engine_id]

    async def _add(self, request: Any) -> None:
        progress = _following.get()
        if progress is not None:
            tokens = request.prompt_token_ids
            total = len(request.prompt_embeds if tokens is None else tokens)
            if progress.add(request.external_req_id, total):
                self._unread[request.request_id] = (progress, request.external_req_id)
        await self._add_request(request)
        if self._unread and self._works and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())

    def _outputs(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        outputs: AsyncGenerator[Any, None] = self._generate(*args, **kwargs)
        progress = _following.get()
        return outputs if progress is None else _watched(outputs, progress)

    async def _ask(self) -> None:
        """Ask until all that is followed has been read."""
        while unread := {
            engine_id: (progress, request_id)
            for engine_id, (progress, request_id) in self._unread.items()
            if not progress.is_read(request_id)
        }:
            try:
                found = await self._core.call_utility_async(METHOD, list(unread))
            except Exception as error:
                self._works = False
                logger.warning(
                    "no prompt_progress but at a prompt's end, for the engine does not say: %s; "
                    "if VLLM_PLUGINS is set, name magi_serve in it",
                    error,
                )
                return
            for engine_id, (_, cache, processed, elapsed_s) in found.items():
                progress, request_id = unread[engine_id]
                progress.update(request_id, int(cache), int(processed), elapsed_s)
            await asyncio.sleep(self._poll_s)


async def _watched(
    outputs: AsyncGenerator[Any, None], progress: PromptProgress
) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            progress.answered(output)
            yield output
