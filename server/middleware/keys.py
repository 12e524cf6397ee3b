"""The keys that clients may send, and a file of them that may change while the service runs."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from magi_serve.server.errors import ServeError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""How soon a change of the file counts."""

_OPTION = re.compile(r"(name=\S+|priority=-?\d+|max-requests=[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a client by its key; `name` is what logs may say."""

    digest: bytes
    name: str
    priority: int = 0
    max_requests: int | None = None


class KeyRing:
    """The keys given singly, and those of `file`, which is looked at again at most every second.

    A file that cannot be read, has a malformed line or no key changes nothing: the keys of before
    stay, and the log says why.

    Raises:
        ServeError: the file is not accepted when the service starts.
    """

    def __init__(
        self,
        single: Iterable[str] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._single = list(single)
        self._file = file
        self._clock = clock
        self._looked_s = clock()
        self._stamp: tuple[int, ...] | None = None
        self._keys = [_key(key, f"key {i}") for i, key in enumerate(self._single, 1)]
        self._texts = list(self._single)
        if file is not None:
            try:
                self._read(file)
            except (OSError, ValueError) as error:
                raise ServeError(f"--api-key-file={file}: {error}") from None

    def __bool__(self) -> bool:
        return bool(self._keys) or self._file is not None

    def all(self) -> list[str]:
        """The keys themselves."""
        return list(self._texts)

    def find(self, sent: bytes) -> Key | None:
        """The key that a client sent, in a time that does not depend on how much of one fits."""
        self._look()
        digest = hashlib.sha256(sent).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def _look(self) -> None:
        now = self._clock()
        if self._file is None or now - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now
        try:
            if _stamp(self._file) != self._stamp:
                self._read(self._file)
                logger.info("%d keys from %s", len(self._keys), self._file)
        except (OSError, ValueError) as error:
            logger.error("--api-key-file=%s: %s; the keys of before stay", self._file, error)

    def _read(self, file: Path) -> None:
        # Before the text: a change in between is then seen the next time.
        self._stamp = _stamp(file)
        entries = _parse(file.read_text("utf-8"))
        single = [_key(key, f"key {i}") for i, key in enumerate(self._single, 1)]
        self._keys = single + [key for _, key in entries]
        self._texts = self._single + [text for text, _ in entries]


def _stamp(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _parse(text: str) -> list[tuple[str, Key]]:
    """The keys of a file; errors say which line, never what is in it."""
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        key, *options = line.split("#")[0].split() or [""]
        if not key:
            continue
        if not all(_OPTION.fullmatch(option) for option in options):
            raise ValueError(
                f"line {number} is not KEY [name=NAME] [priority=N] [max-requests=N]; correct it"
            )
        given = dict(option.split("=", 1) for option in options)
        limit = given.get("max-requests")
        entries.append(
            (
                key,
                _key(
                    key,
                    given.get("name", f"line {number}"),
                    int(given.get("priority", 0)),
                    int(limit) if limit else None,
                ),
            )
        )
    if not entries:
        raise ValueError("no key in it; a line is KEY [name=NAME] [priority=N] [max-requests=N]")
    return entries


def _key(text: str, name: str, priority: int = 0, max_requests: int | None = None) -> Key:
    return Key(hashlib.sha256(text.encode()).digest(), name, priority, max_requests)
