"""What Hopper kernels read by TMA: keys and values as two-dimensional tensors of rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from magi_serve.kernels.ffa.call import AttentionCall

LAZY_GROWTH = 8
"""A row's reference maximum moves only when it has grown by 2^8; fp32 sums bear that easily."""


@dataclass(frozen=True, eq=False, slots=True)
class KVOperands:
    """Keys and values as rows of one stride, and where pages and heads lie among them.

    Attributes:
        k, v: tensor descriptors; a box is one key block, or one page where pages are smaller.
        page_size: keys per page, 0 for contiguous keys.
        page_rows, head_rows: rows from a page to the next, and from a head to the next.
        head_columns: elements from a head to the next where heads lie side by side in a row.
        boxes: boxes per key block.
    """

    k: Any
    v: Any
    page_size: int
    page_rows: int
    head_rows: int
    head_columns: int
    boxes: int


def descriptor(x: Tensor, rows: int, columns: int, stride: int, box: list[int]) -> Any:
    """A TMA descriptor of ``[rows, columns]`` elements whose rows are `stride` apart."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    bits = 8 * x.element_size()
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, box[1] * bits // 8), element_bitwidth=bits, rank=2
    )
    x = x.view(torch.uint8) if bits == 8 else x
    return TensorDescriptor(x, [rows, columns], [stride, 1], box, layout)


def kv_operands(call: AttentionCall, block_n: int) -> KVOperands:
    """The keys and values of `call` for blocks of `block_n` keys."""
    k, v = call.k, call.v
    num_kv_heads, head_dim = k.shape[-2:]
    page_size = k.shape[1] if call.page_table is not None else 0
    head_stride = k.stride(-2) if num_kv_heads > 1 else 0
    if page_size:
        page_stride, row_stride = k.stride(0), k.stride(1)
        heads_outside = head_stride > row_stride
        page_rows = page_stride // row_stride
        head_rows = head_stride // row_stride if heads_outside else 0
        head_columns = 0 if heads_outside else head_stride
        rows = (k.shape[0] - 1) * page_rows + (num_kv_heads - 1) * head_rows + page_size
        box = min(page_size, block_n)
    else:
        row_stride, page_rows, head_rows, head_columns = k.stride(0), 0, 0, head_stride
        rows, box = k.shape[0], block_n
    columns = (num_kv_heads - 1) * head_columns + head_dim
    return KVOperands(
        descriptor(k, rows, columns, row_stride, [box, head_dim]),
        descriptor(v, rows, columns, row_stride, [box, head_dim]),
        page_size,
        page_rows,
        head_rows,
        head_columns,
        block_n // box,
    )
