"""Decode and short extends on Hopper in Gluon, in one launch: a TMA producer warp and a consumer
warp-group.

A program takes one item for the query heads of one kv head, packed into the 64 rows of a matrix
instruction. Where keys are split, it leaves its softmax state in a workspace and counts itself in;
the last program of a tile puts the states together, in the order of the shares, so that the result
does not depend on which was last. It also sets the counter back to zero, for the next launch.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.hopper_blocks import (
    ITEM_NUMBERS,
    LN2,
    LOG2E,
    attend_item,
    fetch_item,
    lane_sum,
    load_band,
    load_item,
    normalise,
    read_number,
    thread_barrier,
    write_item,
)
from magi_serve.kernels.ffa.hopper_operands import LAZY_GROWTH, kv_operands
from magi_serve.kernels.ffa.plan import ROW, Plan, head_blocks

PARTS = 16
"""Shares whose states are read at once."""

LAUNCH_REGISTERS = {1: 168, 2: 128, 3: 80, 4: 64}
"""Per thread at launch, by programs per multiprocessor; consumers get what the producer leaves."""


@gluon.jit
def fetch(k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items_ptr,
              bands_ptr, page_table_ptr, stride_pages, page_rows, head_rows, head_columns,
              BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
              GROUP_CHUNKS: gl.constexpr, HEAD_BLOCKS: gl.constexpr,
              COLUMNS: gl.constexpr):  # fmt: skip
    item_ptr = items_ptr + gl.program_id(0) // HEAD_BLOCKS * COLUMNS
    q_begin, q_len, band_begin, band_end, item_k_begin, item_k_end = load_item(item_ptr)
    for _ in range(gl.minimum(q_len, 1)):
        k_begin, k_end, lo, hi, seq = load_band(bands_ptr, band_begin, band_end, COLUMNS)
        kv_head = gl.program_id(0) % HEAD_BLOCKS // GROUP_CHUNKS
        fetch_item(
            k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, bands_ptr,
            page_table_ptr, gl.to_tensor(0), q_begin, q_len, band_begin, band_end, item_k_begin,
            item_k_end, k_begin, k_end, lo, hi, seq, kv_head, stride_pages, page_rows, head_rows,
            head_columns, STAGES, PAGE, BLOCK_N, COLUMNS)  # fmt: skip


@gluon.jit
def matrix_rows(matrix_row, q_begin, q_len, head_block, GROUPS: gl.constexpr,
                 GROUP_ROWS: gl.constexpr, GROUP_CHUNKS: gl.constexpr):  # fmt: skip
    """Token and query head of matrix rows, and which there are."""
    in_group = head_block % GROUP_CHUNKS * GROUP_ROWS + matrix_row % GROUP_ROWS
    tile_row = matrix_row // GROUP_ROWS
    token = (q_begin + tile_row).to(gl.int64)
    head = head_block // GROUP_CHUNKS * GROUPS + in_group
    return token, head, (tile_row < q_len) & (in_group < GROUPS)


@gluon.jit
def reduce_tile(
    out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_ml_ptr, q_begin, q_len, first_item, num_items,
    head_block, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
    D: gl.constexpr, BLOCK_M: gl.constexpr, HAS_SINK: gl.constexpr, GROUPS: gl.constexpr,
    GROUP_ROWS: gl.constexpr, GROUP_CHUNKS: gl.constexpr, HEAD_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Put the states of a split tile together, a few matrix rows and PARTS shares at a time."""
    ROWS: gl.constexpr = 8 if D == 64 else 4
    AT_ONCE: gl.constexpr = PARTS * 128 // D if D > 128 else PARTS
    PARTIAL: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 2 if D == 64 else 1, 16 if D == 64 else 32], [1, 4, 1], [2, 1, 0]
    )
    STATE: gl.constexpr = gl.SliceLayout(2, PARTIAL)  # [share, row]
    ROW: gl.constexpr = gl.SliceLayout(0, STATE)
    SUM: gl.constexpr = gl.SliceLayout(0, PARTIAL)  # [row, column]
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, SUM)
    share = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, STATE))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, SUM))
    for first_row in range(0, q_len * GROUP_ROWS, ROWS):
        matrix_row = first_row + gl.arange(0, ROWS, layout=ROW)
        token, head, valid = matrix_rows(
            matrix_row, q_begin, q_len, head_block, GROUPS, GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, SUM)
        for i in range(0, num_items, AT_ONCE):
            part = (first_item + i + share).to(gl.int64) * HEAD_BLOCKS + head_block
            there = gl.expand_dims(i + share < num_items, 1) & gl.expand_dims(valid, 0)
            at = gl.expand_dims(part * BLOCK_M, 1) + gl.expand_dims(matrix_row, 0)
            ml_ptr = part_ml_ptr + at * 2
            part_m = gl.load(ml_ptr, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_total = gl.load(ml_ptr + 1, mask=there, other=0.0, cache_modifier=".cg")
            acc_at = gl.expand_dims(at * D, 2) + gl.expand_dims(gl.expand_dims(column, 0), 0)
            part_acc = gl.load(
                part_acc_ptr + acc_at, mask=gl.expand_dims(there, 2), other=0.0,
                cache_modifier=".cg")  # fmt: skip
            m_new = gl.maximum(m, gl.max(part_m, axis=0))
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            weight = gl.exp2(part_m - gl.expand_dims(shift, 0))
            decay = gl.exp2(m - shift)
            total = total * decay + gl.sum(weight * part_total, axis=0)
            acc_decay = gl.expand_dims(gl.convert_layout(decay, OUT_ROW), 1)
            acc = acc * acc_decay + gl.sum(gl.expand_dims(weight, 2) * part_acc, axis=0)
            m = m_new
        sink = 0.0
        if HAS_SINK:
            sink = gl.load(sink_ptr + token * stride_sink_t + head, mask=valid, other=0.0) * LOG2E
        scale, lse = normalise(m, total, sink, HAS_SINK)
        gl.store(lse_ptr + token * stride_lse_t + head, lse, mask=valid)
        out = (acc * gl.expand_dims(gl.convert_layout(scale, OUT_ROW), 1)).to(dtype)
        out_at = gl.convert_layout(token * stride_o_t + head * stride_o_h, OUT_ROW)
        stored = gl.expand_dims(gl.convert_layout(valid, OUT_ROW), 1)
        gl.store(out_ptr + gl.expand_dims(out_at, 1) + gl.expand_dims(column, 0), out, mask=stored)


@gluon.jit
def _consumer(q_smem, item_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
              q_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, part_acc_ptr, part_ml_ptr,
              arrived_ptr, items_ptr, reductions_ptr, bands_ptr,
              stride_q_t, stride_q_h, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
              logit_scale, softcap,
              D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
              GROUPS: gl.constexpr, GROUP_ROWS: gl.constexpr, GROUP_CHUNKS: gl.constexpr,
              HEAD_BLOCKS: gl.constexpr, BELOW: gl.constexpr, HAS_SINK: gl.constexpr,
              SOFTCAP: gl.constexpr, MAX_LOGITS: gl.constexpr, SPLIT: gl.constexpr,
              LAZY: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = q_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    item = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    item_ptr = items_ptr + item * COLUMNS
    q_begin, q_len, band_begin, band_end, item_k_begin, item_k_end = load_item(item_ptr)
    for _ in range(gl.minimum(q_len, 1)):
        k_begin, k_end, lo, hi, _seq = load_band(bands_ptr, band_begin, band_end, COLUMNS)
        write_item(
            item_smem, 0, head_block, q_begin, q_len, band_begin, band_end, item_k_begin,
            item_k_end, k_begin, k_end, lo, hi, 4)  # fmt: skip
        token, head, valid = matrix_rows(
            gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD)), q_begin, q_len, head_block, GROUPS,
            GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        q_at = q_ptr + token * stride_q_t + head * stride_q_h
        column = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
        q = gl.load(
            gl.expand_dims(q_at, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(valid, 1),
            other=0.0)  # fmt: skip
        q_smem.store(q)
        fence_async_shared()
        thread_barrier()
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        acc = gl.zeros([64, D], gl.float32, ACC)
        total = lane_sum(gl.zeros([64, BLOCK_N], gl.float32, S), BLOCK_N)
        acc, m, total, _taken = attend_item(
            acc, m, total, gl.to_tensor(0), q_smem, k_smem, v_smem, k_full, k_empty, v_full,
            v_empty, bands_ptr, item_smem, 0, gl.arange(0, 64, layout=ROWS) // GROUP_ROWS,
            gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S)), logit_scale, softcap, PAGE, BELOW,
            SOFTCAP, STAGES, False, S, ACC, P, dtype, D, BLOCK_N, LAZY, 0, 1, COLUMNS)  # fmt: skip

        q_begin = read_number(item_smem, 1, 4)
        q_len = read_number(item_smem, 2, 4)
        split_tile = gl.load(item_ptr + 6)
        total_row = gl.convert_layout(gl.sum(total, axis=1), ROWS)
        matrix_row = gl.arange(0, 64, layout=ROWS)
        token, head, valid = matrix_rows(
            matrix_row, q_begin, q_len, head_block, GROUPS, GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        out_row = gl.arange(0, 64, layout=OUT_ROWS)
        out_token, out_head, out_valid = matrix_rows(
            out_row, q_begin, q_len, head_block, GROUPS, GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        out_column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ACC)), 0)
        if MAX_LOGITS:
            gl.atomic_max(max_logits_ptr + head, m * LN2, mask=valid)
        if SPLIT:
            # Predicated: no branch may hold stores in the layouts of matrix instructions.
            kept = valid & (split_tile > 0)
            part = (item.to(gl.int64) * HEAD_BLOCKS + head_block) * 64
            ml_ptr = part_ml_ptr + (part + matrix_row) * 2
            gl.store(ml_ptr, m, mask=kept)
            gl.store(ml_ptr + 1, total_row, mask=kept)
            acc_ptr = part_acc_ptr + gl.expand_dims((part + out_row) * D, 1) + out_column
            gl.store(acc_ptr, acc, mask=gl.expand_dims(out_valid & (split_tile > 0), 1))
            thread_barrier()  # all of the state lies there before one thread counts it in
            for _part in range(gl.minimum(split_tile, 1)):
                reduction_ptr = reductions_ptr + (split_tile - 1) * COLUMNS
                first_item = gl.load(reduction_ptr + 2)
                num_items = gl.load(reduction_ptr + 3)
                counter_ptr = arrived_ptr + (split_tile - 1) * HEAD_BLOCKS + head_block
                earlier = gl.atomic_add(counter_ptr, 1, sem="acq_rel")
                for _last in range((earlier == num_items - 1).to(gl.int32)):
                    gl.store(counter_ptr, 0)
                    reduce_tile(
                        out_ptr, lse_ptr, sink_ptr, part_acc_ptr, part_ml_ptr, q_begin, q_len,
                        first_item, num_items, head_block, stride_o_t, stride_o_h, stride_lse_t,
                        stride_sink_t, D, 64, HAS_SINK, GROUPS, GROUP_ROWS, GROUP_CHUNKS,
                        HEAD_BLOCKS, PARTS, dtype)  # fmt: skip
            valid = valid & (split_tile == 0)
            out_valid = out_valid & (split_tile == 0)
        sink = 0.0
        if HAS_SINK:
            sink = gl.load(sink_ptr + token * stride_sink_t + head, mask=valid, other=0.0) * LOG2E
        scale, lse = normalise(m, total_row, sink, HAS_SINK)
        gl.store(lse_ptr + token * stride_lse_t + head, lse, mask=valid)
        out = (acc * gl.expand_dims(gl.convert_layout(scale, OUT_ROWS), 1)).to(dtype)
        out_at = out_ptr + out_token * stride_o_t + out_head * stride_o_h
        gl.store(gl.expand_dims(out_at, 1) + out_column, out, mask=gl.expand_dims(out_valid, 1))


@gluon.jit(
    do_not_specialize=["stride_pages", "stride_sink_t", "page_rows", "head_rows", "head_columns"]
)
def _hopper_decode_kernel(
    k_desc, v_desc, q_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, part_acc_ptr, part_ml_ptr,
    arrived_ptr, items_ptr, reductions_ptr, bands_ptr, page_table_ptr,
    stride_pages, page_rows, head_rows, head_columns,
    stride_q_t, stride_q_h, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
    logit_scale, softcap,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    GROUPS: gl.constexpr, GROUP_ROWS: gl.constexpr, GROUP_CHUNKS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, BELOW: gl.constexpr, HAS_SINK: gl.constexpr,
    SOFTCAP: gl.constexpr, MAX_LOGITS: gl.constexpr, SPLIT: gl.constexpr, LAZY: gl.constexpr,
    PARTS: gl.constexpr, COLUMNS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [64, D], SWIZZLED)
    item_smem = gl.allocate_shared_memory(
        gl.int32, [ITEM_NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SWIZZLED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SWIZZLED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (
            q_smem, item_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            q_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, part_acc_ptr, part_ml_ptr,
            arrived_ptr, items_ptr, reductions_ptr, bands_ptr,
            stride_q_t, stride_q_h, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
            logit_scale, softcap,
            D, BLOCK_N, STAGES, PAGE, GROUPS, GROUP_ROWS, GROUP_CHUNKS, HEAD_BLOCKS, BELOW,
            HAS_SINK, SOFTCAP, MAX_LOGITS, SPLIT, LAZY, PARTS, COLUMNS)),
        (fetch, (
            k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items_ptr,
            bands_ptr, page_table_ptr, stride_pages, page_rows, head_rows, head_columns,
            BLOCK_N, STAGES, PAGE, GROUP_CHUNKS, HEAD_BLOCKS, COLUMNS)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def workspace(call: AttentionCall, plan: Plan, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where programs of a split part leave accumulators, maxima and sums, and count themselves."""
    if plan.reductions is None:
        return call.lse, call.lse, plan.items
    device = call.q.device
    rows = plan.items.shape[0] * heads * plan.config.block_m
    part_acc = torch.empty(rows * call.v.shape[-1], dtype=torch.float32, device=device)
    part_ml = torch.empty(rows * 2, dtype=torch.float32, device=device)
    arrived = plan.counters
    if arrived is None:
        arrived = torch.zeros(plan.reductions.shape[0] * heads, dtype=torch.int32, device=device)
    return part_acc, part_ml, arrived


def run_part(call: AttentionCall, plan: Plan) -> None:
    """Launch one part of `call`: decode items, tiles of 64 packed rows, keys split or not."""
    config = plan.config
    q = call.q
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = call.k.shape[-2]
    groups = num_q_heads // num_kv_heads
    group_rows = config.group_rows(groups)
    heads = head_blocks(num_q_heads, num_kv_heads, config)
    kv = kv_operands(call, config.block_n)
    part_acc, part_ml, arrived = workspace(call, plan, heads)
    _hopper_decode_kernel[(plan.items.shape[0] * heads,)](
        kv.k,
        kv.v,
        q,
        call.out,
        call.lse,
        call.pointer(call.max_logits),
        call.pointer(call.sink),
        part_acc,
        part_ml,
        arrived,
        plan.items,
        plan.items if plan.reductions is None else plan.reductions,
        plan.bands,
        plan.items if call.page_table is None else call.page_table,
        0 if call.page_table is None else call.page_table.stride(0),
        kv.page_rows,
        kv.head_rows,
        kv.head_columns,
        *q.stride()[:2],
        *call.out.stride()[:2],
        call.lse.stride(0),
        call.stride_sink_t,
        call.logit_scale,
        call.softcap,
        D=head_dim,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        PAGE=kv.page_size,
        GROUPS=groups,
        GROUP_ROWS=group_rows,
        GROUP_CHUNKS=heads // num_kv_heads,
        HEAD_BLOCKS=heads,
        BELOW=plan.bounded_below,
        HAS_SINK=call.sink is not None,
        SOFTCAP=call.softcap > 0,
        MAX_LOGITS=call.max_logits is not None,
        SPLIT=plan.reductions is not None,
        LAZY=0 if call.max_logits is not None else LAZY_GROWTH,
        PARTS=PARTS,
        COLUMNS=ROW,
        PRODUCER_REGISTERS=40 if kv.boxes > 2 else 24,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[config.programs_per_sm],
    )
