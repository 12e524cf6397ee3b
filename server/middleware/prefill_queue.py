"""Long prompts take turns, so that short requests between them keep their latency.

The engine reads (prefills) a prompt in chunks, and works on what it has begun before what waits. A
few long prompts would fill its steps for minutes. Here they wait before the engine sees them: only
so many are read at a time, and so many tokens, in the order of priority and arrival. A prompt
leaves with its first token. Prompts that are not long pass by.
"""

import asyncio
import math
import time
from bisect import insort
from collections.abc import Callable
from itertools import count

FIRST_RETRY_AFTER_S = 10
"""When to come again, as long as no long prompt has been read yet."""

LONGEST_RETRY_AFTER_S = 600


class QueueFull(Exception):
    """No more long prompts may wait; one will have been read in about `retry_after_s`."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{waiting} long prompts are waiting")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class Ticket:
    """A place in the queue, and then a turn, until it is released."""

    def __init__(self, queue: "PrefillQueue", tokens: int, priority: int, number: int) -> None:
        self.tokens = tokens
        self.order = (priority, number)
        self.asked_s = queue.now_s()
        self.since_s = 0.0
        self._queue = queue
        self._turn = asyncio.Event()

    async def turn(self) -> None:
        """Wait for the turn; a wait that is cancelled still has to be released."""
        await self._turn.wait()

    def grant(self, now_s: float) -> None:
        self.since_s = now_s
        self._turn.set()

    def release(self, *, read: bool = False) -> None:
        """Leave, wherever it stands; `read` says that the prompt has been read to its end."""
        self._queue.leave(self, read=read)


class PrefillQueue:
    """Turns for long prompts.

    Args:
        long_tokens: from how many tokens on a prompt is long.
        max_running: how many are read at a time.
        max_running_tokens: how many tokens they may have together; one alone may have more.
        max_waiting: how many may wait.

    Attributes:
        running, waiting: the prompts that are being read, and those whose turn it is not.
        read, tokens_read, seconds_read, seconds_waited: of the prompts read to their end, how many,
            their tokens, how long reading took, and how long they had waited.
    """

    def __init__(
        self,
        *,
        long_tokens: int,
        max_running: int,
        max_running_tokens: int,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: list[Ticket] = []
        self.waiting: list[Ticket] = []
        self.places = max_running + max_waiting
        self.read = 0
        self.tokens_read = 0
        self.seconds_read = 0.0
        self.seconds_waited = 0.0
        self._long_tokens = long_tokens
        self._max_running = max_running
        self._max_running_tokens = max_running_tokens
        self._max_waiting = max_waiting
        self._clock = clock
        self._numbers = count()
        self._tokens_per_s: float | None = None

    def now_s(self) -> float:
        """The queue's time."""
        return self._clock()

    def ticket(self, tokens: int, priority: int = 0, *, refuse: bool = True) -> Ticket | None:
        """A place for a prompt of `tokens`, lower `priority` first; None if it is not long.

        Raises:
            QueueFull: it is long, has to wait and cannot; never where `refuse` is False.
        """
        if tokens < self._long_tokens:
            return None
        ticket = Ticket(self, tokens, priority, next(self._numbers))
        insort(self.waiting, ticket, key=lambda t: t.order)
        self._grant()
        if refuse and len(self.waiting) > self._max_waiting and ticket in self.waiting:
            self.waiting.remove(ticket)
            raise QueueFull(len(self.waiting), self.retry_after_s())
        return ticket

    def leave(self, ticket: Ticket, *, read: bool) -> None:
        """As `Ticket.release`; a second time it does nothing."""
        if ticket in self.running:
            self.running.remove(ticket)
            elapsed_s = self._clock() - ticket.since_s
            if read:
                self.read += 1
                self.tokens_read += ticket.tokens
                self.seconds_read += elapsed_s
                self.seconds_waited += ticket.since_s - ticket.asked_s
            if read and elapsed_s > 0:
                speed = ticket.tokens / elapsed_s
                self._tokens_per_s = (speed + (self._tokens_per_s or speed)) / 2
        elif ticket in self.waiting:
            self.waiting.remove(ticket)
        self._grant()

    def retry_after_s(self) -> int:
        """In how many seconds the first of the prompts that are read now will have been.

        An estimate: each is taken to go on at the mean speed of those before.
        """
        if self._tokens_per_s is None or not self.running:
            return FIRST_RETRY_AFTER_S
        now = self._clock()
        left_s = min(t.since_s + t.tokens / self._tokens_per_s - now for t in self.running)
        return min(max(1, math.ceil(left_s)), LONGEST_RETRY_AFTER_S)

    def _grant(self) -> None:
        while self.waiting and self._fits(self.waiting[0]):
            ticket = self.waiting.pop(0)
            self.running.append(ticket)
            ticket.grant(self._clock())

    def _fits(self, ticket: Ticket) -> bool:
        tokens = sum(t.tokens for t in self.running) + ticket.tokens
        return not self.running or (
            len(self.running) < self._max_running and tokens <= self._max_running_tokens
        )
