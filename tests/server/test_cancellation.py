"""Clients that go, many at once, and how a service begins and ends: real processes, tiny model."""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.vllm

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 49152,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
SEATS = 8
"""How many requests the engine runs at a time; more are queued."""

OPTIONS = ["--load-format", "dummy", "--served-model-name", "tiny", "--dtype", "float32"]
OPTIONS += ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "32768"]
OPTIONS += ["--max-num-batched-tokens", "256", "--max-num-seqs", str(SEATS)]

FREE_WITHIN_S = 2.0
"""A second, and a step on a machine that is busy with other tests."""


Said = list[tuple[str, int, float]]
"""What probes said: path, status, seconds."""


class Service:
    """A ``magi-serve serve`` on a port that is known before it answers."""

    def __init__(self, keywords: dict[str, Any], port: int, log: Path) -> None:
        self.port, self.log = port, log
        with log.open("wb") as out:
            self.process = subprocess.Popen(**keywords, stdout=out, stderr=subprocess.STDOUT)

    def connect(self, path: str, body: dict[str, Any] | None = None) -> socket.socket:
        """A connection on which a request has been sent; the server closes it after the answer."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        sock.sendall(request(path, body))
        return sock

    def get(self, path: str) -> tuple[int, str]:
        return parsed(read(self.connect(path)))

    def gauges(self) -> tuple[float, float, float]:
        """Requests that run, requests that wait, and the share of pages in use."""
        text = self.get("/metrics")[1]
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        found = [re.search(rf"^vllm:{name}\{{[^}}]*\}} (\S+)", text, re.M) for name in names]
        running, waiting, pages = (float(match[1]) if match else -1.0 for match in found)
        return running, waiting, pages

    def until(self, true: Callable[[float, float, float], bool], timeout_s: float = 60.0) -> float:
        """How many seconds it took until `true` of the gauges."""
        start = time.monotonic()
        while not true(*(gauges := self.gauges())):
            assert time.monotonic() - start < timeout_s, gauges
            time.sleep(0.005)
        return time.monotonic() - start

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def request(path: str, body: dict[str, Any] | None = None) -> bytes:
    data = (
        b"" if body is None else json.dumps({"model": "tiny", "ignore_eos": True} | body).encode()
    )
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.0\r\nHost: h\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read(sock: socket.socket) -> bytes:
    with sock:
        return b"".join(iter(lambda: sock.recv(65536), b""))


def parsed(answer: bytes) -> tuple[int, str]:
    """Status and body of an answer in HTTP/1.0."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def events(body: str) -> list[str]:
    return [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]


def kinds(**given: Any) -> list[tuple[str, dict[str, Any]]]:
    """The same request in all forms: completion, chat, several at once; streamed or not."""
    text = {"prompt": "Count: one two", "max_tokens": 2000} | given
    words = {"role": "user", "content": "Count: one two"}
    chat = {**text, "messages": [words]}
    del chat["prompt"]
    if "prompt" in given:
        chat["messages"] = [{"role": "user", "content": "one two " * (len(given["prompt"]) // 2)}]
    several = {**text, "prompt": [text["prompt"], text["prompt"]]}
    forms = [
        ("/v1/completions", text),
        ("/v1/chat/completions", chat),
        ("/v1/completions", several),
        ("/v1/completions", {**text, "n": 2}),
    ]
    return [(path, {**body, "stream": stream}) for path, body in forms for stream in (True, False)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from magi_serve.server.demo_model import demo_model

    folder = tmp_path_factory.mktemp("tiny")
    for file in Path(demo_model()).glob("*token*"):
        shutil.copy(file, folder)
    for file in Path(demo_model()).glob("chat_template*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def start(
    model: Path, tmp_path_factory: pytest.TempPathFactory, command: Callable[..., dict[str, Any]]
) -> Iterator[Callable[..., Service]]:
    with contextlib.ExitStack() as stack:

        def started(*words: str) -> Service:
            with socket.create_server(("127.0.0.1", 0)) as sock:
                port = sock.getsockname()[1]
            keywords = command("serve", str(model), "--port", str(port), *OPTIONS, *words)
            service = Service(keywords, port, tmp_path_factory.mktemp("tiny-service") / "log")
            stack.callback(service.end)
            return service

        yield started


def wait_until_ready(service: Service) -> Said:
    """What the probes said from the first answer on."""
    said: Said = []
    deadline = time.monotonic() + 300
    while not said or said[-1][:2] != ("/ready", 200):
        assert service.process.poll() is None and time.monotonic() < deadline, (
            service.log.read_text(errors="replace")[-6000:]
        )
        for path in ("/live", "/startup", "/ready"):
            begin = time.monotonic()
            try:
                said.append((path, service.get(path)[0], time.monotonic() - begin))
            except ConnectionRefusedError:
                assert not said, "refused after it had answered"
        time.sleep(0.05)
    return said


@pytest.fixture(scope="module")
def services(start: Callable[..., Service]) -> tuple[Service, Service, Said]:
    """Two, for either has an end of its own, started side by side; what one's probes said."""
    first, second = start(), start("--shutdown-timeout", "6")
    said = wait_until_ready(second)
    wait_until_ready(first)
    return first, second, said


@pytest.fixture(scope="module")
def service(services: tuple[Service, Service, Said]) -> Service:
    return services[0]


def go_while_decoding(service: Service, i: int) -> float:
    path, body = kinds()[i % 8]
    sock = service.connect(path, body)
    service.until(lambda running, waiting, pages: running > 0 and pages > 0)
    if body["stream"]:
        while b"data: " not in sock.recv(4096):
            pass
    sock.close()
    return service.until(lambda *gauges: gauges == (0, 0, 0))


def go_in_mid_prefill(service: Service, i: int) -> float:
    path, body = kinds(prompt=[5 + i] * 16000)[i % 8]
    sock = service.connect(path, body)
    service.until(lambda running, waiting, pages: running > 0 and pages > 0)
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        assert b"data: " not in sock.recv(4096)  # no token yet
    sock.close()
    return service.until(lambda *gauges: gauges == (0, 0, 0))


def go_while_queued(service: Service, i: int) -> float:
    seats = [service.connect(*kinds(max_tokens=20000)[0]) for _ in range(SEATS)]
    service.until(lambda running, waiting, pages: running == SEATS)
    path, body = kinds()[i % 8]
    sock = service.connect(path, body)
    service.until(lambda running, waiting, pages: waiting > 0)
    sock.close()
    took_s = service.until(lambda running, waiting, pages: waiting == 0)
    assert service.gauges()[0] == SEATS  # nobody else is disturbed
    for seat in seats:
        seat.close()
    service.until(lambda *gauges: gauges == (0, 0, 0))
    return took_s


@pytest.mark.parametrize("cycles", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_pages_are_free_within_a_second_once_the_client_is_gone(
    service: Service, cycles: int
) -> None:
    ways = itertools.cycle([go_while_decoding, go_in_mid_prefill, go_while_queued])
    took_s = [way(service, i // 3) for way, i in zip(ways, range(cycles), strict=False)]
    print(f"{cycles} cycles: median {sorted(took_s)[cycles // 2]:.3f} s, max {max(took_s):.3f} s")
    assert max(took_s) < FREE_WITHIN_S
    assert service.get("/ready")[0] == 200


@pytest.mark.parametrize("requests", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_many_short_requests_during_a_long_prefill(service: Service, requests: int) -> None:
    lives: list[float] = []
    over = threading.Event()

    def ask_live() -> None:
        while not over.is_set():
            begin = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
            connection.request("GET", "/live")
            assert connection.getresponse().status == 200
            connection.close()
            lives.append(time.monotonic() - begin)
            time.sleep(0.01)

    async def short(i: int) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(request("/v1/completions", {"prompt": f"Number {i} is", "max_tokens": 2}))
        answer = await reader.read()
        writer.close()
        return parsed(answer)

    async def all_of_them() -> list[tuple[int, str]]:
        return await asyncio.gather(*(short(i) for i in range(requests)))

    long = service.connect("/v1/completions", {"prompt": [7] * 16000, "max_tokens": 1})
    service.until(lambda running, waiting, pages: running > 0)
    asking = threading.Thread(target=ask_live)
    asking.start()
    answers = asyncio.run(all_of_them())
    over.set()
    asking.join()
    assert [status for status, _ in answers] == [200] * requests
    assert all(json.loads(body)["usage"]["completion_tokens"] == 2 for _, body in answers)
    assert parsed(read(long))[0] == 200
    p99_s = sorted(lives)[len(lives) * 99 // 100]
    print(
        f"{requests} requests: {len(lives)} probes, p99 {p99_s * 1e3:.0f} ms, "
        f"max {max(lives) * 1e3:.0f} ms"
    )
    assert p99_s < 0.2


def engine_pid(service: Service) -> int:
    """The engine core: the child of the service that is not a helper of multiprocessing."""
    for task in Path(f"/proc/{service.process.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
    raise AssertionError("no engine core found")


# Ends the first service.
def test_an_engine_killed_in_mid_stream_is_told_to_clients_and_probes(service: Service) -> None:
    stream = service.connect("/v1/completions", {"prompt": "a", "max_tokens": 9999, "stream": True})
    plain = service.connect("/v1/completions", {"prompt": "b", "max_tokens": 9999})
    while b"data: " not in stream.recv(4096):
        pass
    service.until(lambda running, waiting, pages: running == 2)
    os.kill(engine_pid(service), signal.SIGKILL)
    begin = time.monotonic()
    while service.get("/ready")[0] != 503:
        assert time.monotonic() - begin < 5
    *_, error, done = events(read(stream).decode())
    assert done == "[DONE]" and json.loads(error)["error"]["message"]
    assert time.monotonic() - begin < 5
    status, body = parsed(read(plain))
    assert status >= 500 and json.loads(body)["error"]["message"]
    assert service.get("/live")[0] == 200
    assert service.process.wait(30) == 1


def test_probes_while_the_engine_is_loaded(services: tuple[Service, Service, Said]) -> None:
    said: dict[str, list[int]] = {"/live": [], "/startup": [], "/ready": []}
    for path, code, _ in services[2]:
        said[path].append(code)
    assert set(said["/live"]) == {200}
    for codes in (said["/startup"], said["/ready"]):
        assert codes == sorted(codes, reverse=True) and codes.count(503) > 20
    lives = sorted(took_s for path, _, took_s in services[2] if path == "/live")
    p99_s = lives[len(lives) * 99 // 100]
    print(f"/live during start: {len(lives)} probes, p99 {p99_s:.3f} s, max {lives[-1]:.3f} s")
    assert p99_s < 1.0  # Kubernetes' default


# Ends the second service.
def test_sigterm_loses_no_stream(services: tuple[Service, Service, Said]) -> None:
    service = services[1]
    open_ones = [service.connect(path, body) for path, body in kinds(max_tokens=40)]
    endless = service.connect(*kinds(max_tokens=30000)[0])
    service.until(lambda running, waiting, pages: running == SEATS)
    service.process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    while (ready := service.get("/ready"))[0] == 200:
        assert time.monotonic() - begin < 1
    assert json.loads(ready[1]) == {"status": "draining"}
    late = read(service.connect("/v1/completions", {"prompt": "late"}))
    assert parsed(late)[0] == 503 and b"retry-after: " in late and b"connection: close" in late
    for sock, (_, body) in zip(open_ones, kinds(), strict=True):
        status, text = parsed(read(sock))
        assert status == 200
        if body["stream"]:
            assert events(text)[-1] == "[DONE]"
            assert "error" not in text
        assert '"finish_reason":"length"' in text
    *_, error, done = events(read(endless).decode())
    assert done == "[DONE]" and json.loads(error)["error"]["code"] == 503
    assert 5.5 < time.monotonic() - begin < 12
    assert service.process.wait(30) == 0
    with pytest.raises(ConnectionRefusedError):
        service.get("/live")
