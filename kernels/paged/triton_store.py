"""Writing keys and values into pages, in Triton: one program per token, all heads of k and v at
once, quantised on the way where pages hold 8-bit numbers."""

import triton
import triton.language as tl
from torch import Tensor

from magi_serve.kernels.paged.reference import LEAST_SCALE
from magi_serve.types import LARGEST, PagedKV


@triton.jit
def _write_heads(
    x_ptr, pages_ptr, scale_ptr, token, page, offset, stride_x_t, stride_x_h,
    stride_p_p, stride_p_t, stride_p_h, stride_s_p, stride_s_t, stride_s_h,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """All heads of a token's key, or value, into its slot."""
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    there = (head < HEADS)[:, None] & (dim < D)[None, :]
    x_at = token * stride_x_t + head * stride_x_h
    x = tl.load(x_ptr + x_at[:, None] + dim[None, :], mask=there, other=0.0)
    if LARGEST > 0:
        x = x.to(tl.float32)
        # IEEE division, so that a slot holds the same bits whoever wrote it.
        if SCALES == "token":
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST), LEAST_SCALE)
            scale_at = page * stride_s_p + offset * stride_s_t + head * stride_s_h
            tl.store(scale_ptr + scale_at, scale, mask=head < HEADS)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_H, BLOCK_D]))
        elif SCALES == "head":
            scale = tl.load(scale_ptr + head * stride_s_h, mask=head < HEADS, other=1.0)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], [BLOCK_H, BLOCK_D]))
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if pages_ptr.dtype.element_ty == tl.int8:
            x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
    at = page * stride_p_p + offset * stride_p_t + head * stride_p_h
    tl.store(pages_ptr + at[:, None] + dim[None, :], x.to(pages_ptr.dtype.element_ty), mask=there)


@triton.jit(
    do_not_specialize=[
        "stride_ks_p", "stride_ks_t", "stride_ks_h", "stride_vs_p", "stride_vs_t", "stride_vs_h",
    ]
)  # fmt: skip
def _write_kv_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    stride_k_t, stride_k_h, stride_v_t, stride_v_h,
    stride_kp_p, stride_kp_t, stride_kp_h, stride_vp_p, stride_vp_t, stride_vp_h,
    stride_ks_p, stride_ks_t, stride_ks_h, stride_vs_p, stride_vs_t, stride_vs_h,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SCALES: tl.constexpr, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // PAGE
    offset = slot % PAGE
    _write_heads(
        k_ptr, k_pages_ptr, k_scale_ptr, token, page, offset, stride_k_t, stride_k_h,
        stride_kp_p, stride_kp_t, stride_kp_h, stride_ks_p, stride_ks_t, stride_ks_h,
        HEADS, D, BLOCK_H, BLOCK_D, SCALES, LARGEST, LEAST_SCALE,
    )  # fmt: skip
    _write_heads(
        v_ptr, v_pages_ptr, v_scale_ptr, token, page, offset, stride_v_t, stride_v_h,
        stride_vp_p, stride_vp_t, stride_vp_h, stride_vs_p, stride_vs_t, stride_vs_h,
        HEADS, DV, BLOCK_H, BLOCK_DV, SCALES, LARGEST, LEAST_SCALE,
    )  # fmt: skip


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Strides over pages, tokens and heads of a `PagedKV`'s scale; 0 where one serves all."""
    if scale is None or scale.numel() == 1:
        return 0, 0, 0
    if scale.ndim == 1:
        return 0, 0, scale.stride(0)
    return scale.stride(0), scale.stride(1), scale.stride(2)


def write_kv_triton(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """`magi_serve.write_kv` after its checks."""
    heads, head_dim, head_dim_v = kv.num_kv_heads, kv.k.shape[-1], kv.v.shape[-1]
    _write_kv_kernel[(slot_mapping.shape[0],)](
        k,
        v,
        kv.k,
        kv.v,
        slot_mapping if kv.k_scale is None else kv.k_scale,
        slot_mapping if kv.v_scale is None else kv.v_scale,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *kv.k.stride()[:3],
        *kv.v.stride()[:3],
        *scale_strides(kv.k_scale),
        *scale_strides(kv.v_scale),
        PAGE=kv.page_size,
        HEADS=heads,
        D=head_dim,
        DV=head_dim_v,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_DV=triton.next_power_of_2(head_dim_v),
        SCALES=kv.scale_kind,
        LARGEST=LARGEST.get(kv.k.dtype, 0.0),
        LEAST_SCALE=LEAST_SCALE,
        num_warps=4,
    )
