"""After the warm-up, no batch compiles a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from magi_serve import ffa_attention
from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.warmup import warm_up, warm_up_sequences
from magi_serve.masks import AttentionSlices
from magi_serve.types import AttentionProblem, SinkSpec

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(triton_interprets(), reason="compiles, which the interpreter does not")
@pytest.mark.parametrize(("arch", "kernel"), [(90, "hopper"), (100, "triton")])
def test_no_batch_compiles_a_kernel_after_the_warm_up(
    arch: int, kernel: str, tmp_path: Path
) -> None:
    script = str(ROOT / "tests/kernels/aot.py")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    env.pop("PYTHONSAFEPATH", None)
    child = subprocess.run(
        [sys.executable, script, str(arch), "--warm-up", kernel],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    reports = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(reports) == 4
    for report in reports:
        assert report["kernels"] >= 4
        assert report["later"] == 0, report


def test_kernels_that_are_not_compiled_need_no_warm_up() -> None:
    problem = AttentionProblem("cpu", torch.float32, torch.float32, 4, 2, 64, 64, None, 16)
    planner = PagedPlanner(problem, max_tokens=8, max_seqs=8, device=torch.device("cpu"))
    assert warm_up(planner, max_tokens=64) == 0
    device = torch.device("cpu")
    assert warm_up_sequences(problem, window=3, max_tokens=64, device=device) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 63])
def test_no_sequences_compile_a_kernel_after_the_warm_up(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    arch = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    half, device = torch.bfloat16, torch.device("cuda")
    problem = AttentionProblem("cuda", half, half, 12, 12, 64, 64, arch, sinks=1)
    assert warm_up_sequences(problem, window=window, max_tokens=4000, device=device) == 13
    compiled: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    sink = SinkSpec(torch.zeros(12, device=device))
    for lengths in ([1], [5, 0, 9], [100] * 7, [1, 1, 1], [2000, 1999], [37] * 100):
        cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        qkv = torch.randn(cu_seqlens[-1], 3, 12, 64, dtype=half, device=device)
        slices = AttentionSlices.of_sequences(cu_seqlens, window)
        ffa_attention(*qkv.unbind(1), slices, sink=sink)
    assert compiled == []
