"""``magi-serve doctor``: what this machine can run and why not the rest; ``--check`` tries it."""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from magi_serve import (
    AttentionOutput,
    AttentionSlices,
    MaskType,
    PagedKV,
    SinkSpec,
    ffa_attention,
    paged_attention,
)
from magi_serve.kernels.capabilities import SPECS
from magi_serve.types import AttentionProblem
from magi_serve.versions import nvidia_driver, versions


def main(argv: Sequence[str]) -> int:
    """Print the diagnosis.

    Args:
        argv: ``--json`` for one JSON object instead of text, ``--check`` to try what can run.

    Returns:
        0 if some kernel can run here and, with ``--check``, all that can run are right; else 1.
    """
    parser = argparse.ArgumentParser(prog="magi-serve doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--check", action="store_true", help="run each kernel that can run against the reference"
    )
    args = parser.parse_args(argv)
    found = diagnose()
    if args.check:
        found["checks"] = check(found["kernels"])
    print(json.dumps(found, indent=2) if args.json else "\n".join(_as_text(found)))
    can_run = any(kernel["runs_on"] for kernel in found["kernels"])
    return 0 if can_run and all(c["passed"] for c in found.get("checks", ())) else 1


def diagnose() -> dict[str, Any]:
    """Versions, GPUs, for each kernel where it runs or why not, and the state of vLLM's plugin."""
    gpus = _gpus()
    return {
        "versions": versions(),
        "driver": nvidia_driver(),
        "gpus": gpus,
        "kernels": [_kernel(spec, gpus) for spec in SPECS],
        "vllm": _vllm(),
    }


def check(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run every kernel of `diagnose` where it can run, against the reference in float64.

    A kernel passes if its largest error is at most twice that of the reference in the same dtype,
    plus a few units of that dtype's precision. The reference itself is not tried.

    Returns:
        One entry per kernel, device, dtype and case: ``passed``, ``plain_error`` and ``error``, or
        ``raised`` with the exception.
    """
    dtypes = {spec.name: spec.dtypes for spec in SPECS}
    results = []
    for kernel in (k for k in kernels if k["name"] != "reference"):
        for device in kernel["runs_on"]:
            for dtype in dtypes[kernel["name"]]:
                for name, case in _CASES.items():
                    run = case(dtype, device)
                    entry = {"kernel": kernel["name"], "device": device, "case": name}
                    entry["dtype"] = str(dtype).removeprefix("torch.")
                    results.append(entry | _compare(run, kernel["name"], dtype))
    return results


def _compare(run: "_Case", kernel: str, dtype: torch.dtype) -> dict[str, Any]:
    truth = run(torch.float64, "reference").out
    plain = run(dtype, "reference").out
    plain_error = float((plain.double() - truth).abs().max())
    try:
        error = float((run(dtype, kernel).out.double() - truth).abs().max())
    except Exception as raised:  # the other kernels are to be tried all the same
        said = f"{type(raised).__name__}: {raised}"
        return {"passed": False, "raised": said, "plain_error": plain_error}
    limit = 2 * plain_error + 4 * torch.finfo(dtype).eps
    return {"passed": error <= limit, "error": error, "plain_error": plain_error}  # NaN fails


_Case = Callable[[torch.dtype, str], AttentionOutput]
"""Runs one problem in a dtype, rounded to the dtype under test first, with the kernel named."""


def _ffa_case(dtype: torch.dtype, device: str) -> _Case:
    """All four mask types, two sinks per head, a soft cap; GQA of 2."""
    q, k, v, sinks = _random(dtype, device, (96, 4, 64), (96, 2, 64), (96, 2, 64), (2, 4))
    slices = AttentionSlices(
        [[0, 40], [40, 96], [0, 40], [40, 96]],
        [[0, 40], [30, 96], [40, 96], [0, 30]],
        list(MaskType)[::-1],
    )

    def run(dtype: torch.dtype, kernel: str) -> AttentionOutput:
        return ffa_attention(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            slices,
            softcap=20.0,
            sink=SinkSpec(sinks),
            kernel=kernel,
        )

    return run


def _paged_case(
    lengths_q: Sequence[int], lengths_k: Sequence[int]
) -> Callable[[torch.dtype, str], _Case]:
    """Shuffled pages, a window, a soft cap, a sink, GQA of 4; the unused page is NaN."""

    def case(dtype: torch.dtype, device: str) -> _Case:
        page_size, num_seqs = 16, len(lengths_q)
        max_pages = -(-max(lengths_k) // page_size)
        num_pages = num_seqs * max_pages
        shape = (num_pages + 1, page_size, 2, 64)
        q, k, v, sink = _random(dtype, device, (sum(lengths_q), 8, 64), shape, shape, (8,))
        k[-1] = v[-1] = float("nan")
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
        table = order.to(device, torch.int32).view(num_seqs, max_pages)
        seqlens_k = torch.tensor(lengths_k, dtype=torch.int32, device=device)
        cu_seqlens_q = torch.tensor([0, *lengths_q]).cumsum(0).to(device, torch.int32)

        def run(dtype: torch.dtype, kernel: str) -> AttentionOutput:
            return paged_attention(
                q.to(dtype),
                PagedKV(k.to(dtype), v.to(dtype), table, seqlens_k),
                cu_seqlens_q,
                window=(40, 0),
                softcap=20.0,
                sink=SinkSpec(sink),
                kernel=kernel,
            )

        return run

    return case


_CASES: dict[str, Callable[[torch.dtype, str], _Case]] = {
    "ffa": _ffa_case,
    "paged prefill": _paged_case((33, 7, 64), (33, 90, 64)),
    "paged decode": _paged_case((1, 1, 1), (1, 55, 130)),
}


def _random(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal numbers that `dtype` holds exactly, so that every dtype computes the same problem."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "arch": 10 * properties.major + properties.minor,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def _kernel(spec: Any, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Where `spec` does an ordinary problem (bf16, head_dim 128, GQA, pages of 16), and why not."""
    problem = AttentionProblem(
        device="cpu",
        q_dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        head_dim_v=128,
        page_size=16,
    )
    reasons: dict[str, list[str]] = {"cpu": spec.why_not(problem)}
    on_cuda = [dataclasses.replace(problem, device="cuda", arch=gpu["arch"]) for gpu in gpus]
    for one in dict.fromkeys(on_cuda or [dataclasses.replace(problem, device="cuda")]):
        reasons["cuda"] = reasons.get("cuda", []) + spec.why_not(one)
    if not gpus:
        reasons["cuda"].append("no NVIDIA GPU that this PyTorch can use")
    return {
        "name": spec.name,
        "summary": spec.summary,
        "runs_on": [device for device, why in reasons.items() if not why],
        "why_not": {device: why for device, why in reasons.items() if why},
    }


def _vllm() -> dict[str, Any]:
    """Whether CUSTOM is our backend, asked of vLLM itself after it loaded its plugins."""
    group = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [point.name for point in group if point.value.startswith("magi_serve.")]
    found: dict[str, Any] = {"plugin": ours[0] if ours else None, "custom": None, "ours": False}
    if importlib.util.find_spec("vllm") is None:
        return found | {"problem": "vLLM is not installed"}
    if not ours:
        return found | {"problem": "magi-serve is on the path but not installed: pip install it"}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where vLLM's log goes
            from vllm.plugins import load_general_plugins
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            load_general_plugins()
            path = AttentionBackendEnum.CUSTOM.get_path()
    except Exception as error:  # whatever keeps vLLM from loading is what the user wants to read
        return found | {"problem": f"{type(error).__name__}: {error}"}
    return found | {"custom": path, "ours": path.startswith("magi_serve.")}


def _as_text(found: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{name} {v or '(not installed)'}" for name, v in found["versions"].items())
    for gpu in found["gpus"]:
        yield f"GPU: {gpu['name']}, sm_{gpu['arch']}, {gpu['memory_gib']} GiB"
    yield f"{'' if found['gpus'] else 'no GPU; '}NVIDIA driver: {found['driver'] or 'not found'}"
    for kernel in found["kernels"]:
        runs = "runs on " + ", ".join(kernel["runs_on"]) if kernel["runs_on"] else "cannot run here"
        yield f"kernel {kernel['name']:<10} {runs}: {kernel['summary']}"
        for device, reasons in kernel["why_not"].items():
            yield f"{'':<18}not on {device}: {'; '.join(reasons)}"
    vllm = found["vllm"]
    if vllm["ours"]:
        yield f"vLLM: --attention-backend CUSTOM is ours, {vllm['custom']}"
    else:
        why = vllm.get("problem") or f"CUSTOM belongs to {vllm['custom']}"
        yield f"vLLM: our backend cannot be chosen: {why}"
    for run in found.get("checks", ()):
        said = (
            run.get("raised") or f"error {run['error']:.1e}, plain torch {run['plain_error']:.1e}"
        )
        where = f"{run['kernel']} on {run['device']}, {run['dtype']}, {run['case']}"
        yield f"{'pass' if run['passed'] else 'FAIL'}  {where:<48} {said}"
