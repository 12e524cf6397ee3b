"""Kernels compiled ahead of time are found by a later process, after a trip through an image."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"model": "small", "tensor_parallel_size": 4, "num_q_heads": 32, "num_kv_heads": 4}
SHAPES = [{**SHAPE, "head_dim": 64, "sinks": 1, "window": 128}]


def run(script: str, *words: str, **variables: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / script), *words],
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter does not compile")
@pytest.mark.parametrize(
    ("arch", "max_num_batched_tokens"),
    [("90", 2048), pytest.param("100", 64, marks=pytest.mark.slow)],  # Gluon's too, and without
)
def test_a_second_process_finds_every_kernel_in_the_cache(
    arch: str, max_num_batched_tokens: int, tmp_path: Path
) -> None:
    shapes, cache, image = tmp_path / "shapes.json", tmp_path / "cache", tmp_path / "image"
    shapes.write_text(json.dumps(SHAPES))
    variables = {"CACHE_DIR": str(cache), "WARM_KERNELS_DIR": str(image)}
    variables["TRITON_CACHE_DIR"] = str(cache / "triton")
    limits = ("--max-num-seqs", "1", "--max-num-batched-tokens", str(max_num_batched_tokens))

    def warm() -> list[dict[str, Any]]:
        out = run("warm_cache.py", arch, "--shapes", str(shapes), *limits, **variables)
        return [json.loads(line) for line in out.splitlines()]

    (first,) = warm()
    assert first["launched"] == first["compiled"] > 1
    # As the image does it: kernels go into a layer, and from there into an empty volume.
    shutil.move(cache / "triton", image)
    home = {"HOME": str(cache / "home"), "HF_HOME": str(cache / "hf")}
    run("entrypoint.py", sys.executable, "-c", "", **variables, **home)
    (second,) = warm()
    assert second["launched"] == first["launched"]
    assert second["compiled"] == 0
