"""What each attention kernel can do: a row per implementation; all else is derived from them.

Kernel choice, the vLLM backend's ``supports_*`` answers, ``magi-serve doctor`` and the text of
errors all ask `KernelSpec.why_not`. To add or change support, change a row here; there is no
second list.
"""

import functools
import importlib
import importlib.util
import re
from dataclasses import dataclass
from types import ModuleType

import torch

from magi_serve.types import LARGEST, AttentionProblem
from magi_serve.versions import versions

_SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}


OLDEST_TRITON = (3, 6)
"""The first Triton that has what the kernels use; as in pyproject.toml."""


@functools.cache
def triton_problem() -> str | None:
    """Why triton cannot be used at all, or None. A version that cannot be told is taken."""
    oldest = ".".join(map(str, OLDEST_TRITON))
    way_out = f"pip install 'triton>={oldest}'"
    if not importlib.util.find_spec("triton"):
        return f"triton is not installed: {way_out}"
    version = versions()["triton"]
    number = re.match(r"(\d+)\.(\d+)", version or "")
    if number and tuple(map(int, number.groups())) < OLDEST_TRITON:
        return f"triton {version} is installed, {oldest} or newer is needed: {way_out}"
    return None


@functools.cache
def triton_interprets() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU (``TRITON_INTERPRET=1``)."""
    if triton_problem():
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One implementation of attention, and the problems it takes.

    Attributes:
        name: what ``kernel=`` and ``MAGI_SERVE_KERNEL`` call it.
        module: where it lives; loaded when first launched.
        devices: device types it runs on.
        min_arch, max_arch: CUDA compute capabilities, as ``10 * major + minor``; 0 for no bound.
        dtypes: dtypes of q; k and v must have the same, or one of `quantised`.
        quantised: dtypes of 8-bit k and v, in pages.
        fp8_min_arch: CUDA compute capability from which 8-bit floats are converted.
        max_head_dim: largest head dim of k and of v.
        head_dim_multiple: head dims must be a multiple of this.
        head_dims: the only head dims taken, the same for k and v; empty for no such bound.
        page_multiple: page sizes must be a multiple of this.
        page_tile: page sizes must divide this or be a multiple of it; 0 for no such bound.
        even_rows: whether operands must be rows of one stride, aligned to 16 bytes (TMA).
        needs_triton: whether it is written in Triton or Gluon.
        interpretable: whether Triton's interpreter runs it on the CPU.
        planned: whether it runs over a plan of work items (`kernels.ffa.plan`).
        alibi: whether it adds ALiBi's biases.
        summary: one line for people.
    """

    name: str
    module: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    summary: str
    min_arch: int = 0
    max_arch: int = 0
    head_dim_multiple: int = 1
    head_dims: tuple[int, ...] = ()
    page_multiple: int = 1
    page_tile: int = 0
    even_rows: bool = False
    needs_triton: bool = False
    interpretable: bool = False
    planned: bool = True
    alibi: bool = False
    quantised: tuple[torch.dtype, ...] = ()
    fp8_min_arch: int = 0

    def why_not(self, problem: AttentionProblem) -> list[str]:
        """The reasons why this kernel cannot do `problem`; empty means that it can."""
        reasons = []
        if self.needs_triton and (broken := triton_problem()):
            reasons.append(broken)
        interpreted = self.interpretable and problem.device == "cpu" and triton_interprets()
        if problem.device not in self.devices and not interpreted:
            reasons.append(
                f"device {problem.device} is not supported (accepts {', '.join(self.devices)})"
            )
        if problem.arch is not None and problem.arch < self.min_arch:
            reasons.append(
                f"sm_{problem.arch} is not supported (needs sm_{self.min_arch} or newer)"
            )
        if problem.arch is not None and self.max_arch and problem.arch > self.max_arch:
            reasons.append(
                f"sm_{problem.arch} is not supported (made for sm_{self.min_arch} to "
                f"sm_{self.max_arch})"
            )
        accepted = ", ".join(_SHORT[d] for d in self.dtypes)
        if problem.q_dtype not in self.dtypes:
            reasons.append(f"q dtype {problem.q_dtype} is not supported (accepts {accepted})")
        reasons += self._why_not_kv_dtype(problem)
        for name in ("head_dim", "head_dim_v"):
            dim = getattr(problem, name)
            if not 0 < dim <= self.max_head_dim or dim % self.head_dim_multiple:
                step = (
                    f" in steps of {self.head_dim_multiple}" if self.head_dim_multiple > 1 else ""
                )
                reasons.append(
                    f"{name}={dim} is not supported (accepts {self.head_dim_multiple} to "
                    f"{self.max_head_dim}{step})"
                )
        if self.head_dims and not (problem.head_dim == problem.head_dim_v in self.head_dims):
            reasons.append(
                f"head_dim={problem.head_dim} with head_dim_v={problem.head_dim_v} is not "
                f"supported (accepts {', '.join(map(str, self.head_dims))}, the same for both)"
            )
        if problem.alibi and not self.alibi:
            reasons.append("ALiBi is not supported")
        if self.even_rows and not problem.even_rows:
            reasons.append(
                "these strides are not supported (accepts rows of one stride, aligned to 16 bytes, "
                "the same for k and v)"
            )
        if problem.num_kv_heads < 1 or problem.num_q_heads % max(problem.num_kv_heads, 1):
            reasons.append(
                f"{problem.num_q_heads} query heads over {problem.num_kv_heads} kv heads is not "
                "supported (query heads must be a multiple of kv heads)"
            )
        if problem.page_size is not None and (
            problem.page_size < 1 or problem.page_size % self.page_multiple
        ):
            reasons.append(
                f"page_size={problem.page_size} is not supported (accepts multiples of "
                f"{self.page_multiple})"
            )
        tile = self.page_tile
        if problem.page_size and tile and tile % problem.page_size and problem.page_size % tile:
            reasons.append(
                f"page_size={problem.page_size} is not supported (accepts divisors and multiples "
                f"of {tile})"
            )
        return reasons

    def _why_not_kv_dtype(self, problem: AttentionProblem) -> list[str]:
        kv_dtype = problem.kv_dtype
        if kv_dtype == problem.q_dtype:
            return []
        if kv_dtype not in self.quantised:
            others = "".join(f" or {_SHORT[d]}" for d in self.quantised)
            return [
                f"k and v of {kv_dtype} with q of {problem.q_dtype} is not supported (accepts q's "
                f"dtype{others})"
            ]
        if problem.page_size is None:
            return [f"k and v of {kv_dtype} that are not in pages is not supported"]
        is_float = kv_dtype.is_floating_point
        if is_float and problem.arch is not None and problem.arch < self.fp8_min_arch:
            return [
                f"k and v of {kv_dtype} is not supported on sm_{problem.arch} (needs "
                f"sm_{self.fp8_min_arch} or newer)"
            ]
        return []

    def load(self) -> ModuleType:
        """The implementation's module."""
        return importlib.import_module(self.module)


_SERVED = (torch.float16, torch.bfloat16, torch.float32)
_QUANTISED = tuple(LARGEST)

SPECS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="cpu",
        module="magi_serve.kernels.ffa.cpu",
        devices=("cpu",),
        dtypes=_SERVED,
        quantised=_QUANTISED,
        max_head_dim=1024,
        alibi=True,
        summary="vectorised torch with fp32 arithmetic, for the CPU platform",
    ),
    KernelSpec(
        name="hopper",
        module="magi_serve.kernels.ffa.hopper",
        devices=("cuda",),
        dtypes=(torch.float16, torch.bfloat16),
        quantised=_QUANTISED,
        max_head_dim=256,
        head_dims=(64, 128, 256),
        min_arch=90,
        max_arch=90,
        page_multiple=16,
        page_tile=128,
        even_rows=True,
        needs_triton=True,
        summary="warp-specialised Gluon for Hopper; Triton for prefill too small to fill the chip",
    ),
    KernelSpec(
        name="triton",
        module="magi_serve.kernels.ffa.triton_attention",
        devices=("cuda",),
        dtypes=_SERVED,
        quantised=_QUANTISED,
        max_head_dim=512,
        head_dim_multiple=8,
        alibi=True,
        min_arch=80,
        fp8_min_arch=89,
        page_multiple=16,
        needs_triton=True,
        interpretable=True,
        summary="portable Triton: wgmma on Hopper, tcgen05 on Blackwell, mma.sync on Ampere",
    ),
    KernelSpec(
        name="reference",
        module="magi_serve.kernels.ffa.reference",
        devices=("cpu", "cuda"),
        dtypes=(*_SERVED, torch.float64),
        quantised=_QUANTISED,
        max_head_dim=1 << 20,
        alibi=True,
        planned=False,
        summary="plain torch in q's own dtype: the truth for tests, slow",
    ),
)
"""Every kernel, in the order in which dispatch prefers them."""

KERNEL_NAMES = tuple(spec.name for spec in SPECS)
