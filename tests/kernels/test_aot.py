"""The kernels compile for every supported architecture, by both Tritons, without spills.

No GPU is needed: `aot.py` runs the real host code against a stand-in driver, in a process for each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from magi_serve.kernels.capabilities import triton_interprets

AOT = Path(__file__).with_name("aot.py")
NEWER_TRITON = Path(sys.prefix) / "triton-3.8"

SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
"""Shared memory that a program may have, in bytes."""

MATRIX = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma", 103: "tcgen05.mma"}
"""What 16-bit prefill must be made of."""

ALLOWED_STACK = {
    # Scalars of a band that consumers set aside around the main loop; none of it is in the loop.
    "_hopper_prefill_kernel": 192,
    # Two registers around the loop of decode, with Triton 3.8 on sm_80 and D256.
    "_attention_kernel": 8,
}

Cases = list[dict[str, Any]]

pytestmark = pytest.mark.skipif(triton_interprets(), reason="compiles, which is not interpreting")


def compile_cases(arch: int, triton: str, cache: Path, *options: str) -> Cases:
    """What `aot.py` reports for one architecture and one Triton."""
    paths = [str(AOT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    if triton == "newer":
        paths.insert(0, str(NEWER_TRITON))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(cache / f"{triton}-{arch}"),
    }
    command = [sys.executable, str(AOT), str(arch), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def tritons() -> list[str]:
    return ["own", "newer"] if NEWER_TRITON.is_dir() else ["own"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Future[Cases]]]:
    """Reports by architecture and Triton, compiled two at a time while tests look at the first."""
    cache = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(2) as pool:
        yield {
            (arch, triton): pool.submit(compile_cases, arch, triton, cache)
            for arch in SHARED_LIMIT
            for triton in tritons()
        }


def assert_fit(arch: int, cases: Cases, extra_stack: int = 0) -> None:
    """No spills, shared memory within the limit, matrix instructions of the architecture."""
    wrong = []
    for case in cases:
        name, kernels = case["case"], case["kernels"]
        assert kernels, f"{name} compiled nothing"
        for kernel in kernels:
            where = f"{kernel['kernel']} of {name} on sm_{arch} by Triton {case['triton']}"
            if kernel["stack"] > ALLOWED_STACK.get(kernel["kernel"], 0) + extra_stack:
                wrong.append(f"{where} spills {kernel['stack']} bytes")
            if kernel["shared"] > SHARED_LIMIT[arch]:
                wrong.append(f"{where} takes {kernel['shared']} bytes of shared memory")
        if name.startswith(("prefill bf16", "prefill fp16", "slices", "hopper")):
            matrix = kernels[0]["matrix"]
            if matrix != MATRIX[arch]:
                wrong.append(f"{where} multiplies by {matrix}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("triton", ["own", "newer"])
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_default_tiles_compile_without_spills(
    compiled: dict[Any, Future[Cases]], arch: int, triton: str
) -> None:
    if (arch, triton) not in compiled:
        pytest.skip(f"needs a second Triton in {NEWER_TRITON}: make setup")
    cases = compiled[arch, triton].result()
    assert len(cases) >= 10
    assert_fit(arch, cases)
    version = cases[0]["triton"]
    assert version.startswith("3.8") if triton == "newer" else version >= "3.6"


@pytest.mark.slow
@pytest.mark.parametrize("triton", ["own", "newer"])
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_the_whole_grid_of_tiles_compiles(arch: int, triton: str, tmp_path: Path) -> None:
    if triton not in tritons():
        pytest.skip(f"needs a second Triton in {NEWER_TRITON}: make setup")
    assert_fit(arch, compile_cases(arch, triton, tmp_path, "--all"), extra_stack=64)


COUNT_SPECIALISATIONS = """
import sys; sys.path.insert(0, sys.argv[1])
import aot, torch
from magi_serve.kernels.ffa import triton_attention
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import Plan, TileConfig

aot.compile_only(90)
q, k = torch.empty(64, 8, 64).half(), torch.empty(64, 1, 64).half()
out, lse = torch.empty_like(q), torch.empty(64, 8)
for num_items in (1, 7, 16, 160, 161):
    for sink in (torch.zeros(8), torch.zeros(64, 8)):
        table = torch.zeros(num_items, 8, dtype=torch.int32)
        plan = Plan(TileConfig(16, 64, num_stages=2), table, table, None)
        call = AttentionCall(q, k, k, None, (plan,), 0.1, 0.0, sink, out, lse, None)
        triton_attention.run(call)
(cache,) = triton_attention._attention_kernel.device_caches.values()
print(len(cache[0]))
"""


def test_the_number_of_items_never_compiles_a_kernel_anew(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_SPECIALISATIONS, str(AOT.parent)],
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(
                [str(AOT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        },
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["1"], done.stdout + done.stderr
