"""Where keys, values and their scales lie in the slots of a cache that packs them side by side."""

import torch
from torch import Tensor

from magi_serve.types import ScaleKind

SCALE_BYTES = 4
"""Of one fp32 scale behind a token's key, and behind its value."""


def slot_size(head_dim: int, head_dim_v: int, scales: ScaleKind) -> int:
    """Numbers per slot and head: 8-bit ones where there are scales per token."""
    return head_dim + head_dim_v + (2 * SCALE_BYTES if scales == "token" else 0)


def split_slots(
    slots: Tensor, head_dim: int, head_dim_v: int, dtype: torch.dtype, scales: ScaleKind
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Views of k, v, k_scale and v_scale, as `PagedKV` takes them; scales only if per token.

    Args:
        slots: ``[num_pages, page_size, num_kv_heads, slot_size]`` of any strides but a unit last
            one: a key before its value, each followed by its scale where that is per token.
        dtype: what the slots hold; any dtype of as many bits may be given.

    Source: the cache of vLLM, whose modes ``*_per_token_head`` have such scales.
    """
    numbers = slots.view(dtype)
    if scales != "token":
        return numbers[..., :head_dim], numbers[..., head_dim:], None, None
    v_at = head_dim + SCALE_BYTES

    def scale(at: int) -> Tensor:
        return slots[..., at : at + SCALE_BYTES].view(torch.float32).squeeze(-1)

    return (
        numbers[..., :head_dim],
        numbers[..., v_at : v_at + head_dim_v],
        scale(head_dim),
        scale(v_at + head_dim_v),
    )
