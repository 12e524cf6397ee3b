"""After the warm-up, no batch compiles a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.warmup import warm_up
from magi_serve.types import AttentionProblem

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
