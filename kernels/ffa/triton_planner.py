"""Plans of paged batches in one Triton launch per part: the tables of `plan.paged_tables`, bit for
bit.

A program writes `ROWS` rows of every table and needs nothing of what others do: it counts the tiles
of every sequence itself and finds the length of every tile, `CHUNK` at a time. So one launch does,
without atomics or a scan over programs. Where a tile goes is counted, not sorted: after all tiles
that are longer, or as long and earlier. Where keys are split, each program looks for the size of
the shares: larger ones are fewer, so a binary search tries six of the 64 sizes. What a program's
threads have to tell each other goes through a scratch of its own, behind a barrier.

Work per program, for T tiles of S sequences: a prefix sum over S; then for each of T / 256 tiles
per thread a binary search of log2(S) dependent loads from L1, a few dozen instructions, and a
comparison with the program's 16 tiles. 256 decodes are one chunk in each of some 30 programs; 2,048
tiles of prefill are two or three chunks in each of some 130, one per multiprocessor of an H200.

All is int32 but the number of all tiles' key blocks. Rows, keys and windows are less than
`UNBOUNDED`, 2^30. A diagonal is ``keys - end - left`` or ``keys - end + right`` and is only ever
added to rows of its own sequence, which are at most `end`: sums lie in ``[-2^31, 2^31)``. Tiles
reach at most one tile past the last row, shares at most one key block past the last key.

Numbers that vary by batch select no specialisation. There are two, with and without `SPLIT`: fewer
than kinds of `plan.Cut`, each of which a warm-up plans for.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.kernels.ffa.plan import ROW, Batch, Buffers, Part, Tables
from magi_serve.masks import UNBOUNDED

ROWS = 16
"""Rows of each table that a program writes."""

INTERPRETED_ROWS = 256
"""The same in Triton's interpreter, which takes its time by operation, not by element."""

CHUNK = 1024
"""Sequences, or tiles, that a program looks at at once."""

_NONE: tl.constexpr = tl.constexpr(UNBOUNDED)


@triton.jit
def _rows(seq, live, batch):
    """First row, and row past the last, of sequences that are `live`.

    Sequence `num_seqs` is the rows after all others.
    """
    cu_seqlens_q_ptr, num_seqs, num_tokens = batch[0], batch[3], batch[4]
    begin = tl.load(cu_seqlens_q_ptr + seq, mask=live, other=0).to(tl.int32)
    real = live & (seq < num_seqs)
    end = tl.load(cu_seqlens_q_ptr + seq + 1, mask=real, other=num_tokens).to(tl.int32)
    begin = tl.minimum(tl.maximum(begin, 0), num_tokens)
    return begin, tl.minimum(tl.maximum(end, 0), num_tokens)


@triton.jit
def _keys(seq, live, end, batch):
    """Keys, diagonals and offset of sequences that are `live`, whose rows end before `end`.

    `causal` is 0, 1, or 2 for a flag per sequence; `left` and `right` are -1 for no bound.
    """
    seqlens_k_ptr, causal_ptr, num_seqs, causal = batch[1], batch[2], batch[3], batch[5]
    left, right, max_keys = batch[6], batch[7], batch[8]
    real = live & (seq < num_seqs)
    keys = tl.load(seqlens_k_ptr + seq, mask=real, other=0).to(tl.int32)
    flag = tl.load(causal_ptr + seq, mask=real & (causal == 2), other=0).to(tl.int32)
    offset = keys - end
    lo = tl.where(left < 0, -_NONE, offset - left)
    hi = tl.where(right < 0, _NONE, offset + right)
    hi = tl.where((causal == 1) | (flag != 0), tl.minimum(hi, offset), hi)
    return tl.minimum(keys, max_keys), lo, hi, offset


@triton.jit
def _tiles(tile, live, ends_ptr, cut, batch):
    """Rows, sequence, keys, and key blocks of tiles that are `live`.

    Of the `num_owners` sequences from `first_seq` on, each has the tiles up to its entry of
    `ends_ptr`. `search_step` is the largest power of two up to `num_owners`.
    """
    first_seq, num_owners, search_step, tile_q, block_n = cut[0], cut[1], cut[2], cut[3], cut[4]
    owner = tl.zeros_like(tile)
    first = tl.zeros_like(tile)
    step = search_step
    while step > 0:
        probe = owner + step
        inside = live & (probe <= num_owners)
        last = tl.load(ends_ptr + probe - 1, mask=inside, other=0)
        past = inside & (last <= tile)
        owner = tl.where(past, probe, owner)
        first = tl.where(past, last, first)
        step = step // 2
    seq = first_seq + owner
    begin, end = _rows(seq, live, batch)
    keys, lo, hi, _offset = _keys(seq, live, end, batch)
    q_begin = begin + (tile - first) * tile_q
    q_len = tl.minimum(end - q_begin, tile_q)
    k_begin = tl.maximum(q_begin + lo, 0)
    k_end = tl.maximum(tl.minimum(q_begin + q_len + hi, keys), k_begin)
    blocks = (k_end + block_n - 1) // block_n - k_begin // block_n
    blocks = tl.where(live & (k_end > k_begin), blocks, 0)
    return q_begin, q_len, seq, k_begin, k_end, blocks


@triton.jit
def _share_size(number, total, budget, min_share, whole):
    """Key blocks per share, the size of this `number` as `plan._share_size` tries them.

    A size that leaves every tile whole is as good as any larger one.
    """
    step = 32 + number
    size = (total * step + (32 * budget - 1)) // (32 * budget)
    size = tl.maximum(size, (min_share * step + 31) // 32)
    return tl.minimum(size, whole).to(tl.int32)


@triton.jit
def _store_rows(table_ptr, row, rows, used, c0, c1, c2, c3, c4, c5, c6, COLUMNS: tl.constexpr):
    """Write entries at `row`, where that is one of the table's `rows`: zeros if not `used`."""
    column = tl.arange(0, COLUMNS)[None, :]
    value = tl.where(column == 0, c0[:, None], tl.where(column == 1, c1[:, None], 0))
    value = tl.where(column == 2, c2[:, None], tl.where(column == 3, c3[:, None], value))
    value = tl.where(column == 4, c4[:, None], tl.where(column == 5, c5[:, None], value))
    value = tl.where(column == 6, c6[:, None], value)
    at = table_ptr + row.to(tl.int64)[:, None] * COLUMNS + column
    tl.store(at, tl.where(used[:, None], value, 0), mask=(row < rows)[:, None])


@triton.jit(
    do_not_specialize=[
        "cu_seqlens_q_ptr",
        "seqlens_k_ptr",
        "causal_ptr",
        "num_seqs",
        "num_tokens",
        "causal",
        "left",
        "right",
        "max_keys",
        "first_seq",
        "num_owners",
        "search_step",
        "capacity",
        "tile_q",
        "block_n",
        "budget",
        "min_share",
        "band_rows",
        "item_rows",
        "reduction_rows",
        "stride_scratch",
    ]
)
def _plan_kernel(
    bands_ptr, items_ptr, reductions_ptr, scratch_ptr,
    cu_seqlens_q_ptr, seqlens_k_ptr, causal_ptr,
    num_seqs, num_tokens, causal, left, right, max_keys,
    first_seq, num_owners, search_step, capacity, tile_q, block_n, budget, min_share,
    band_rows, item_rows, reduction_rows, stride_scratch,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = pid * ROWS + tl.arange(0, ROWS)
    each = tl.arange(0, CHUNK)
    zero = tl.zeros([ROWS], tl.int32)

    batch = (
        cu_seqlens_q_ptr, seqlens_k_ptr, causal_ptr,
        num_seqs, num_tokens, causal, left, right, max_keys,
    )  # fmt: skip
    cut = (first_seq, num_owners, search_step, tile_q, block_n)

    is_band = (row <= num_seqs) & (row < band_rows)
    keys, lo, hi, offset = _keys(row, is_band, _rows(row, is_band, batch)[1], batch)
    seq = tl.minimum(row, tl.maximum(num_seqs - 1, 0))
    _store_rows(
        bands_ptr, row, band_rows, is_band, zero, keys, lo, hi, seq, offset, zero, COLUMNS
    )  # fmt: skip

    # Tiles up to each sequence; none where all of the program's rows are past what is planned.
    most = tl.maximum(capacity, budget)
    owners = tl.where(pid * ROWS < most, num_owners, 0)
    ends_ptr = scratch_ptr + pid.to(tl.int64) * stride_scratch
    blocks_ptr = ends_ptr + num_owners
    count = 0
    for chunk in range(0, owners, CHUNK):
        owner = chunk + each
        begin, end = _rows(first_seq + owner, owner < owners, batch)
        tiles = tl.where(owner < owners, (tl.maximum(end - begin, 0) + tile_q - 1) // tile_q, 0)
        tl.store(ends_ptr + owner, count + tl.cumsum(tiles, 0), mask=owner < owners)
        count += tl.sum(tiles, 0)
    count = tl.minimum(count, capacity)
    tl.debug_barrier()

    if SPLIT:
        total = tl.zeros([], tl.int64)
        top = 0
        for chunk in range(0, count, CHUNK):
            tile = chunk + each
            blocks = _tiles(tile, tile < count, ends_ptr, cut, batch)[5]
            tl.store(blocks_ptr + tile, blocks, mask=tile < count)
            total += tl.sum(blocks.to(tl.int64), 0)
            top = tl.maximum(top, tl.max(blocks, 0))
        tl.debug_barrier()

        # The least number from 0 to 62 whose shares fit, else 63, which leaves every tile whole.
        whole = tl.maximum(top, min_share)
        low = 0
        high = 63
        for _ in range(6):
            middle = (low + high) // 2
            size = _share_size(middle, total, budget, min_share, whole)
            made = 0
            for chunk in range(0, count, CHUNK):
                tile = chunk + each
                blocks = tl.load(blocks_ptr + tile, mask=tile < count, other=0)
                shares = tl.maximum((blocks + size - 1) // size, 1)
                made += tl.sum(tl.where(tile < count, shares, 0), 0)
            low = tl.where(made <= budget, low, middle + 1)
            high = tl.where(made <= budget, middle, high)
        size = tl.where(low == 63, whole, _share_size(low, total, budget, min_share, whole))

        # What comes before this program's items, and before its tiles.
        before = zero
        share_tile = zero
        first_item = zero
        made = 0
        for chunk in range(0, count, CHUNK):
            tile = chunk + each
            blocks = tl.load(blocks_ptr + tile, mask=tile < count, other=0)
            shares = tl.where(tile < count, tl.maximum((blocks + size - 1) // size, 1), 0)
            ends = made + tl.cumsum(shares, 0)
            past = (ends[None, :] <= row[:, None]) & (tile < count)[None, :]
            share_tile += tl.sum(past.to(tl.int32), 1)
            before += tl.sum(tl.where(past, shares[None, :], 0), 1)
            first_item += tl.sum(tl.where(tile[None, :] < row[:, None], shares[None, :], 0), 1)
            made += tl.sum(shares, 0)

        used = row < made
        q_begin, q_len, seq, k_begin, k_end, blocks = _tiles(share_tile, used, ends_ptr, cut, batch)
        start = k_begin // block_n + (row - before) * size
        stop = tl.minimum(start + size, k_begin // block_n + blocks)
        k_begin = tl.maximum(k_begin, start * block_n)
        k_end = tl.maximum(tl.minimum(k_end, stop * block_n), k_begin)
        _store_rows(
            items_ptr, row, item_rows, used, q_begin, q_len, seq, seq + 1, k_begin, k_end,
            tl.where(blocks > size, share_tile + 1, 0), COLUMNS,
        )  # fmt: skip

        used = row < count
        q_begin, q_len, seq, k_begin, k_end, blocks = _tiles(row, used, ends_ptr, cut, batch)
        shares = tl.maximum((blocks + size - 1) // size, 1)
        _store_rows(
            reductions_ptr, row, reduction_rows, used, q_begin, q_len, first_item, shares,
            zero, zero, zero, COLUMNS,
        )  # fmt: skip
    else:
        used = row < count
        q_begin, q_len, seq, k_begin, k_end, blocks = _tiles(row, used, ends_ptr, cut, batch)
        before = zero
        for chunk in range(0, tl.where(pid * ROWS < count, count, 0), CHUNK):
            tile = chunk + each
            others = _tiles(tile, tile < count, ends_ptr, cut, batch)[5]
            others = tl.where(tile < count, others, -1)
            longer = others[None, :] > blocks[:, None]
            as_long = (others[None, :] == blocks[:, None]) & (tile[None, :] < row[:, None])
            before += tl.sum((longer | as_long).to(tl.int32), 1)
        _store_rows(
            items_ptr, tl.where(used, before, row), item_rows, used,
            q_begin, q_len, seq, seq + 1, k_begin, k_end, zero, COLUMNS,
        )  # fmt: skip


@functools.cache
def _no_flags(device: torch.device) -> Tensor:
    """What is passed where `causal` is the same for all sequences: never read."""
    return torch.empty(1, dtype=torch.bool, device=device)


def paged_tables(batch: Batch, parts: list[Part], out: Buffers | None) -> Tables:
    """What `plan.paged_tables` returns, in a launch per part; the first also writes the bands."""
    cu_seqlens_q = batch.cu_seqlens_q.contiguous()
    seqlens_k = batch.seqlens_k.contiguous()
    num_seqs = seqlens_k.shape[0]
    rows = INTERPRETED_ROWS if triton_interprets() else ROWS
    left, right = batch.window or (None, None)
    if isinstance(batch.causal, Tensor):
        causal, flags = 2, batch.causal.bool().contiguous()
    else:
        causal, flags = int(bool(batch.causal)), _no_flags(seqlens_k.device)

    def table(length: int) -> Tensor:
        return torch.empty(length, ROW, dtype=torch.int32, device=seqlens_k.device)

    bands = out.bands if out else table(num_seqs + 1)
    made: list[tuple[Tensor, Tensor | None]] = []
    with torch.cuda.device_of(seqlens_k):  # kernels launch on the current device
        for part in parts:
            cut, first = part.cut, int(part.first)  # a bool would be of another type to Triton
            owners = part.stop - first
            most = max(cut.capacity, cut.budget)
            split = cut.budget > 0
            items = out.items if out else table(most)
            reductions = items
            if split:
                reductions = out.reductions if out else table(cut.capacity)
            band_rows = 0 if made else bands.shape[0]
            item_rows, reduction_rows = items.shape[0], reductions.shape[0] if split else 0
            stride_scratch = owners + (cut.capacity if split else 0)
            scratch = torch.empty(
                triton.cdiv(most, rows) * stride_scratch,
                dtype=torch.int32,
                device=seqlens_k.device,
            )
            _plan_kernel[(triton.cdiv(max(band_rows, item_rows, reduction_rows), rows),)](
                bands,
                items,
                reductions,
                scratch,
                cu_seqlens_q,
                seqlens_k,
                flags,
                num_seqs,
                batch.num_tokens,
                causal,
                -1 if left is None else left,
                -1 if right is None else right,
                min(batch.max_keys, UNBOUNDED),
                first,
                owners,
                1 << (owners.bit_length() - 1),
                cut.capacity,
                cut.tile_q,
                cut.config.block_n,
                cut.budget,
                cut.config.min_share,
                band_rows,
                item_rows,
                reduction_rows,
                stride_scratch,
                SPLIT=split,
                ROWS=rows,
                CHUNK=CHUNK,
                COLUMNS=ROW,
                num_warps=8,
            )
            made.append((items[:most], reductions[: cut.capacity] if split else None))
    return bands[: num_seqs + 1], made
