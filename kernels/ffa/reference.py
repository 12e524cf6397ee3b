"""Attention as its definition says, in plain torch: what every other kernel is compared with.

``out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + sum_t exp(sink_t))`` over the keys ``j`` that
row ``i`` sees, with ``s_ij = cap(softmax_scale * q_i·k_j)`` and ``cap(x) = softcap * tanh(x /
softcap)``; ALiBi takes ``slope * |j - position_i|`` from it.

Arithmetic runs in q's own dtype (softmax at least in fp32), so float64 inputs give the truth and
bf16 inputs give what a plain torch model would compute. The whole score matrix is made: use small
shapes.
"""

import torch
from torch import Tensor

from magi_serve.kernels.merge import apply_sink
from magi_serve.kernels.paged.reference import gather_pages
from magi_serve.masks import AttentionSlices, MaskType
from magi_serve.spans import BidirectionalSpans
from magi_serve.types import AttentionOutput, PagedKV, SinkSpec


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
    bias: Tensor | None = None,
) -> AttentionOutput:
    """Attention under a dense mask.

    Args:
        q: ``[num_tokens, num_q_heads, head_dim]``.
        k, v: ``[num_keys, num_kv_heads, head_dim]`` and ``[..., head_dim_v]``.
        visible: ``[num_tokens, num_keys]`` bool.
        softmax_scale: multiplies q·k.
        softcap: tanh cap on scaled logits; 0 for none.
        sink: per head, or per token and head; not capped.
        bias: added to capped logits, ``[num_tokens, num_q_heads, num_keys]``.

    Returns:
        out, lse and max-logits; keys that a row does not see are not used, whatever they hold.
    """
    groups = q.shape[1] // k.shape[1]
    seen = visible.any(0)[:, None, None]
    k = torch.where(seen, k, 0).repeat_interleave(groups, 1)
    v = torch.where(seen, v, 0).repeat_interleave(groups, 1)
    logits = torch.einsum("thd,nhd->thn", q, k) * softmax_scale
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~visible[:, None], float("-inf"))
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - torch.where(torch.isfinite(lse), lse, 0.0)[..., None])
    out = torch.einsum("thn,nhd->thd", p.to(v.dtype), v)
    heads = logits.new_full((q.shape[1],), float("-inf"))
    max_logits = torch.cat([logits.movedim(1, 2).reshape(-1, q.shape[1]), heads[None]]).amax(0)
    result = AttentionOutput(out, lse, max_logits)
    return result if sink is None else apply_sink(result, sink)


def slices_mask(
    slices: AttentionSlices, total_q: int, total_k: int, device: torch.device
) -> Tensor:
    """The dense mask of `slices`, ``[total_q, total_k]`` bool."""
    visible = torch.zeros(total_q, total_k, dtype=torch.bool, device=device)
    for (qs, qe), (ks, ke), kind in zip(
        slices.q_ranges.tolist(), slices.k_ranges.tolist(), slices.mask_types.tolist(), strict=True
    ):
        i = torch.arange(qs, qe, device=device)[:, None]
        j = torch.arange(ks, ke, device=device)[None]
        cell = torch.ones(qe - qs, ke - ks, dtype=torch.bool, device=device)
        if kind in (MaskType.CAUSAL, MaskType.BI_CAUSAL):
            cell &= j < ke - (qe - i - 1)
        if kind in (MaskType.INV_CAUSAL, MaskType.BI_CAUSAL):
            cell &= j >= ks + (i - qs)
        visible[qs:qe, ks:ke] |= cell
    return visible


def ffa_attention_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttentionSlices,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
) -> AttentionOutput:
    """`attend` under the mask of `slices`; arguments as in `magi_serve.ffa_attention`."""
    visible = slices_mask(slices, q.shape[0], k.shape[0], q.device)
    return attend(q, k, v, visible, softmax_scale=softmax_scale, softcap=softcap, sink=sink)


def paged_attention_ref(
    q: Tensor,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    *,
    causal: bool | Tensor = True,
    window: tuple[int | None, int | None] | None = None,
    spans: BidirectionalSpans | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
) -> AttentionOutput:
    """One sequence after the other; arguments as in `magi_serve.paged_attention`."""
    starts, lengths = cu_seqlens_q.tolist(), kv.seqlens_k.tolist()
    causal_of = causal.tolist() if isinstance(causal, Tensor) else [causal] * len(lengths)
    left, right = window or (None, None)
    empty = torch.zeros(q.shape[0], 0, dtype=torch.bool, device=q.device)
    total = attend(
        q, q[:0, : kv.num_kv_heads], _no_values(q, kv), empty, softmax_scale=softmax_scale
    )
    out, lse, max_logits = total.out, total.lse, total.max_logits
    assert max_logits is not None
    for s, num_keys in enumerate(lengths):
        rows = slice(starts[s], starts[s + 1])
        k, v = gather_pages(kv, s, num_keys, q.dtype)
        position = torch.arange(num_keys - (rows.stop - rows.start), num_keys, device=q.device)[
            :, None
        ]
        key = torch.arange(num_keys, device=q.device)[None]
        visible = (key <= position) if causal_of[s] else torch.ones_like(key <= position)
        if left is not None:
            visible &= key >= position - left
        if right is not None:
            visible &= key <= position + right
        for start, end in spans.ranges[s] if spans is not None else ():
            both = (position >= start) & (position < end) & (key >= start) & (key < end)
            if spans is not None and spans.within_window and left is not None:
                both &= key >= position - left
            visible |= both
        bias = None
        if alibi_slopes is not None:
            slopes = alibi_slopes.to(torch.promote_types(q.dtype, torch.float32))
            bias = -slopes[:, None] * (key - position).abs()[:, None]
        part = attend(
            q[rows], k, v, visible, softmax_scale=softmax_scale, softcap=softcap, bias=bias
        )
        assert part.max_logits is not None
        out[rows], lse[rows] = part.out, part.lse
        max_logits = torch.maximum(max_logits, part.max_logits)
    result = AttentionOutput(out, lse, max_logits)
    return result if sink is None else apply_sink(result, sink)


def _no_values(q: Tensor, kv: PagedKV) -> Tensor:
    return q.new_zeros(0, kv.num_kv_heads, kv.v.shape[-1])
