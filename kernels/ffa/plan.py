"""Turning masks into work items: the one form of work that every planned kernel reads.

A *band* is a key range and a diagonal range: row ``i`` sees the keys of ``[k_begin, k_end)`` with
``i + lo <= key <= i + hi``. Every mask is a set of bands. For paged attention there is one band per
sequence, or segment of one (`magi_serve.spans`), and keys count from the sequence's start; for
slices keys count through the packed k.

A *tile* is up to ``tile_q`` consecutive query rows that share the same bands. An *item* is a tile
with a range of keys: the whole of what the tile sees, or one of several equal shares (split KV),
whose partial results a *reduction* puts together. Heads are not in the plan: a kernel repeats
every item for each head.

Everything here is vectorised torch on the device where the lengths are: no host synchronisation,
tables of a size that depends only on host counts, so that captured CUDA graphs can be replayed over
them. Unused entries are zeros: they have no rows. For paged attention by Triton's kernels the same
tables are made in Triton (`triton_planner`); this is the truth for those.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError
from magi_serve.masks import UNBOUNDED
from magi_serve.spans import BidirectionalSpans, Segment
from magi_serve.types import AttentionProblem

Regime = Literal["prefill", "decode", "slices"]
Window = tuple[int | None, int | None]

BAND_COLUMNS = ("k_begin", "k_end", "lo", "hi", "seq", "offset")
"""Row ``i`` of paged attention sits at the key ``i + offset``; 0 for slices, where it need not."""
ITEM_COLUMNS = ("q_begin", "q_len", "band_begin", "band_end", "k_begin", "k_end", "split_tile")
"""`split_tile` is 0 for a whole tile, else 1 + the row of the reduction that its share is for."""
REDUCTION_COLUMNS = ("q_begin", "q_len", "first_item", "num_items")
ROW = 8
"""Columns per table row, the named ones first: 32 bytes."""
L2_BYTES = 32 << 20
"""Keys and values up to about this size stay in L2."""


def normal_window(window: Window | None) -> Window | None:
    """`window` with None for a side that reaches every key; None if both do."""
    left, right = (None if w is None or w >= UNBOUNDED else w for w in window or (None, None))
    return None if left is None and right is None else (left, right)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How a kernel cuts one kind of work; tuned data, see `tuned/`.

    Attributes:
        block_m: matrix rows per program: query rows times query heads of one kv head.
        block_n: keys per step.
        num_warps, num_stages: as Triton takes them.
        packed: whether a tile holds all query heads of a kv head, or one.
        programs: programs that fill the chip; 0 if keys are never split.
        programs_per_sm: how many of them share a multiprocessor.
        queued: whether programs take their work from a queue, so that keys need no splitting.
        fused: whether the last program of a split tile reduces it, in the same launch.
        waves: shares per program slot when tiles are many, for an even finish.
        min_share: least key blocks in a share.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1
    packed: bool = True
    programs: int = 0
    programs_per_sm: int = 1
    queued: bool = False
    fused: bool = False
    waves: int = 4
    min_share: int = 4

    def group_rows(self, groups: int) -> int:
        """Query heads of one kv head that a program takes at once."""
        return min(groups, self.block_m) if self.packed else 1

    def tile_q(self, groups: int) -> int:
        """Query rows per tile."""
        return max(1, self.block_m // groups) if self.packed else self.block_m


@dataclass(frozen=True, slots=True)
class Cut:
    """How one part of a batch is cut, from host counts alone; what a kernel is compiled for.

    Attributes:
        config: tiles.
        tile_q: query rows per tile.
        capacity: most tiles there can be.
        budget: items that keys may be split into, 0 where they are not.
    """

    config: TileConfig
    tile_q: int
    capacity: int
    budget: int

    @property
    def kind(self) -> tuple[TileConfig, bool]:
        """Equal for parts that launch the same kernels."""
        return self.config, self.budget > 0


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """Work items of one launch.

    Attributes:
        config: the tiling that the items are for.
        bands: ``[num_bands, ROW]`` int32, `BAND_COLUMNS`.
        items: ``[num_items, ROW]`` int32, `ITEM_COLUMNS`.
        reductions: ``[num_tiles, ROW]`` int32, `REDUCTION_COLUMNS`; None if no tile is split.
        bounded_below: whether some row's keys start after its band's first.
        head_major: whether all items of a head come before the next head's: for keys beyond L2.
        counters: ``[num_tiles * head_blocks]`` int32 zeros that launches which reduce split tiles
            themselves count in and leave as zeros; None if a launch is to bring its own.
    """

    config: TileConfig
    bands: Tensor
    items: Tensor
    reductions: Tensor | None
    bounded_below: bool = True
    head_major: bool = True
    counters: Tensor | None = None


@dataclass(eq=False, slots=True)
class Buffers:
    """Device tables at fixed addresses, for plans that captured CUDA graphs read.

    Attributes:
        bands, items, reductions, counters: as in `Plan`, with room for any batch.
        plans: how many were made in them; they hold the last one.
    """

    bands: Tensor
    items: Tensor
    reductions: Tensor
    counters: Tensor
    plans: int = 0


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True, eq=False, slots=True)
class PagedPlan:
    """The launches of one batch, made once per step and used by every layer with the same mask.

    What it was made for is kept beside them, so that a call with anything else is refused.
    """

    parts: tuple[Plan, ...]
    kernel: str
    num_tokens: int
    num_seqs: int
    window: Window | None
    causal: bool | Tensor
    spans: BidirectionalSpans | None
    shape: tuple[int, int, int, int]
    """Query heads, kv heads, head_dim, head_dim_v."""
    buffers: Buffers | None = None
    """Where its tables lie, if they are its planner's."""
    number: int = 0
    """Which of the plans in `buffers` it is."""
    outgrown: bool = False
    """Whether its tables are its own only because its planner's were too small."""

    def check_tables(self) -> None:
        """Refuse a plan whose tables hold another one, or would not outlive it in a captured graph.

        Looks at the host only. Replays of a graph run no Python: they read what tables hold then.

        Raises:
            ArgumentError: the planner has made another plan of decodes since; or a CUDA graph is
                being captured, and the plan has more decodes than its planner's buffers hold.
        """
        if self.buffers is not None and self.buffers.plans != self.number:
            raise ArgumentError(
                f"plan is number {self.number} of its planner's plans of decodes, and number "
                f"{self.buffers.plans} has overwritten its tables; use a plan before the next one "
                "is made, or give batches that overlap a PagedPlanner each"
            )
        if self.outgrown and capturing():
            raise ArgumentError(
                f"plan of {self.num_seqs} decodes with {self.num_tokens} rows is larger than its "
                "planner's buffers, and the CUDA graph being captured would read its tables after "
                "they are gone; give PagedPlanner a larger max_seqs and max_tokens, or capture a "
                "smaller batch"
            )


def table_of(columns: list[Tensor], out: Tensor | None, used: Tensor | None = None) -> Tensor:
    """Columns as an int32 table of `ROW` columns: a new one, or the first rows of `out`.

    Rows that are not `used`, and the rest of `out`, are zeros: a graph captured for a larger batch
    then finds no work there.
    """
    rows = columns[0].shape[0]
    values = torch.stack(columns, 1)
    table = values.new_zeros(rows, ROW, dtype=torch.int32) if out is None else out.zero_()[:rows]
    table[:, : len(columns)] = values if used is None else values * used[:, None]
    return table


def expand(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every unit of `counts`: its owner, its number within the owner, and whether it exists."""
    ends = counts.cumsum(0)
    unit = torch.arange(capacity, device=counts.device)
    owner = torch.searchsorted(ends, unit, right=True)
    exists = owner < counts.shape[0]
    owner = owner.clamp(max=counts.shape[0] - 1)
    return owner, unit - (ends - counts)[owner], exists


def _share_size(blocks: Tensor, exists: Tensor, budget: int, least: int) -> Tensor:
    """Key blocks per share: the least size, of 64 tried, that makes at most `budget` shares.

    The sizes grow from ``max(total / budget, least)`` in steps of a 32nd of it, rounded up.
    ``sum(ceil(blocks / size)) <= total / size + tiles``, so twice ``total / budget`` is enough
    wherever half the budget covers the tiles; the sizes tried end with one that leaves every tile
    whole.
    """
    steps = torch.arange(32, 96, device=blocks.device)
    sizes = torch.maximum(-(-blocks.sum() * steps // (32 * budget)), -(-least * steps // 32))
    sizes[-1:] = blocks.max().clamp(min=least)
    shares = torch.where(exists, (-(-blocks // sizes[:, None])).clamp(min=1), 0).sum(1)
    fits = (shares <= budget).long()
    fits[-1:] = 1
    # Indexing with a scalar on the device would wait for it.
    return sizes.index_select(0, fits.argmax(0, keepdim=True))


def make_items(
    tiles: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    config: TileConfig,
    *,
    budget: int,
    out: Buffers | None,
) -> tuple[Tensor, Tensor | None]:
    """Items and reductions for tiles ``(q_begin, q_len, band_begin, band_end, k_begin, k_end)``.

    `budget` is the number of items that keys may be split into; 0 keeps every tile whole and orders
    tiles longest first.
    """
    q_begin, q_len, band_begin, band_end, k_begin, k_end = tiles
    capacity = q_begin.shape[0]
    exists = q_len > 0
    k_end = torch.maximum(k_end, k_begin)
    start = k_begin // config.block_n
    blocks = torch.where(exists & (k_end > k_begin), -(-k_end // config.block_n) - start, 0)
    if not budget:
        order = blocks.masked_fill(~exists, -1).argsort(descending=True, stable=True)
        columns = [c[order] for c in (q_begin, q_len, band_begin, band_end, k_begin, k_end)]
        return table_of(columns, out.items if out else None, exists[order]), None
    size = _share_size(blocks, exists, budget, config.min_share)
    shares = torch.where(exists, (-(-blocks // size)).clamp(min=1), 0)
    tile, share, used = expand(shares, max(budget, capacity))
    share_begin = (start[tile] + share * size) * config.block_n
    begin = torch.maximum(k_begin[tile], share_begin)
    end = torch.minimum(k_end[tile], share_begin + size * config.block_n)
    items = table_of(
        [
            q_begin[tile],
            q_len[tile],
            band_begin[tile],
            band_end[tile],
            begin,
            torch.maximum(end, begin),
            torch.where(shares[tile] > 1, tile + 1, 0),
        ],
        out.items if out else None,
        used,
    )
    reductions = table_of(
        [q_begin, q_len, shares.cumsum(0) - shares, shares],
        out.reductions if out else None,
        exists,
    )
    return items, reductions


def split_budget(config: TileConfig, num_tiles: int, head_blocks: int, *, is_decode: bool) -> int:
    """How many items keys may be split into, given about how many tiles there are (host counts).

    Few tiles get one wave of programs; decode with many tiles gets several, so that the last wave
    is a small part of the whole. Prefill tiles are split only while they leave programs idle.
    """
    if config.queued:
        return 0
    slots = config.programs // head_blocks
    if 2 * num_tiles <= slots:
        return slots
    return config.waves * slots if is_decode and num_tiles <= config.waves * slots // 2 else 0


def head_blocks(num_q_heads: int, num_kv_heads: int, config: TileConfig) -> int:
    """Programs per item: kv heads, times the chunks that the query heads of each are cut into."""
    groups = num_q_heads // num_kv_heads
    return num_kv_heads * -(-groups // config.group_rows(groups))


def exceeds_l2(problem: AttentionProblem, num_keys: int) -> bool:
    """Whether so many keys and values leave the L2 cache of the GPUs that we tile for."""
    key_bytes = (problem.head_dim + problem.head_dim_v) * problem.kv_dtype.itemsize
    return num_keys * problem.num_kv_heads * key_bytes > L2_BYTES


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Sequences in the segments of `BidirectionalSpans.segments`, on the device.

    Attributes:
        table: ``[num_segments + 1, 7]`` int64, columns as in `magi_serve.spans.Segment`; the last
            is the rows after all sequences.
        first: of each sequence, and of those rows, the first segment; then how many there are.
    """

    table: Tensor
    first: list[int]

    @classmethod
    def of(cls, spans: BidirectionalSpans, left: int | None, device: torch.device) -> "Segments":
        """The segments of a batch, on their way to `device`: nothing waits for them."""
        num_seqs = len(spans.ranges)
        rest = Segment(num_seqs, -UNBOUNDED, UNBOUNDED, 0, UNBOUNDED, True, False)
        cut = [*spans.segments(left), rest]
        counts = Counter(segment.seq for segment in cut)
        first = [0, *itertools.accumulate(counts[seq] for seq in range(num_seqs + 1))]
        table = torch.tensor(cut, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(table.to(device, non_blocking=True), first)

    def __len__(self) -> int:
        return self.first[-1]


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Paged sequences to plan for; the attributes are `PagedPlanner.plan`'s arguments."""

    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    num_tokens: int
    causal: bool | Tensor
    window: Window | None
    max_keys: int
    segments: Segments | None = None


class Part(NamedTuple):
    """The sequences ``[first, stop)`` of a batch, or their segments, and how they are cut.

    Sequence `num_seqs` is the rows after all others.
    """

    first: int
    stop: int
    cut: Cut


Tables = tuple[Tensor, list[tuple[Tensor, Tensor | None]]]
"""The bands of a batch; items and reductions of each part, without the latter if not split."""


def paged_tables(batch: Batch, parts: list[Part], out: Buffers | None) -> Tables:
    """Tables of `batch`, in `out` where that is given."""
    begin, end, bands = paged_bands(batch)
    table = table_of(list(bands.unbind(1)), out.bands if out else None)
    made = []
    for first, stop, cut in parts:
        if batch.segments is not None:
            first, stop = batch.segments.first[first], batch.segments.first[stop]
        rows = begin[first:stop], end[first:stop]
        made.append(plan_rows(*rows, bands, cut, first_band=first, out=out))
    return table, made


def paged_bands(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """First row, row past the last, and band of every sequence or segment of one, and of the rows
    after them all.

    A query row's position is bottom-right aligned: the last row sits at the last key. Rows from
    ``cu_seqlens_q[-1]`` to `num_tokens` form one more entry that sees no key, so that they come
    out as 0.

    Returns:
        ``begin``, ``end`` ``[n + 1]`` and bands ``[n + 1, 6]``, int64, of n sequences or segments.
    """
    left, right = batch.window or (None, None)
    begin = batch.cu_seqlens_q.long().clamp(0, batch.num_tokens)
    end = torch.nn.functional.pad(begin[1:], (0, 1), value=batch.num_tokens)
    keys = torch.nn.functional.pad(batch.seqlens_k.long(), (0, 1))
    offset = keys - end
    lo = torch.full_like(keys, -UNBOUNDED) if left is None else offset - left
    hi = torch.full_like(keys, UNBOUNDED) if right is None else offset + right
    if isinstance(batch.causal, Tensor):
        is_causal = torch.nn.functional.pad(batch.causal.bool(), (0, 1))
        hi = torch.where(is_causal, torch.minimum(hi, offset), hi)
    elif batch.causal:
        hi = torch.minimum(hi, offset)
    seq = torch.arange(keys.shape[0], device=keys.device).clamp(max=max(keys.shape[0] - 2, 0))
    keys = keys.clamp(max=batch.max_keys)
    k_begin = torch.zeros_like(keys)
    if batch.segments is not None:
        of, first, stop, k_begin, k_end, from_window, both_ways = batch.segments.table.unbind(1)
        begin, end, offset, keys, lo, hi, seq = (
            x[of] for x in (begin, end, offset, keys, lo, hi, seq)
        )
        begin, end = (torch.clamp(x - offset, begin, end) for x in (first, stop))
        keys = torch.minimum(keys, k_end)
        lo = torch.where(from_window > 0, lo, -UNBOUNDED)
        hi = torch.where(both_ways > 0, UNBOUNDED, hi)
    return begin, end, torch.stack([k_begin, keys, lo, hi, seq, offset], 1)


def plan_rows(
    begin: Tensor,
    end: Tensor,
    bands: Tensor,
    cut: Cut,
    *,
    first_band: int,
    out: Buffers | None,
) -> tuple[Tensor, Tensor | None]:
    """Items and reductions for rows that each lie in one band.

    ``[begin, end)`` are the rows of the bands from `first_band` on; `bands` ``[n, 6]`` are all
    bands of the batch.
    """
    tile_q = cut.tile_q
    counts = (end - begin + tile_q - 1).clamp(min=0) // tile_q
    owner, number, exists = expand(counts, cut.capacity)
    q_begin = begin[owner] + number * tile_q
    q_len = torch.where(exists, (end[owner] - q_begin).clamp(0, tile_q), 0)
    band = owner + first_band
    k_begin, k_end, lo, hi, *_ = bands[band].unbind(1)
    k_begin = torch.maximum(k_begin, q_begin + lo)
    k_end = torch.minimum(k_end, q_begin + q_len + hi)
    return make_items(
        (q_begin, q_len, band, band + 1, k_begin, k_end), cut.config, budget=cut.budget, out=out
    )
