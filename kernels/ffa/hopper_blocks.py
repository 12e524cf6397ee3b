"""What Hopper kernels in Gluon are made of: bands in blocks, loads by TMA, one block of softmax.

Functions of a program's warps; none keeps state. Layouts come in as constants, or from operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

LOG2E = gl.constexpr(1.4426950408889634)

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


_RESCALE_ASM = gl.constexpr({d: _rescale_asm(d // 2)[0] for d in (64, 128)})
_RESCALE_CONSTRAINTS = gl.constexpr({d: _rescale_asm(d // 2)[1] for d in (64, 128)})
# Named barriers for turns; Triton numbers its own from 0.
_TURN_ASM = gl.constexpr(
    [f"bar.{op} {10 + i}, 256; mov.b32 $0, $1;" for i in range(3) for op in ("arrive", "sync")]
)


@gluon.jit
def band(bands_ptr, number, item_k_begin, item_k_end, q_begin, q_len, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, COLUMNS: gl.constexpr):  # fmt: skip
    """A band cut to its item, and its blocks: visited ``[begin, end)``, needing no mask
    ``[full_begin, full_end)``.
    """
    band_ptr = bands_ptr + number * COLUMNS
    k_begin = gl.maximum(gl.load(band_ptr), item_k_begin)
    k_end = gl.minimum(gl.load(band_ptr + 1), item_k_end)
    lo = gl.load(band_ptr + 2)
    hi = gl.load(band_ptr + 3)
    seq = gl.load(band_ptr + 4)
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
        lo,
        hi,
        seq,
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
def softmax(s, m, total, logit_scale, softcap, first_key, row_begin, row_last, column,
             MASKED: gl.constexpr, BELOW: gl.constexpr, SOFTCAP: gl.constexpr, LAZY: gl.constexpr,
             BLOCK_N: gl.constexpr):  # fmt: skip
    """One block of the online softmax in base 2; `logit_scale` is scale / softcap with a cap."""
    if SOFTCAP:
        e = gl.exp2(s * (logit_scale * 2.8853900817779268))
        s = softcap * (1.0 - 2.0 / (e + 1.0)) * LOG2E
    if MASKED:
        last = row_last - first_key
        s = gl.where(gl.expand_dims(column, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
        if BELOW:
            first = row_begin - first_key
            s = gl.where(gl.expand_dims(column, 0) >= gl.expand_dims(first, 1), s, float("-inf"))
    if SOFTCAP:
        m_new = gl.maximum(m, gl.max(s, axis=1))
    else:
        m_new = gl.maximum(m, gl.max(s, axis=1) * logit_scale)
    if LAZY > 0:
        m_new = gl.where(m_new - m > LAZY, m_new, m)
    shift = m_new
    if MASKED:
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
    dirty = (first_key < begin) | (first_key + BLOCK_N > end)
    for _ in range(dirty.to(gl.int32)):
        for i in gl.static_range(BLOCK_N // 16):  # a few registers at a time
            key = first_key + i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, ROWS))
            clean = gl.expand_dims((key >= begin) & (key < end), 1)
            rows = v_block.slice(i * 16, 16, dim=0)
            v = rows.load(ROWS)
            rows.store(gl.where(clean, v, gl.zeros_like(v)))
        fence_async_shared()
        thread_barrier()
