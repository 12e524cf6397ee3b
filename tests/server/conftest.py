"""The service as users run it: one real process for all tests of a run."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 300.0


@dataclass
class Service:
    """A running ``magi-serve serve``; what it prints goes to `log`."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = field(default="", init=False)
    curl: str = field(default="", init=False)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        """Until the process says so itself."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "magi-serve is ready: " not in self.said():
            assert self.process.poll() is None, self.said()[-6000:]
            assert time.monotonic() < deadline, self.said()[-6000:]
            time.sleep(0.2)
        time.sleep(0.2)  # the rest of the line
        line, after = self.said().partition("magi-serve is ready: ")[2].splitlines()[:2]
        self.url, self.curl = line.split()[0], after.strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that end the service which others use come last, whatever their files are called."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.fixture(scope="session")
def command() -> Callable[..., dict[str, Any]]:
    """What to start for ``magi-serve WORDS``, as keywords of `subprocess`."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    def keywords(*words: str) -> dict[str, Any]:
        program = [sys.executable, "-m", "magi_serve.cli"]
        return {"args": [*program, *words], "env": {**os.environ, **settings}}

    return keywords


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, command: Callable[..., dict[str, Any]]
) -> Iterator[Service]:
    """SmolLM2-135M on a free port, with vLLM's engine and worker as processes of their own."""
    from magi_serve.server.demo_model import demo_model

    log = tmp_path_factory.mktemp("service") / "log"
    words = ["serve", str(demo_model()), "--served-model-name", "SmolLM2", "--port", "0"]
    # fp32: many CPUs are several times slower in bf16.
    words += ["--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "1024", "--max-num-seqs", "4"]
    with log.open("wb") as out:
        process = subprocess.Popen(**command(*words), stdout=out, stderr=subprocess.STDOUT)
    service = Service(process, log)
    try:
        service.wait_until_ready()
        yield service
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
