"""Writing keys and values into pages, in Triton: one program per token, all heads of k and v at
once."""

import triton
import triton.language as tl
from torch import Tensor

from magi_serve.types import PagedKV


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, slots_ptr,
    stride_k_t, stride_k_h, stride_v_t, stride_v_h,
    stride_kp_p, stride_kp_t, stride_kp_h, stride_vp_p, stride_vp_t, stride_vp_h,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE
    offset = slot % PAGE
    i = tl.arange(0, BLOCK_K)
    head = (i // D).to(tl.int64)
    dim = i % D
    k = tl.load(k_ptr + token * stride_k_t + head * stride_k_h + dim, mask=head < HEADS)
    k_at = k_pages_ptr + page * stride_kp_p + offset * stride_kp_t + head * stride_kp_h + dim
    tl.store(k_at, k.to(k_pages_ptr.dtype.element_ty), mask=head < HEADS)
    i = tl.arange(0, BLOCK_V)
    head = (i // DV).to(tl.int64)
    dim = i % DV
    v = tl.load(v_ptr + token * stride_v_t + head * stride_v_h + dim, mask=head < HEADS)
    v_at = v_pages_ptr + page * stride_vp_p + offset * stride_vp_t + head * stride_vp_h + dim
    tl.store(v_at, v.to(v_pages_ptr.dtype.element_ty), mask=head < HEADS)


def write_kv_triton(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """`magi_serve.write_kv` after its checks."""
    heads, head_dim, head_dim_v = kv.num_kv_heads, kv.k.shape[-1], kv.v.shape[-1]
    _write_kv_kernel[(slot_mapping.shape[0],)](
        k,
        v,
        kv.k,
        kv.v,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        PAGE=kv.page_size,
        HEADS=heads,
        D=head_dim,
        DV=head_dim_v,
        BLOCK_K=triton.next_power_of_2(heads * head_dim),
        BLOCK_V=triton.next_power_of_2(heads * head_dim_v),
        num_warps=4,
    )
