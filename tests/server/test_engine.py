"""Which options are taken, refused or filled in, before any engine starts."""

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from magi_serve.server import engine

CUSTOM = {"backend": "CUSTOM", "host": "127.0.0.1", "worker": engine.WORKER_EXTENSION}

ASK_VLLM = """
import json, sys
from magi_serve.server import engine
from magi_serve.errors import MagiServeError

said = {}
for words in json.loads(sys.argv[1]):
    try:
        args = engine.parse_args(words)
        said[" ".join(words)] = {
            "backend": engine.chosen_backend(args),
            "host": args.host,
            "worker": args.worker_extension_cls,
            "model": args.model,
        }
    except MagiServeError as error:
        said[" ".join(words)] = str(error)
open(sys.argv[2], "w").write(json.dumps(said))
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's own parser makes of some command lines; in one process, which imports vLLM."""
    file = tmp_path_factory.mktemp("parsed") / "said.json"
    lines = [
        ["m"],
        ["--model", "m"],
        ["m", "--host", "0.0.0.0"],
        ["m", "--attention-backend", "auto"],
        ["m", "--attention-backend", "TRITON_ATTN"],
        ["m", "--attention-config.backend", "FLASH_ATTN"],
        ["m", "--attention-config", '{"backend_per_kind": {"sliding_window": "TRITON_ATTN"}}'],
        ["m", "--worker-extension-cls", "some.where.Else"],
        ["m", "--api-server-count", "1"],
        ["m", "--data-parallel-size", "2"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", ASK_VLLM, json.dumps(lines), str(file)],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(file.read_text())
    return said


@pytest.mark.vllm
def test_what_the_user_left_open_is_filled_in(parsed: dict[str, Any]) -> None:
    for line in ("m", "--model m", "m --api-server-count 1"):
        assert parsed[line] == {**CUSTOM, "model": "m"}
    per_kind = next(line for line in parsed if "backend_per_kind" in line)
    assert parsed[per_kind]["backend"] == "CUSTOM"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("m --host 0.0.0.0", "host", "0.0.0.0"),
        ("m --attention-backend auto", "backend", "AUTO"),
        ("m --attention-backend TRITON_ATTN", "backend", "TRITON_ATTN"),
        ("m --attention-config.backend FLASH_ATTN", "backend", "FLASH_ATTN"),
        ("m --worker-extension-cls some.where.Else", "worker", "some.where.Else"),
    ],
)
def test_what_the_user_chose_stays(
    parsed: dict[str, Any], line: str, name: str, value: str
) -> None:
    assert parsed[line][name] == value


@pytest.mark.vllm
def test_several_engines_are_refused_with_the_way_out(parsed: dict[str, Any]) -> None:
    said = parsed["m --data-parallel-size 2"]
    assert said.startswith("--data-parallel-size=2: ")
    assert "vllm serve ... --attention-backend CUSTOM" in said


PLAIN = {
    "headless": False,
    "api_server_count": None,
    "data_parallel_size": 1,
    "data_parallel_size_local": None,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_external_lb": False,
    "data_parallel_hybrid_lb": False,
}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, []),
        ({"api_server_count": 1}, []),
        ({"api_server_count": 0}, ["--api-server-count=0"]),
        ({"headless": True}, ["--headless=True"]),
        ({"grpc": True}, ["--grpc=True"]),
        ({"data_parallel_rank": 0}, ["--data-parallel-rank=0"]),
        ({"data_parallel_start_rank": 1}, ["--data-parallel-start-rank=1"]),
        (
            {"data_parallel_size": 4, "data_parallel_hybrid_lb": True},
            ["--data-parallel-size=4", "--data-parallel-hybrid-lb=True"],
        ),
    ],
)
def test_modes_with_several_servers_or_engines(given: dict[str, Any], refused: list[str]) -> None:
    assert engine.refused_modes(Namespace(**(PLAIN | given))) == refused


class FakeClient:
    def __init__(self, *reports: dict[str, Any]) -> None:
        self.reports = list(reports)

    async def collective_rpc(self, method: str, timeout: float) -> list[dict[str, Any]]:
        assert method == "magi_serve_report"
        return self.reports


def test_equal_reports_of_workers_are_told_once() -> None:
    group = {"layers": 2, "backend": "a.B", "impl": "a.C", "kernel": "cpu", "ours": True}
    one, other = {**group, "layers": 1}, {**group, "ours": False}
    client = FakeClient(
        {"device": "X", "groups": [group, one]}, {"device": "X", "groups": [group, other]}
    )
    args = Namespace(worker_extension_cls=engine.WORKER_EXTENSION)
    said = asyncio.run(engine.attention_report(client, args))
    assert said == {"device": "X", "workers": 2, "groups": [group, one, other]}


def test_a_worker_extension_of_ones_own_is_left_alone() -> None:
    args = Namespace(worker_extension_cls="types.SimpleNamespace")
    said = asyncio.run(engine.attention_report(FakeClient(), args))
    assert "types.SimpleNamespace" in said["unknown"]
    assert engine.WORKER_EXTENSION in said["unknown"]


def test_the_worker_describes_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from magi_serve.backends.vllm.worker import WorkerReport

    class Stock: ...

    def layer(impl: Any) -> SimpleNamespace:
        return SimpleNamespace(impl=impl, get_attn_backend=lambda: Stock)

    platforms = SimpleNamespace(current_platform=SimpleNamespace(get_device_name=lambda: "X"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    worker: Any = WorkerReport()
    layers = {"a": layer(Stock()), "b": layer(Stock()), "mamba": object()}
    worker.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers)
    )
    kv_groups = [SimpleNamespace(layer_names=["a", "b"]), SimpleNamespace(layer_names=["mamba"])]
    worker.model_runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=kv_groups)
    )
    report = worker.magi_serve_report()
    (group,) = report["groups"]
    assert report["device"] == "X"
    assert (group["layers"], group["kernel"], group["ours"]) == (2, None, False)
    assert group["backend"].endswith("Stock")
