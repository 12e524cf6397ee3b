"""Kernel choice and the capability table that it is made from."""

import logging
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from magi_serve.errors import ArgumentError, NoKernelError
from magi_serve.kernels import capabilities, dispatch
from magi_serve.kernels.capabilities import KERNEL_NAMES, SPECS, triton_interprets
from magi_serve.kernels.dispatch import choose_kernel
from magi_serve.types import AttentionProblem

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ON_CPU = AttentionProblem("cpu", BF16, BF16, 32, 8, 128, 128, page_size=16)
ON_A100 = replace(ON_CPU, device="cuda", arch=80)
ON_B200 = replace(ON_CPU, device="cuda", arch=100)


def reasons(name: str, problem: AttentionProblem) -> str:
    return "; ".join(next(s for s in SPECS if s.name == name).why_not(problem))


def test_the_cpu_kernel_is_preferred_on_a_cpu() -> None:
    assert choose_kernel(ON_CPU).name == "cpu"


@pytest.mark.parametrize("problem", [ON_A100, ON_B200])
def test_triton_is_preferred_on_gpus_without_a_kernel_of_their_own(
    problem: AttentionProblem,
) -> None:
    assert choose_kernel(problem).name == "triton"


@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512])
@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128, 256, 272, None])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_what_is_promised_is_accepted(
    head_dim: int, page_size: int | None, dtype: torch.dtype
) -> None:
    for problem in (
        ON_CPU,
        ON_A100,
        ON_B200,
        replace(ON_A100, arch=90),
        replace(ON_B200, arch=103),
    ):
        problem = replace(
            problem,
            q_dtype=dtype,
            kv_dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim,
            page_size=page_size,
            sinks=2,
            sink_per_token=True,
            softcap=True,
            window=True,
            max_logits=True,
        )
        assert choose_kernel(problem).planned


def test_only_the_reference_takes_float64() -> None:
    problem = replace(ON_CPU, q_dtype=torch.float64, kv_dtype=torch.float64)
    assert choose_kernel(problem).name == "reference"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("triton", {"arch": 75}, "sm_75 is not supported (needs sm_80 or newer)"),
        (
            "triton",
            {"head_dim": 520},
            "head_dim=520 is not supported (accepts 8 to 512 in steps of 8)",
        ),
        ("triton", {"head_dim_v": 100}, "head_dim_v=100 is not supported"),
        ("triton", {"page_size": 24}, "page_size=24 is not supported (accepts multiples of 16)"),
        (
            "triton",
            {"q_dtype": torch.float64},
            "q dtype torch.float64 is not supported (accepts fp16",
        ),
        ("triton", {"kv_dtype": torch.float16}, "(accepts q's dtype or e4m3 or e5m2 or int8)"),
        (
            "triton",
            {"kv_dtype": E4M3},
            "torch.float8_e4m3fn is not supported on sm_80 (needs sm_89",
        ),
        (
            "reference",
            {"kv_dtype": E4M3, "page_size": None},
            "that are not in pages is not supported",
        ),
        ("triton", {"num_kv_heads": 5}, "query heads must be a multiple of kv heads"),
        ("cpu", {}, "device cuda is not supported (accepts cpu)"),
        ("reference", {"q_dtype": torch.int8}, "q dtype torch.int8 is not supported"),
    ],
)
def test_refusals_name_the_value_and_what_is_accepted(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    assert reason in reasons(name, replace(ON_A100, **changes))


@pytest.mark.skipif(triton_interprets(), reason="the interpreter runs on the CPU")
def test_triton_on_a_cpu_is_refused_outside_its_interpreter() -> None:
    with pytest.raises(NoKernelError) as caught:
        choose_kernel(ON_CPU, "triton")
    assert "kernel triton cannot do cpu" in str(caught.value)
    assert "device cpu is not supported (accepts cuda)" in str(caught.value)
    assert "use kernel='cpu' or leave kernel out" in str(caught.value)


def test_every_kernel_can_be_forced_where_it_runs() -> None:
    assert choose_kernel(ON_CPU, "reference").name == "reference"
    assert choose_kernel(ON_A100, "reference").name == "reference"
    assert choose_kernel(ON_A100, "triton").name == "triton"


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError) as caught:
        choose_kernel(ON_CPU, "Triton")
    message = str(caught.value)
    assert message.startswith("kernel='Triton' is unknown")
    assert all(name in message for name in KERNEL_NAMES)


def test_the_choice_is_logged_once_with_who_was_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatch._choose.cache_clear()
    # At the logger itself: what others did to its parents' handlers is not our subject.
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("magi_serve.kernels.dispatch")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            for _ in range(3):
                choose_kernel(ON_A100)
    finally:
        logger.removeHandler(handler)
    (record,) = records
    assert "kernel triton for cuda sm_80" in record.getMessage()
    assert "not cpu: device cuda is not supported" in record.getMessage()


def test_kernels_have_the_module_and_the_functions_that_are_called() -> None:
    for spec in SPECS:
        if spec.name == "hopper":  # needs a Triton that has Gluon
            continue
        module = spec.load()
        names = ("run", "tile_config") if spec.planned else ("ffa_attention_ref",)
        assert all(callable(getattr(module, name)) for name in names)


@pytest.fixture
def triton_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """As if that Triton were installed."""

    def install(version: str | None) -> None:
        monkeypatch.setattr(capabilities, "versions", lambda: {"triton": version})
        capabilities.triton_problem.cache_clear()
        dispatch._choose.cache_clear()

    yield install
    monkeypatch.undo()
    capabilities.triton_problem.cache_clear()
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1+git0bc1", "2.10.0", "3.5"])
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_a_triton_that_is_too_old_is_refused(
    triton_version: Callable[[str | None], None], name: str, version: str
) -> None:
    triton_version(version)
    problem = replace(ON_A100, arch=90)
    said = f"triton {version} is installed, 3.6 or newer is needed: pip install 'triton>=3.6'"
    assert reasons(name, problem) == said
    with pytest.raises(NoKernelError, match=r"3\.6 or newer is needed"):
        choose_kernel(problem, name)
    assert choose_kernel(problem).name == "reference"


@pytest.mark.parametrize("version", ["3.6.0", "3.6.0+git1", "3.10.0", "4.0.0a1", None, "main"])
def test_a_newer_triton_or_one_of_unknown_version_is_taken(
    triton_version: Callable[[str | None], None], version: str | None
) -> None:
    triton_version(version)
    assert reasons("triton", ON_A100) == ""


def test_the_oldest_triton_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (bound,) = [x for x in project["dependencies"] if x.startswith("triton")]
    major, minor = capabilities.OLDEST_TRITON
    assert bound.startswith(f"triton>={major}.{minor};")
