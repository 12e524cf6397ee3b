"""A line on a terminal that says how far a server is with a prompt; nothing elsewhere."""

import threading
import time
from collections.abc import Mapping
from typing import TextIO

_CLEAR = "\r\x1b[K"
_WIDTH = 30


class ProgressBar:
    """The line, redrawn every second until it is cleared: a server may say nothing for long."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun_s = time.monotonic()
        self._figures: Mapping[str, int] | None = None
        self._lock = threading.Lock()
        self._cleared = threading.Event()
        self._cleared.set()

    def start(self) -> None:
        """Draw the line, if there is a terminal."""
        if self._stream.isatty():
            self._cleared.clear()
            self._begun_s = time.monotonic()
            threading.Thread(target=self._run, daemon=True).start()

    def update(self, figures: Mapping[str, int]) -> None:
        """Show llama.cpp's ``prompt_progress``."""
        self._figures = figures
        self._draw()

    def clear(self) -> None:
        """Take the line away; a second time it does nothing."""
        with self._lock:
            if not self._cleared.is_set():
                self._cleared.set()
                self._stream.write(_CLEAR)
                self._stream.flush()

    def _run(self) -> None:
        self._draw()
        while not self._cleared.wait(1.0):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if not self._cleared.is_set():
                elapsed_s = time.monotonic() - self._begun_s
                self._stream.write(f"{_CLEAR}{line(self._figures, elapsed_s)}")
                self._stream.flush()


def line(figures: Mapping[str, int] | None, elapsed_s: float) -> str:
    """What the terminal shows, `elapsed_s` after the request was sent."""
    if not figures or not figures.get("total"):
        return f"waiting for the first token, {elapsed_s:.0f} s"
    total, processed = figures["total"], figures.get("processed", 0)
    filled = _WIDTH * processed // total
    cached = figures.get("cache", 0)
    text = f"reading [{'#' * filled:<{_WIDTH}}] {100 * processed // total:3d}%  "
    text += f"{processed} of {total} tokens"
    if cached:
        text += f", {cached} cached"
    speed = (processed - cached) * 1e3 / max(1, figures.get("time_ms", 0))
    if processed < total and speed > 0:
        text += f", {(total - processed) / speed:.0f} s left"
    return text
