"""Prefill over a quantised cache on Hopper in Gluon: `hopper_prefill` with converting warps.

The producer brings K and V blocks of 8-bit numbers by rings of their own; converting warps write
them as fp16 into the rings that the consumers read. These turn their rows of q into fp16 as well,
and are else the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.counters import counter
from magi_serve.kernels.ffa.hopper_blocks import ITEM_NUMBERS, cut_band, load_band, read_number
from magi_serve.kernels.ffa.hopper_convert import KINDS, to_fp16
from magi_serve.kernels.ffa.hopper_operands import LAZY_GROWTH, descriptor, kv_operands
from magi_serve.kernels.ffa.hopper_prefill import consume, produce
from magi_serve.kernels.ffa.plan import ROW, Plan
from magi_serve.kernels.paged.triton_store import scale_strides
from magi_serve.types import scale_kind


@gluon.jit
def _convert_block(raw, raw_full, raw_empty, block, full, empty, done, KIND: gl.constexpr,
                   RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
                   BLOCK_N: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Block number `done` from the ring `raw` into the ring `block`."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [WARPS, 1], [1, 0])
    AT_ONCE: gl.constexpr = WARPS * 1024 // D  # 32 numbers per thread
    slot = done % RAW_STAGES
    stage = done % STAGES
    mbarrier.wait(raw_full.index(slot), (done // RAW_STAGES) & 1)
    mbarrier.wait(empty.index(stage), ((done // STAGES) & 1) ^ 1)
    for i in gl.static_range(BLOCK_N // AT_ONCE):
        x = raw.index(slot).slice(i * AT_ONCE, AT_ONCE, dim=0).load(ROWS)
        block.index(stage).slice(i * AT_ONCE, AT_ONCE, dim=0).store(to_fp16(x, KIND))
    fence_async_shared()
    mbarrier.arrive(raw_empty.index(slot), count=1)
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _convert(k_raw, v_raw, k_smem, v_smem, item_smem, q_full, q_empty, k_raw_full, k_raw_empty,
             v_raw_full, v_raw_empty, k_full, k_empty, v_full, v_empty, bands_ptr,
             KIND: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
             RAW_STAGES: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
             Q_STAGES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Walks the items as a consumer does, and converts all their blocks."""
    done = 0
    handed = 0
    mbarrier.wait(q_full.index(0), 0)
    while read_number(item_smem, handed % (Q_STAGES + 1) * ITEM_NUMBERS, WARPS) >= 0:
        item_at = handed % (Q_STAGES + 1) * ITEM_NUMBERS
        q_begin = read_number(item_smem, item_at + 1, WARPS)
        q_len = read_number(item_smem, item_at + 2, WARPS)
        band_begin = read_number(item_smem, item_at + 3, WARPS)
        band_end = read_number(item_smem, item_at + 4, WARPS)
        item_k_begin = read_number(item_smem, item_at + 5, WARPS)
        item_k_end = read_number(item_smem, item_at + 6, WARPS)
        mbarrier.arrive(q_empty.index(handed % Q_STAGES), count=1)
        for number in range(band_begin, band_end):
            band_k_begin, band_k_end, lo, hi, _seq = load_band(bands_ptr, number, band_end, COLUMNS)
            (base, k_begin, k_end, seen_begin, seen_end, block_begin, block_end, full_begin,
             full_end) = cut_band(
                band_k_begin, band_k_end, lo, hi, item_k_begin, item_k_end, q_begin, q_len, PAGE,
                BLOCK_N)  # fmt: skip
            for _block in range(block_end - block_begin):
                _convert_block(
                    k_raw, k_raw_full, k_raw_empty, k_smem, k_full, k_empty, done, KIND, RAW_STAGES,
                    STAGES, D, BLOCK_N, WARPS)  # fmt: skip
                _convert_block(
                    v_raw, v_raw_full, v_raw_empty, v_smem, v_full, v_empty, done, KIND, RAW_STAGES,
                    STAGES, D, BLOCK_N, WARPS)  # fmt: skip
                done += 1
        handed += 1
        mbarrier.wait(q_full.index(handed % Q_STAGES), (handed // Q_STAGES) & 1)


@gluon.jit(
    do_not_specialize=[
        "head_major", "num_items", "stride_pages", "stride_sink_t", "page_rows", "head_rows",
        "head_columns", "stride_ks_h", "stride_vs_h",
    ]
)  # fmt: skip
def _hopper_quantised_prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    queue_ptr, items_ptr, bands_ptr, page_table_ptr,
    num_items, num_q_heads, stride_pages, page_rows, head_rows, head_columns,
    stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, stride_ks_h, stride_vs_h,
    logit_scale, softcap, head_major,
    KIND: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    RAW_STAGES: gl.constexpr, PAGE: gl.constexpr, GROUPS: gl.constexpr, BELOW: gl.constexpr,
    HAS_SINK: gl.constexpr, SOFTCAP: gl.constexpr, MAX_LOGITS: gl.constexpr, SCALED: gl.constexpr,
    TURNS: gl.constexpr, LAZY: gl.constexpr, Q_STAGES: gl.constexpr, COLUMNS: gl.constexpr,
    WARPS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, WARP_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [Q_STAGES * 2, 64, D], SWIZZLED)
    k_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D], SWIZZLED)
    v_smem = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, D], SWIZZLED)
    k_raw = gl.allocate_shared_memory(k_desc.dtype, [RAW_STAGES, BLOCK_N, D], k_desc.layout)
    v_raw = gl.allocate_shared_memory(v_desc.dtype, [RAW_STAGES, BLOCK_N, D], v_desc.layout)
    item_smem = gl.allocate_shared_memory(
        gl.int32, [(Q_STAGES + 1) * ITEM_NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], BARRIER)
    k_raw_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], BARRIER)
    v_raw_full = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], BARRIER)
    v_raw_empty = gl.allocate_shared_memory(gl.int64, [RAW_STAGES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=3)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(RAW_STAGES):
        mbarrier.init(k_raw_full.index(i), count=1)
        mbarrier.init(k_raw_empty.index(i), count=1)
        mbarrier.init(v_raw_full.index(i), count=1)
        mbarrier.init(v_raw_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consume, (
            q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr, items_ptr,
            bands_ptr, num_items, num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
            stride_ks_h, stride_vs_h, logit_scale, softcap, True, SCALED, GROUPS,
            D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS, False, LAZY,
            head_major, Q_STAGES, COLUMNS, 2, 0)),
        (consume, (
            q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr, items_ptr,
            bands_ptr, num_items, num_q_heads, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
            stride_ks_h, stride_vs_h, logit_scale, softcap, True, SCALED, GROUPS,
            D, BLOCK_N, STAGES, PAGE, BELOW, HAS_SINK, SOFTCAP, MAX_LOGITS, TURNS, False, LAZY,
            head_major, Q_STAGES, COLUMNS, 2, 1)),
        (_convert, (
            k_raw, v_raw, k_smem, v_smem, item_smem, q_full, q_empty, k_raw_full, k_raw_empty,
            v_raw_full, v_raw_empty, k_full, k_empty, v_full, v_empty, bands_ptr, KIND, D, BLOCK_N,
            RAW_STAGES, STAGES, PAGE, Q_STAGES, COLUMNS, WARPS)),
        (produce, (
            q_desc, k_desc, v_desc, q_smem, k_raw, v_raw, item_smem, q_full, q_empty, k_raw_full,
            k_raw_empty, v_raw_full, v_raw_empty, queue_ptr, items_ptr, bands_ptr, page_table_ptr,
            num_items, num_q_heads, stride_pages, page_rows, head_rows, D, 2, BLOCK_N, RAW_STAGES,
            PAGE, GROUPS, head_columns, head_major, Q_STAGES, COLUMNS)),
    ], [4, WARPS, 1], [CONSUMER_REGISTERS, WARP_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


RAW_STAGES = {64: 2, 128: 1}
"""Blocks of K, and of V, on their way to conversion, by head dim: what shared memory leaves."""

WARPS = 4
"""Converting warps. Two of them, with more registers for the consumers, take 1.16x the time."""

CONSUMER_REGISTERS, WARP_REGISTERS, PRODUCER_REGISTERS, LAUNCH_REGISTERS = 208, 64, 32, 128
"""Per thread; a multiprocessor has 512 for the four warp-groups."""


def run_part(call: AttentionCall, plan: Plan) -> None:
    """Launch one part of `call`: prefill items over quantised pages, keys not split."""
    config = plan.config
    q = call.q
    num_tokens, num_q_heads, head_dim = q.shape
    kv = kv_operands(call, config.block_n)
    q_columns = (num_q_heads - 1) * q.stride(1) + head_dim
    num_items = plan.items.shape[0]
    assert config.block_m == 128 and q.stride(1) == head_dim
    _hopper_quantised_prefill_kernel[(min(config.programs, num_items * num_q_heads),)](
        descriptor(q, num_tokens, q_columns, q.stride(0), [64, head_dim]),
        kv.k,
        kv.v,
        call.out,
        call.lse,
        call.pointer(call.max_logits),
        call.pointer(call.sink),
        call.pointer(call.k_scale),
        call.pointer(call.v_scale),
        counter(q.device),
        plan.items,
        plan.bands,
        plan.items if call.page_table is None else call.page_table,
        num_items,
        num_q_heads,
        0 if call.page_table is None else call.page_table.stride(0),
        kv.page_rows,
        kv.head_rows,
        kv.head_columns,
        *call.out.stride()[:2],
        call.lse.stride(0),
        call.stride_sink_t,
        scale_strides(call.k_scale)[2],
        scale_strides(call.v_scale)[2],
        call.logit_scale,
        call.softcap,
        int(plan.head_major),
        KIND=KINDS.index(call.k.dtype),
        D=head_dim,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        RAW_STAGES=RAW_STAGES[head_dim],
        PAGE=kv.page_size,
        GROUPS=num_q_heads // call.k.shape[-2],
        BELOW=plan.bounded_below,
        HAS_SINK=call.sink is not None,
        SOFTCAP=call.softcap > 0,
        MAX_LOGITS=call.max_logits is not None,
        SCALED=scale_kind(call.k_scale) == "head",
        TURNS=False,
        LAZY=0 if call.max_logits is not None else LAZY_GROWTH,
        Q_STAGES=1,
        COLUMNS=ROW,
        WARPS=WARPS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        WARP_REGISTERS=WARP_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )
