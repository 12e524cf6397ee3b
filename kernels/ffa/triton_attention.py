"""Attention in portable Triton: one kernel over work items, and one that reduces split keys.

A program takes one item for one kv head. Its rows are query rows times the query heads of that kv
head (packed GQA), so that keys are read once for all of them. For each band of the item it walks
blocks of keys in one online softmax, in base 2: masked blocks at the edges, unmasked ones between.
The finalizer applies sink, lse and normalisation once, for whoever holds the complete state: the
program itself, or the reduction where keys were split.

Triton turns the products into wgmma on Hopper, tcgen05 on Blackwell and mma.sync elsewhere.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from magi_serve.kernels.ffa import tuning
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import ROW, Plan, Regime, TileConfig
from magi_serve.kernels.paged.triton_store import scale_strides
from magi_serve.types import AttentionProblem, scale_kind

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(x, softcap):
    """``softcap * tanh(x)`` in base 2; ``tanh|x| = (1 - e) / (1 + e)``, ``e = exp(-2|x|)``."""
    e = tl.exp2(-2.0 * LOG2E * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t) * (softcap * LOG2E)


@triton.jit
def _load_rows(at, live, offs_d, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows of k or v at the pointers `at`; with MASKED, zeros for rows that are not `live`."""
    if MASKED:
        x = tl.load(at, mask=live[:, None] & (offs_d < DIM)[None, :], other=0.0)
    elif DIM == BLOCK:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(offs_d < DIM)[None, :], other=0.0)
    return x


@triton.jit
def _as_fp16(q):
    """bf16 queries as fp16 times a power of two: exact, but for what is 2^-30 of their largest.

    8-bit keys are exact in fp16 too, and become that in one instruction, where bf16 takes three.
    """
    q = q.to(tl.float32)
    size = tl.where(tl.abs(q) < float("inf"), tl.abs(q), 0.0)
    largest = tl.max(tl.max(size, 1), 0).to(tl.int32, bitcast=True)
    exponent = tl.maximum(largest >> 23, 16)  # biased by 127
    shrink = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # largest to 2^14
    grow = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q * shrink).to(tl.float16), grow


@triton.jit
def _walk_blocks(
    acc, m, total, v_unit, q, k_ptr, v_ptr, pages_ptr, block_begin, block_end, base, row, lo, hi,
    load_begin, load_end, k_begin, k_end, logit_scale, softcap, position, slope, k_scale_ptr,
    v_scale_ptr, stride_k_p, stride_k_t, stride_v_p, stride_v_t,
    stride_ks_p, stride_ks_t, stride_vs_p, stride_vs_t,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SCALES: tl.constexpr, MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Key blocks ``[block_begin, block_end)`` from `base` on, into the softmax state of the rows.

    Keys are visible within ``[k_begin, k_end)`` and ``row + lo <= key <= row + hi``; only those in
    ``[load_begin, load_end)`` are read. Without MASKED, every key of these blocks is visible to
    every row. With ALIBI, `slope` is in base 2, and `position` where a row sits among the keys.
    Quantised numbers are exact in q's dtype. With scales per token, `acc` counts in
    units of the largest scale of values so far, `v_unit`: so probabilities stay within fp16.
    """
    SCALED: tl.constexpr = SOFTCAP or ALIBI  # before the maximum, not with it
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    for n in tl.range(block_begin, block_end, num_stages=STAGES):
        key = base + n * BLOCK_N + offs_n
        live = (key >= load_begin) & (key < load_end)
        if PAGE == 0:
            page = tl.zeros([], tl.int64)
            offset = key
        elif PAGE % BLOCK_N == 0:
            first = base + n * BLOCK_N
            page = tl.load(pages_ptr + first // PAGE).to(tl.int64)
            offset = first % PAGE + offs_n
        else:
            if MASKED:
                page = tl.load(pages_ptr + key // PAGE, mask=live, other=0).to(tl.int64)
            else:
                page = tl.load(pages_ptr + key // PAGE).to(tl.int64)
            offset = key % PAGE
        k_row = page * stride_k_p + offset.to(tl.int64) * stride_k_t
        v_row = page * stride_v_p + offset.to(tl.int64) * stride_v_t
        k_at = k_ptr + k_row[:, None] + offs_d[None, :]
        v_at = v_ptr + v_row[:, None] + offs_dv[None, :]
        k = _load_rows(k_at, live, offs_d, D, BLOCK_D, MASKED).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SCALES == "token":
            k_scale_at = page * stride_ks_p + offset.to(tl.int64) * stride_ks_t
            v_scale_at = page * stride_vs_p + offset.to(tl.int64) * stride_vs_t
            s = s * tl.load(k_scale_ptr + k_scale_at, mask=live, other=0.0)[None, :]
            v_scale = tl.load(v_scale_ptr + v_scale_at, mask=live, other=0.0)
        if SOFTCAP:
            s = _capped(s * logit_scale, softcap)
        elif ALIBI:
            s = s * logit_scale
        if ALIBI:
            distance = tl.abs(key[None, :] - position[:, None]).to(tl.float32)
            s = s - slope[:, None] * distance
        if MASKED:
            first_key = tl.maximum(row + lo, k_begin)
            last_key = tl.minimum(row + hi, k_end - 1)
            visible = (key[None, :] >= first_key[:, None]) & (key[None, :] <= last_key[:, None])
            s = tl.where(visible, s, float("-inf"))
        # A positive scale commutes with max, and then rides along in the subtraction's FMA.
        m_new = tl.maximum(m, tl.max(s, 1) if SCALED else tl.max(s, 1) * logit_scale)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2((s if SCALED else s * logit_scale) - shift[:, None])
        decay = tl.exp2(m - shift)
        total = total * decay + tl.sum(p, 1)
        if SCALES == "token":
            unit = tl.maximum(tl.max(v_scale, 0), tl.maximum(v_unit, 1e-37))
            p = p * (v_scale / unit)[None, :]
            decay = decay * (v_unit / unit)
            v_unit = unit
        acc = acc * decay[:, None]
        m = m_new
        v = _load_rows(v_at, live, offs_dv, DV, BLOCK_DV, MASKED).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision=PRECISION)
    return acc, m, total, v_unit


@triton.jit
def _store_rows(
    acc, m, total, out_ptr, lse_ptr, sink_ptr, token, head, valid,
    stride_o_t, stride_o_h, stride_lse_t, stride_lse_h, stride_sink_t,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Finish complete softmax states: sink, lse and normalisation, once per row.

    `total` is 0 for a row that saw no key, and NaN for one that saw a NaN: maxima drop NaN, sums do
    not.
    """
    offs_dv = tl.arange(0, BLOCK_DV)
    token = token.to(tl.int64)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    if HAS_SINK:
        sink = tl.load(sink_ptr + token * stride_sink_t + head, mask=valid, other=0.0) * LOG2E
        top = tl.maximum(m, sink)
        top_safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.where(m == float("-inf"), 0.0, tl.exp2(m_safe - top_safe))
        # The difference of equal numbers, fused with the scaling above, would not be 0.
        sink_weight = tl.exp2(tl.where(sink >= m, 0.0, sink - top_safe))
        with_sink = total * weight + tl.where(sink == float("-inf"), 0.0, sink_weight)
        scale = tl.where(with_sink == 0, 0.0, weight / with_sink)
        lse = tl.where(with_sink == 0, float("-inf"), (top_safe + tl.log2(with_sink)) * LN2)
    else:
        scale = tl.where(total == 0, 0.0, 1.0 / total)
        lse = tl.where(total == 0, float("-inf"), (m_safe + tl.log2(total)) * LN2)
    out_at = out_ptr + (token * stride_o_t + head * stride_o_h)[:, None] + offs_dv[None, :]
    out = (acc * scale[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=valid[:, None] & (offs_dv < DV)[None, :])
    tl.store(lse_ptr + token * stride_lse_t + head * stride_lse_h, lse, mask=valid)


# Counts that vary by batch: a specialisation for 1 or a multiple of 16 would compile while serving.
@triton.jit(
    do_not_specialize=[
        "num_items", "stride_sink_t", "stride_pages", "stride_ks_p", "stride_ks_t", "stride_ks_h",
        "stride_vs_p", "stride_vs_t", "stride_vs_h",
    ]
)  # fmt: skip
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, alibi_ptr, k_scale_ptr,
    v_scale_ptr, part_acc_ptr, part_ml_ptr, items_ptr, bands_ptr, page_table_ptr, num_items,
    logit_scale, softcap,
    stride_q_t, stride_q_h, stride_k_p, stride_k_t, stride_k_h, stride_v_p, stride_v_t, stride_v_h,
    stride_o_t, stride_o_h, stride_lse_t, stride_lse_h, stride_sink_t, stride_pages,
    stride_ks_p, stride_ks_t, stride_ks_h, stride_vs_p, stride_vs_t, stride_vs_h,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, HEAD_BLOCKS:
        tl.constexpr,
    HAS_SINK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MAX_LOGITS: tl.constexpr,
    SCALES: tl.constexpr, SPLIT: tl.constexpr,
    ALL_MASKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if SPLIT:  # heads of one share side by side: they read neighbouring memory
        item = pid // HEAD_BLOCKS
        head_block = pid % HEAD_BLOCKS
    else:  # items of one head side by side: they read the same keys
        item = pid % num_items
        head_block = pid // num_items
    item_ptr = items_ptr + item * COLUMNS
    q_begin = tl.load(item_ptr)
    q_len = tl.load(item_ptr + 1)
    if q_len == 0:
        return
    band_begin = tl.load(item_ptr + 2)
    band_end = tl.load(item_ptr + 3)
    item_k_begin = tl.load(item_ptr + 4)
    item_k_end = tl.load(item_ptr + 5)
    split_tile = tl.load(item_ptr + 6)

    kv_head = (head_block // GROUP_CHUNKS).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    in_group = (head_block % GROUP_CHUNKS) * GROUP_ROWS + offs_m % GROUP_ROWS
    row = q_begin + offs_m // GROUP_ROWS
    head = kv_head * GROUPS + in_group
    valid = (offs_m // GROUP_ROWS < q_len) & (in_group < GROUPS)

    offs_d = tl.arange(0, BLOCK_D)
    q_at = q_ptr + (row.to(tl.int64) * stride_q_t + head * stride_q_h)[:, None] + offs_d[None, :]
    q = tl.load(q_at, mask=valid[:, None] & (offs_d < D)[None, :], other=0.0)
    v_unit = 1.0
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        if q.dtype == tl.bfloat16:
            q, unit = _as_fp16(q)
            logit_scale *= unit
        if SCALES == "head":
            logit_scale *= tl.load(k_scale_ptr + kv_head * stride_ks_h)
            v_unit = tl.load(v_scale_ptr + kv_head * stride_vs_h)
        elif SCALES == "token":
            k_scale_ptr += kv_head * stride_ks_h
            v_scale_ptr += kv_head * stride_vs_h
            v_unit = 0.0
    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=valid, other=0.0) * LOG2E
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_head_ptr = k_ptr + kv_head * stride_k_h
    v_head_ptr = v_ptr + kv_head * stride_v_h

    for band in range(band_begin, band_end):
        band_ptr = bands_ptr + band * COLUMNS
        k_begin = tl.maximum(tl.load(band_ptr), item_k_begin)
        k_end = tl.minimum(tl.load(band_ptr + 1), item_k_end)
        lo = tl.load(band_ptr + 2)
        hi = tl.load(band_ptr + 3)
        position = row
        if ALIBI:
            position = row + tl.load(band_ptr + 5)
        pages_ptr = page_table_ptr
        base = k_begin
        if PAGE > 0:
            pages_ptr = page_table_ptr + tl.load(band_ptr + 4).to(tl.int64) * stride_pages
            base = 0
        # What any row sees, what every row sees, and both in whole blocks.
        last = q_begin + q_len - 1
        load_begin = tl.maximum(k_begin, q_begin + lo)
        load_end = tl.minimum(k_end, last + hi + 1)
        block_begin = (load_begin - base) // BLOCK_N
        block_end = tl.where(
            load_end > load_begin, (load_end - base + BLOCK_N - 1) // BLOCK_N, block_begin
        )
        if ALL_MASKED:
            full_begin = block_end
            full_end = block_end
        else:
            full_begin = (tl.maximum(k_begin, last + lo) - base + BLOCK_N - 1) // BLOCK_N
            full_begin = tl.minimum(tl.maximum(full_begin, block_begin), block_end)
            full_end = tl.maximum(tl.minimum(k_end, q_begin + hi + 1) - base, 0) // BLOCK_N
            full_end = tl.minimum(tl.maximum(full_end, full_begin), block_end)
        acc, m, total, v_unit = _walk_blocks(
            acc, m, total, v_unit, q, k_head_ptr, v_head_ptr, pages_ptr, block_begin, full_begin,
            base, row, lo, hi, load_begin, load_end, k_begin, k_end, logit_scale, softcap,
            position, slope, k_scale_ptr, v_scale_ptr, stride_k_p, stride_k_t, stride_v_p,
            stride_v_t,
            stride_ks_p, stride_ks_t, stride_vs_p, stride_vs_t,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, SCALES, True, SOFTCAP, ALIBI,
            PRECISION, STAGES,
        )  # fmt: skip
        if not ALL_MASKED:
            acc, m, total, v_unit = _walk_blocks(
                acc, m, total, v_unit, q, k_head_ptr, v_head_ptr, pages_ptr, full_begin, full_end,
                base, row, lo, hi, load_begin, load_end, k_begin, k_end, logit_scale, softcap,
                position, slope, k_scale_ptr, v_scale_ptr, stride_k_p, stride_k_t, stride_v_p,
                stride_v_t,
                stride_ks_p, stride_ks_t, stride_vs_p, stride_vs_t,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, SCALES, False, SOFTCAP, ALIBI,
                PRECISION, STAGES,
            )  # fmt: skip
            acc, m, total, v_unit = _walk_blocks(
                acc, m, total, v_unit, q, k_head_ptr, v_head_ptr, pages_ptr, full_end, block_end,
                base, row, lo, hi, load_begin, load_end, k_begin, k_end, logit_scale, softcap,
                position, slope, k_scale_ptr, v_scale_ptr, stride_k_p, stride_k_t, stride_v_p,
                stride_v_t,
                stride_ks_p, stride_ks_t, stride_vs_p, stride_vs_t,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, PAGE, SCALES, True, SOFTCAP, ALIBI,
                PRECISION, STAGES,
            )  # fmt: skip

    if SCALES != "none":
        acc = acc * v_unit
    if MAX_LOGITS:
        tl.atomic_max(max_logits_ptr + head, m * LN2, mask=valid)
    if SPLIT and split_tile > 0:
        part = (item.to(tl.int64) * HEAD_BLOCKS + head_block) * BLOCK_M + offs_m
        offs_dv = tl.arange(0, BLOCK_DV)
        part_at = part_acc_ptr + part[:, None] * BLOCK_DV + offs_dv[None, :]
        tl.store(part_at, acc, mask=valid[:, None])
        tl.store(part_ml_ptr + part * 2, m, mask=valid)
        tl.store(part_ml_ptr + part * 2 + 1, total, mask=valid)
        return
    _store_rows(
        acc, m, total, out_ptr, lse_ptr, sink_ptr, row, head, valid,
        stride_o_t, stride_o_h, stride_lse_t, stride_lse_h, stride_sink_t, DV, BLOCK_DV, HAS_SINK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_sink_t"])
def _reduce_kernel(
    out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_ml_ptr, reductions_ptr,
    stride_o_t, stride_o_h, stride_lse_t, stride_lse_h, stride_sink_t,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, HEAD_BLOCKS:
        tl.constexpr,
    HAS_SINK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One matrix row of one split tile: its partial states, PARTS at a time, put together and
    finished."""
    reduction_ptr = reductions_ptr + tl.program_id(0) * COLUMNS
    head_block = tl.program_id(1)
    matrix_row = tl.program_id(2)
    q_begin = tl.load(reduction_ptr)
    q_len = tl.load(reduction_ptr + 1)
    first_item = tl.load(reduction_ptr + 2).to(tl.int64)
    num_items = tl.load(reduction_ptr + 3)
    in_group = (head_block % GROUP_CHUNKS) * GROUP_ROWS + matrix_row % GROUP_ROWS
    if (num_items < 2) | (matrix_row // GROUP_ROWS >= q_len) | (in_group >= GROUPS):
        return
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_p = tl.arange(0, PARTS)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for i in range(0, num_items, PARTS):
        there = i + offs_p < num_items
        part = ((first_item + i + offs_p) * HEAD_BLOCKS + head_block) * BLOCK_M + matrix_row
        part_m = tl.load(part_ml_ptr + part * 2, mask=there, other=float("-inf"))
        part_l = tl.load(part_ml_ptr + part * 2 + 1, mask=there, other=0.0)
        part_acc = tl.load(
            part_acc_ptr + part[:, None] * BLOCK_DV + offs_dv[None, :],
            mask=there[:, None],
            other=0.0,
        )
        m_new = tl.maximum(m, tl.max(part_m, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(part_m - shift)
        decay = tl.exp2(m - shift)
        total = total * decay + tl.sum(weight * part_l, 0)
        acc = acc * decay[:, None] + tl.sum(weight[:, None] * part_acc, 0)[None, :]
        m = m_new
    one = tl.arange(0, 1)
    head = (head_block // GROUP_CHUNKS) * GROUPS + in_group + one
    token = q_begin + matrix_row // GROUP_ROWS + one
    _store_rows(
        acc, m, total, out_ptr, lse_ptr, sink_ptr, token, head, one == 0,
        stride_o_t, stride_o_h, stride_lse_t, stride_lse_h, stride_sink_t, DV, BLOCK_DV, HAS_SINK,
    )  # fmt: skip


@functools.cache
def num_sms(device: str) -> int:
    """Multiprocessors of the current device; where there is none, as many as an H200 has."""
    if device != "cuda":
        return 132
    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)


@tuning.cached
def tile_config(problem: AttentionProblem, regime: Regime, max_q_len: int) -> TileConfig:
    """Tuned tiles for `problem`: by regime, width of the dtype and padded head dim.

    Decode tiles hold all query heads of a kv head for `max_q_len` rows, 16 to 64 matrix rows; no
    more than 32, in fp32 16, at a head dim of 512, whose accumulator takes all registers.
    """
    rows = problem.num_q_heads // problem.num_kv_heads * max_q_len
    bits = 8 * (problem.q_dtype if problem.q_dtype == torch.float32 else problem.kv_dtype).itemsize
    dim = max(_padded(problem.head_dim), _padded(problem.head_dim_v), 64)
    most = 64 if dim < 512 else 16 if bits == 32 else 32
    decode_m = min(max(triton.next_power_of_2(rows), 16), most)
    kinds = tuning.kinds(problem, regime, wide=decode_m > 16)
    found = tuning.row("triton", problem, kinds, bits=bits, dim=dim)
    assert found is not None
    entry: dict[str, Any] = dict(found)
    per_sm = entry.pop("programs_per_sm")
    if regime == "decode":
        entry["block_m"] = decode_m
    return TileConfig(programs=per_sm * num_sms(problem.device), programs_per_sm=per_sm, **entry)


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def run(call: AttentionCall) -> None:
    """Launch `call`: one kernel per part, and a reduction where the part's keys are split."""
    for plan in call.parts:
        run_part(call, plan)


def run_part(call: AttentionCall, plan: Plan) -> None:
    """Launch one part of `call`."""
    config = plan.config
    q, k, v = call.q, call.k, call.v
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads, head_dim_v = k.shape[-2], v.shape[-1]
    groups = num_q_heads // num_kv_heads
    group_rows = config.group_rows(groups)
    group_chunks = -(-groups // group_rows)
    heads = num_kv_heads * group_chunks
    paged = call.page_table is not None
    page_size = k.shape[1] if paged else 0
    split = plan.reductions is not None
    num_items = plan.items.shape[0]
    dims = {"DV": head_dim_v, "BLOCK_DV": _padded(head_dim_v)}
    grouping = {
        "GROUPS": groups,
        "GROUP_ROWS": group_rows,
        "GROUP_CHUNKS": group_chunks,
        "HEAD_BLOCKS": heads,
        "HAS_SINK": call.sink is not None,
        "COLUMNS": ROW,
    }
    if split:
        part_rows = num_items * heads * config.block_m
        part_acc = torch.empty(
            part_rows * _padded(head_dim_v), dtype=torch.float32, device=q.device
        )
        part_ml = torch.empty(part_rows * 2, dtype=torch.float32, device=q.device)
    else:
        part_acc = part_ml = call.lse
    _attention_kernel[(num_items * heads,)](
        q,
        k,
        v,
        call.out,
        call.lse,
        call.pointer(call.max_logits),
        call.pointer(call.sink),
        call.pointer(call.alibi),
        call.pointer(call.k_scale),
        call.pointer(call.v_scale),
        part_acc,
        part_ml,
        plan.items,
        plan.bands,
        plan.items if call.page_table is None else call.page_table,
        num_items,
        call.logit_scale,
        call.softcap,
        *q.stride()[:2],
        *(k.stride()[:3] if paged else (0, *k.stride()[:2])),
        *(v.stride()[:3] if paged else (0, *v.stride()[:2])),
        *call.out.stride()[:2],
        *call.lse.stride(),
        call.stride_sink_t,
        0 if call.page_table is None else call.page_table.stride(0),
        *scale_strides(call.k_scale),
        *scale_strides(call.v_scale),
        D=head_dim,
        BLOCK_D=_padded(head_dim),
        **dims,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PAGE=page_size,
        **grouping,
        SOFTCAP=call.softcap > 0,
        ALIBI=call.alibi is not None,
        MAX_LOGITS=call.max_logits is not None,
        SCALES=scale_kind(call.k_scale),
        SPLIT=split,
        ALL_MASKED=config.block_m < 64,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if plan.reductions is None:
        return
    _reduce_kernel[(plan.reductions.shape[0], heads, config.tile_q(groups) * group_rows)](
        call.out,
        call.lse,
        call.pointer(call.sink),
        part_acc,
        part_ml,
        plan.reductions,
        *call.out.stride()[:2],
        *call.lse.stride(),
        call.stride_sink_t,
        **dims,
        BLOCK_M=config.block_m,
        PARTS=16,
        **grouping,
        num_warps=2,
    )
