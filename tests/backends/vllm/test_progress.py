"""What the engine core says of prompts, over a fake of its scheduler."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from magi_serve.backends.vllm import progress


def stats(total: int, cached: int) -> Any:
    return SimpleNamespace(num_prompt_tokens=total, num_cached_tokens=cached)


def request(computed: int, prefill_stats: Any, *events: tuple[str, float]) -> Any:
    made = [SimpleNamespace(type=SimpleNamespace(name=n), timestamp=t) for n, t in events]
    return SimpleNamespace(
        num_prompt_tokens=1000,
        num_computed_tokens=computed,
        prefill_stats=prefill_stats,
        events=made,
    )


def core(requests: dict[str, Any], *under_way: dict[str, int]) -> Any:
    steps = [(None, SimpleNamespace(num_scheduled_tokens=tokens), None) for tokens in under_way]
    return SimpleNamespace(
        scheduler=SimpleNamespace(requests=requests), batch_queue=steps if under_way else None
    )


def test_computed_tokens_with_those_of_the_cache() -> None:
    engine = core({"a": request(512, stats(1000, 256))})
    assert progress.prompt_progress(engine, ["a"]) == {"a": [1000, 256, 512, -1]}


def test_a_step_that_has_not_ended_does_not_count() -> None:
    engine = core({"a": request(768, stats(1000, 0))}, {"a": 256, "b": 9}, {"a": 256}, {"b": 1})
    assert progress.prompt_progress(engine, ["a"])["a"][:3] == [1000, 0, 256]


def test_what_was_cached_counts_before_the_first_step_ends() -> None:
    engine = core({"a": request(512, stats(1000, 256))}, {"a": 256})
    assert progress.prompt_progress(engine, ["a"])["a"][:3] == [1000, 256, 256]


@pytest.mark.parametrize("prefill_stats", [stats(0, 0), None])
def test_requests_that_wait_or_decode_are_left_out(prefill_stats: Any) -> None:
    engine = core({"a": request(0, prefill_stats)})
    assert progress.prompt_progress(engine, ["a", "unknown"]) == {}


def test_time_runs_from_the_first_step_even_after_a_preemption() -> None:
    now = time.monotonic()
    events = [("QUEUED", now - 90), ("SCHEDULED", now - 60), ("PREEMPTED", now - 20)]
    events.append(("SCHEDULED", now - 10))
    engine = core({"a": request(512, stats(1000, 0), *events)})
    assert progress.prompt_progress(engine, ["a"])["a"][3] == pytest.approx(60, abs=1)


def test_the_engine_core_gets_the_method_only_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.engine.core", raising=False)
    progress.add_method()
    assert "vllm.v1.engine.core" not in sys.modules
    fake = SimpleNamespace(EngineCore=type("EngineCore", (), {}))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", fake)  # type: ignore[arg-type]
    progress.add_method()
    assert getattr(fake.EngineCore, progress.METHOD) is progress.prompt_progress


@pytest.mark.vllm
def test_vllm_has_what_the_method_reads() -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreEventType
    from vllm.v1.request import Request

    assert "num_scheduled_tokens" in SchedulerOutput.__dataclass_fields__
    made = Request("a", list(range(1000)), SamplingParams(), None)
    engine = core({"a": made})
    assert progress.prompt_progress(engine, ["a"]) == {}
    made.record_event(EngineCoreEventType.QUEUED)
    made.record_event(EngineCoreEventType.SCHEDULED)
    made.prefill_stats.set(1000, 256, 0)
    made.num_computed_tokens = 512
    (found,) = progress.prompt_progress(engine, ["a"]).values()
    assert found[:3] == [1000, 256, 512] and 0 <= found[3] < 10
