"""From ready to ended: what ``/ready`` says, and in which order the service stops.

After SIGTERM the longest way is ``--shutdown-timeout`` (`SHUTDOWN_TIMEOUT_S` where none is given),
`FINAL_EVENTS_S` and `ENGINE_STOP_S`.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import uvicorn

from magi_serve.server import engine
from magi_serve.server.errors import ServeError
from magi_serve.server.gate import Gate
from magi_serve.server.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = engine.SHUTDOWN_TIMEOUT_S

FINAL_EVENTS_S = 1.0
"""How long clients have to take the final event of a stream that is cut."""

ENGINE_STOP_S = 3.0
"""How long the engine's processes have to end before they are killed."""

LINGER_S = 5.0
"""How long ``/ready`` answers 503 after the engine's death, before the process ends."""

_WATCH_PERIOD_S = 0.25


async def warm_up(client: Any) -> None:
    """Two tokens from the engine `client`, a prefill and a decode, before requests are taken.

    Raises:
        ServeError: the engine died of it.
    """
    if "generate" not in await client.get_supported_tasks():
        return
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    try:
        prompt = {"type": "token", "prompt_token_ids": [0]}
        async for _ in client.generate(prompt, params, "magi-serve-warm-up"):
            pass
    except Exception as error:
        if client.errored:
            raise ServeError("the engine died of its first request, see above") from error
        logger.warning("this model takes no plain prompt, so it is not warmed up: %s", error)


class Lifecycle:
    """The one life of a service, over `server`'s HTTP, the requests in `gate` and an engine."""

    def __init__(self, server: uvicorn.Server, gate: Gate, client: Any, grace_s: float) -> None:
        self.heartbeat = Heartbeat(client)
        self.verdict = SimpleNamespace(should_exit=False)
        """In place of a server, for vLLM: it asks here for the end when the engine has died."""
        self._server = server
        self._gate = gate
        self._client = client
        self._grace_s = grace_s
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._died = asyncio.Event()

    def stop(self) -> None:
        """Drain; at once the second time."""
        (self._hurried if self._asked.is_set() else self._asked).set()

    async def why_not_ready(self) -> str | None:
        """The reason why no requests should be sent here; None where they should."""
        if self._gate.refusing is not None:
            return self._gate.refusing
        try:
            await self._client.check_health()
        except Exception as error:
            return f"the engine is not healthy ({type(error).__name__})"
        return self.heartbeat.why_not()

    async def run(self) -> int:
        """From the first request to the last, then tell `server` to stop.

        Returns:
            0 when a signal was the reason, 1 when it was the engine's death.
        """
        watching = [asyncio.create_task(work) for work in (self.heartbeat.run(), self._watch())]
        try:
            await _first_of(self._asked.wait(), self._died.wait())
            code = await (self._drain() if self._asked.is_set() else self._mourn())
        finally:
            for task in watching:
                task.cancel()
            self._server.force_exit = self._hurried.is_set()
            self._server.should_exit = True
        await self._stop_engine()
        return code

    async def _drain(self) -> int:
        self._gate.refuse("draining")
        logger.info("draining: %d open requests, %g s at most", self._gate.open, self._grace_s)
        idle = self._gate.wait_until_idle(self._grace_s)
        await _first_of(idle, self._hurried.wait(), self._died.wait())
        if self._died.is_set():
            return await self._cut_by_death()
        if self._gate.open:
            logger.warning("stopping with %d open requests", self._gate.open)
            await self._gate.cut("the service is stopping", FINAL_EVENTS_S)
        return 0

    async def _mourn(self) -> int:
        self._gate.refuse("the engine has died")
        logger.error("the engine has died; the service ends in %g s", LINGER_S)
        await _first_of(self._linger(), self._hurried.wait(), self._asked.wait())
        return 1

    async def _linger(self) -> None:
        await asyncio.gather(self._cut_by_death(), asyncio.sleep(LINGER_S))

    async def _cut_by_death(self) -> int:
        """End what vLLM does not end itself; 1 if there was such a request."""
        if await self._gate.wait_until_idle(FINAL_EVENTS_S):
            return 0
        await self._gate.cut("the engine has died", FINAL_EVENTS_S)
        return 1

    async def _watch(self) -> None:
        terminate_if_errored = engine.vllm_server("terminate_if_errored")
        while not self.verdict.should_exit:
            await asyncio.sleep(_WATCH_PERIOD_S)
            terminate_if_errored(self.verdict, self._client)
        self._died.set()

    async def _stop_engine(self) -> None:
        """Ahead of vLLM's own end of it, which would wait for ``--shutdown-timeout`` again."""
        timeout_s = 0.5 if self._hurried.is_set() else ENGINE_STOP_S
        stop = functools.partial(self._client.shutdown, timeout=timeout_s)
        await asyncio.get_running_loop().run_in_executor(None, stop)


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Return when one of `waits` has ended, and cancel the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
