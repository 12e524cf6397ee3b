"""Decode and short extends over a quantised cache on Hopper in Gluon, in one launch.

As `hopper_decode`, but with the matrices turned around: 8-bit keys and values become fp16 on their
way through registers, and an operand in registers must be the left one. So a program computes
``S' = K q'`` and ``out' = V' p'``, with keys, or columns of the head, as the 64 rows of a matrix
instruction, and the packed query rows as its few columns. Every byte of the cache is read from
shared memory once.

Which register holds what is chosen so that 8-bit numbers leave shared memory in runs without bank
conflicts: columns of the head are taken in another order, in q alike, and put back in the output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.hopper_blocks import (
    ITEM_NUMBERS,
    LN2,
    LOG2E,
    clean_values,
    cut_band,
    load_band,
    load_item,
    normalise,
    read_number,
    thread_barrier,
    write_item,
)
from magi_serve.kernels.ffa.hopper_convert import KINDS, q_as_fp16, to_fp16
from magi_serve.kernels.ffa.hopper_decode import (
    LAUNCH_REGISTERS,
    PARTS,
    fetch,
    matrix_rows,
    reduce_tile,
    workspace,
)
from magi_serve.kernels.ffa.hopper_operands import LAZY_GROWTH, kv_operands
from magi_serve.kernels.ffa.plan import ROW, Plan, head_blocks
from magi_serve.kernels.paged.triton_store import scale_strides
from magi_serve.types import scale_kind


def _log2(n: int) -> int:
    return n.bit_length() - 1


def _bits(row: int, column: int, count: int, axis: int) -> list[list[int]]:
    """Bases of `count` bits from ``(row, column)`` on, along `axis`."""
    return [[row << i, column] if axis == 0 else [row, column << i] for i in range(count)]


def _key_layout(block_n: int, d: int) -> gl.DistributedLinearLayout:
    """Keys ``[block_n, d]`` as they leave shared memory: 16 bytes or 32 in a row per thread."""
    run = min(d // 4, 32)
    registers = _bits(0, 1, _log2(run), 1) + _bits(0, 128, _log2(d // 128), 1)
    registers += _bits(8, 0, 1, 0) + _bits(64, 0, _log2(block_n // 64), 0)
    lanes = _bits(0, run, 2, 1) + _bits(1, 0, 3, 0)
    return gl.DistributedLinearLayout(registers, lanes, _bits(16, 0, 2, 0), [], [block_n, d])


def _value_layout(block_n: int, d: int, *, keys_first: bool) -> gl.DistributedLinearLayout:
    """Values ``[block_n, d]`` as they leave shared memory, or with pairs of keys side by side."""
    run = d // 32
    columns = _bits(0, 1, _log2(run), 1)
    pair = _bits(1, 0, 1, 0)
    registers = pair + columns if keys_first else columns + pair
    registers += _bits(8, 0, _log2(block_n // 8), 0)
    lanes = _bits(2, 0, 2, 0) + _bits(0, run, 3, 1)
    return gl.DistributedLinearLayout(registers, lanes, _bits(0, 8 * run, 2, 1), [], [block_n, d])


@gluon.jit
def _in_matrix_order(x, ROWS: gl.constexpr, D: gl.constexpr):
    """Columns of keys, or of q, as the matrix instruction takes them from a thread's run."""
    HIGH: gl.constexpr = 2 if D == 256 else 1
    MIDDLE: gl.constexpr = 1 if D == 64 else 2
    x = gl.reshape(x, [ROWS, HIGH, 4, MIDDLE, 8, 2])
    return gl.reshape(gl.permute(x, (0, 1, 3, 4, 2, 5)), [ROWS, D])


@gluon.jit
def _turned(v, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Values ``[BLOCK_N, D]`` as ``[D, BLOCK_N]``, with columns in the order of `_turned_back`."""
    v = gl.reshape(v, [BLOCK_N, 4, 8, D // 64, 2])
    return gl.reshape(gl.permute(v, (3, 1, 4, 2, 0)), [D, BLOCK_N])


@gluon.jit
def _turned_back(acc, N: gl.constexpr, D: gl.constexpr):
    """``[D, N]`` with the columns of the head in their own order."""
    acc = gl.reshape(acc, [D // 64, 4, 2, 8, N])
    return gl.reshape(gl.permute(acc, (1, 3, 0, 2, 4)), [D, N])


@gluon.jit
def _thread_sum(p, BLOCK_N: gl.constexpr, N: gl.constexpr):
    """``[BLOCK_N, N]`` to ``[32, N]``: each thread its own registers; the rest once per item."""
    p = gl.reshape(p, [BLOCK_N // 64, 4, 2, 8, N])
    return gl.reshape(gl.sum(gl.sum(p, axis=2), axis=0), [32, N])


@gluon.jit
def _attend(
    acc, m, total, q_smem, p_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, bands_ptr,
    item_smem, logit_scale, softcap,
    KIND: gl.constexpr, PAGE: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
    S: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, PAIRS: gl.constexpr,
    GROUP_ROWS: gl.constexpr, D: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr,
    LAZY: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The online softmax over all key blocks of an item; `acc` is ``[D, N]``, columns turned."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    taken = 0
    number = read_number(item_smem, 3, 4)
    q_begin = read_number(item_smem, 1, 4)
    q_len = read_number(item_smem, 2, 4)
    item_k_begin = read_number(item_smem, 5, 4)
    item_k_end = read_number(item_smem, 6, 4)
    row = q_begin + gl.arange(0, N, layout=gl.SliceLayout(0, S)) // GROUP_ROWS
    offset = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, S))
    for band in range(number, read_number(item_smem, 4, 4)):
        band_k_begin, band_k_end, lo, hi, _seq = load_band(bands_ptr, band, band + 1, COLUMNS)
        (base, k_begin, k_end, seen_begin, seen_end, block_begin, block_end, full_begin,
         full_end) = cut_band(
            band_k_begin, band_k_end, lo, hi, item_k_begin, item_k_end, q_begin, q_len, PAGE,
            BLOCK_N)  # fmt: skip
        row_begin = gl.maximum(row + lo, k_begin)
        row_last = gl.minimum(row + hi, k_end - 1)
        stored_from = base if PAGE == 0 else seen_begin - seen_begin % PAGE
        for j in range(block_end - block_begin):
            first_key = base + (block_end - 1 - j) * BLOCK_N
            stage = taken % STAGES
            phase = (taken // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            k = k_smem.index(stage).load(KEYS)
            k = gl.convert_layout(_in_matrix_order(to_fp16(k, KIND), BLOCK_N, D), OPERAND)
            s = warpgroup_mma(
                k, q_smem.permute((1, 0)), gl.zeros([BLOCK_N, N], gl.float32, S), use_acc=False,
                is_async=True)  # fmt: skip
            s, k = warpgroup_mma_wait(num_outstanding=0, deps=(s, k))
            mbarrier.arrive(k_empty.index(stage), count=1)
            if SOFTCAP:
                e = gl.exp2(s * (logit_scale * 2.8853900817779268))
                s = softcap * (1.0 - 2.0 / (e + 1.0)) * LOG2E
            else:
                s = s * logit_scale
            key = gl.expand_dims(first_key + offset, 1)
            seen = (key >= gl.expand_dims(row_begin, 0)) & (key <= gl.expand_dims(row_last, 0))
            s = gl.where(seen, s, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, axis=0))
            if LAZY > 0:
                m_new = gl.where(m_new - m > LAZY, m_new, m)
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            p = gl.exp2(s - gl.expand_dims(shift, 0))
            decay = gl.exp2(m - shift)
            LANES: gl.constexpr = gl.SliceLayout(0, total.type.layout)
            total *= gl.expand_dims(gl.convert_layout(decay, LANES), 0)
            total += _thread_sum(p, BLOCK_N, N)
            acc *= gl.expand_dims(decay, 0)
            m = m_new
            p_smem.store(gl.permute(p.to(gl.float16), (1, 0)))
            mbarrier.wait(v_full.index(stage), phase)
            clean_values(v_smem.index(stage), first_key, stored_from, k_end, BLOCK_N, D)
            fence_async_shared()
            thread_barrier()
            v = gl.convert_layout(v_smem.index(stage).load(VALUES), PAIRS)
            v = gl.convert_layout(_turned(to_fp16(v, KIND), BLOCK_N, D), OPERAND)
            acc_next = warpgroup_mma(v, p_smem.permute((1, 0)), acc, is_async=True)
            acc, v = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, v))
            mbarrier.arrive(v_empty.index(stage), count=1)
            taken += 1
    return acc, m, total


@gluon.jit
def _consumer(q_smem, p_smem, item_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
              q_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
              part_acc_ptr, part_ml_ptr, arrived_ptr, items_ptr, reductions_ptr, bands_ptr,
              stride_q_t, stride_q_h, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
              stride_ks_h, stride_vs_h, logit_scale, softcap,
              KIND: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, PAIRS: gl.constexpr,
              D: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
              PAGE: gl.constexpr, GROUPS: gl.constexpr, GROUP_ROWS: gl.constexpr,
              GROUP_CHUNKS: gl.constexpr, HEAD_BLOCKS: gl.constexpr, HAS_SINK: gl.constexpr,
              SOFTCAP: gl.constexpr, MAX_LOGITS: gl.constexpr, SCALED: gl.constexpr,
              SPLIT: gl.constexpr, LAZY: gl.constexpr, PARTS: gl.constexpr,
              COLUMNS: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16]
    )
    ROWS: gl.constexpr = gl.SliceLayout(0, S)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    item = gl.program_id(0) // HEAD_BLOCKS
    head_block = gl.program_id(0) % HEAD_BLOCKS
    kv_head = head_block // GROUP_CHUNKS
    item_ptr = items_ptr + item * COLUMNS
    q_begin, q_len, band_begin, band_end, item_k_begin, item_k_end = load_item(item_ptr)
    for _ in range(gl.minimum(q_len, 1)):
        write_item(
            item_smem, 0, head_block, q_begin, q_len, band_begin, band_end, item_k_begin,
            item_k_end, 0, 0, 0, 0, 4)  # fmt: skip
        token, head, valid = matrix_rows(
            gl.arange(0, N, layout=gl.SliceLayout(1, LOAD)), q_begin, q_len, head_block, GROUPS,
            GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        q_at = q_ptr + token * stride_q_t + head * stride_q_h
        column = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD))
        q = gl.load(
            gl.expand_dims(q_at, 1) + gl.expand_dims(column, 0), mask=gl.expand_dims(valid, 1),
            other=0.0)  # fmt: skip
        if q.dtype == gl.bfloat16:
            q, unit = q_as_fp16(q)
            logit_scale *= unit
        v_scale = 1.0
        if SCALED:
            logit_scale *= gl.load(k_scale_ptr + kv_head * stride_ks_h)
            v_scale = gl.load(v_scale_ptr + kv_head * stride_vs_h)
        q_smem.store(_in_matrix_order(q, N, D))
        fence_async_shared()
        thread_barrier()
        acc, m, total = _attend(
            gl.zeros([D, N], gl.float32, S), gl.full([N], float("-inf"), gl.float32, ROWS),
            _thread_sum(gl.zeros([BLOCK_N, N], gl.float32, S), BLOCK_N, N), q_smem, p_smem, k_smem,
            v_smem, k_full, k_empty, v_full, v_empty, bands_ptr, item_smem, logit_scale, softcap,
            KIND, PAGE, SOFTCAP, STAGES, S, KEYS, VALUES, PAIRS, GROUP_ROWS, D, N, BLOCK_N, LAZY,
            COLUMNS)  # fmt: skip

        q_begin = read_number(item_smem, 1, 4)
        q_len = read_number(item_smem, 2, 4)
        split_tile = gl.load(item_ptr + 6)
        total_row = gl.convert_layout(gl.sum(total, axis=0), ROWS)
        acc = _turned_back(acc * v_scale, N, D)
        OUT: gl.constexpr = acc.type.layout
        OUT_ROWS: gl.constexpr = gl.SliceLayout(0, OUT)
        matrix_row = gl.arange(0, N, layout=ROWS)
        token, head, valid = matrix_rows(
            matrix_row, q_begin, q_len, head_block, GROUPS, GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        out_row = gl.arange(0, N, layout=OUT_ROWS)
        out_token, out_head, out_valid = matrix_rows(
            out_row, q_begin, q_len, head_block, GROUPS, GROUP_ROWS, GROUP_CHUNKS)  # fmt: skip
        out_column = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(1, OUT)), 1)
        if MAX_LOGITS:
            gl.atomic_max(max_logits_ptr + head, m * LN2, mask=valid)
        if SPLIT:
            kept = valid & (split_tile > 0)
            part = (item.to(gl.int64) * HEAD_BLOCKS + head_block) * N
            ml_ptr = part_ml_ptr + (part + matrix_row) * 2
            gl.store(ml_ptr, m, mask=kept)
            gl.store(ml_ptr + 1, total_row, mask=kept)
            acc_ptr = part_acc_ptr + gl.expand_dims((part + out_row) * D, 0) + out_column
            gl.store(acc_ptr, acc, mask=gl.expand_dims(out_valid & (split_tile > 0), 0))
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
                        stride_sink_t, D, N, HAS_SINK, GROUPS, GROUP_ROWS, GROUP_CHUNKS,
                        HEAD_BLOCKS, PARTS, dtype)  # fmt: skip
            valid = valid & (split_tile == 0)
            out_valid = out_valid & (split_tile == 0)
        sink = 0.0
        if HAS_SINK:
            sink = gl.load(sink_ptr + token * stride_sink_t + head, mask=valid, other=0.0) * LOG2E
        scale, lse = normalise(m, total_row, sink, HAS_SINK)
        gl.store(lse_ptr + token * stride_lse_t + head, lse, mask=valid)
        out = (acc * gl.expand_dims(gl.convert_layout(scale, OUT_ROWS), 0)).to(dtype)
        out_at = out_ptr + out_token * stride_o_t + out_head * stride_o_h
        gl.store(gl.expand_dims(out_at, 0) + out_column, out, mask=gl.expand_dims(out_valid, 0))


@gluon.jit(
    do_not_specialize=[
        "stride_pages", "stride_sink_t", "page_rows", "head_rows", "head_columns", "stride_ks_h",
        "stride_vs_h",
    ]
)  # fmt: skip
def _hopper_quantised_kernel(
    k_desc, v_desc, q_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
    part_acc_ptr, part_ml_ptr, arrived_ptr, items_ptr, reductions_ptr, bands_ptr, page_table_ptr,
    stride_pages, page_rows, head_rows, head_columns,
    stride_q_t, stride_q_h, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t, stride_ks_h,
    stride_vs_h, logit_scale, softcap,
    KIND: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, PAIRS: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, GROUPS: gl.constexpr, GROUP_ROWS: gl.constexpr, GROUP_CHUNKS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr, HAS_SINK: gl.constexpr, SOFTCAP: gl.constexpr,
    MAX_LOGITS: gl.constexpr, SCALED: gl.constexpr, SPLIT: gl.constexpr, LAZY: gl.constexpr,
    PARTS: gl.constexpr, COLUMNS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    Q: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    KV: gl.constexpr = k_desc.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(gl.float16, [N, D], Q)
    p_smem = gl.allocate_shared_memory(gl.float16, [N, BLOCK_N], Q)
    item_smem = gl.allocate_shared_memory(
        gl.int32, [ITEM_NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, D], KV)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, D], KV)
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
            q_smem, p_smem, item_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
            q_ptr, out_ptr, lse_ptr, max_logits_ptr, sink_ptr, k_scale_ptr, v_scale_ptr,
            part_acc_ptr, part_ml_ptr, arrived_ptr, items_ptr, reductions_ptr, bands_ptr,
            stride_q_t, stride_q_h, stride_o_t, stride_o_h, stride_lse_t, stride_sink_t,
            stride_ks_h, stride_vs_h, logit_scale, softcap,
            KIND, KEYS, VALUES, PAIRS, D, N, BLOCK_N, STAGES, PAGE, GROUPS, GROUP_ROWS,
            GROUP_CHUNKS, HEAD_BLOCKS, HAS_SINK, SOFTCAP, MAX_LOGITS, SCALED, SPLIT, LAZY, PARTS,
            COLUMNS)),
        (fetch, (
            k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items_ptr,
            bands_ptr, page_table_ptr, stride_pages, page_rows, head_rows, head_columns,
            BLOCK_N, STAGES, PAGE, GROUP_CHUNKS, HEAD_BLOCKS, COLUMNS)),
    ], [1], [PRODUCER_REGISTERS])  # fmt: skip


def run_part(call: AttentionCall, plan: Plan) -> None:
    """Launch one part of `call`: decode items over quantised pages, keys split or not."""
    config = plan.config
    q = call.q
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = call.k.shape[-2]
    groups = num_q_heads // num_kv_heads
    heads = head_blocks(num_q_heads, num_kv_heads, config)
    kv = kv_operands(call, config.block_n)
    part_acc, part_ml, arrived = workspace(call, plan, heads)
    _hopper_quantised_kernel[(plan.items.shape[0] * heads,)](
        kv.k,
        kv.v,
        q,
        call.out,
        call.lse,
        call.pointer(call.max_logits),
        call.pointer(call.sink),
        call.pointer(call.k_scale),
        call.pointer(call.v_scale),
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
        scale_strides(call.k_scale)[2],
        scale_strides(call.v_scale)[2],
        call.logit_scale,
        call.softcap,
        KIND=KINDS.index(call.k.dtype),
        KEYS=_key_layout(config.block_n, head_dim),
        VALUES=_value_layout(config.block_n, head_dim, keys_first=False),
        PAIRS=_value_layout(config.block_n, head_dim, keys_first=True),
        D=head_dim,
        N=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        PAGE=kv.page_size,
        GROUPS=groups,
        GROUP_ROWS=config.group_rows(groups),
        GROUP_CHUNKS=heads // num_kv_heads,
        HEAD_BLOCKS=heads,
        HAS_SINK=call.sink is not None,
        SOFTCAP=call.softcap > 0,
        MAX_LOGITS=call.max_logits is not None,
        SCALED=scale_kind(call.k_scale) == "head",
        SPLIT=plan.reductions is not None,
        LAZY=0 if call.max_logits is not None else LAZY_GROWTH,
        PARTS=PARTS,
        COLUMNS=ROW,
        PRODUCER_REGISTERS=40 if kv.boxes > 2 else 24,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS[config.programs_per_sm],
    )
