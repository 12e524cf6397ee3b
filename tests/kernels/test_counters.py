"""Counters for launches: shared by those that follow each other, one each for what may overlap."""

import pytest
import torch

from magi_serve.kernels.ffa import counters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_OF_STREAM", {})
    monkeypatch.setattr(counters, "_POOLS", {})
    monkeypatch.setattr(counters, "POOL", 3)


def capture(monkeypatch: pytest.MonkeyPatch, *, on: bool) -> None:
    monkeypatch.setattr(counters, "capturing", lambda: on)


def test_launches_of_one_stream_share_a_counter_that_starts_at_zero() -> None:
    first = counters.counter(CPU)
    assert first.tolist() == [0] * counters.WORDS
    first.fill_(7)  # a launch that did not leave zeros would be seen by the next
    assert counters.counter(CPU) is first


def test_every_captured_launch_keeps_a_counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = counters.counter(CPU)
    capture(monkeypatch, on=True)
    held = [counters.counter(CPU) for _ in range(3)]
    assert len({x.data_ptr() for x in (eager, *held)}) == 4
    capture(monkeypatch, on=False)
    for x in held:
        x.fill_(7)
    assert counters.counter(CPU) is eager
    assert eager.tolist() == [0] * counters.WORDS


def test_a_pool_that_is_spent_costs_a_fill_in_the_graph_and_no_launch_its_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters.counter(CPU)
    capture(monkeypatch, on=True)
    for _ in range(3):
        counters.counter(CPU).fill_(7)
    late = [counters.counter(CPU) for _ in range(2)]
    assert [x.tolist() for x in late] == [[0] * counters.WORDS] * 2
    assert late[0].data_ptr() != late[1].data_ptr()


def test_a_capture_before_any_launch_needs_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    capture(monkeypatch, on=True)
    assert counters.counter(CPU).tolist() == [0] * counters.WORDS
