"""The service's own figures, ``magi_...``, in the same scrape as vLLM's ``vllm:...``.

They are read where they arise when a scrape comes; nothing is counted twice. What only the engine's
processes know is asked for between two of its steps, at most once in `PERIOD_S`, and only while
somebody scrapes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from magi_serve.backends.vllm.engine_state import METHOD
from magi_serve.server.middleware.admission import Tally
from magi_serve.server.middleware.prefill_queue import PrefillQueue

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
"""For how long what the engine has said is shown."""

ANSWER_S = 30.0
"""How long an answer is waited for; a stuck engine is the heartbeat's subject."""


class EngineFigures:
    """What the engine's processes said last.

    Attributes:
        state: as `engine_state` returns it.
        plans: how many batches each worker has planned, and the seconds that it took.
    """

    def __init__(self, client: Any, *, plans: bool) -> None:
        """`plans`: whether the workers have our extension, and can be asked."""
        self.state: dict[str, Any] | None = None
        self.plans: list[tuple[int, float]] = []
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._asks = {"state": True, "plans": plans}
        self._asked_s = -PERIOD_S
        self._asking: asyncio.Future[None] | None = None

    def refresh(self) -> None:
        """Ask again if the answers are old; they are for the next scrape. From any thread."""
        self._loop.call_soon_threadsafe(self._ask_if_old)

    def _ask_if_old(self) -> None:
        now = time.monotonic()
        if now - self._asked_s >= PERIOD_S and (self._asking is None or self._asking.done()):
            self._asked_s = now
            self._asking = asyncio.ensure_future(self.ask())

    async def ask(self) -> None:
        """Ask now."""
        state = await self._answer(
            "state", lambda: self._client.engine_core.call_utility_async(METHOD)
        )
        if state is not None:
            self.state = state
        plans = await self._answer(
            "plans", lambda: self._client.collective_rpc("magi_serve_plan_time")
        )
        if plans is not None:
            self.plans = [(int(count), float(seconds)) for count, seconds in plans]

    async def _answer(self, what: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        if not self._asks[what]:
            return None
        try:
            return await asyncio.wait_for(ask(), ANSWER_S)
        except TimeoutError:
            return None
        except Exception as error:
            self._asks[what] = False
            logger.warning("/metrics will not have the engine's %s: %s", what, error)
            return None


_SHOWN: list["Figures"] = []
"""What this process shows: the figures of its one service, if any."""


@dataclass(eq=False, slots=True)
class Figures(Collector):
    """Everything that is shown.

    Attributes:
        attention: as `engine.attention_report` returns it.
        tally: requests that are open and were refused.
        queue: long prompts.
        engine: what the engine said.
    """

    attention: dict[str, Any]
    tally: Tally
    queue: PrefillQueue
    engine: EngineFigures | None = None

    def register(self) -> None:
        """Show them in every scrape of this process, in place of an earlier service's."""
        while _SHOWN:
            REGISTRY.unregister(_SHOWN.pop())
        REGISTRY.register(self)
        _SHOWN.append(self)

    def describe(self) -> list[Metric]:
        """Nothing ahead: names are known from the first scrape on."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._attention()
        yield from self._requests()
        yield from self._long_prompts()
        if self.engine is not None:
            self.engine.refresh()
            yield from self._engine(self.engine)

    def _attention(self) -> Iterator[Metric]:
        info = InfoMetricFamily(
            "magi_attention", "The attention of each KV group: class, kernel, layers, device."
        )
        for number, group in enumerate(self.attention.get("groups", [])):
            labels = {
                "group": str(number),
                "backend": group["backend"],
                "kernel": group["kernel"] or "",
                "layers": str(group["layers"]),
                "device": self.attention["device"],
            }
            info.add_metric(list(labels), labels)
        yield info

    def _requests(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "magi_requests_open", "Requests that are being answered.", self.tally.open
        )
        refused = CounterMetricFamily(
            "magi_requests_refused", "Requests answered with 429, by limit.", labels=["limit"]
        )
        for limit, count in self.tally.refused.items():
            refused.add_metric([limit], count)
        yield refused

    def _long_prompts(self) -> Iterator[Metric]:
        queue = self.queue
        for state, tickets in (("reading", queue.running), ("waiting", queue.waiting)):
            yield GaugeMetricFamily(
                f"magi_long_prompts_{state}", f"Long prompts that are {state}.", len(tickets)
            )
            yield GaugeMetricFamily(
                f"magi_long_prompt_tokens_{state}",
                f"Tokens of the long prompts that are {state}.",
                sum(ticket.tokens for ticket in tickets),
            )
        yield CounterMetricFamily(
            "magi_long_prompts_read", "Long prompts read to their end.", queue.read
        )
        yield CounterMetricFamily(
            "magi_long_prompt_tokens_read", "Tokens of these.", queue.tokens_read
        )
        yield CounterMetricFamily(
            "magi_long_prompt_reading_seconds", "Time that they took.", queue.seconds_read
        )
        yield CounterMetricFamily(
            "magi_long_prompt_waiting_seconds", "Time that they had waited.", queue.seconds_waited
        )

    def _engine(self, engine: EngineFigures) -> Iterator[Metric]:
        if (state := engine.state) is not None:
            yield GaugeMetricFamily(
                "magi_kv_pages", "Pages of the KV cache, of all groups.", state["pages"]
            )
            yield GaugeMetricFamily(
                "magi_kv_pages_free", "Those that no request holds.", state["free_pages"]
            )
            held = GaugeMetricFamily(
                "magi_kv_pages_held",
                "Pages of a group's requests; a shared page counts for each.",
                labels=["group", "kind", "page_tokens"],
            )
            for number, group in enumerate(state["groups"]):
                labels = [str(number), group["kind"], str(group["page_tokens"])]
                held.add_metric(labels, group["held"])
            yield held
            unread = GaugeMetricFamily(
                "magi_prompt_tokens_unread",
                "Tokens of prompts in the engine that it has not read.",
                labels=["state"],
            )
            for name, tokens in state["unread_tokens"].items():
                unread.add_metric([name], tokens)
            yield unread
        if engine.plans:
            count, seconds = max(engine.plans)
            yield CounterMetricFamily(
                "magi_plans", "Batches planned, by the worker that planned most.", count
            )
            yield CounterMetricFamily("magi_plan_seconds", "Host time that it took.", seconds)
