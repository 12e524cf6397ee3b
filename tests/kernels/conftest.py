"""Where kernels are tested: fixtures that a test runs in every place, or only in some.

`cpu` runs as it is, `triton` in its interpreter (``TRITON_INTERPRET=1 pytest tests/kernels``) and
on a GPU (``pytest -m gpu tests/kernels``).
"""

from collections.abc import Iterator

import pytest
import torch

from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.testing import IN_INTERPRETER, ON_CPU, ON_GPU, Place, fix_interpreter

if triton_interprets():
    from magi_serve.kernels.ffa import triton_attention

    fix_interpreter()
    # As if on a chip with few multiprocessors: keys are split all the same, into few programs.
    triton_attention._num_sms = lambda device: 3

on_cpu = pytest.param(
    ON_CPU,
    id="cpu",
    marks=pytest.mark.skipif(triton_interprets(), reason="runs without TRITON_INTERPRET"),
)
in_interpreter = pytest.param(
    IN_INTERPRETER,
    id="interpreter",
    marks=pytest.mark.skipif(not triton_interprets(), reason="needs TRITON_INTERPRET=1"),
)
on_gpu = pytest.param(
    ON_GPU,
    id="gpu",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: on busy cores, torch's threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[on_cpu, in_interpreter, on_gpu])
def place(request: pytest.FixtureRequest) -> Place:
    """Every place where a kernel can run."""
    value: Place = request.param
    return value


@pytest.fixture(params=[on_cpu, in_interpreter])
def host_place(request: pytest.FixtureRequest) -> Place:
    """Places where a new specialisation costs nothing."""
    value: Place = request.param
    return value


@pytest.fixture(params=[on_gpu])
def gpu_place(request: pytest.FixtureRequest) -> Place:
    """A GPU only: full-size work."""
    value: Place = request.param
    return value
