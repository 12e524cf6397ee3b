"""Timing on a power-limited GPU: CUDA-graph replays in adjacent pairs, and the rates of the chip.

The clock of a card under load moves by more than the difference of two good kernels, so times of
separate runs say little. Here the two take turns (baseline, ours, baseline, ours, ...) and the
ratio is the median over neighbours, which had the same clock and heat.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Timer = Callable[[], float]
"""Runs some work for a few milliseconds and returns the milliseconds of one call."""

TURN_MS = 20.0
"""How long one turn lasts, about."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value; of one alone, no spread."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Race:
    """Milliseconds of both and the baseline's over ours: over 1 means that ours is faster."""

    baseline_ms: Spread
    ours_ms: Spread
    ratio: Spread
    pairs: int


def race(baseline: Timer, ours: Timer, pairs: int) -> Race:
    """Let both take turns, `pairs` times after one that does not count."""
    baseline()
    ours()
    turns = [(baseline(), ours()) for _ in range(pairs)]
    return Race(
        Spread.of([b for b, _ in turns]),
        Spread.of([o for _, o in turns]),
        Spread.of([b / o for b, o in turns]),
        pairs,
    )


class Replay:
    """A `Timer` of a captured graph that calls `run` once for each of `buffers`.

    Args:
        run: takes a buffer's number; launches on the current stream and never synchronises.
        buffers: how many buffers there are.
    """

    def __init__(self, run: Callable[[int], Any], buffers: int) -> None:
        self.calls = buffers
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(min(buffers, 2)):
                run(i)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i in range(buffers):
                run(i)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self.replays = 1
        self()  # the first one loads the graph
        self.replays = max(1, int(TURN_MS / (self() * self.calls)))

    def __call__(self) -> float:
        self._begin.record()
        for _ in range(self.replays):
            self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / (self.replays * self.calls)


def fastest(timers: Sequence[tuple[str, Timer]]) -> tuple[str, Timer]:
    """The one of several settings that takes the least time, by the median of three turns each."""
    if len(timers) == 1:
        return timers[0]
    medians = [statistics.median(timer() for _ in range(3)) for _, timer in timers]
    return timers[medians.index(min(medians))]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the chip reaches in this run: the ceilings that shares are of."""

    copy_tb_per_s: float
    read_tb_per_s: float
    matmul_tflops: float


def measure_rates() -> Rates:
    """Copy (bytes read and written), plain read (a sum) and bf16 matrix product of this GPU."""
    copy, read = _bandwidths(1 << 28)
    matmul = _matmul_rate(8192)
    torch.cuda.empty_cache()
    return Rates(copy, read, matmul)


def _bandwidths(count: int) -> tuple[float, float]:
    source = torch.randn(count, device="cuda")
    target = torch.empty_like(source)
    copy_ms = _median_ms(lambda _: target.copy_(source))
    read_ms = _median_ms(lambda _: source.sum())
    return 8 * count / copy_ms / 1e9, 4 * count / read_ms / 1e9


def _matmul_rate(n: int) -> float:
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _median_ms(lambda _: torch.mm(a, b, out=out)) / 1e9


def _median_ms(run: Callable[[int], Any]) -> float:
    timer = Replay(run, 1)
    return statistics.median(timer() for _ in range(5))
