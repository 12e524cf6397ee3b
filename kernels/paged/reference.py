"""The paged key/value cache as its definition says: slot ``page * page_size + offset`` holds one
token; 8-bit numbers there stand for themselves times a scale.
"""

import torch
from torch import Tensor

from magi_serve.types import LARGEST, PagedKV

LEAST_SCALE = 2.0**-100
"""The scale of a token's head that is all zeros, or nearly: no number is divided by less."""


def token_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale with which the largest number of each ``x[..., :]`` becomes `dtype`'s, fp32."""
    largest = x.float().abs().amax(-1)
    # By a tensor: by a number, torch would multiply with its reciprocal on a GPU.
    return (largest / torch.full_like(largest, LARGEST[dtype])).clamp(min=LEAST_SCALE)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """``x / scale`` to the nearest number of `dtype`, saturating; int8 for NaN is arbitrary.

    Args:
        x: ``[..., head_dim]``, any floating dtype.
        dtype: one of `LARGEST`.
        scale: fp32, broadcast against ``x[..., 0]``; None for 1.
    """
    x = x.float()
    if scale is not None:
        x = x / scale[..., None]
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (x.round() if dtype == torch.int8 else x).to(dtype)


def dequantise(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values ``[..., head_dim]`` as `dtype`: times `scale`, broadcast as in `quantise`."""
    x = x.to(dtype)
    return x if scale is None else x * scale[..., None].to(dtype)


def gather_pages(
    kv: PagedKV, seq: int, num_keys: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The first `num_keys` keys and values of sequence `seq`, densely, in `dtype` or the pages'.

    Returns:
        k ``[num_keys, num_kv_heads, head_dim]`` and v ``[num_keys, num_kv_heads, head_dim_v]``.
    """
    key = torch.arange(num_keys, device=kv.k.device)
    slots = kv.page_table[seq, key // kv.page_size].long(), key % kv.page_size
    return read_slots(kv.k, kv.k_scale, slots, dtype), read_slots(kv.v, kv.v_scale, slots, dtype)


def read_slots(
    pool: Tensor, scale: Tensor | None, at: tuple[Tensor, Tensor], dtype: torch.dtype | None
) -> Tensor:
    """What the slots `at` ``(page, offset)`` of a pool stand for, in `dtype`; None: as stored."""
    if pool.dtype not in LARGEST:
        return pool[at] if dtype is None else pool[at].to(dtype)
    found = pool.view(torch.int8)[at].view(pool.dtype)  # 8-bit floats know few operations
    if dtype is None:
        return found
    return dequantise(found, scale[at] if scale is not None and scale.ndim == 3 else scale, dtype)


def write_kv_ref(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """One token after the other; arguments as in `magi_serve.write_kv`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, kv.page_size)
            write_slots(kv.k, kv.k_scale, k[token], (page, offset))
            write_slots(kv.v, kv.v_scale, v[token], (page, offset))


def write_slots(
    pool: Tensor, scale: Tensor | None, x: Tensor, at: tuple[int, int] | tuple[Tensor, Tensor]
) -> None:
    """Write `x` into slots `at` ``(page, offset)`` of a pool, and what it is scaled with."""
    if pool.dtype not in LARGEST:
        pool[at] = x.to(pool.dtype)
        return
    if scale is not None and scale.ndim == 3:
        scale[at] = of_token = token_scale(x, pool.dtype)
        scale = of_token
    pool.view(torch.int8)[at] = quantise(x, pool.dtype, scale).view(torch.int8)
