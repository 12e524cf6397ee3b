"""The tensors of a case: buffers that together are larger than L2, so that each call misses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magi_serve.bench.cases import STORED, Case, make_slices
from magi_serve.errors import DeviceError
from magi_serve.kernels.paged.reference import dequantise, quantise
from magi_serve.masks import AttentionSlices
from magi_serve.testing import make_pool
from magi_serve.types import LARGEST, PagedKV

ONE_BUFFER_BYTES = 4 << 30
"""From this size on a buffer is so much larger than L2 that it needs no second one."""


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """Operands of one call; k and v are ``[pages, page_size, ...]`` or ``[tokens, ...]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """What all kernels are given for a case; lengths and page table are the same in all buffers.

    Attributes:
        page_table, kv: None for contiguous keys.
        scales: of keys and of values, ``[num_kv_heads]`` fp32, where they are quantised.
        slices: None for pages.
        sink: ``[num_q_heads]`` bf16, or None.
    """

    case: Case
    buffers: tuple[Buffer, ...]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqlens_k: Tensor
    page_table: Tensor | None
    slices: AttentionSlices | None
    sink: Tensor | None
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)

    @property
    def max_q(self) -> int:
        return max(self.case.q_lens)

    @property
    def max_k(self) -> int:
        return max(self.case.k_lens)

    @property
    def window(self) -> tuple[int, int]:
        """``(left, right)`` with -1 for unlimited, as most libraries have it."""
        return (-1, -1) if self.case.window is None else (self.case.window - 1, 0)

    def kv(self, i: int) -> PagedKV:
        assert self.page_table is not None
        buffer = self.buffers[i]
        return PagedKV(buffer.k, buffer.v, self.page_table, self.seqlens_k, *self.scales)

    def in_bf16(self) -> Inputs:
        """The same inputs with keys and values in bf16: what they were before they were stored."""

        def plain(x: Tensor, scale: Tensor | None) -> Tensor:
            return dequantise(x, scale, torch.bfloat16)

        buffers = []
        for b in self.buffers:
            both = torch.empty(
                (*b.k.shape[:3], 2 * b.k.shape[3]), dtype=b.q.dtype, device=b.q.device
            )
            k, v = both.chunk(2, dim=-1)
            k.copy_(plain(b.k, self.scales[0]))
            v.copy_(plain(b.v, self.scales[1]))
            buffers.append(replace(b, k=k, v=v))
        return replace(
            self, case=replace(self.case, stored=None), buffers=tuple(buffers), scales=(None, None)
        )


def num_buffers(case: Case, l2_bytes: int) -> int:
    """How many buffers push each other out of L2: all but one are twice as large as it is."""
    size = case.bytes()
    if size >= ONE_BUFFER_BYTES:
        return 1
    return min(64, 1 + max(1, -(-2 * l2_bytes // size)))


def make_inputs(
    case: Case, *, buffers: int, device: torch.device | str = "cuda", seed: int = 0
) -> Inputs:
    """Random operands. Pages of a sequence lie anywhere in the pool, as after hours of serving."""
    random = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16
    heads = (case.num_kv_heads, case.head_dim)
    table = None
    num_pages = 0
    if case.page_size is not None:
        pages_of = [-(-n // case.page_size) for n in case.k_lens]
        num_pages = sum(pages_of)
        order = torch.randperm(num_pages, generator=random, device=device).to(torch.int32)
        table = torch.zeros(len(pages_of), max(pages_of), dtype=torch.int32, device=device)
        for row, pages in zip(table, order.split(pages_of), strict=True):
            row[: len(pages)] = pages

    stored = dtype if case.stored is None else getattr(torch, STORED[case.stored])
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if case.stored is not None:
        # Normal numbers fill what is stored without saturating.
        k_scale = torch.full(heads[:1], 5.5 / LARGEST[stored], device=device)
        scales = k_scale, 1.25 * k_scale

    def fill(x: Tensor, scale: Tensor | None) -> None:
        if scale is None:
            x.normal_(generator=random)
            return
        for pages in x.split(4096):  # so that fp32 of them is small
            normal = torch.randn(pages.shape, generator=random, dtype=dtype, device=device)
            pages.view(torch.int8).copy_(quantise(normal, x.dtype, scale).view(torch.int8))

    def buffer() -> Buffer:
        q = torch.randn(
            case.num_tokens, case.num_q_heads, case.head_dim,
            generator=random, dtype=dtype, device=device,
        )  # fmt: skip
        if case.page_size is None:
            k, v = (
                torch.randn(sum(case.k_lens), *heads, generator=random, dtype=dtype, device=device)
                for _ in range(2)
            )
        else:
            k, v = make_pool(
                num_pages, case.page_size, *heads, case.head_dim,
                layout="packed", dtype=stored, device=device, poison=0.0,
            )  # fmt: skip
            for x, scale in zip((k, v), scales, strict=True):
                fill(x, scale)
        return Buffer(q, k, v, torch.full_like(q, float("nan")))

    def cumulative(lens: tuple[int, ...]) -> Tensor:
        ends = torch.tensor([0, *lens]).cumsum(0)
        return ends.to(torch.int32).to(device)

    sink = None
    if case.sink:
        sink = torch.randn(case.num_q_heads, generator=random, device=device).to(dtype)
    return Inputs(
        case,
        tuple(buffer() for _ in range(buffers)),
        cumulative(case.q_lens),
        cumulative(case.k_lens),
        torch.tensor(case.k_lens, dtype=torch.int32, device=device),
        table,
        make_slices(case) if case.page_size is None else None,
        sink,
        scales,
    )


def need_gpu() -> None:
    """Refuse to go on without a GPU.

    Raises:
        DeviceError: there is none.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "bench attention measures kernels on an NVIDIA GPU, and PyTorch "
            f"{torch.__version__} finds none here; --list works without"
        )
