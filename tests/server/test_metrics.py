"""The service's own figures: over fakes, in a scrape; the real ones are in test_http.py."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from magi_serve.backends.vllm.engine_state import METHOD, engine_state
from magi_serve.backends.vllm.plan_time import PlanTime
from magi_serve.server import metrics
from magi_serve.server.metrics import EngineFigures, Figures
from magi_serve.server.middleware.admission import Admission, Tally
from magi_serve.server.middleware.prefill_queue import PrefillQueue, QueueFull
from magi_serve.settings import ServiceSettings

ATTENTION = {
    "device": "a GPU",
    "workers": 1,
    "groups": [
        {"layers": 12, "backend": "ours.Backend", "impl": "ours.Impl", "kernel": "hopper"},
        {"layers": 2, "backend": "theirs.Backend", "impl": "theirs.Impl", "kernel": None},
    ],
}
STATE = {
    "pages": 100,
    "free_pages": 60,
    "groups": [
        {"kind": "FullAttentionSpec", "page_tokens": 16, "held": 30},
        {"kind": "SlidingWindowSpec", "page_tokens": 16, "held": 10},
    ],
    "unread_tokens": {"running": 500, "waiting": 7000},
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_of(clock: Callable[[], float], **limits: int) -> PrefillQueue:
    options = {"long_tokens": 100, "max_running": 1, "max_running_tokens": 10_000, "max_waiting": 1}
    return PrefillQueue(**{**options, **limits}, clock=clock)


def scrape(figures: Figures) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(figures)
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: dict[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
    (one,) = [v for given, v in found[name] if labels.items() <= given.items()]
    return one


def test_the_attention_of_each_group_is_shown() -> None:
    found = scrape(Figures(ATTENTION, Tally(), queue_of(Clock())))
    groups = [labels for labels, one in found["magi_attention_info"] if one == 1]
    assert [(g["group"], g["kernel"], g["layers"]) for g in groups] == [
        ("0", "hopper", "12"),
        ("1", "", "2"),
    ]
    assert groups[0]["device"] == "a GPU" and groups[1]["backend"] == "theirs.Backend"


def test_an_unknown_attention_is_no_error() -> None:
    found = scrape(Figures({"unknown": "another extension"}, Tally(), queue_of(Clock())))
    assert "magi_attention_info" not in found and value(found, "magi_requests_open") == 0


def test_long_prompts_are_counted_from_their_arrival_to_their_end() -> None:
    clock = Clock()
    queue = queue_of(clock)
    figures = Figures(ATTENTION, Tally(), queue)
    first, second = queue.ticket(400), queue.ticket(600)
    assert first is not None and second is not None
    with pytest.raises(QueueFull):
        queue.ticket(100)
    found = scrape(figures)
    for name, wanted in (("prompts", 1), ("prompt_tokens", (400, 600))):
        reading, waiting = (wanted, wanted) if isinstance(wanted, int) else wanted
        assert value(found, f"magi_long_{name}_reading") == reading
        assert value(found, f"magi_long_{name}_waiting") == waiting
    clock.now = 4.0
    first.release(read=True)
    clock.now = 6.0
    second.release(read=True)
    found = scrape(figures)
    assert value(found, "magi_long_prompts_read_total") == 2
    assert value(found, "magi_long_prompt_tokens_read_total") == 1000
    assert value(found, "magi_long_prompt_reading_seconds_total") == 6
    assert value(found, "magi_long_prompt_waiting_seconds_total") == 4
    assert value(found, "magi_long_prompts_reading") == 0


def test_a_prompt_that_was_given_up_is_not_read() -> None:
    clock = Clock()
    queue = queue_of(clock)
    ticket = queue.ticket(400)
    assert ticket is not None
    clock.now = 3.0
    ticket.release()
    found = scrape(Figures(ATTENTION, Tally(), queue))
    assert value(found, "magi_long_prompts_read_total") == 0
    assert value(found, "magi_long_prompt_reading_seconds_total") == 0


def test_open_and_refused_requests_are_counted() -> None:
    tally = Tally()
    inside = asyncio.Event()
    leave = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inside.set()
        await leave.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def nothing(message: Message | None = None) -> Any:
        return {"type": "http.disconnect"}

    async def run() -> tuple[float, float]:
        admission = Admission(app, ServiceSettings(max_requests=1), tally)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        open_one = asyncio.create_task(admission(scope, nothing, nothing))
        await inside.wait()
        await admission(scope, nothing, nothing)
        during = value(scrape(figures), "magi_requests_open")
        leave.set()
        await open_one
        return during, value(scrape(figures), "magi_requests_open")

    figures = Figures(ATTENTION, tally, queue_of(Clock()))
    assert asyncio.run(run()) == (1, 0)
    found = scrape(figures)
    assert value(found, "magi_requests_refused_total", limit="requests") == 1
    assert value(found, "magi_requests_refused_total", limit="queue") == 0


class FakeClient:
    """An engine's client whose core answers with `STATE`, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.engine_core = self
        self.asked: list[str] = []
        self.fails = fails

    async def call_utility_async(self, method: str) -> Any:
        self.asked.append(method)
        if self.fails:
            raise RuntimeError("no such method")
        return STATE

    async def collective_rpc(self, method: str) -> list[tuple[int, float]]:
        self.asked.append(method)
        return [(90, 0.5), (100, 2.0)]


def test_what_the_engine_says_is_shown() -> None:
    async def run() -> Figures:
        engine = EngineFigures(FakeClient(), plans=True)
        await engine.ask()
        return Figures(ATTENTION, Tally(), queue_of(Clock()), engine)

    figures = asyncio.run(run())
    figures.engine.refresh = lambda: None  # type: ignore[union-attr, method-assign]
    found = scrape(figures)
    assert (value(found, "magi_kv_pages"), value(found, "magi_kv_pages_free")) == (100, 60)
    assert value(found, "magi_kv_pages_held", group="1", kind="SlidingWindowSpec") == 10
    assert value(found, "magi_prompt_tokens_unread", state="waiting") == 7000
    assert value(found, "magi_plans_total") == 100 and value(found, "magi_plan_seconds_total") == 2


def test_scrapes_ask_the_engine_again_only_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[int]:
        client = FakeClient()
        engine = EngineFigures(client, plans=False)
        counts = []
        for period in (60.0, 60.0, 0.0):
            monkeypatch.setattr(metrics, "PERIOD_S", period)
            await asyncio.to_thread(engine.refresh)
            await asyncio.sleep(0.01)
            counts.append(client.asked.count(METHOD))
        assert "magi_serve_plan_time" not in client.asked
        return counts

    assert asyncio.run(run()) == [1, 1, 2]


def test_an_engine_that_cannot_say_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> EngineFigures:
        client = FakeClient(fails=True)
        engine = EngineFigures(client, plans=True)
        await engine.ask()
        await engine.ask()
        assert client.asked.count(METHOD) == 1
        return engine

    with caplog.at_level(logging.WARNING):
        engine = asyncio.run(run())
    assert engine.state is None and engine.plans
    assert [r.getMessage() for r in caplog.records] == [
        "/metrics will not have the engine's state: no such method"
    ]


def page(number: int) -> SimpleNamespace:
    return SimpleNamespace(is_null=number == 0)


def requests(*counts: tuple[int, int]) -> Iterator[SimpleNamespace]:
    for prompt, computed in counts:
        yield SimpleNamespace(num_prompt_tokens=prompt, num_computed_tokens=computed)


def test_pages_that_a_window_has_left_are_not_held() -> None:
    def group(*pages: list[int]) -> SimpleNamespace:
        held = {str(i): [page(n) for n in numbers] for i, numbers in enumerate(pages)}
        return SimpleNamespace(kv_cache_spec=object(), block_size=16, req_to_blocks=held)

    manager = SimpleNamespace(
        block_pool=SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 4),
        coordinator=SimpleNamespace(
            single_type_managers=[group([1, 2, 3], [4]), group([0, 0, 5], [0], [])]
        ),
    )
    scheduler = SimpleNamespace(
        kv_cache_manager=manager,
        running=list(requests((100, 30), (50, 60))),
        waiting=list(requests((900, 0))),
    )
    state = engine_state(SimpleNamespace(scheduler=scheduler))
    assert (state["pages"], state["free_pages"]) == (10, 4)
    assert [g["held"] for g in state["groups"]] == [4, 1]
    assert state["unread_tokens"] == {"running": 70, "waiting": 900}


def test_the_time_of_plans_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 7.0, 7.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    plan_time = PlanTime()

    @plan_time
    def plan() -> str:
        return "planned"

    assert plan() == plan() == "planned"
    assert (plan_time.count, plan_time.seconds) == (2, 0.75)
