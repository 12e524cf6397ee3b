"""The tensors of a case: buffers that together are larger than L2, so that each call misses it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from magi_serve.bench.cases import Case, make_slices
from magi_serve.errors import DeviceError
from magi_serve.masks import AttentionSlices
from magi_serve.testing import make_pool
from magi_serve.types import PagedKV

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
        return PagedKV(self.buffers[i].k, self.buffers[i].v, self.page_table, self.seqlens_k)


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
                layout="packed", dtype=dtype, device=device, poison=0.0,
            )  # fmt: skip
            for x in (k, v):
                x.normal_(generator=random)
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
