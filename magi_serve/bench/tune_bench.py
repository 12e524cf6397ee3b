"""A candidate on the GPU: compiled, held against the reference, then ready to take turns."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from magi_serve.bench import accuracy
from magi_serve.bench.cases import make_slices, parse
from magi_serve.bench.inputs import Inputs, make_inputs, num_buffers
from magi_serve.bench.measure import prepare_ours
from magi_serve.bench.timing import Replay, Timer
from magi_serve.bench.tune_compile import Compiler, Gpu, Job
from magi_serve.errors import ArgumentError, DeviceError, MagiServeError, NoKernelError
from magi_serve.kernels.ffa import tuning

LOCAL_BYTES = {"_hopper_prefill_kernel": 192, "_attention_kernel": 8}
"""Local memory per thread that a kernel may use; 0 for all others. Both set scalars aside around
their main loops; anything more is spilled registers."""


MOST_WAIT_S = 60.0
"""How long a compilation ahead is waited for, before it is done here."""


class Unfit(MagiServeError):
    """A candidate cannot be timed; the message is the reason."""


class Lost(MagiServeError):
    """The GPU answers no more: nothing else can be measured by this process."""


class Place(Protocol):
    """One case with its operands."""

    def contender(self, job: Job, *, present: bool = False) -> Timer:
        """A timer of the case as `job` has it, held against the reference.

        Raises:
            NoKernelError: the kernel cannot do the case at all.
            Unfit: it does not compile, spills (borne of the `present` row), does not fit, is wrong.
            Lost: and the GPU with it.
        """


class Bench(Protocol):
    """Where candidates are measured."""

    gpu: Gpu

    def expect(self, jobs: Iterable[Job]) -> None:
        """What will be wanted, in this order."""

    def open(self, case: str) -> contextlib.AbstractContextManager[Place]:
        """The operands of a case, for as long as it is open; raises Unfit where they do not fit."""


class GpuBench:
    """The current GPU.

    Args:
        left_s: how many seconds there are still to wait for a compilation.

    Raises:
        DeviceError: there is none.
    """

    def __init__(self, left_s: Callable[[], float]) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                "kernels are measured on an NVIDIA GPU, and PyTorch "
                f"{torch.__version__} finds none here; --list works without"
            )
        found = torch.cuda.get_device_properties(0)
        arch = 10 * found.major + found.minor
        self.gpu = Gpu(torch.cuda.get_device_name(), arch, found.multi_processor_count)
        self._l2_bytes = found.L2_cache_size
        self._left_s = left_s
        self._compiler = Compiler(self.gpu)

    def expect(self, jobs: Iterable[Job]) -> None:
        self._compiler.expect(jobs)

    def close(self) -> None:
        self._compiler.close()

    @contextlib.contextmanager
    def open(self, case: str) -> Iterator[Place]:
        parsed = parse(case)
        try:
            inputs = make_inputs(parsed, buffers=num_buffers(parsed, self._l2_bytes))
        except torch.OutOfMemoryError as error:
            raise Unfit(f"{case} needs more memory than there is: {_line(error)}") from error

        def wait(job: Job) -> None:
            self._compiler.wait(job, min(self._left_s(), MOST_WAIT_S))

        try:
            yield GpuPlace(inputs, wait)
        finally:
            del inputs
            gc.collect()
            torch.cuda.empty_cache()


class GpuPlace:
    """The operands of a case, in as many buffers as L2 asks for."""

    def __init__(self, inputs: Inputs, wait: Callable[[Job], None]) -> None:
        self._inputs = inputs
        self._wait = wait

    def contender(self, job: Job, *, present: bool = False) -> Timer:
        self._wait(job)
        try:
            with tuning.used(job.tuned):
                return self._prepare(job.kernel, present)
        except (NoKernelError, Unfit):
            raise
        except ArgumentError as error:
            raise Unfit(str(error)) from error
        except Exception as error:
            try:
                torch.cuda.synchronize()
            except Exception as second:
                raise Lost(f"the GPU failed: {_line(error)}") from second
            raise Unfit(_line(error)) from error

    def _prepare(self, kernel: str, present: bool) -> Timer:
        inputs = self._inputs
        if inputs.slices is not None:
            # Plans of slices are kept while the mask lives, a few of each: ours has only one.
            inputs = replace(inputs, slices=make_slices(inputs.case))
        buffer = inputs.buffers[0]
        # Memory that the result may be given holds NaN, so that rows left out show.
        buffer.out.fill_(float("nan"))
        torch.full_like(buffer.out, float("nan"))
        _, run = prepare_ours(inputs, kernel)
        with launches() as kernels:
            result = run(0)
        torch.cuda.synchronize()
        if not present and (reason := spills(kernels)):
            raise Unfit(reason)
        _, wrong = accuracy.check(inputs, result)
        if wrong is not None:
            raise Unfit(f"wrong: {wrong}")
        replay = Replay(run, len(inputs.buffers))

        def turn() -> float:
            assert run is not None  # the graph reads the plan that `run` holds
            return replay()

        return turn


@contextlib.contextmanager
def launches() -> Iterator[list[Any]]:
    """The compiled kernels that Triton launches inside."""
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    run = JITFunction.run

    def remember(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **options)
        found.append(kernel)
        return kernel

    JITFunction.run = remember
    try:
        yield found
    finally:
        JITFunction.run = run


def spills(kernels: Iterable[Any]) -> str | None:
    """Which of `kernels` uses more local memory than it may, and how much; or None."""
    for kernel in kernels:
        size = 4 * int(kernel.n_spills)
        if size > LOCAL_BYTES.get(kernel.name, 0):
            return f"{kernel.name} spills {size} bytes per thread"
    return None


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
