"""Who is let in, who waits and who is refused: over fakes, then with real prompts."""

import asyncio
import contextlib
import gc
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import httpx

from magi_serve.server.middleware import engine_door
from magi_serve.server.middleware.admission import Admission, OpenRequest, current
from magi_serve.server.middleware.auth import SCOPE_KEY
from magi_serve.server.middleware.keys import Key
from magi_serve.server.middleware.lengths import Capacity
from magi_serve.server.middleware.options import leave_room
from magi_serve.server.middleware.prefill_queue import (
    FIRST_RETRY_AFTER_S,
    LONGEST_RETRY_AFTER_S,
    PrefillQueue,
    QueueFull,
    Ticket,
)
from magi_serve.settings import ServiceSettings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def queue_of(clock: Clock | None = None, **changes: int) -> PrefillQueue:
    sizes = {"long_tokens": 10, "max_running": 2, "max_running_tokens": 100, "max_waiting": 2}
    return PrefillQueue(**(sizes | changes), clock=clock or Clock())


def long(queue: PrefillQueue, tokens: int = 20, priority: int = 0) -> Ticket:
    ticket = queue.ticket(tokens, priority)
    assert ticket is not None
    return ticket


def test_short_prompts_pass_by_a_full_queue() -> None:
    queue = queue_of()
    for _ in range(4):
        long(queue)
    assert queue.ticket(9) is None
    assert (len(queue.running), len(queue.waiting)) == (2, 2)
    with pytest.raises(QueueFull):
        queue.ticket(10)
    assert queue.ticket(10, refuse=False) is not None


def test_long_prompts_go_by_priority_and_then_by_arrival() -> None:
    queue = queue_of(max_running=1, max_waiting=9)
    first = long(queue)
    late, urgent, later = long(queue, priority=1), long(queue, priority=-1), long(queue, priority=1)
    assert queue.waiting == [urgent, late, later]
    first.release()
    first.release()
    assert queue.running == [urgent]


def test_the_budget_of_tokens_holds_and_one_alone_may_have_more() -> None:
    queue = queue_of(max_running=3)
    huge, small = long(queue, 500), long(queue, 10)
    assert queue.running == [huge]
    huge.release()
    more = long(queue, 91)
    assert queue.running == [small] and queue.waiting == [more]
    small.release()
    assert queue.running == [more]


def test_leaving_the_queue_lets_the_next_one_in() -> None:
    queue = queue_of(max_running=1)
    first, second, third = long(queue), long(queue), long(queue)
    second.release()
    assert queue.waiting == [third]
    long(queue)
    first.release()
    assert queue.running == [third]


def test_retry_after_is_when_a_prompt_will_have_been_read() -> None:
    clock = Clock()
    queue = queue_of(clock, max_running=1, max_waiting=0)
    first = long(queue, 100)
    with pytest.raises(QueueFull) as full:
        queue.ticket(20)
    assert full.value.retry_after_s == FIRST_RETRY_AFTER_S
    clock.now += 10
    first.release(read=True)  # 10 tokens/s
    long(queue, 300)
    clock.now += 10
    assert queue.retry_after_s() == 20
    clock.now += 100
    assert queue.retry_after_s() == 1
    queue.running[0].release()  # cancelled: says nothing of the speed
    long(queue, 10**9)
    assert queue.retry_after_s() == LONGEST_RETRY_AFTER_S


class Engine:
    """Answers with two outputs, each when told to; counts what it works on."""

    def __init__(self, policy: str = "fcfs") -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
        self.go_on = asyncio.Event()
        self.working = 0
        self.priorities: list[int] = []

    async def generate(
        self, prompt: Any, params: Any, request_id: str, priority: int = 0
    ) -> AsyncGenerator[int, None]:
        self.working += 1
        self.priorities.append(priority)
        try:
            for output in (1, 2):
                await self.go_on.wait()
                yield output
        finally:
            self.working -= 1

    encode = generate


PLAIN = SimpleNamespace(prompt_logprobs=None)


def prompt(tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": [1] * tokens}


def with_engine(
    check: Callable[[Any, PrefillQueue], Awaitable[None]],
    policy: str = "fcfs",
    **sizes: int,
) -> None:
    async def run() -> None:
        client, queue = Engine(policy), queue_of(**({"max_running": 1} | sizes))
        engine_door.hang(client, ServiceSettings(max_prompt_logprobs=100), queue)
        current.set(OpenRequest("/v1/completions"))
        await check(client, queue)

    asyncio.run(asyncio.wait_for(run(), timeout=10))


@pytest.fixture
def errors_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one class of vLLM that the door needs, without importing vLLM."""
    errors = SimpleNamespace(VLLMValidationError=ValueError)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(exceptions=errors))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", errors)


async def all_of(stream: Any) -> list[int]:
    return [output async for output in stream]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("errors_of_vllm")
def test_a_long_prompt_leaves_the_queue_with_its_first_token() -> None:
    async def check(client: Any, queue: PrefillQueue) -> None:
        streams = [client.generate(prompt(20), PLAIN, "r") for _ in range(3)]
        tasks = [asyncio.ensure_future(all_of(stream)) for stream in streams]
        short = asyncio.ensure_future(all_of(client.encode(prompt(2), PLAIN, "s")))
        await settle()
        assert client.working == 2  # the short one, and the first of the long
        client.go_on.set()
        assert await asyncio.gather(*tasks, short) == [[1, 2]] * 4
        assert not queue.running and not queue.waiting

    with_engine(check)


@pytest.mark.usefixtures("errors_of_vllm")
def test_whoever_goes_frees_the_place_at_once() -> None:
    """Queued or read, cancelled or closed, never begun."""

    async def check(client: Any, queue: PrefillQueue) -> None:
        first, second, third = (client.generate(prompt(20), PLAIN, "r") for _ in range(3))
        reading = asyncio.ensure_future(anext(first))
        waiting = asyncio.ensure_future(anext(second))
        await settle()
        waiting.cancel()
        await settle()
        assert len(queue.waiting) == 1 and len(queue.running) == 1
        del third
        gc.collect()
        assert not queue.waiting and len(queue.running) == 1
        reading.cancel()
        await settle()
        assert not queue.running and client.working == 0
        closed = client.generate(prompt(20), PLAIN, "r")
        client.go_on.set()
        assert await anext(closed) == 1 and not queue.running
        await closed.aclose()
        assert client.working == 0

    with_engine(check)


@pytest.mark.usefixtures("errors_of_vllm")
def test_a_full_queue_refuses_before_there_is_an_answer() -> None:
    async def check(client: Any, queue: PrefillQueue) -> None:
        kept = [client.generate(prompt(20), PLAIN, "r") for _ in range(2)]
        request = OpenRequest("/v1/completions")
        current.set(request)
        with pytest.raises(Exception, match="1 long prompts are waiting"):
            client.generate(prompt(20), PLAIN, "r")
        assert request.refusal and request.refusal.status == 429
        assert request.refusal.retry_after_s == FIRST_RETRY_AFTER_S
        request.has_output = True  # a beam search: it goes on
        kept.append(client.generate(prompt(20), PLAIN, "r"))
        current.set(None)  # the service itself
        kept.append(client.generate(prompt(20), PLAIN, "r"))

    with_engine(check, max_waiting=1)


@pytest.mark.usefixtures("errors_of_vllm")
def test_more_long_prompts_than_ever_fit_the_queue_are_no_matter_of_time() -> None:
    async def check(client: Any, queue: PrefillQueue) -> None:
        request = OpenRequest("/v1/completions")
        current.set(request)
        with pytest.raises(Exception, match="more than 3 long prompts"):
            [client.generate(prompt(20), PLAIN, f"r-{i}") for i in range(9)]
        assert request.refusal and request.refusal.status == 400
        gc.collect()
        assert not queue.running and not queue.waiting

    with_engine(check)


@pytest.mark.usefixtures("errors_of_vllm")
def test_priorities_come_with_the_key_and_a_request_can_only_lower_its_own() -> None:
    async def check(client: Any, queue: PrefillQueue) -> None:
        client.go_on.set()
        for own in (0, 3, -9):
            key = Key(b"", "a", priority=-5)
            current.set(OpenRequest("/v1/completions", key))
            await all_of(client.generate(prompt(2), PLAIN, "r", priority=own))
        assert client.priorities == [-5, -2, -5]

    with_engine(check, policy="priority")


@pytest.mark.usefixtures("errors_of_vllm")
def test_too_many_logprobs_of_the_prompt_are_refused_with_the_product() -> None:
    async def check(client: Any, queue: PrefillQueue) -> None:
        params = SimpleNamespace(prompt_logprobs=4)
        client.generate(prompt(20), params, "r")
        with pytest.raises(Exception, match=r"105 logprobs, the limit is 100"):
            client.generate(prompt(21), params, "r")

    with_engine(check)


def test_what_fits_is_counted_in_tokens_and_pages() -> None:
    model = Capacity(max_model_len=100, page_size=16, num_pages=None)
    assert model.why_not(90, 10) is None
    said = model.why_not(90, 11) or ""
    for part in ("maximum context length is 100", "needs 101", "90 in the prompt", "11 requested"):
        assert part in said
    assert "7 KV pages" in said and "at most 10 tokens" in said
    said = model.why_not(300, 0, or_more=True) or ""
    assert "at least 300 in the prompt" in said and "at most" not in said
    small = Capacity(max_model_len=100, page_size=16, num_pages=4)
    assert small.why_not(60, 4) is None
    assert "5 KV pages of 4" in (small.why_not(60, 5) or "")


@pytest.mark.parametrize(
    ("given", "changes", "threshold"),
    [
        (0, {}, 3072),
        (500, {}, 500),
        (0, {"max_model_len": 1000}, 1000),
        (0, {"enable_chunked_prefill": False}, 0),
        (0, {"is_hybrid": True}, 0),
    ],
)
def test_long_prompts_leave_room_in_every_step(
    given: int, changes: dict[str, Any], threshold: int
) -> None:
    sizes = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": True}
    both = SimpleNamespace(**(sizes | {"max_model_len": 10**6, "is_hybrid": False} | changes))
    args = Namespace(long_prefill_token_threshold=given, magi_serve=ServiceSettings())
    leave_room(args, SimpleNamespace(scheduler_config=both, model_config=both))
    assert args.long_prefill_token_threshold == threshold


class Client:
    """Requests to `Admission` over an application that answers when told to."""

    def __init__(self, **settings: int) -> None:
        self.go_on = asyncio.Event()
        self.admission = Admission(self.app, ServiceSettings(**settings))

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        await self.go_on.wait()
        status = 200
        if scope["path"] == "/refused":
            request = current.get()
            assert request is not None
            request.refusal = engine_door.Refusal(429, "full", retry_after_s=7)
            status = 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'"vLLM\'s"'})

    def ask(
        self, key: Key | None = None, path: str = "/v1/completions", method: str = "POST"
    ) -> "asyncio.Task[tuple[int, dict[bytes, bytes], Any]]":
        return asyncio.ensure_future(self._ask({"path": path, "method": method, SCOPE_KEY: key}))

    async def _ask(self, scope: dict[str, Any]) -> tuple[int, dict[bytes, bytes], Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any: ...

        await self.admission({"type": "http", **scope}, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


ALICE, BOB = Key(b"a", "alice"), Key(b"b", "bob", max_requests=1)


@pytest.mark.parametrize(
    ("keys", "statuses"),
    [
        ([ALICE, ALICE, ALICE], [200, 200, 429]),
        ([BOB, BOB, ALICE], [200, 429, 200]),
        ([None, None, None, None], [200, 200, 200, 429]),
        ([ALICE, ALICE, BOB, None], [200, 200, 200, 429]),
    ],
)
def test_open_requests_are_counted_in_all_and_by_key(
    keys: list[Key | None], statuses: list[int]
) -> None:
    async def run() -> None:
        client = Client(max_requests=3, max_requests_per_key=2)
        tasks = [client.ask(key) for key in keys]
        await settle()
        probe = client.ask(ALICE, "/metrics", "GET")
        client.go_on.set()
        answers = await asyncio.gather(*tasks)
        assert [status for status, _, _ in answers] == statuses
        assert (await probe)[0] == 200
        refused = answers[statuses.index(429)]
        assert int(refused[1][b"retry-after"]) > 0
        assert refused[2]["error"]["type"] == "RateLimitError"
        assert (await client.ask(keys[0]))[0] == 200  # all places are free again

    asyncio.run(asyncio.wait_for(run(), timeout=10))


def test_a_request_that_is_cancelled_gives_its_place_back() -> None:
    async def run() -> None:
        client = Client(max_requests=1)
        task = client.ask(ALICE)
        await settle()
        task.cancel()
        await settle()
        client.go_on.set()
        assert (await client.ask(BOB))[0] == 200

    asyncio.run(asyncio.wait_for(run(), timeout=10))


def test_a_refusal_of_the_engine_s_door_replaces_what_the_handler_makes_of_it() -> None:
    async def run() -> None:
        client = Client()
        client.go_on.set()
        status, headers, body = await client.ask(path="/refused")
        assert (status, headers[b"retry-after"]) == (429, b"7")
        assert body["error"]["message"] == "full"

    asyncio.run(run())


KEY = "sk-of-the-tests-0123456789"
WORD = "zebra"
LENGTH = 32768
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 49152,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def traces() -> Iterator[tuple[str, list[bytes]]]:
    """Where OpenTelemetry's protobuf over HTTP may be sent, and what has come."""
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory,
    command: Callable[..., dict[str, Any]],
    traces: tuple[str, list[bytes]],
) -> Iterator[tuple[str, Path]]:
    """A real service with a key in a file, small limits and a queue of one, and its log."""
    from magi_serve.server.demo_model import demo_model

    folder = tmp_path_factory.mktemp("admission")
    for pattern in ("*token*", "chat_template*"):
        for file in Path(demo_model()).glob(pattern):
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "keys").write_text(f"{KEY} name=tests\n")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    words = ["serve", str(folder), "--served-model-name", "m", "--port", str(port)]
    words += ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", str(LENGTH), "--no-enable-prefix-caching"]
    words += ["--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    words += ["--api-key-file", str(folder / "keys"), "--max-body-bytes", "400000"]
    words += ["--max-long-prefills", "1", "--max-queue", "1"]
    words += ["--logging-config.formatter", "json", "--otlp-traces-endpoint", traces[0]]
    log = folder / "log"
    with log.open("wb") as out:
        keywords = command(*words)
        keywords["env"]["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
        process = subprocess.Popen(**keywords, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 200
        while "magi-serve is ready: " not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def post(
    url: str, body: Any, path: str = "/v1/completions", key: str = KEY, **given: Any
) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(url + path, json=body, headers=headers, timeout=120, **given)


@pytest.mark.vllm
def test_logs_in_json_name_the_request(url: tuple[str, Path]) -> None:
    address, log = url
    ask = {"model": "m", "prompt": "One", "max_tokens": 1}
    for name in ("tab-7/é".encode("latin-1"), b"order-66", None):
        given = {} if name is None else {"X-Request-Id": name}
        answer = httpx.post(
            f"{address}/v1/completions",
            json=ask,
            headers={"Authorization": f"Bearer {KEY}", **given},
            timeout=60,
        )
        assert answer.status_code == 200
        if name == b"order-66":
            assert "order-66" in answer.json()["id"]
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    records = [json.loads(line) for line in lines]
    ours = [r for r in records if r["name"].startswith("magi_serve.")]
    assert any("magi-serve is ready: " in r["message"] for r in ours)
    access = [r for r in records if '"POST /v1/completions' in r["message"]]
    names = [r["request_id"] for r in access]
    assert "order-66" in names and len(set(names)) == len(names) >= 3
    assert all(re.fullmatch(r"order-66|[0-9a-f]{32}", name) for name in names)


@pytest.mark.vllm
def test_a_request_is_part_of_the_clients_trace(
    url: tuple[str, Path], traces: tuple[str, list[bytes]]
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {
        "Authorization": f"Bearer {KEY}",
        "traceparent": f"00-{trace}-b7ad6b7169203331-01",
        "X-Request-Id": "traced-1",
    }
    ask = {"model": "m", "prompt": "One", "max_tokens": 1}
    answer = httpx.post(f"{url[0]}/v1/completions", json=ask, headers=headers, timeout=60)
    assert answer.status_code == 200
    deadline = time.monotonic() + 30
    while not (found := [body for body in traces[1] if bytes.fromhex(trace) in body]):
        assert time.monotonic() < deadline, len(traces[1])
        time.sleep(0.2)
    assert b"traced-1" in found[0]


@pytest.mark.vllm
def test_a_real_service_asks_for_the_key_of_the_file(url: tuple[str, Path]) -> None:
    ask = {"model": "m", "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    assert post(url[0], ask, key="wrong").status_code == 401
    assert post(url[0], ask).json()["usage"]["completion_tokens"] == 2
    for path in (
        "/metrics",
        "/metrics/",
        "//metrics",
        "/docs",
        "/openapi.json",
        "/version",
        "/load",
    ):
        assert httpx.get(url[0] + path).status_code == 401
    assert (
        httpx.get(f"{url[0]}/live").status_code == httpx.get(f"{url[0]}/health").status_code == 200
    )


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("prompt", "requested", "sums"),
    [
        (90, 32679, ["90 in the prompt", "32679 requested", "needs 32769", "at most 32678"]),
        (32768, 1, ["32768 in the prompt", "1 requested", "needs 32769"]),
        (40000, 8, ["40000 in the prompt", "8 requested", "needs 40008"]),
        (70000, 8, ["at least 65537 in the prompt"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_fit_is_refused_with_the_sums(
    url: tuple[str, Path], prompt: int, requested: int, sums: list[str], stream: bool
) -> None:
    text = " the" * prompt  # one token each
    body = {"model": "m", "prompt": text, "max_tokens": requested, "stream": stream}
    answer = post(url[0], body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, 400), error
    missing = [s for s in [*sums, f"is {LENGTH} tokens", "KV pages"] if s not in error["message"]]
    assert not missing, error["message"]


@pytest.mark.vllm
def test_a_chat_needs_room_for_one_token_even_if_it_does_not_ask(url: tuple[str, Path]) -> None:
    messages = [{"role": "user", "content": " the" * LENGTH}]
    answer = post(url[0], {"model": "m", "messages": messages}, "/v1/chat/completions")
    assert answer.status_code == 400
    assert "in the prompt and 1 requested" in answer.json()["error"]["message"]
    count = post(url[0], {"model": "m", "prompt": " the" * 100}, "/tokenize").json()["count"]
    assert count == 100


@pytest.mark.vllm
@pytest.mark.parametrize("requested", [-1, 10**12, "5x"])
def test_impossible_numbers_of_tokens_are_refused(url: tuple[str, Path], requested: Any) -> None:
    answer = post(url[0], {"model": "m", "prompt": "x", "max_tokens": requested})
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert len(answer.content) < 1000


@pytest.mark.vllm
def test_bodies_are_limited_honest_lying_or_chunked(url: tuple[str, Path]) -> None:
    host, port = url[0].removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\n"
    chunk = b"61a80\r\n" + b" " * 400000 + b"\r\n"
    for headers, body in (
        ("Content-Length: 400001\r\n", b""),
        ("Content-Length: 400001\r\n", b" " * 400001),
        ("Transfer-Encoding: chunked\r\n", chunk + chunk),
    ):
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            sock.sendall(f"{head}{headers}\r\n".encode() + body)
            assert sock.recv(100).startswith(b"HTTP/1.1 413")
    answer = post(url[0], {"model": "m", "prompt": [WORD] * 5000})
    assert answer.status_code == 400 and len(answer.content) < 1000 and WORD not in answer.text
    answer = post(url[0], {"model": "m", "prompt": "x", "logprobs": 1000})
    assert answer.status_code == 400 and "1000" in answer.json()["error"]["message"]


LONG = [1000 + i % 1000 for i in range(9_000)]


@pytest.mark.vllm
def test_a_short_prompt_is_answered_between_long_ones_and_the_queue_has_an_end(
    url: tuple[str, Path],
) -> None:
    long = {"model": "m", "prompt": LONG, "max_tokens": 1}
    ends: dict[str, tuple[float, int]] = {}

    def ask(name: str, body: Any) -> None:
        with contextlib.suppress(httpx.HTTPError):
            answer = post(url[0], body)
            ends[name] = time.monotonic(), answer.status_code

    threads = [threading.Thread(target=ask, args=(name, long)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
        time.sleep(0.4)
    full = post(url[0], long)
    assert full.status_code == 429 and int(full.headers["retry-after"]) > 0
    assert "--max-queue" in full.json()["error"]["message"]
    streamed = post(url[0], long | {"stream": True})
    assert streamed.status_code == 429
    ask("short", {"model": "m", "prompt": "The capital", "max_tokens": 1})
    for thread in threads:
        thread.join()
    assert [ends[name][1] for name in ("first", "second", "short")] == [200] * 3
    assert ends["short"][0] < ends["first"][0]


@pytest.mark.vllm
def test_a_client_that_goes_leaves_the_queue(url: tuple[str, Path]) -> None:
    long = {"model": "m", "prompt": LONG, "max_tokens": 1}
    body = json.dumps(long).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = url[0].removeprefix("http://").split(":")
    for _ in range(2):  # one is read, one waits
        socks = []
        for _ in range(2):
            socks.append(socket.create_connection((host, int(port)), timeout=30))
            socks[-1].sendall(head.encode() + body)
            time.sleep(0.2)
        assert post(url[0], long).status_code == 429
        for sock in reversed(socks):
            sock.close()
        time.sleep(0.5)
    assert post(url[0], long | {"prompt": LONG[:8500]}).status_code == 200


@pytest.mark.vllm
def test_neither_keys_nor_prompts_are_in_the_log(url: tuple[str, Path]) -> None:
    post(url[0], {"model": "m", "prompt": f"{WORD} {WORD} 7731", "max_tokens": 1})
    post(url[0], {"model": "m", "prompt": f"{WORD} 7731", "n": WORD})
    said = url[1].read_text(errors="replace")
    assert "attention by magi-serve" in said
    assert KEY not in said and WORD not in said
