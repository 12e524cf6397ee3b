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
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from magi_serve.kernels.capabilities import triton_interprets

AOT = Path(__file__).with_name("aot.py")
NEWER_TRITON = Path(sys.prefix) / "triton-3.8"

SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 103: 232_448}
"""Shared memory that a program may have, in bytes."""

MOST_STACK = {  # by kernel, or by case
    # Scalars of a band that consumers set aside around the main loop; none of it is in the loop.
    "_hopper_prefill_kernel": 112,
    # Accumulators of 64 packed rows, and what stands by around the loop.
    "_hopper_quantised_kernel": 112,
    "_hopper_quantised_prefill_kernel": 112,
    # Triton 3.8 takes 168 registers where 3.6 takes 220, for three programs per multiprocessor.
    "decode bf16 d128 int8 per token": 16,
}

MATRIX = {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma", 103: "tcgen05.mma"}
"""What 16-bit prefill must be made of."""

LIMITS = Path(__file__).with_name("aot_limits.json")
"""Registers, stack and shared memory of each default kernel, by Triton, architecture and case.

``python tests/kernels/test_aot.py`` writes what is compiled now. What it changes belongs into the
commit that changes the kernels: a stack that grows is a spill to be explained.
"""

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


def numbers(kernel: dict[str, Any]) -> list[int]:
    """As `LIMITS` has them."""
    return [kernel["registers"], kernel["stack"], kernel["shared"]]


def short(version: str) -> str:
    """Major and minor of a Triton: one set of limits for all of its patches."""
    return ".".join(version.split(".")[:2])


def assert_within_limits(arch: int, cases: Cases) -> None:
    """No kernel takes more than is committed."""
    limits, wrong = json.loads(LIMITS.read_text()), []
    for case in cases:
        key = f"{short(case['triton'])}/sm_{arch}/{case['case']}"
        for kernel in case["kernels"]:
            most = limits.get(key, {}).get(kernel["kernel"])
            if most is None or any(n > m for n, m in zip(numbers(kernel), most, strict=True)):
                wrong.append(f"{kernel['kernel']} of {key}: {numbers(kernel)}, committed {most}")
    assert not wrong, "\n".join(["registers, stack, shared memory:", *wrong])


def assert_fit(arch: int, cases: Cases, stack: int) -> None:
    """Stack and shared memory within the limits, matrix instructions of the architecture."""
    wrong = []
    for case in cases:
        name, kernels = case["case"], case["kernels"]
        assert kernels, f"{name} compiled nothing"
        for kernel in kernels:
            where = f"{kernel['kernel']} of {name} on sm_{arch} by Triton {case['triton']}"
            most = max(stack, MOST_STACK.get(kernel["kernel"], 0), MOST_STACK.get(name, 0))
            if kernel["stack"] > most:
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
    assert_fit(arch, cases, stack=0)
    assert_within_limits(arch, cases)
    version = cases[0]["triton"]
    assert version.startswith("3.8") if triton == "newer" else version >= "3.6"


@pytest.mark.slow
@pytest.mark.parametrize("triton", ["own", "newer"])
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_the_whole_grid_of_tiles_compiles(arch: int, triton: str, tmp_path: Path) -> None:
    if triton not in tritons():
        pytest.skip(f"needs a second Triton in {NEWER_TRITON}: make setup")
    assert_fit(arch, compile_cases(arch, triton, tmp_path, "--all"), stack=64)


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


def write_limits() -> None:
    """Write what every default kernel takes now to `LIMITS`, a case per line."""
    wanted = [(arch, triton) for triton in tritons() for arch in SHARED_LIMIT]
    with TemporaryDirectory() as cache, ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda one: compile_cases(*one, Path(cache)), wanted)
        lines: dict[str, list[str]] = {}
        for (arch, _), cases in zip(wanted, found, strict=True):
            for case in cases:
                key = f"{short(case['triton'])}/sm_{arch}/{case['case']}"
                value = {kernel["kernel"]: numbers(kernel) for kernel in case["kernels"]}
                lines.setdefault(key, []).append(json.dumps(value))
    text = ",\n".join(f"  {json.dumps(key)}: {value}" for key, (value,) in lines.items())
    LIMITS.write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    write_limits()
