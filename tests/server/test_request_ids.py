"""The name of a request: what the client sent, if it can stand in a log."""

import asyncio
import logging
from typing import Any

import pytest

pytest.importorskip("starlette")

from magi_serve.server.request_ids import RequestIds, name_log_records


def ask(*sent: tuple[bytes, bytes], kind: str = "http") -> tuple[list[tuple[bytes, bytes]], Any]:
    """Headers that the application sees, and the name in what it logs."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(
            [scope["headers"], logging.getLogger("x").makeRecord("x", 20, "", 0, "", (), None)]
        )

    async def nothing(*_: Any) -> Any:
        return None

    before = logging.getLogRecordFactory()
    try:
        name_log_records()
        name_log_records()
        scope = {"type": kind, "headers": list(sent)}
        asyncio.run(RequestIds(app)(scope, nothing, nothing))
        assert scope["headers"] == list(sent)
        outside = logging.getLogger("x").makeRecord("x", 20, "", 0, "", (), None)
        assert not hasattr(outside, "request_id")
    finally:
        logging.setLogRecordFactory(before)
    headers, record = seen
    return headers, getattr(record, "request_id", None)


def test_the_clients_own_name_is_kept() -> None:
    headers, name = ask((b"host", b"x"), (b"X-Request-ID", b"a/b:c-1"))
    assert headers == [(b"host", b"x"), (b"x-request-id", b"a/b:c-1")]
    assert name == "a/b:c-1"


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [(b"x-request-id", b"")],
        [(b"x-request-id", b"two words")],
        [(b"x-request-id", b"line\nbreak")],
        [(b"x-request-id", b"\xff")],
        [(b"x-request-id", b"9" * 129)],
        [(b"x-request-id", b"one"), (b"x-request-id", b"other")],
    ],
    ids=["none", "empty", "space", "line break", "not ASCII", "long", "two"],
)
def test_what_cannot_stand_in_a_log_is_replaced(sent: list[tuple[bytes, bytes]]) -> None:
    (first, name), (second, other) = ask(*sent), ask(*sent)
    assert first == [(b"x-request-id", name.encode())] and len(name) == 32
    assert name != other and second != first


def test_what_is_no_request_has_no_name() -> None:
    assert ask((b"x-request-id", b"one"), kind="websocket") == ([(b"x-request-id", b"one")], None)
