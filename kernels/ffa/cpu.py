"""Attention on the CPU: many items at once in batched torch products, fp32 throughout.

Items come longest first, so neighbours are of like length: as many as fit a budget of scores and
gathered keys form one batch, and one online softmax walks their keys in steps.
"""

import torch
from torch import Tensor

from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import Plan, Regime, TileConfig
from magi_serve.kernels.paged.reference import read_slots
from magi_serve.types import AttentionProblem

_KEYS_PER_STEP = 2048
_SCORES_PER_BATCH = 1 << 23
_GATHERED_PER_BATCH = 1 << 25
"""Numbers of k and v that lie side by side at once: 128 MiB."""


def tile_config(problem: AttentionProblem, regime: Regime, max_q_len: int) -> TileConfig:
    """One row per tile for decode, else 64; keys are never split."""
    groups = problem.num_q_heads // problem.num_kv_heads
    return TileConfig(block_m=groups * (1 if regime == "decode" else 64), block_n=64)


def run(call: AttentionCall) -> None:
    """Compute `call` into its outputs."""
    for plan in call.parts:
        items = plan.items[plan.items[:, 1] > 0].long()
        while len(items):
            rows = int(items[:, 1].max())
            widest = int((items[:, 5] - items[:, 4]).max().clamp(1, _KEYS_PER_STEP))
            per_key = call.k.shape[-2] * (call.k.shape[-1] + call.v.shape[-1])
            count = min(
                _SCORES_PER_BATCH // (rows * call.q.shape[1] * widest),
                _GATHERED_PER_BATCH // (widest * per_key),
            )
            count = max(count, 1)
            _attend_batch(call, plan, items[:count])
            items = items[count:]


def _attend_batch(call: AttentionCall, plan: Plan, items: Tensor) -> None:
    q_begin, q_len, band_begin, band_end, k_begin, k_end = (items[:, i] for i in range(6))
    num_q_heads, num_kv_heads = call.q.shape[1], call.k.shape[-2]
    groups = num_q_heads // num_kv_heads
    tile = int(q_len.max())
    step = torch.arange(tile)
    row = q_begin[:, None] + step.clamp(max=tile - 1).minimum(q_len[:, None] - 1)
    n, heads = len(items), (num_kv_heads, groups)
    # [items, kv heads, rows * groups, head_dim]
    q = call.q[row].float().unflatten(2, heads).permute(0, 2, 1, 3, 4).flatten(2, 3)
    bands = plan.bands.long()
    num_bands = int((band_end - band_begin).max())

    state_shape = (n, num_kv_heads, tile * groups)
    m = torch.full(state_shape, float("-inf"))
    denominator = torch.zeros(state_shape)
    acc = torch.zeros(*state_shape, call.v.shape[-1])
    for offset in range(0, int((k_end - k_begin).max()), _KEYS_PER_STEP):
        width = min(_KEYS_PER_STEP, int((k_end - k_begin).max()) - offset)
        key = k_begin[:, None] + offset + torch.arange(width)
        visible = torch.zeros(n, tile, width, dtype=torch.bool)
        for b in range(num_bands):
            band = bands[(band_begin + b).clamp(max=len(bands) - 1)]
            kb, ke, lo, hi = (band[:, i, None, None] for i in range(4))
            at, of = key[:, None], row[..., None]
            inside = (at >= kb) & (at < ke) & (at >= of + lo) & (at <= of + hi)
            visible |= inside & (band_begin + b < band_end)[:, None, None]
        visible &= (key < k_end[:, None])[:, None]
        k, v = _gather_keys(
            call, bands[band_begin.clamp(max=len(bands) - 1), 4], key, visible.any(1)
        )
        logits = torch.matmul(q, k.permute(0, 2, 3, 1)) * call.softmax_scale
        if call.softcap > 0:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        if call.alibi is not None:
            position = row + bands[band_begin.clamp(max=len(bands) - 1), 5, None]
            distance = (key[:, None] - position[..., None]).abs()
            slopes = call.alibi.view(num_kv_heads, 1, groups, 1)
            logits = logits - (slopes * distance[:, None, :, None]).flatten(2, 3)
        hidden = ~visible.repeat_interleave(groups, 1)[:, None]
        logits = logits.masked_fill_(hidden, float("-inf"))
        m_new = torch.maximum(m, logits.amax(-1))
        shift = torch.where(torch.isfinite(m_new), m_new, 0.0)
        p = torch.exp(logits.sub_(shift[..., None]))
        decay = torch.exp(m - shift)
        denominator = denominator * decay + p.sum(-1)
        acc = acc * decay[..., None] + torch.matmul(p, v.permute(0, 2, 1, 3))
        m = m_new

    lse = m + torch.log(denominator)
    rows = (torch.arange(tile) < q_len[:, None]).flatten()
    at = (q_begin[:, None] + step).flatten()[rows]

    def by_row(x: Tensor) -> Tensor:
        """``[items, kv heads, rows * groups, ...]`` as ``[valid rows, num_q_heads, ...]``."""
        x = x.unflatten(2, (tile, groups)).transpose(1, 2).flatten(2, 3)
        return x.flatten(0, 1)[rows]

    maxima, lse, total, acc = by_row(m), by_row(lse), by_row(denominator), by_row(acc)
    if call.max_logits is not None:
        call.max_logits.copy_(torch.maximum(call.max_logits, maxima.amax(0)))
    empty = total == 0  # no key seen; NaN where a NaN was
    lse = torch.where(empty, float("-inf"), lse)
    scale = torch.where(empty, 0.0, 1 / total)
    if call.sink is not None:
        with_sink = torch.logaddexp(lse, call.sink[at] if call.sink.ndim == 2 else call.sink)
        scale = torch.where(empty, 0.0, scale * torch.exp(lse - with_sink))
        lse = with_sink
    call.out[at] = (acc * scale[..., None]).to(call.out.dtype)
    call.lse[at] = lse


def _gather_keys(
    call: AttentionCall, seq: Tensor, key: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """k and v ``[items, keys, num_kv_heads, head_dim]`` in fp32; zero where no row sees the key."""
    at = torch.where(seen, key, 0)
    if call.page_table is None:
        found = [x[at.clamp(max=max(len(x) - 1, 0))].float() for x in (call.k, call.v)]
    else:
        page_size = call.k.shape[1]
        page = torch.where(seen, call.page_table[seq[:, None], at // page_size].long(), 0)
        slots = page, at % page_size
        pools = (call.k, call.k_scale), (call.v, call.v_scale)
        found = [read_slots(pool, scale, slots, torch.float32) for pool, scale in pools]
    k, v = (torch.where(seen[..., None, None], x, 0) for x in found)
    return k, v
