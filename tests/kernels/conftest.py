"""Where kernels are tested: fixtures that a test runs in every place, or only in some.

`cpu` runs as it is, `triton` in its interpreter (``TRITON_INTERPRET=1 pytest tests/kernels``) and
on a GPU (``pytest -m gpu tests/kernels``).
"""

from collections.abc import Iterator

import pytest
import torch

from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.testing import IN_INTERPRETER, ON_CPU, ON_GPU, ON_HOPPER, Place, fix_interpreter

if triton_interprets():
    from magi_serve.kernels.ffa import triton_attention

    fix_interpreter()
    # As if on a chip with few multiprocessors: keys are split all the same, into few programs.
    triton_attention.num_sms = lambda device: 3

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
on_hopper = pytest.param(
    ON_HOPPER,
    id="hopper",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
            reason="needs an NVIDIA GPU of the Hopper kind",
        ),
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
    """Every place where a kernel that takes any problem can run."""
    value: Place = request.param
    return value


@pytest.fixture(params=[on_cpu, in_interpreter, on_gpu, on_hopper])
def any_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Those, and kernels that take only 16-bit problems of some head dims."""
    value: Place = request.param
    if value is not ON_HOPPER:
        yield value
        return
    from magi_serve.kernels.ffa import hopper, triton_attention

    # As if on a chip with few multiprocessors, which a small batch fills: else it goes to Triton.
    monkeypatch.setattr(triton_attention, "num_sms", lambda device: 4)
    for module in (hopper, triton_attention):
        module.tile_config.cache_clear()
    yield value
    for module in (hopper, triton_attention):
        module.tile_config.cache_clear()


@pytest.fixture(params=[on_cpu, in_interpreter])
def host_place(request: pytest.FixtureRequest) -> Place:
    """Places where a new specialisation costs nothing."""
    value: Place = request.param
    return value


@pytest.fixture(params=[on_gpu, on_hopper])
def gpu_place(request: pytest.FixtureRequest) -> Place:
    """A GPU only: full-size work."""
    value: Place = request.param
    return value
