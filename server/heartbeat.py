"""Whether the engine steps: a question once a second that it answers between two steps."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from typing import Any

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 10.0
"""A step that lasts longer is not expected until one has been seen to."""

PATIENCE = 2.0
"""How many times as long as the longest recent step the next one may last."""


class Heartbeat:
    """Asks the engine `client` whether it sleeps, which says more than the answer.

    vLLM's engine core takes such a question off its queue only between two steps, and a step waits
    for the workers: an answer means that the step before it has ended. An idle engine answers at
    once. Unlike statistics, which come with steps too, answers need no option and no open request.
    """

    def __init__(
        self, client: Any, *, stuck_after_s: float = STUCK_AFTER_S, period_s: float = 1.0
    ) -> None:
        self.beats = 0
        self._client = client
        self._stuck_after_s = stuck_after_s
        self._period_s = period_s
        self._waits_s: deque[float] = deque(maxlen=64)
        self._waited_s = 0.0
        self._asleep = False

    @property
    def limit_s(self) -> float:
        """How long the engine may leave a question unanswered before it counts as stuck."""
        return max(self._stuck_after_s, PATIENCE * max(self._waits_s, default=0.0))

    def why_not(self) -> str | None:
        """Why the engine does not take requests; None where it does."""
        if self._waited_s > self.limit_s:
            return f"the engine has ended no step for {self._waited_s:.0f} s"
        return "the engine is asleep" if self._asleep else None

    async def run(self) -> None:
        """Ask until cancelled; one question at a time."""
        while True:
            question = asyncio.ensure_future(self._client.is_sleeping())
            try:
                await self._wait_for(question)
            finally:
                question.cancel()
            await asyncio.sleep(self._period_s)

    async def _wait_for(self, question: "asyncio.Future[bool]") -> None:
        stuck = False
        seen = time.monotonic()
        while not question.done():
            await asyncio.wait({question}, timeout=self._period_s)
            now = time.monotonic()
            # Time in which this process itself stood still says nothing about the engine.
            self._waited_s += min(now - seen, 2 * self._period_s)
            seen = now
            if not stuck and self.why_not() and not question.done():
                stuck = True
                logger.error("%s; not ready until it does", self.why_not())
        waited_s, self._waited_s = self._waited_s, 0.0
        with contextlib.suppress(Exception):  # a dead engine is the health check's subject
            self._asleep = bool(question.result())
            self._waits_s.append(waited_s)
            self.beats += 1
            if stuck:
                logger.warning("the engine steps again, after %.0f s", waited_s)
