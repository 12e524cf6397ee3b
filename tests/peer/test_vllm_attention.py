"""vLLM's own tests of attention backends against ours: its batches, reference and tolerance."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.vllm

UPSTREAM = Path(sys.prefix) / "vllm-tests"
# Every batch with the heads of the whole model, the small ones also as sharded over four ranks.
SELECTED = (
    "(causal_backend_correctness and not fp8 or sliding_window_backend_correctness) "
    "and not (auto-2 or [2-) and not (large and (auto-4 or [4-))"
)
COUNTS = {
    "test_causal_backend_correctness": 18,
    "test_non_causal_backend_correctness": 3,
    "test_sliding_window_backend_correctness": 9,
}


def make_configs(folder: Path) -> None:
    """The shapes that the tests are about, under the names that they ask for."""
    from transformers import LlamaConfig, MistralConfig

    llama = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    windowed = MistralConfig(
        hidden_size=2048,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        sliding_window=2047,
        max_position_embeddings=4096,
        architectures=["MistralForCausalLM"],
        dtype="bfloat16",
    )
    llama.save_pretrained(folder / "meta-llama__Meta-Llama-3-8B")
    windowed.save_pretrained(folder / "microsoft__Phi-tiny-MoE-instruct")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """For each of vLLM's tests, its cases: None, or what failed."""
    if not UPSTREAM.is_dir():
        pytest.skip(f"{UPSTREAM} is missing: make test fetches it")
    folder = tmp_path_factory.mktemp("peer")
    make_configs(folder)
    search = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        "PEER_MODELS": str(folder),
        "PYTHONPATH": os.pathsep.join(p for p in search if p),
        "HF_HUB_OFFLINE": "1",
    }
    command = ["-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={UPSTREAM}", "-k", SELECTED]
    command += ["-p", "custom_backend", "-p", "no:cacheprovider", "-p", "no:logging"]
    command += [
        f"--junitxml={folder / 'junit.xml'}",
        "tests/v1/attention/test_attention_backends.py",
    ]
    process = subprocess.run(
        [sys.executable, *command],
        cwd=UPSTREAM,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert (folder / "junit.xml").exists(), process.stdout[-6000:]
    found: dict[str, dict[str, Any]] = {}
    for case in ET.parse(folder / "junit.xml").iter("testcase"):
        failure = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        name, _, parameters = case.attrib["name"].partition("[")
        message = None if failure is None else failure.attrib.get("message", failure.tag)
        found.setdefault(name, {})[parameters.rstrip("]")] = message
    return found


@pytest.mark.parametrize("name", COUNTS)
def test_vllms_own_backend_tests_pass(
    name: str, outcomes: dict[str, dict[str, str | None]]
) -> None:
    cases = outcomes[name]
    assert {case: why for case, why in cases.items() if why is not None} == {}
    assert len(cases) == COUNTS[name]
