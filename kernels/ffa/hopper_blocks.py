"""What Hopper kernels in Gluon are made of: bands in blocks, loads by TMA, one block of softmax.

Functions of a program's warps; none keeps state. Layouts come in as constants, or from operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)

# Names that changed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


def _rescale_asm(registers: int) -> tuple[str, str]:
    """PTX for ``acc *= decay`` over a thread's accumulator, skipped by a warp whose decays are
    all 1.
    """
    first, second = f"${2 * registers}", f"${2 * registers + 2}"
    lines = [
        "{ .reg .pred p;",
        f"setp.neu.f32 p, {first}, 0f3F800000;",
        f"setp.neu.or.f32 p, {second}, 0f3F800000, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra SKIP;",
    ]
    lines += [f"mul.ftz.f32 ${i}, ${i}, {second if i & 2 else first};" for i in range(registers)]
    tied = [str(i) for i in range(registers)]
    constraints = ["=f"] * registers + tied + ["f"] * registers
    return "\n".join([*lines, "SKIP: }"]), ",".join(constraints)


_RESCALE_ASM = gl.constexpr({d: _rescale_asm(d // 2)[0] for d in (64, 128, 256)})
_RESCALE_CONSTRAINTS = gl.constexpr({d: _rescale_asm(d // 2)[1] for d in (64, 128, 256)})
# Named barriers for turns; Triton numbers its own from 0.
_TURN_ASM = gl.constexpr(
    [f"bar.{op} {10 + i}, 256; mov.b32 $0, $1;" for i in range(3) for op in ("arrive", "sync")]
)


@gluon.jit
def read_number(smem, at, NUM_WARPS: gl.constexpr):
    """One of the numbers that warps hand each other in shared memory."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    return gl.max(smem.index(at).load(ONE), axis=0)


@gluon.jit
def write_number(smem, at, number, NUM_WARPS: gl.constexpr):
    """Hand a number on; barriers are the caller's."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    smem.index(at).store(gl.full([1], number, gl.int32, ONE))


@gluon.jit
def load_item(item_ptr):
    """Query rows, bands and keys of an item."""
    q_begin = gl.load(item_ptr)
    q_len = gl.load(item_ptr + 1)
    band_begin = gl.load(item_ptr + 2)
    band_end = gl.load(item_ptr + 3)
    k_begin = gl.load(item_ptr + 4)
    k_end = gl.load(item_ptr + 5)
    return q_begin, q_len, band_begin, band_end, k_begin, k_end


@gluon.jit
def load_band(bands_ptr, number, end, COLUMNS: gl.constexpr):
    """Keys, diagonals and sequence of a band; zeros from the item's `end` of bands on."""
    band_ptr = bands_ptr + number * COLUMNS
    there = number < end
    k_begin = gl.load(band_ptr, mask=there, other=0)
    k_end = gl.load(band_ptr + 1, mask=there, other=0)
    lo = gl.load(band_ptr + 2, mask=there, other=0)
    hi = gl.load(band_ptr + 3, mask=there, other=0)
    seq = gl.load(band_ptr + 4, mask=there, other=0)
    return k_begin, k_end, lo, hi, seq


@gluon.jit
def write_item(smem, at, head, q_begin, q_len, band_begin, band_end, item_k_begin, item_k_end,
               k_begin, k_end, lo, hi, NUM_WARPS: gl.constexpr):  # fmt: skip
    """Hand an item, the head to do it for, and its first band to the warps that attend."""
    write_number(smem, at, head, NUM_WARPS)
    write_number(smem, at + 1, q_begin, NUM_WARPS)
    write_number(smem, at + 2, q_len, NUM_WARPS)
    write_number(smem, at + 3, band_begin, NUM_WARPS)
    write_number(smem, at + 4, band_end, NUM_WARPS)
    write_number(smem, at + 5, item_k_begin, NUM_WARPS)
    write_number(smem, at + 6, item_k_end, NUM_WARPS)
    write_number(smem, at + 7, k_begin, NUM_WARPS)
    write_number(smem, at + 8, k_end, NUM_WARPS)
    write_number(smem, at + 9, lo, NUM_WARPS)
    write_number(smem, at + 10, hi, NUM_WARPS)


ITEM_NUMBERS = gl.constexpr(11)
"""How many `write_item` writes."""


@gluon.jit
def cut_band(k_begin, k_end, lo, hi, item_k_begin, item_k_end, q_begin, q_len,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """A band cut to its item, and its blocks: visited ``[begin, end)``, needing no mask
    ``[full_begin, full_end)``.
    """
    k_begin = gl.maximum(k_begin, item_k_begin)
    k_end = gl.minimum(k_end, item_k_end)
    base = k_begin if PAGE == 0 else 0
    last = q_begin + q_len - 1
    seen_begin = gl.maximum(k_begin, q_begin + lo)
    seen_end = gl.minimum(k_end, last + hi + 1)
    block_begin = (seen_begin - base) // BLOCK_N
    block_end = (gl.maximum(seen_end, seen_begin) - base + BLOCK_N - 1) // BLOCK_N
    block_end = gl.where(seen_end > seen_begin, block_end, block_begin)
    full_begin = (gl.maximum(k_begin, last + lo) - base + BLOCK_N - 1) // BLOCK_N
    full_begin = gl.maximum(full_begin, block_begin)
    full_end = gl.maximum(gl.minimum(k_end, q_begin + hi + 1) - base, 0) // BLOCK_N
    full_end = gl.minimum(full_end, block_end)
    return (
        base,
        k_begin,
        k_end,
        seen_begin,
        seen_end,
        block_begin,
        block_end,
        full_begin,
        full_end,
    )


@gluon.jit
def page_ids(pages_ptr, block, last_page, PAGE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Pages of a key block, all loads issued before any is used."""
    COUNT: gl.constexpr = 1 if PAGE == 0 or PAGE > BLOCK_N else BLOCK_N // PAGE
    ids = ()
    for i in gl.static_range(COUNT):
        if PAGE == 0:
            ids = ids + (block,)
        elif PAGE > BLOCK_N:
            ids = ids + (gl.load(pages_ptr + gl.minimum(block * BLOCK_N // PAGE, last_page)),)
        else:
            ids = ids + (gl.load(pages_ptr + gl.minimum(block * COUNT + i, last_page)),)
    return ids


@gluon.jit
def load_block(desc, smem, bar, ids, block, base, kv_head, page_rows, head_rows,
                PAGE: gl.constexpr, BLOCK_N: gl.constexpr, head_columns):  # fmt: skip
    """One key block by TMA: one box, or one per page."""
    column = kv_head * head_columns
    if PAGE == 0:
        mbarrier.expect(bar, desc.block_type.nbytes)
        tma_load(desc, [base + block * BLOCK_N, column], bar, smem)
    elif PAGE > BLOCK_N:
        mbarrier.expect(bar, desc.block_type.nbytes)
        row = ids[0] * page_rows + kv_head * head_rows + block * BLOCK_N % PAGE
        tma_load(desc, [row, column], bar, smem)
    else:
        COUNT: gl.constexpr = BLOCK_N // PAGE
        mbarrier.expect(bar, desc.block_type.nbytes * COUNT)
        for i in gl.static_range(COUNT):
            row = ids[i] * page_rows + kv_head * head_rows
            tma_load(desc, [row, column], bar, smem.slice(i * PAGE, PAGE, dim=0))


@gluon.jit
def work_unit(unit, num_items, num_q_heads, head_major):
    """Item and query head of a work unit: all items of a head in turn, or all heads of an item."""
    run = gl.where(head_major != 0, num_items, num_q_heads)
    item = gl.where(head_major != 0, unit % run, unit // run)
    head = gl.where(head_major != 0, unit // run, unit % run)
    return item, head


@gluon.jit
def to_operand(p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 probabilities as 16-bit operand, two per instruction (a plain cast takes 1.5 per
    element).
    """
    if dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.bfloat16, is_pure=True,
            pack=2)  # fmt: skip
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True,
            pack=2)  # fmt: skip
    return gl.convert_layout(x, LAYOUT)


@gluon.jit
def lane_sum(p, BLOCK_N: gl.constexpr):
    """``[64, BLOCK_N]`` to ``[64, 4]``: each thread its own registers; lanes are added once per
    item.
    """
    return gl.sum(gl.sum(gl.reshape(p, [64, BLOCK_N // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def rescale(acc, decay, D: gl.constexpr, LAYOUT: gl.constexpr):
    """``acc *= decay`` behind one warp-uniform branch: with the lazy maximum, decay is nearly
    always 1.
    """
    column = gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, LAYOUT)), 1)
    ASM: gl.constexpr = _RESCALE_ASM[D]
    CONSTRAINTS: gl.constexpr = _RESCALE_CONSTRAINTS[D]
    return gl.inline_asm_elementwise(
        ASM, CONSTRAINTS, [acc, column.broadcast_to([64, D])], dtype=gl.float32, is_pure=True,
        pack=D // 2)  # fmt: skip


@gluon.jit
def turn(x, ID: gl.constexpr, SYNC: gl.constexpr):
    """Named barrier of two warp-groups: SYNC waits for the turn, else passes it on."""
    ASM: gl.constexpr = _TURN_ASM[ID * 2 + (1 if SYNC else 0)]
    gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def softmax(s, m, total, logit_scale, softcap, first_key, lower_to, row_begin, row_last, column,
             UPPER: gl.constexpr, LOWER: gl.constexpr, SOFTCAP: gl.constexpr, LAZY: gl.constexpr,
             BLOCK_N: gl.constexpr):  # fmt: skip
    """One block of the online softmax in base 2; `logit_scale` is scale / softcap with a cap.

    UPPER masks keys past each row's last; LOWER those before its first, in blocks below `lower_to`.
    """
    if SOFTCAP:
        e = gl.exp2(s * (logit_scale * 2.8853900817779268))
        s = softcap * (1.0 - 2.0 / (e + 1.0)) * LOG2E
    if UPPER:
        last = row_last - first_key
        s = gl.where(gl.expand_dims(column, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    if LOWER:  # noqa: SIM102 -- this is compiled away, the next is not
        if first_key < lower_to:
            first = row_begin - first_key
            s = gl.where(gl.expand_dims(column, 0) >= gl.expand_dims(first, 1), s, float("-inf"))
    if SOFTCAP:
        m_new = gl.maximum(m, gl.max(s, axis=1))
    else:
        m_new = gl.maximum(m, gl.max(s, axis=1) * logit_scale)
    if LAZY > 0:
        m_new = gl.where(m_new - m > LAZY, m_new, m)
    shift = m_new
    if UPPER or LOWER:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    if SOFTCAP:
        p = gl.exp2(s - gl.expand_dims(shift, 1))
    else:
        p = gl.exp2(s * logit_scale - gl.expand_dims(shift, 1))
    decay = gl.exp2(m - shift)
    LANES: gl.constexpr = total.type.layout
    sums = gl.convert_layout(lane_sum(p, BLOCK_N), LANES)
    total = total * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, LANES)), 1) + sums
    return p, m_new, total, decay


@gluon.jit
def clean_values(v_block, first_key, begin, end, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Zero the rows of a V block outside ``[begin, end)``, if there are any.

    Every warp-group does so for itself: all write the same bytes, so none waits for another.
    """
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    AT_ONCE: gl.constexpr = 2048 // D  # a few registers
    dirty = (first_key < begin) | (first_key + BLOCK_N > end)
    for _ in range(dirty.to(gl.int32)):
        for i in gl.static_range(BLOCK_N // AT_ONCE):
            key = first_key + i * AT_ONCE + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, ROWS))
            clean = gl.expand_dims((key >= begin) & (key < end), 1)
            rows = v_block.slice(i * AT_ONCE, AT_ONCE, dim=0)
            v = rows.load(ROWS)
            rows.store(gl.where(clean, v, gl.zeros_like(v)))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def fetch_item(
    k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, bands_ptr, page_table_ptr,
    fetched, q_begin, q_len, band_begin, band_end, item_k_begin, item_k_end, band_k_begin,
    band_k_end, lo, hi, seq, kv_head, stride_pages, page_rows, head_rows, head_columns,
    STAGES: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """The producer's side of an item: all its key blocks, downwards, through the rings."""
    for number in range(band_begin, band_end):
        if number > band_begin:
            band_k_begin, band_k_end, lo, hi, seq = load_band(bands_ptr, number, band_end, COLUMNS)
        (base, k_begin, k_end, seen_begin, seen_end, block_begin, block_end, full_begin,
         full_end) = cut_band(
            band_k_begin, band_k_end, lo, hi, item_k_begin, item_k_end, q_begin, q_len, PAGE,
            BLOCK_N)  # fmt: skip
        pages_ptr = page_table_ptr + seq.to(gl.int64) * stride_pages
        last_page = gl.maximum(seen_end - 1, 0) // (PAGE if PAGE > 0 else BLOCK_N)
        following = page_ids(pages_ptr, gl.maximum(block_end - 1, 0), last_page, PAGE, BLOCK_N)
        for j in range(block_end - block_begin):
            block = block_end - 1 - j
            ids = following
            stage = fetched % STAGES
            phase = (fetched // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            load_block(
                k_desc, k_smem.index(stage), k_full.index(stage), ids, block, base, kv_head,
                page_rows, head_rows, PAGE, BLOCK_N, head_columns)  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            load_block(
                v_desc, v_smem.index(stage), v_full.index(stage), ids, block, base, kv_head,
                page_rows, head_rows, PAGE, BLOCK_N, head_columns)  # fmt: skip
            following = page_ids(
                pages_ptr, gl.maximum(block - 1, block_begin), last_page, PAGE, BLOCK_N
            )
            fetched += 1
    return fetched


@gluon.jit
def step(
    acc, m, total, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, taken, first_key,
    lower_to, row_begin, row_last, column, logit_scale, softcap,
    UPPER: gl.constexpr, LOWER: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, ACC: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, LAZY: gl.constexpr, WARP_GROUP: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """QK of block `taken` and PV of the one before it (one block higher), issued together;
    softmax under PV.
    """
    operand = to_operand(p, dtype, P)
    k_stage = taken % STAGES
    v_stage = (taken - 1) % STAGES
    mbarrier.wait(k_full.index(k_stage), (taken // STAGES) & 1)
    if TURNS:
        turn(taken, WARP_GROUP, True)
    s = warpgroup_mma(q, k_smem.index(k_stage).permute((1, 0)), p, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), ((taken - 1) // STAGES) & 1)
    acc_next = warpgroup_mma(operand, v_smem.index(v_stage), acc, is_async=True)
    if TURNS:
        turn(taken, (WARP_GROUP + 1) % CONSUMERS, False)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    p, m, total, decay = softmax(
        s, m, total, logit_scale, softcap, first_key, lower_to, row_begin, row_last, column, UPPER,
        LOWER, SOFTCAP, LAZY, BLOCK_N)  # fmt: skip
    acc, operand = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, operand))
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc = rescale(acc, decay, D, ACC)
    return acc, m, total, p


@gluon.jit
def attend_item(
    acc, m, total, taken, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, bands_ptr,
    item_smem, item_at, tile_row, column, logit_scale, softcap,
    PAGE: gl.constexpr, BELOW: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr,
    D: gl.constexpr, BLOCK_N: gl.constexpr, LAZY: gl.constexpr, WARP_GROUP: gl.constexpr,
    CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """A consumer's side of an item: the online softmax over all its key blocks.

    `tile_row` is the query row, counted from `q_begin`, of each matrix row. Blocks go downwards:
    masked ones above the full ones, those, masked ones below. QK of one block and PV of the one
    before it are in flight together, so the first block has QK only and the last PV only. Only
    these two can hold values that no row may read.
    """
    number = read_number(item_smem, item_at + 3, 4)
    while number < read_number(item_smem, item_at + 4, 4):
        # Read again for every band: registers are what the loops over blocks are short of.
        q_begin = read_number(item_smem, item_at + 1, 4)
        q_len = read_number(item_smem, item_at + 2, 4)
        item_k_begin = read_number(item_smem, item_at + 5, 4)
        item_k_end = read_number(item_smem, item_at + 6, 4)
        band_k_begin = read_number(item_smem, item_at + 7, 4)
        band_k_end = read_number(item_smem, item_at + 8, 4)
        lo = read_number(item_smem, item_at + 9, 4)
        hi = read_number(item_smem, item_at + 10, 4)
        if number > read_number(item_smem, item_at + 3, 4):
            band_k_begin, band_k_end, lo, hi, _seq = load_band(
                bands_ptr, number, number + 1, COLUMNS
            )
        (base, k_begin, k_end, seen_begin, seen_end, block_begin, block_end, full_begin,
         full_end) = cut_band(
            band_k_begin, band_k_end, lo, hi, item_k_begin, item_k_end, q_begin, q_len, PAGE,
            BLOCK_N)  # fmt: skip
        if block_end > block_begin:
            row = q_begin + tile_row
            row_begin = gl.maximum(row + lo, k_begin)
            row_last = gl.minimum(row + hi, k_end - 1)
            key = base + (block_end - 1) * BLOCK_N
            lowest_above = gl.maximum(full_end, block_begin)
            num_above = gl.maximum(block_end - 1 - lowest_above, 0)
            lowest_full = gl.maximum(full_begin, block_begin)
            num_full = gl.maximum(block_end - 1 - num_above - lowest_full, 0)
            num_below = block_end - 1 - num_above - num_full - block_begin
            lower_to = base + full_begin * BLOCK_N
            # A page with a key that some row sees is the sequence's own from its start on.
            stored_from = base if PAGE == 0 else seen_begin - seen_begin % PAGE
            p = gl.zeros([64, BLOCK_N], gl.float32, S)
            stage = taken % STAGES
            mbarrier.wait(k_full.index(stage), (taken // STAGES) & 1)
            if TURNS:
                turn(taken, WARP_GROUP, True)
            s = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), p, use_acc=False, is_async=True
            )
            if TURNS:
                turn(taken, (WARP_GROUP + 1) % CONSUMERS, False)
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            p, m, total, decay = softmax(
                s, m, total, logit_scale, softcap, key, lower_to, row_begin, row_last, column, True,
                BELOW, SOFTCAP, LAZY, BLOCK_N)  # fmt: skip
            acc = rescale(acc, decay, D, ACC)
            mbarrier.wait(v_full.index(stage), (taken // STAGES) & 1)
            clean_values(v_smem.index(stage), key, stored_from, k_end, BLOCK_N, D)
            taken += 1
            key -= BLOCK_N
            for _above in range(num_above):
                acc, m, total, p = step(
                    acc, m, total, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, taken,
                    key, lower_to, row_begin, row_last, column, logit_scale, softcap, True, BELOW,
                    SOFTCAP, STAGES, TURNS, ACC, P, dtype, D, BLOCK_N, LAZY, WARP_GROUP,
                    CONSUMERS)  # fmt: skip
                taken += 1
                key -= BLOCK_N
            for _full in range(num_full):
                acc, m, total, p = step(
                    acc, m, total, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, taken,
                    key, lower_to, row_begin, row_last, column, logit_scale, softcap, False, False,
                    SOFTCAP, STAGES, TURNS, ACC, P, dtype, D, BLOCK_N, LAZY, WARP_GROUP,
                    CONSUMERS)  # fmt: skip
                taken += 1
                key -= BLOCK_N
            if BELOW:
                for _below in range(num_below):
                    acc, m, total, p = step(
                        acc, m, total, p, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                        taken, key, lower_to, row_begin, row_last, column, logit_scale, softcap,
                        False, True, SOFTCAP, STAGES, TURNS, ACC, P, dtype, D, BLOCK_N, LAZY,
                        WARP_GROUP, CONSUMERS)  # fmt: skip
                    taken += 1
                    key -= BLOCK_N
            operand = to_operand(p, dtype, P)
            stage = (taken - 1) % STAGES
            mbarrier.wait(v_full.index(stage), ((taken - 1) // STAGES) & 1)
            if BELOW:
                clean_values(v_smem.index(stage), key + BLOCK_N, stored_from, k_end, BLOCK_N, D)
            acc_next = warpgroup_mma(operand, v_smem.index(stage), acc, is_async=True)
            acc, operand = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next, operand))
            mbarrier.arrive(v_empty.index(stage), count=1)
        number += 1
    return acc, m, total, taken


@gluon.jit
def normalise(m, total, sink, HAS_SINK: gl.constexpr):
    """What a row's accumulator is to be multiplied with, and its natural-log lse.

    `m` and `total` are the row's maximum and sum in base 2, `sink` its logit in base 2. `total` is
    0 for a row that saw no key, NaN for one that saw a NaN: maxima drop NaN, sums do not.
    """
    m_safe = gl.where(m == float("-inf"), 0.0, m)
    if HAS_SINK:
        highest = gl.maximum(m, sink)
        highest = gl.where(highest == float("-inf"), 0.0, highest)
        weight = gl.where(m == float("-inf"), 0.0, gl.exp2(m_safe - highest))
        # The difference of equal numbers, fused with the scaling above, would not be 0.
        sink_weight = gl.exp2(gl.where(sink >= m, 0.0, sink - highest))
        with_sink = total * weight + gl.where(sink == float("-inf"), 0.0, sink_weight)
        scale = gl.where(with_sink == 0, 0.0, weight / with_sink)
        lse = gl.where(with_sink == 0, float("-inf"), (highest + gl.log2(with_sink)) * LN2)
    else:
        scale = gl.where(total == 0, 0.0, 1.0 / total)
        lse = gl.where(total == 0, float("-inf"), (m_safe + gl.log2(total)) * LN2)
    return scale, lse
