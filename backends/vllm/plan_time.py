"""The host time that a worker spends on plans, for the service's figures."""

import time
from contextlib import ContextDecorator


class PlanTime(ContextDecorator):
    """Counts what runs inside, one at a time.

    Attributes:
        count, seconds: how many times, and how long in all.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._since_s = 0.0

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._since_s


plan_time = PlanTime()
"""Of this process."""
