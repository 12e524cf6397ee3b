"""The doctor tells the truth about this machine, in text and in JSON, and its check can fail."""

import json
from typing import Any

import pytest
import torch

from magi_serve import AttentionOutput, doctor, versions
from magi_serve.kernels.capabilities import KERNEL_NAMES


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Importing vLLM takes ten seconds: only the test that is about it does."""
    if not request.node.get_closest_marker("vllm"):
        found = {"plugin": None, "custom": None, "ours": False, "problem": "not asked"}
        monkeypatch.setattr(doctor, "_vllm", lambda: found)


def test_every_kernel_is_listed_with_where_it_runs_or_why_not() -> None:
    found = doctor.diagnose()
    assert [kernel["name"] for kernel in found["kernels"]] == list(KERNEL_NAMES)
    for kernel in found["kernels"]:
        assert set(kernel["runs_on"]) | set(kernel["why_not"]) == {"cpu", "cuda"}
        assert all(reasons for reasons in kernel["why_not"].values())
    cpu = next(kernel for kernel in found["kernels"] if kernel["name"] == "cpu")
    assert "cpu" in cpu["runs_on"]


def test_json_is_one_object_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_check_passes_for_every_kernel_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--check"]) == 0
    said = capsys.readouterr().out
    assert "pass  cpu on cpu, bfloat16, paged decode" in said and "FAIL" not in said


@pytest.mark.parametrize(
    "fault", ["wrong", "nan", "raises"], ids=["a wrong result", "a NaN", "an exception"]
)
def test_check_fails_on(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = doctor.paged_attention

    def faulty(*args: Any, kernel: str, **kwargs: Any) -> AttentionOutput:
        result = honest(*args, kernel=kernel, **kwargs)
        if kernel == "reference":
            return result
        if fault == "raises":
            raise RuntimeError("out of shared memory")
        result.out[-1, 0, 0] = float("nan") if fault == "nan" else 1.0 + result.out[-1, 0, 0]
        return result

    monkeypatch.setattr(doctor, "paged_attention", faulty)
    assert doctor.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  cpu on cpu, float32, paged decode" in said
    assert "pass  cpu on cpu, float32, ffa" in said
    assert ("out of shared memory" in said) is (fault == "raises")


def test_a_machine_where_nothing_runs_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SPECS", ())
    assert doctor.main([]) == 1


def test_the_gpu_and_its_architecture_decide_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def triton(*archs: int) -> dict[str, Any]:
        gpus = [{"name": "some GPU", "arch": arch, "memory_gib": 80.0} for arch in archs]
        monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
        return next(k for k in doctor.diagnose()["kernels"] if k["name"] == "triton")

    assert "cuda" in triton(90)["runs_on"]
    assert "sm_75" in triton(75)["why_not"]["cuda"][0]
    assert "cuda" in triton(90, 75)["why_not"]
    assert "no NVIDIA GPU" in triton()["why_not"]["cuda"][0]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16 10:00:00 UTC 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    ],
)
def test_the_driver_version_is_read(
    text: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(versions, "DRIVER_FILE", file)
    assert versions.nvidia_driver() is None
    file.write_text(text)
    assert versions.nvidia_driver() == "570.86.15"


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_as_installed")
def test_custom_is_ours_in_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "--attention-backend CUSTOM is ours, magi_serve.backends.vllm" in said
