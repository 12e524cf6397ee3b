"""Which of several rows is better, and by how much more than the noise."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from magi_serve.bench.timing import Spread
from magi_serve.kernels.ffa.tuned_files import Row

LEAST_GAIN = 1.005
"""A row that is better by less than this is not worth a change."""
MOST_LOSS = 0.99
"""No case may become slower than by this, beyond its noise."""


@dataclass(slots=True)
class Trial:
    """A row that was tried: ratios of the present row's time over its own, by case.

    `reason` says why it was given up: it does not compile, was wrong, was slower.
    """

    row: Row
    ratios: list[Spread] = field(default_factory=list)
    reason: str | None = None


def mean(ratios: Sequence[Spread]) -> Spread:
    """Geometric means of the medians and of the quartiles."""
    return Spread(
        *(
            math.exp(statistics.fmean(math.log(getattr(ratio, side)) for ratio in ratios))
            for side in ("median", "low", "high")
        )
    )


def lost(ratio: Spread) -> bool:
    """Whether a case has become slower by more than is borne, and than the noise."""
    return ratio.median < MOST_LOSS and ratio.high < 1


def wins(ratios: Sequence[Spread]) -> bool:
    """Whether the lower quartile is a gain, the median one that is worth it, and no case lost."""
    gained = mean(ratios)
    return gained.low > 1 and gained.median >= LEAST_GAIN and not any(map(lost, ratios))


def best(trials: Sequence[Trial], num_cases: int) -> Trial | None:
    """The trial with the largest mean among those that win over all cases; the first of equals."""
    winners = [
        trial
        for trial in trials
        if trial.reason is None and len(trial.ratios) == num_cases and wins(trial.ratios)
    ]
    return max(winners, key=lambda trial: mean(trial.ratios).median, default=None)


def closest(trials: Sequence[Trial]) -> Trial | None:
    """The trial that came closest to winning, or farthest beyond; None if none was timed."""
    timed = [trial for trial in trials if trial.ratios]
    return max(timed, key=lambda t: (len(t.ratios), mean(t.ratios).median), default=None)


def crossover(present: float, sized: Sequence[tuple[float, Spread]]) -> float:
    """From how many tiles per multiprocessor on Gluon should have the work.

    Args:
        present: from how many on it has it.
        sized: tiles per multiprocessor, ascending, with Triton's time over Gluon's.

    Returns:
        The lowest size down to which Gluon is faster beyond the noise without a gap; or, if
        Triton is faster beyond the noise from `present` on, the size where that ends.
    """
    chosen = present
    for size, ratio in reversed(sized):
        if size >= present:
            continue
        if not (ratio.low > 1 and ratio.median >= LEAST_GAIN):
            break
        chosen = _down(size)
    if chosen < present:
        return chosen
    above = [(size, ratio) for size, ratio in sized if size >= present]
    for i, (size, ratio) in enumerate(above):
        if not (ratio.high < 1 and ratio.median <= 1 / LEAST_GAIN):
            break
        chosen = _down(above[i + 1][0]) if i + 1 < len(above) else _down(size) + 0.01
    return round(chosen, 2)


def _down(size: float) -> float:
    """Rounded so that work of `size` still reaches it."""
    return math.floor(size * 100) / 100
