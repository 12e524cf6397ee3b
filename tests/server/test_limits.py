"""What a request may carry: bytes, nesting, prompts and lists; refused before the app reads it."""

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from magi_serve.server.middleware.limits import MAX_CONTAINERS, Limits, problem_of
from magi_serve.settings import ServiceSettings

SETTINGS = ServiceSettings()


class App:
    """Reads its body, then waits for the client to go if it is told to."""

    def __init__(self) -> None:
        self.body: bytes | None = None
        self.after: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.body = message["body"]
        assert not message["more_body"]
        self.after.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def send_body(
    chunks: Iterable[bytes],
    headers: dict[str, str] | None = None,
    settings: ServiceSettings = SETTINGS,
    path: str = "/v1/completions",
) -> tuple[int, dict[str, Any], App, int]:
    """The status, the error, the application and how many chunks were read."""
    app, answer, read = App(), [], 0
    chunks = list(chunks)

    async def receive() -> dict[str, Any]:
        nonlocal read
        if read == len(chunks):
            return {"type": "http.disconnect"}
        read += 1
        more = read < len(chunks)
        return {"type": "http.request", "body": chunks[read - 1], "more_body": more}

    async def send(message: Any) -> None:
        answer.append(message)

    pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": pairs}
    asyncio.run(Limits(app, settings)(scope, receive, send))
    said = json.loads(b"".join(message.get("body", b"") for message in answer) or b"{}")
    return answer[0]["status"] if answer else 0, said.get("error", {}), app, read


SMALL = ServiceSettings(max_body_bytes=100)


def test_a_body_within_the_limits_reaches_the_application_unchanged() -> None:
    body = b' {"prompt": "caf\xc3\xa9", "n": 2}\n'
    status, _, app, _ = send_body([body[:7], b"", body[7:]], settings=SMALL)
    assert (status, app.body, app.after) == (200, body, ["http.disconnect"])


@pytest.mark.parametrize("length", [None, "10", "101", "9" * 400, "0", "-5", "x"])
def test_a_body_that_is_too_large_is_not_read_further(length: str | None) -> None:
    """Content-Length absent, lying and honest."""
    headers = {"Content-Length": length} if length else {}
    status, error, app, read = send_body([b" " * 60] * 1000, headers, SMALL)
    assert (status, error["code"], error["type"]) == (413, 413, "RequestTooLargeError")
    assert "100 bytes" in error["message"] and "--max-body-bytes" in error["message"]
    assert app.body is None and read <= 2


def test_an_upload_is_counted_and_not_parsed() -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert send_body([b"--x\r\n\xff\x00"], headers, SMALL)[0] == 200
    assert send_body([b"--x" + b"\xff" * 100], headers, SMALL)[0] == 413
    assert send_body([b'{"n": 100000}'], headers, SMALL)[0] == 400  # a route may not look


def test_a_client_that_goes_while_it_sends_is_not_answered() -> None:
    app = App()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(Limits(app, SETTINGS)(scope, receive, send))
    assert app.body is None


def problem(body: Any, **settings: Any) -> str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = problem_of(data, ServiceSettings(**settings))
    return "" if found is None else found.message


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b'{"a": 1}}', b"[1 2]", b'\xef\xbb\xbf{"n": 9}', '{"n": 9}'.encode("utf-16"),
     b"\xff", b'{"a": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000, b'"' * 100_001,
     b'{"a": NaN', b"]["],
)  # fmt: skip
def test_what_is_not_json_in_utf_8_is_refused(body: bytes) -> None:
    assert "not JSON in UTF-8" in problem(body)


@pytest.mark.parametrize("levels", [1, 5, 64])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}"), ('[{"a]}":', "}]")])
def test_nesting_is_counted_exactly(levels: int, left: str, right: str) -> None:
    per_pair = left.replace('"a]}"', "").count("[") + left.replace('"a]}"', "").count("{")
    pairs = levels // per_pair
    body = (left * pairs + '"[[[{{{"' + right * pairs).encode()
    depth = pairs * per_pair
    assert not problem(body, max_json_depth=max(depth, 1))
    if depth > 1:
        assert f"more than {depth - 1} levels" in problem(body, max_json_depth=depth - 1)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + b"x" * 20_000_000 + b'"}',
        b'{"prompt": "' + b'\\"' * 10_000_000 + b'"}',
        b'{"prompt": "' + b'\\"' * 10_000_000,
        b'"\\' * 10_000_000,
        b'{"prompt": [' + b"12345," * 3_000_000 + b"1]}",
        b"[" + b"[]," * 6_000_000 + b"[]]",
        b"[" * 20_000_000,
        b"]" * 20_000_000,
        b"[" * 10_000_000 + b"]" * 10_000_000,
    ],
    ids=[
        "text",
        "quotes",
        "unfinished",
        "backslashes",
        "tokens",
        "arrays",
        "open",
        "close",
        "deep",
    ],
)
def test_no_body_takes_long_to_check(body: bytes) -> None:
    start = time.process_time()
    problem(body)
    assert time.process_time() - start < 2.0


def test_a_body_of_many_small_arrays_is_refused() -> None:
    assert f"more than {MAX_CONTAINERS} arrays" in problem([[]] * MAX_CONTAINERS)


def test_a_request_as_clients_send_it_is_within_the_limits() -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    for body in (
        {"prompt": list(range(10_000)), "n": 4, "logit_bias": {"5": 1}, "stop": ["a", "b"]},
        {"prompt": ["x"] * 256, "n": None, "stop": None},
        {"messages": [turn] * 2000, "tools": [{"function": {"parameters": {}}}] * 100},
        {"input": [turn] * 2000, "temperature": 0},
        {"model": "m", "input": "x" * 10_000, "n": "2"},
        [1, 2],
        None,
    ):
        assert problem(body) == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["x"] * 257}, ["prompt", "257 x n=1 = 257", "256", "--max-sequences"]),
        ({"prompt": [[1, 2]] * 100, "n": 3}, ["100 x n=3 = 300"]),
        ({"prompt": "x", "n": 257}, ["n=257"]),
        ({"prompt": "x", "n": "1e9"}, ["n=1000000000"]),
        ({"prompt": "x", "n": 1e300}, ["limit is 256"]),
        ({"n": 1000}, ["n=1000"]),
        ({"prompt": "x", "best_of": 300}, ["n=300"]),
        ({"sampling_params": {"n": 300}}, ["n=300"]),
        ({"input": ["x"] * 300}, ["input", "300"]),
        ({"messages": [[{"role": "user"}]] * 300}, ["messages", "300"]),
        ({"query": "x", "documents": [{"text": "x"}] * 300}, ["documents", "300"]),
        ({"stop": ["x"] * 65}, ["stop has 65", "64", "--max-stop"]),
        ({"stop": ["x" * 2000]}, ["stop", "2000 characters", "1024"]),
        ({"stop": "x" * 2000}, ["2000 characters"]),
        ({"stop_token_ids": list(range(70))}, ["stop_token_ids has 70"]),
        ({"bad_words": ["x"] * 70}, ["bad_words has 70"]),
        ({"stop_sequences": ["x"] * 70}, ["stop_sequences has 70"]),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, ["1025", "1024", "--max-logit-bias"]),
        ({"allowed_token_ids": list(range(2000))}, ["allowed_token_ids has 2000"]),
    ],
)
def test_what_is_too_much_is_refused_with_both_numbers(body: Any, words: list[str]) -> None:
    said = problem(body)
    assert all(word in said for word in words), said
    assert len(said) < 700


def test_the_error_has_the_form_of_the_api_and_the_field() -> None:
    _, error, app, _ = send_body([b'{"prompt": "zebra", "n": 999}'])
    assert (error["code"], error["type"], error["param"]) == (400, "BadRequestError", "n")
    assert app.body is None and "zebra" not in json.dumps(error)
    status, error, _, _ = send_body(
        [b'{"stop_sequences": ["%s"]}' % (b"z" * 5000)], path="/v1/messages"
    )
    assert status == 400 and error["type"] == "invalid_request_error"
