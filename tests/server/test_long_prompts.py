"""Long prompts on a real service that reads them in small steps: progress, usage, clients."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import httpx
import openai

pytestmark = pytest.mark.vllm

MODEL = "SmolLM2"
STEP = 256
"""Tokens that the engine reads at a time."""

EXAMPLES = Path(__file__).parents[2] / "examples"
SENTENCE = "One two three four five six seven. "  # 8 tokens


@pytest.fixture(scope="module")
def url(
    tmp_path_factory: pytest.TempPathFactory, command: Callable[..., dict[str, Any]]
) -> Iterator[str]:
    from magi_serve.server.demo_model import demo_model

    log = tmp_path_factory.mktemp("small-steps") / "log"
    words = ["serve", str(demo_model()), "--served-model-name", MODEL, "--port", "0"]
    words += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"]
    words += ["--max-model-len", "8192", "--max-num-batched-tokens", str(STEP)]
    with log.open("wb") as out:
        process = subprocess.Popen(**command(*words), stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while not (said := re.search(r"magi-serve is ready: (\S+)", log.read_text("utf-8"))):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
            time.sleep(0.2)
        yield said[1]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def stream(url: str, path: str = "/v1/completions", **body: Any) -> Any:
    """The head of a streamed answer, its chunks, and the time of each."""
    asked = {"model": MODEL, "max_tokens": 3, "temperature": 0, "stream": True, **body}
    chunks, times = [], []
    with httpx.stream("POST", url + path, json=asked, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
                times.append(time.monotonic())
    assert answer.status_code == 200
    return answer, chunks, times


def progress(chunks: list[dict[str, Any]]) -> list[dict[str, int]]:
    """The progress objects, which come before everything else."""
    found = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert ["prompt_progress" in chunk for chunk in chunks[: len(found)]] == [True] * len(found)
    return found


def test_a_long_prompt_shows_true_progress_with_and_without_the_cache(url: str) -> None:
    first, second, third = SENTENCE * 150, "Eight nine ten. " * 200, "Ten nine eight. " * 200
    usage = {"stream_options": {"include_usage": True}, "return_progress": True}

    answer, chunks, times = stream(url, prompt=first + second, **usage)
    assert answer.headers["x-accel-buffering"] == "no"
    cold = progress(chunks)
    total = chunks[-1]["usage"]["prompt_tokens"]
    assert total > 7 * STEP
    assert len(cold) >= 4, "one for each step, but for those that end within a poll"
    assert all((f["total"], f["cache"]) == (total, 0) for f in cold)
    assert all(f["processed"] % STEP == 0 for f in cold[:-1]), "whole steps"
    done = [f["processed"] for f in cold]
    assert done == sorted(set(done)) and done[-1] == total
    spent = [f["time_ms"] for f in cold]
    assert spent == sorted(spent)
    seen_ms = (times[len(cold) - 1] - times[0]) * 1e3
    assert spent[-1] - spent[0] == pytest.approx(seen_ms, rel=0.2, abs=300)
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    _, chunks, _ = stream(url, prompt=first + third, **usage)
    warm = progress(chunks)
    cached = chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    total = chunks[-1]["usage"]["prompt_tokens"]
    assert 1000 < cached <= 1201
    assert len(warm) >= 3
    assert all((f["total"], f["cache"]) == (total, cached) for f in warm)
    done = [f["processed"] for f in warm]
    assert done == sorted(set(done)) and done[0] >= cached and done[-1] == total

    _, chunks, _ = stream(url, prompt=first + second, **usage)
    (last, *others) = reversed(progress(chunks))
    assert last["processed"] == last["total"] and len(others) <= 1
    assert last["cache"] == chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 1700


def test_usage_comes_only_when_asked_for_and_has_cached_tokens_everywhere(url: str) -> None:
    words = {"messages": [{"role": "user", "content": SENTENCE * 20}]}
    for path, prompt in (
        ("/v1/completions", {"prompt": SENTENCE * 20}),
        ("/v1/chat/completions", words),
    ):
        _, chunks, _ = stream(url, path, return_progress=True, **prompt)
        assert not any(chunk.get("usage") for chunk in chunks)
        assert progress(chunks)[-1]["processed"] == progress(chunks)[-1]["total"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, chunks, _ = stream(url, path, stream_options=options, **prompt)
        found = [chunk["usage"] for chunk in chunks]
        assert len(found) >= 4 and progress(chunks) == []
        cached = {usage["prompt_tokens_details"]["cached_tokens"] for usage in found}
        assert len(cached) == 1 and min(cached) > 100
        whole = httpx.post(url + path, json={"model": MODEL, "max_tokens": 1, **prompt}).json()
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] in cached


def test_the_official_client_puts_a_stream_with_progress_together(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    messages: Any = [{"role": "user", "content": SENTENCE * 40 + "What comes next?"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    with client.chat.completions.stream(**asked, extra_body={"return_progress": True}) as events:
        snapshots = [event.snapshot for event in events if event.type == "chunk"]
    together = snapshots[-1].choices[0].message
    whole = client.chat.completions.create(**asked).choices[0].message
    assert (together.role, together.content) == ("assistant", whole.content)


def test_the_service_answers_while_a_long_text_is_tokenised(url: str) -> None:
    waits: list[float] = []
    done = threading.Event()

    def watch() -> None:
        with httpx.Client() as client:
            while not done.is_set():
                begin = time.monotonic()
                client.get(f"{url}/live", timeout=60)
                waits.append(time.monotonic() - begin)
                time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    # A token for each digit, and few enough characters that they alone are no reason to refuse it.
    text = " ".join(map(str, range(80_000)))
    answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": text}, timeout=300)
    took = time.monotonic() - begin
    done.set()
    watcher.join()
    assert answer.status_code == 400 and "8192" in answer.json()["error"]["message"]
    assert max(waits) < max(0.5, took / 2), f"{took:.1f} s, of which {max(waits):.1f} s deaf"


@pytest.fixture
def book(tmp_path: Path) -> str:
    file = tmp_path / "book.txt"
    file.write_text("The capital of France is Paris. " * 20, "utf-8")
    return str(file)


QUESTION = "What is the capital of France?"


def client(url: str, *words: str) -> str:
    """What a client prints."""
    env = {"OPENAI_BASE_URL": f"{url}/v1", "PATH": "/usr/bin:/bin", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_client(url: str, book: str) -> None:
    program = [sys.executable, "-m", "magi_serve.cli", "complete", "--temperature", "0"]
    program += ["--max-tokens", "16"]
    assert "Paris" in client(url, *program, "--file", book, QUESTION)


def test_the_example_for_the_official_client(url: str, book: str) -> None:
    said = client(url, sys.executable, str(EXAMPLES / "openai_client.py"), book, QUESTION)
    assert re.search(r"read (\d+) of \1 tokens, \d+ of them cached, after \d", said)
    assert re.search(r"\d+ prompt tokens, \d+ of them cached; \d+ tokens", said)


def test_the_example_for_curl(url: str, book: str) -> None:
    said = client(url, str(EXAMPLES / "curl.sh"), book, QUESTION)
    assert '"prompt_progress":{"total":' in said
    assert said.rstrip().endswith("data: [DONE]")


def test_the_example_for_langchain(url: str, book: str) -> None:
    pytest.importorskip("langchain_openai")
    assert client(url, sys.executable, str(EXAMPLES / "langchain_style.py"), book, QUESTION).strip()
