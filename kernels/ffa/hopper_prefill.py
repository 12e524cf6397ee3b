"""Prefill on Hopper in Gluon: a TMA producer warp and one to three consumer warp-groups of 64 rows.

A program walks work units, each an item for one query head, which an atomic queue hands out:
programs stay in step, so that keys and values larger than L2 are read from memory about once. The
last program to end leaves the queue at zero. The
producer brings q and, by separate rings, K and V blocks (one 2-D TMA box per page). A consumer
keeps QK of the next block in flight during the softmax and PV of the last; its running maximum
follows lazily (only growth beyond 2^8 rescales the accumulator), exact after normalisation.

V rows that no row of the tile may read (past the sequence's end, left of a window) are zeroed in
shared memory before use: probabilities there are 0, but what is stored may be NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.counters import counter
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
    tma_load,
    turn,
    work_unit,
    write_item,
    write_number,
)
from magi_serve.kernels.ffa.hopper_convert import q_as_fp16
from magi_serve.kernels.ffa.hopper_operands import LAZY_GROWTH, descriptor, kv_operands
from magi_serve.kernels.ffa.plan import ROW, Plan


@gluon.jit
def produce(q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full,
    k_empty, v_full, v_empty,
              queue_ptr, items_ptr, bands_ptr, page_table_ptr, num_items, num_q_heads,
              stride_pages, page_rows, head_rows,
              D: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
              STAGES: gl.constexpr, PAGE: gl.constexpr,
              GROUPS: gl.constexpr, head_columns, head_major,
              Q_STAGES: gl.constexpr,
              COLUMNS: gl.constexpr):  # fmt: skip
    num_units = num_items * num_q_heads
    fetched = 0
    handed = 0
    unit = gl.program_id(0)
    while unit < num_units:
        item, head = work_unit(unit, num_items, num_q_heads, head_major)
        q_begin, q_len, band_begin, band_end, item_k_begin, item_k_end = load_item(
            items_ptr + item * COLUMNS
        )
        k_begin, k_end, lo, hi, seq = load_band(bands_ptr, band_begin, band_end, COLUMNS)
        for _ in range(gl.minimum(q_len, 1)):
            slot = handed % Q_STAGES
            mbarrier.wait(q_empty.index(slot), ((handed // Q_STAGES) & 1) ^ 1)
            write_item(
                item_smem, handed % (Q_STAGES + 1) * ITEM_NUMBERS, head, q_begin, q_len, band_begin,
                band_end, item_k_begin, item_k_end, k_begin, k_end, lo, hi, 1)  # fmt: skip
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes * CONSUMERS)
            for w in gl.static_range(CONSUMERS):
                tma_load(
                    q_desc,
                    [q_begin + w * 64, head * D],
                    q_full.index(slot),
                    q_smem.index(slot * CONSUMERS + w),
                )
            handed += 1
            fetched = fetch_item(
                k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, bands_ptr,
                page_table_ptr, fetched, q_begin, q_len, band_begin, band_end, item_k_begin,
                item_k_end, k_begin, k_end, lo, hi, seq, head // GROUPS, stride_pages, page_rows,
                head_rows, head_columns, STAGES, PAGE, BLOCK_N, COLUMNS)  # fmt: skip
        unit = gl.atomic_add(queue_ptr, 1) + gl.num_programs(0)  # hidden behind blocks in flight
    slot = handed % Q_STAGES
    mbarrier.wait(q_empty.index(slot), ((handed // Q_STAGES) & 1) ^ 1)
    write_number(item_smem, handed % (Q_STAGES + 1) * ITEM_NUMBERS, -1, 1)  # the end
    mbarrier.arrive(q_full.index(slot), count=1)
    if gl.atomic_add(queue_ptr + 1, 1) == gl.num_programs(0) - 1:  # zeros for the next launch
        gl.store(queue_ptr, 0)
        gl.store(queue_ptr + 1, 0)


@gluon.jit
def consume(q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
              out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr, items_ptr,
              bands_ptr, num_items, num_q_heads,
              stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, stride_ks_h, stride_vs_h,
              logit_scale, softcap,
              QUANTISED: gl.constexpr, SCALED: gl.constexpr, GROUPS: gl.constexpr,
              D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
              BELOW: gl.constexpr, HAS_SINK: gl.constexpr, SOFTCAP: gl.constexpr,
              MAX_LOGITS: gl.constexpr, TURNS: gl.constexpr,
              Q_IN_REGISTERS: gl.constexpr, LAZY: gl.constexpr, head_major,
              Q_STAGES: gl.constexpr,
              COLUMNS: gl.constexpr, CONSUMERS: gl.constexpr,
              WARP_GROUP: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = gl.float16 if QUANTISED else q_smem.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    Q: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    lane = gl.arange(0, 64, layout=ROWS)
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
    taken = 0
    handed = 0
    if TURNS and WARP_GROUP == CONSUMERS - 1:
        turn(handed, 0, False)  # the first turn is the first warp-group's
    mbarrier.wait(q_full.index(0), 0)
    while read_number(item_smem, handed % (Q_STAGES + 1) * ITEM_NUMBERS, 4) >= 0:
        item_at = handed % (Q_STAGES + 1) * ITEM_NUMBERS
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        acc = gl.zeros([64, D], gl.float32, ACC)
        total = lane_sum(gl.zeros([64, BLOCK_N], gl.float32, S), BLOCK_N)
        slot = handed % Q_STAGES
        if Q_IN_REGISTERS:
            q = q_smem.index(slot * CONSUMERS + WARP_GROUP).load(Q)
            mbarrier.arrive(q_empty.index(slot), count=1)
        else:
            q = q_smem.index(slot * CONSUMERS + WARP_GROUP)
        item_scale = logit_scale
        if QUANTISED and q.dtype == gl.bfloat16:
            q16, unit = q_as_fp16(q.load(STORE))
            q = q._reinterpret(gl.float16, [64, D], q.layout)
            q.store(q16)
            fence_async_shared()
            thread_barrier()
            item_scale *= unit
        if SCALED:
            kv_head = read_number(item_smem, item_at, 4) // GROUPS
            item_scale *= gl.load(k_scale_ptr + kv_head * stride_ks_h)
        acc, m, total, taken = attend_item(
            acc, m, total, taken, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, bands_ptr,
            item_smem, item_at, WARP_GROUP * 64 + lane, column, item_scale, softcap, PAGE, BELOW,
            SOFTCAP, STAGES, TURNS, S, ACC, P, dtype, D, BLOCK_N, LAZY, WARP_GROUP, CONSUMERS,
            COLUMNS)  # fmt: skip
        if not Q_IN_REGISTERS:
            mbarrier.arrive(q_empty.index(slot), count=1)

        # Finish: max-logit, sink, lse, normalisation. What it needs is read again rather than kept.
        item_at = handed % (Q_STAGES + 1) * ITEM_NUMBERS
        head = read_number(item_smem, item_at, 4)
        q_begin = read_number(item_smem, item_at + 1, 4)
        q_len = read_number(item_smem, item_at + 2, 4)
        row = q_begin + WARP_GROUP * 64 + lane
        total_row = gl.convert_layout(gl.sum(total, axis=1), ROWS)
        valid = WARP_GROUP * 64 + lane < q_len
        if MAX_LOGITS:
            top = gl.max(gl.where(valid, m, float("-inf")), axis=0)
            gl.atomic_max(max_logits_ptr + head, top * LN2)
        token = row.to(gl.int64)
        sink = 0.0
        if HAS_SINK:
            sink = gl.load(sink_ptr + token * stride_sink_t + head, mask=valid, other=0.0) * LOG2E
        scale, lse = normalise(m, total_row, sink, HAS_SINK)
        gl.store(lse_ptr + token * stride_lse_t + head, lse, mask=valid)
        if SCALED:
            scale *= gl.load(v_scale_ptr + head // GROUPS * stride_vs_h)
        out = acc * gl.expand_dims(gl.convert_layout(scale, OUT_ROWS), 1)
        out = out.to(out_ptr.dtype.element_ty)
        # Through shared memory, so that each thread stores whole 16-byte pieces of a row.
        store_row = WARP_GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE))
        store_column = gl.arange(0, D, layout=gl.SliceLayout(0, STORE))
        out_row = out_ptr + (q_begin + store_row).to(gl.int64) * stride_o_t + head * stride_o_h
        out_at = gl.expand_dims(out_row, 1) + gl.expand_dims(store_column, 0)
        gl.store(out_at, gl.convert_layout(out, STORE), mask=gl.expand_dims(store_row < q_len, 1))
        handed += 1
        mbarrier.wait(q_full.index(handed % Q_STAGES), (handed // Q_STAGES) & 1)


@gluon.jit(
    do_not_specialize=[
        "head_major",
        "num_items",
        "stride_pages",
        "stride_sink_t",
        "page_rows",
        "head_rows",
        "head_columns",
    ]
)
def _hopper_prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, queue_ptr, items_ptr,
    bands_ptr, page_table_ptr,
    num_items, num_q_heads, stride_pages, page_rows, head_rows, stride_o_t, stride_o_h,
    stride_lse_t, stride_sink_t,
    logit_scale, softcap,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    PAGE: gl.constexpr,
    GROUPS: gl.constexpr, head_columns, BELOW: gl.constexpr, HAS_SINK: gl.constexpr,
    SOFTCAP: gl.constexpr,
    MAX_LOGITS: gl.constexpr, TURNS: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, LAZY: gl.constexpr,
    head_major, Q_STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, 64, D], SWIZZLED)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SWIZZLED)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], SWIZZLED)
    # One more than Q_STAGES: an item's numbers are read until its output is stored.
    item_smem = gl.allocate_shared_memory(
        gl.int32, [(Q_STAGES + 1) * ITEM_NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    # Written out: arguments kept in a tuple would no longer be constants.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (
                q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty,
                out_ptr, lse_ptr, max_logits_ptr, sink_ptr, 0, 0, items_ptr, bands_ptr, num_items,
                num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, 0, 0,
                logit_scale, softcap, False, False, GROUPS,
                D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS,
                Q_IN_REGISTERS, LAZY,
                head_major, Q_STAGES, COLUMNS, CONSUMERS, 0)),
            (produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, queue_ptr, items_ptr, bands_ptr, page_table_ptr,
                num_items,
                num_q_heads, stride_pages, page_rows, head_rows, D, CONSUMERS, BLOCK_N, STAGES,
                PAGE,
                GROUPS, head_columns, head_major, Q_STAGES, COLUMNS)),
        ], [1], [PRODUCER_REGISTERS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty,
                out_ptr, lse_ptr, max_logits_ptr, sink_ptr, 0, 0, items_ptr, bands_ptr, num_items,
                num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, 0, 0,
                logit_scale, softcap, False, False, GROUPS,
                D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS,
                Q_IN_REGISTERS, LAZY,
                head_major, Q_STAGES, COLUMNS, CONSUMERS, 0)),
            (consume, (
                q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty,
                out_ptr, lse_ptr, max_logits_ptr, sink_ptr, 0, 0, items_ptr, bands_ptr, num_items,
                num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, 0, 0,
                logit_scale, softcap, False, False, GROUPS,
                D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS,
                Q_IN_REGISTERS, LAZY,
                head_major, Q_STAGES, COLUMNS, CONSUMERS, 1)),
            (produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, queue_ptr, items_ptr, bands_ptr, page_table_ptr,
                num_items,
                num_q_heads, stride_pages, page_rows, head_rows, D, CONSUMERS, BLOCK_N, STAGES,
                PAGE,
                GROUPS, head_columns, head_major, Q_STAGES, COLUMNS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty,
                out_ptr, lse_ptr, max_logits_ptr, sink_ptr, 0, 0, items_ptr, bands_ptr, num_items,
                num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, 0, 0,
                logit_scale, softcap, False, False, GROUPS,
                D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS,
                Q_IN_REGISTERS, LAZY,
                head_major, Q_STAGES, COLUMNS, CONSUMERS, 0)),
            (consume, (
                q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty,
                out_ptr, lse_ptr, max_logits_ptr, sink_ptr, 0, 0, items_ptr, bands_ptr, num_items,
                num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, 0, 0,
                logit_scale, softcap, False, False, GROUPS,
                D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS,
                Q_IN_REGISTERS, LAZY,
                head_major, Q_STAGES, COLUMNS, CONSUMERS, 1)),
            (consume, (
                q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                v_empty,
                out_ptr, lse_ptr, max_logits_ptr, sink_ptr, 0, 0, items_ptr, bands_ptr, num_items,
                num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, 0, 0,
                logit_scale, softcap, False, False, GROUPS,
                D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS,
                Q_IN_REGISTERS, LAZY,
                head_major, Q_STAGES, COLUMNS, CONSUMERS, 2)),
            (produce, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full,
                k_empty, v_full, v_empty, queue_ptr, items_ptr, bands_ptr, page_table_ptr,
                num_items,
                num_q_heads, stride_pages, page_rows, head_rows, D, CONSUMERS, BLOCK_N, STAGES,
                PAGE,
                GROUPS, head_columns, head_major, Q_STAGES, COLUMNS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def _registers(consumers: int, programs_per_sm: int, boxes: int) -> tuple[int, int, int]:
    """Registers of a consumer thread, of a producer thread, and per thread at launch.

    Triton gives every warp the launch count, then moves registers between warp-groups: what
    consumers gain, the producer's group must hold. A producer that tracks many pages needs more.
    """
    many = boxes > 2
    if consumers == 2:
        return (232, 40, 168) if many else (240, 24, 168)
    if consumers == 3:
        return 160, 32, 128
    if programs_per_sm == 3:
        return 136, 24, 80
    return (216, 40, 128) if many else (232, 24, 128)


def run_part(call: AttentionCall, plan: Plan) -> None:
    """Launch one part of `call`: prefill items, tiles of whole warp-groups, keys not split."""
    config = plan.config
    q = call.q
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = call.k.shape[-2]
    consumers = config.block_m // 64
    block_n = config.block_n
    kv = kv_operands(call, block_n)
    q_columns = (num_q_heads - 1) * q.stride(1) + head_dim
    consumer_registers, producer_registers, launch_registers = _registers(
        consumers, config.programs_per_sm, kv.boxes
    )
    num_items = plan.items.shape[0]
    assert q.stride(1) == head_dim
    _hopper_prefill_kernel[(min(config.programs, num_items * num_q_heads),)](
        descriptor(q, num_tokens, q_columns, q.stride(0), [64, head_dim]),
        kv.k,
        kv.v,
        call.out,
        call.lse,
        call.pointer(call.max_logits),
        call.pointer(call.sink),
        counter(q.device),
        plan.items,
        plan.bands,
        plan.items if call.page_table is None else call.page_table,
        num_items,
        num_q_heads,
        0 if call.page_table is None else call.page_table.stride(0),
        kv.page_rows,
        kv.head_rows,
        *call.out.stride()[:2],
        call.lse.stride(0),
        call.stride_sink_t,
        call.logit_scale,
        call.softcap,
        D=head_dim,
        BLOCK_N=block_n,
        STAGES=config.num_stages,
        CONSUMERS=consumers,
        PAGE=kv.page_size,
        GROUPS=num_q_heads // num_kv_heads,
        head_columns=kv.head_columns,
        BELOW=plan.bounded_below,
        HAS_SINK=call.sink is not None,
        SOFTCAP=call.softcap > 0,
        MAX_LOGITS=call.max_logits is not None,
        # Two warp-groups keep out of each other's way by themselves where pages slow the producer.
        TURNS=consumers == 3 or (consumers == 2 and kv.page_size == 0),
        Q_IN_REGISTERS=head_dim == 128 and consumers == 2 and not plan.bounded_below,
        LAZY=0 if call.max_logits is not None else LAZY_GROWTH,
        head_major=int(plan.head_major),
        Q_STAGES=2 if consumers == 1 else 1,
        COLUMNS=ROW,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers,
        num_warps=4,
        maxnreg=launch_registers,
    )
