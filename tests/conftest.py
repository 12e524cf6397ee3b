"""What all tests share: who is left out on this machine, how hypothesis runs, and a real service.

The service is one process for all tests of a run, as users run it.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Triton's interpreter takes seconds for an example: a deadline would measure the machine.
settings.register_profile("magi-serve", deadline=None, print_blob=True)
settings.load_profile("magi-serve")

START_TIMEOUT_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if importlib.util.find_spec("vllm") is None:
        missing["vllm"] = "vLLM is not importable here"
    wanted = any(item.get_closest_marker(name) for item in items for name in ("gpu", "multi_gpu"))
    gpus = _num_gpus() if wanted else 0
    if gpus == 0:
        missing["gpu"] = "no NVIDIA GPU here"
    if gpus < 2:
        missing["multi_gpu"] = f"needs several NVIDIA GPUs, found {gpus}"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Tests that end the service which others use come last, whatever their files are called.
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.fixture
def vllm_as_installed() -> Iterator[None]:
    """Leaves vLLM's registry and platform as they were, and starts without an override."""
    if importlib.util.find_spec("vllm") is None:
        yield
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform, custom = type(current_platform), AttentionBackendEnum.CUSTOM
    stock = vars(platform).get("get_attn_backend_cls")
    custom.clear_override()
    yield
    custom.clear_override()
    if stock is not None:
        platform.get_attn_backend_cls = stock


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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
