"""Compiling the kernels of candidates ahead of time, on idle cores, into Triton's cache.

Compiling takes longer than timing. Worker processes run the host code of a case's launches against
a stand-in driver that names the architecture and stops each launch after compilation, so that they
touch neither the GPU nor its clock. Should anything fail here, the kernel is compiled when it is
timed, and what is wrong shows there.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from magi_serve.bench.cases import Case, make_slices, parse
from magi_serve.kernels.dispatch import choose_kernel
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.slices import plan_slices
from magi_serve.kernels.ffa.tuned_files import Row, RowName, Tuned
from magi_serve.types import AttentionProblem

MOST_WORKERS = 12


@dataclass(frozen=True, slots=True)
class Job:
    """A case with a kernel and one row of tuned numbers in the place of another."""

    case: str
    kernel: str
    base: Tuned
    name: RowName
    row: Row

    @property
    def tuned(self) -> Tuned:
        """What is in force; raises ArgumentError for a row that is not accepted."""
        return self.base.with_row(self.name, self.row)

    @property
    def key(self) -> tuple[object, ...]:
        return self.case, self.kernel, self.name, *sorted(self.row.items())


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels are compiled for."""

    name: str
    arch: int
    multiprocessors: int


class Compiler:
    """Worker processes that compile what is expected, in that order.

    Args:
        gpu: what to compile for.
        workers: how many; None for as many as there are idle cores, 0 for none.
    """

    def __init__(self, gpu: Gpu, workers: int | None = None) -> None:
        if workers is None:
            workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 2)
        self._jobs: dict[tuple[object, ...], Future[None]] = {}
        self._pool: ProcessPoolExecutor | None = None
        if workers > 0:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, context, _stand_in, (gpu,))

    def expect(self, jobs: Iterable[Job]) -> None:
        """Compile what `jobs` launch, after what was expected before."""
        if self._pool is None:
            return
        with contextlib.suppress(RuntimeError):  # the workers died, or were sent home
            for job in jobs:
                if job.key not in self._jobs:
                    self._jobs[job.key] = self._pool.submit(compile_job, job)

    def wait(self, job: Job, timeout_s: float) -> None:
        """Until `job` is compiled, if it was expected; at most so long."""
        future = self._jobs.get(job.key)
        if future is not None:
            with contextlib.suppress(Exception):
                future.result(timeout_s)

    def close(self) -> None:
        """Leave undone what is left."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()


_GPU: list[Gpu] = []


class _StandIn:
    """Enough of a Triton driver to compile for an architecture with tensors on the CPU."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _stand_in(gpu: Gpu) -> None:
    """Make this process compile for `gpu` and launch nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from magi_serve.kernels.ffa import triton_attention, tuning

    torch.set_num_threads(1)
    _GPU[:] = [gpu]
    driver.set_active(_StandIn(gpu.arch))
    # Nothing here may ask for the GPU, which would start CUDA. What is replaced had a cache.
    tuning.gpu_name = lambda: gpu.name  # type: ignore[assignment]
    triton_attention.num_sms = lambda device: gpu.multiprocessors  # type: ignore[assignment]
    run = JITFunction.run

    def compile_and_stop(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_and_stop


def compile_job(job: Job) -> None:
    """Compile what `job` launches, in a process that `_stand_in` has prepared."""
    from magi_serve.kernels.ffa import tuning

    with tuning.used(job.tuned):
        _launch(parse(job.case), job.kernel)


def _launch(case: Case, kernel: str) -> None:
    """Run the host code of `case` over tensors that hold nothing, with few pages."""
    bf16 = torch.bfloat16
    heads = (case.num_kv_heads, case.head_dim)
    problem = AttentionProblem(
        device="cuda",
        q_dtype=bf16,
        kv_dtype=bf16,
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim,
        arch=_GPU[0].arch,
        page_size=case.page_size,
        sinks=int(case.sink),
        window=case.window is not None,
    )
    spec = choose_kernel(problem, kernel)
    table = None
    if case.page_size is None:
        k, v = (torch.empty(sum(case.k_lens), *heads, dtype=bf16) for _ in range(2))
        config = spec.load().tile_config(problem, "slices", case.num_tokens)
        plan = plan_slices(make_slices(case), case.num_tokens, config, problem, torch.device("cpu"))
        parts: tuple[Any, ...] = (plan,)
    else:
        pool = torch.empty(2, case.page_size, heads[0], 2 * heads[1], dtype=bf16)
        k, v = pool.split(case.head_dim, dim=-1)
        table = torch.zeros(len(case.k_lens), 1, dtype=torch.int32)
        parts = _plan(case, problem, kernel)
    q = torch.empty(case.num_tokens, case.num_q_heads, case.head_dim, dtype=bf16)
    spec.load().run(
        AttentionCall(
            q,
            k,
            v,
            table,
            parts,
            case.head_dim**-0.5,
            0.0,
            torch.zeros(case.num_q_heads) if case.sink else None,
            torch.empty_like(q),
            torch.empty(q.shape[:2]),
            None,
        )
    )


def _plan(case: Case, problem: AttentionProblem, kernel: str) -> tuple[Any, ...]:
    cpu = torch.device("cpu")
    decodes = case.q_lens[: case.num_decodes]
    planner = PagedPlanner(
        problem,
        max_tokens=case.num_tokens,
        max_seqs=len(case.q_lens),
        device=cpu,
        window=None if case.window is None else (case.window - 1, 0),
        kernel=kernel,
    )
    return planner.plan(
        torch.tensor([0, *case.q_lens]).cumsum(0).to(torch.int32),
        torch.tensor(case.k_lens, dtype=torch.int32),
        num_tokens=case.num_tokens,
        num_decodes=len(decodes),
        num_decode_tokens=sum(decodes),
        max_decode_q_len=max(decodes, default=1),
        max_seqlen_k=max(case.k_lens),
    ).parts
