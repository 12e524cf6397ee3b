"""Compile our attention kernels into Triton's cache, without a GPU.

    TRITON_CACHE_DIR=/cache/triton python warm_cache.py 90 --shapes shapes.json

For every shape of the file this runs the warm-up that an engine runs when it starts, against a
stand-in driver that names the architecture and stops each launch after compilation. It prints one
JSON line per shape: how many kernels are launched, and how many of them were not in the cache.

A GPU finds these entries because Triton's cache knows nothing of a device but its architecture. Its
key is made of the sources of a kernel and of what it calls, its arguments' types, alignments and
constants, its launch options, the versions of Triton and of ptxas, and the environment variables
that change what Triton generates. A GPU's name and its count of multiprocessors are not in it, but
decide how batches are cut, and by that which kernels are launched. Entries hold absolute paths: use
the cache where it was made.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from magi_serve.kernels.ffa import api, triton_attention, tuning, warmup
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.paged.triton_store import write_kv_triton
from magi_serve.types import AttentionProblem

GPUS = {90: ("NVIDIA H200", 132), 100: ("NVIDIA B200", 148), 103: ("NVIDIA B300", 148)}
"""By architecture: the GPU that is stood in for, and how many multiprocessors it has."""

PAGE_SIZE = 16
"""vLLM's default where our backend runs."""


class StandIn:
    """Enough of a Triton driver to compile for an architecture with tensors on the CPU."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def stand_in(arch: int) -> None:
    """Let this process compile for a GPU of `arch`; every launch stops after compilation."""
    name, multiprocessors = GPUS[arch]
    driver.set_active(StandIn(arch))
    tuning.gpu_name = lambda: name
    triton_attention.num_sms = lambda device: multiprocessors
    warmup.write_kv = write_kv_triton  # the public one goes by the device of its tensors
    run = JITFunction.run

    def compile_and_stop(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_and_stop


def problem_of(shape: dict[str, Any], arch: int) -> AttentionProblem:
    """What one GPU computes of a layer of `shape`, in bf16."""
    gpus = shape["tensor_parallel_size"]
    head_dim, bf16 = shape["head_dim"], torch.bfloat16
    return AttentionProblem(
        device="cuda",
        arch=arch,
        q_dtype=bf16,
        kv_dtype=bf16,
        num_q_heads=shape["num_q_heads"] // gpus,
        num_kv_heads=max(shape["num_kv_heads"] // gpus, 1),  # copied where GPUs outnumber them
        head_dim=head_dim,
        head_dim_v=head_dim,
        page_size=PAGE_SIZE,
        sinks=shape.get("sinks", 0),
        window="window" in shape,
    )


def warm(shape: dict[str, Any], arch: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Compile what layers of `shape` launch for any batch within the limits."""
    planner = PagedPlanner(
        problem_of(shape, arch),
        max_tokens=max_num_seqs,
        max_seqs=max_num_seqs,
        device=torch.device("cpu"),
        window=(shape["window"] - 1, 0) if "window" in shape else None,
    )
    api._problem = lambda *args, **kwargs: planner.problem  # it would ask the tensors' device
    warmup.warm_up(planner, max_tokens=max_num_batched_tokens)


def reports(arch: int, shapes: Path, *limits: int) -> Iterator[dict[str, Any]]:
    """Warm one shape after the other; what happened to each."""
    stand_in(arch)
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for shape in json.loads(shapes.read_text()):
        hits.clear()
        warm(shape, arch, *limits)
        yield {"arch": arch, **shape, "launched": len(hits), "compiled": hits.count(False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", type=int, choices=GPUS, help="compute capability")
    parser.add_argument("--shapes", type=Path, required=True, help="JSON: heads of whole models")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="as for the engine")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="likewise")
    args = parser.parse_args()
    limits = args.max_num_seqs, args.max_num_batched_tokens
    for report in reports(args.arch, args.shapes, *limits):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
