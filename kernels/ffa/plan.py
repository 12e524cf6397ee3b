"""Turning masks into work items: the one form of work that every planned kernel reads.

A *band* is a key range and a diagonal range: row ``i`` sees the keys of ``[k_begin, k_end)`` with
``i + lo <= key <= i + hi``. Every mask is a set of bands. For paged attention there is one band per
sequence and keys count from the sequence's start; for slices keys count through the packed k.

A *tile* is up to ``tile_q`` consecutive query rows that share the same bands. An *item* is a tile
with a range of keys: the whole of what the tile sees, or one of several equal shares (split KV),
whose partial results a *reduction* puts together. Heads are not in the plan: a kernel repeats
every item for each head.

Everything here is vectorised torch on the device where the lengths are: no host synchronisation,
tables of a size that depends only on host counts, so that captured CUDA graphs can be replayed over
them. Unused entries have no rows (``q_len == 0``).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from magi_serve.types import UNBOUNDED, AttentionProblem, AttentionSlices

Regime = Literal["prefill", "decode", "slices"]
Window = tuple[int | None, int | None]

BAND_COLUMNS = ("k_begin", "k_end", "lo", "hi", "seq")
ITEM_COLUMNS = ("q_begin", "q_len", "band_begin", "band_end", "k_begin", "k_end", "is_part")
REDUCTION_COLUMNS = ("q_begin", "q_len", "first_item", "num_items")
ROW = 8
"""Columns per table row, the named ones first: 32 bytes."""


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
    waves: int = 4
    min_share: int = 4

    def group_rows(self, groups: int) -> int:
        """Query heads of one kv head that a program takes at once."""
        return min(groups, self.block_m) if self.packed else 1

    def tile_q(self, groups: int) -> int:
        """Query rows per tile."""
        return max(1, self.block_m // groups) if self.packed else self.block_m


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
    """

    config: TileConfig
    bands: Tensor
    items: Tensor
    reductions: Tensor | None
    bounded_below: bool = True
    head_major: bool = True


L2_BYTES = 32 << 20
"""Keys and values up to about this size stay in the L2 cache of the GPUs that we tile for."""


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
    shape: tuple[int, int, int, int]
    """Query heads, kv heads, head_dim, head_dim_v."""


def _table(columns: list[Tensor], out: Tensor | None) -> Tensor:
    """Columns as an int32 table of `ROW` columns: a new one, or the first rows of `out`.

    The rest of `out` is emptied: a graph captured for a larger batch then finds no work there.
    """
    rows = columns[0].shape[0]
    table = columns[0].new_zeros(rows, ROW, dtype=torch.int32) if out is None else out[:rows]
    table[:, : len(columns)] = torch.stack(columns, 1)
    if out is not None:
        out[rows:] = 0
    return table


def _expand(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every unit of `counts`: its owner, its number within the owner, and whether it exists."""
    ends = counts.cumsum(0)
    unit = torch.arange(capacity, device=counts.device)
    owner = torch.searchsorted(ends, unit, right=True)
    exists = owner < counts.shape[0]
    owner = owner.clamp(max=counts.shape[0] - 1)
    return owner, unit - (ends - counts)[owner], exists


def _share_size(blocks: Tensor, exists: Tensor, budget: int, least: int) -> Tensor:
    """Key blocks per share: the least size, of 64 tried, that makes at most `budget` shares.

    ``sum(ceil(blocks / size)) <= total / size + tiles``, so twice ``total / budget`` is enough
    wherever half the budget covers the tiles; the sizes tried end with one that leaves every tile
    whole.
    """
    base = (blocks.sum() / budget).clamp(min=least)
    steps = torch.arange(64, device=blocks.device) / 32
    sizes = torch.ceil(base * (1 + steps)).long()
    sizes[-1:] = blocks.max().clamp(min=least)
    shares = torch.where(exists, (-(-blocks // sizes[:, None])).clamp(min=1), 0).sum(1)
    fits = (shares <= budget).long()
    fits[-1:] = 1
    # Indexing with a scalar on the device would wait for it.
    return sizes.index_select(0, fits.argmax(0, keepdim=True))


def _items(
    tiles: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    config: TileConfig,
    *,
    budget: int,
    out: "Buffers | None",
) -> tuple[Tensor, Tensor | None]:
    """Items and reductions for tiles ``(q_begin, q_len, band_begin, band_end, k_begin, k_end)``.

    `budget` is the number of items that keys may be split into; 0 keeps every tile whole and orders
    tiles longest first.
    """
    q_begin, q_len, band_begin, band_end, k_begin, k_end = tiles
    capacity = q_begin.shape[0]
    k_end = torch.maximum(k_end, k_begin)
    start = k_begin // config.block_n
    blocks = torch.where(k_end > k_begin, -(-k_end // config.block_n) - start, 0)
    if not budget:
        order = blocks.masked_fill(q_len == 0, -1).argsort(descending=True, stable=True)
        columns = [c[order] for c in (q_begin, q_len, band_begin, band_end, k_begin, k_end)]
        return _table(columns, out.items if out else None), None
    exists = q_len > 0
    size = _share_size(blocks, exists, budget, config.min_share)
    shares = torch.where(exists, (-(-blocks // size)).clamp(min=1), 0)
    tile, share, used = _expand(shares, max(budget, capacity))
    share_begin = (start[tile] + share * size) * config.block_n
    begin = torch.maximum(k_begin[tile], share_begin)
    end = torch.minimum(k_end[tile], share_begin + size * config.block_n)
    items = _table(
        [
            q_begin[tile],
            torch.where(used, q_len[tile], 0),
            band_begin[tile],
            band_end[tile],
            begin,
            torch.maximum(end, begin),
            shares[tile] > 1,
        ],
        out.items if out else None,
    )
    reductions = _table(
        [q_begin, q_len, shares.cumsum(0) - shares, shares], out.reductions if out else None
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


@dataclass(frozen=True, eq=False, slots=True)
class Buffers:
    """Device tables at fixed addresses, for plans that captured CUDA graphs read."""

    bands: Tensor
    items: Tensor
    reductions: Tensor


def head_blocks(problem: AttentionProblem, config: TileConfig) -> int:
    """Programs per item: kv heads, times the chunks that the query heads of each are cut into."""
    groups = problem.num_q_heads // problem.num_kv_heads
    return problem.num_kv_heads * -(-groups // config.group_rows(groups))


def paged_bands(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    *,
    num_tokens: int,
    causal: bool | Tensor,
    window: Window | None,
    max_keys: int = UNBOUNDED,
) -> tuple[Tensor, Tensor, Tensor]:
    """First row, row past the last, and band of every sequence, and of the rows after them all.

    A query row's position is bottom-right aligned: the last row sits at the last key. Rows from
    ``cu_seqlens_q[-1]`` to `num_tokens` form one more entry that sees no key, so that they come
    out as 0.

    Returns:
        ``begin``, ``end`` ``[num_seqs + 1]`` and bands ``[num_seqs + 1, 5]``, int64.
    """
    left, right = window or (None, None)
    begin = cu_seqlens_q.long().clamp(0, num_tokens)
    end = torch.nn.functional.pad(begin[1:], (0, 1), value=num_tokens)
    keys = torch.nn.functional.pad(seqlens_k.long(), (0, 1))
    offset = keys - end
    lo = torch.full_like(keys, -UNBOUNDED) if left is None else offset - left
    hi = torch.full_like(keys, UNBOUNDED) if right is None else offset + right
    if isinstance(causal, Tensor):
        is_causal = torch.nn.functional.pad(causal.bool(), (0, 1))
        hi = torch.where(is_causal, torch.minimum(hi, offset), hi)
    elif causal:
        hi = torch.minimum(hi, offset)
    seq = torch.arange(keys.shape[0], device=keys.device).clamp(max=max(keys.shape[0] - 2, 0))
    keys = keys.clamp(max=max_keys)
    return begin, end, torch.stack([torch.zeros_like(keys), keys, lo, hi, seq], 1)


def plan_rows(
    begin: Tensor,
    end: Tensor,
    bands: Tensor,
    config: TileConfig,
    *,
    tile_q: int,
    first_band: int,
    capacity: int,
    budget: int,
    out: Buffers | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Items and reductions for rows that each lie in one band.

    ``[begin, end)`` are the rows of the bands from `first_band` on; `capacity` bounds the number
    of tiles (a host count); `bands` ``[n, 5]`` are all bands of the batch.
    """
    counts = (end - begin + tile_q - 1).clamp(min=0) // tile_q
    owner, number, exists = _expand(counts, capacity)
    q_begin = begin[owner] + number * tile_q
    q_len = torch.where(exists, (end[owner] - q_begin).clamp(0, tile_q), 0)
    band = owner + first_band
    k_begin, k_end, lo, hi, _ = bands[band].unbind(1)
    k_begin = torch.maximum(k_begin, q_begin + lo)
    k_end = torch.minimum(k_end, q_begin + q_len + hi)
    return _items((q_begin, q_len, band, band + 1, k_begin, k_end), config, budget=budget, out=out)


def plan_slices(
    slices: AttentionSlices,
    total_q: int,
    config: TileConfig,
    problem: AttentionProblem,
    device: torch.device,
) -> Plan:
    """Plan for a list of slices; made on the host once and kept, with its device copy, in `slices`.

    Rows are cut where a slice begins or ends, so that all rows of a tile lie in the same slices; a
    tile's keys are split by position, whatever part of a range its slices cover.
    """
    key = (config, problem.num_q_heads, problem.num_kv_heads, total_q, device)
    if key not in slices.cache:
        plan = _plan_slices(slices, total_q, config, problem)
        slices.cache[key] = Plan(
            config,
            plan.bands.to(device),
            plan.items.to(device),
            None if plan.reductions is None else plan.reductions.to(device),
        )
    plan = slices.cache[key]
    assert isinstance(plan, Plan)
    return plan


def _plan_slices(
    slices: AttentionSlices, total_q: int, config: TileConfig, problem: AttentionProblem
) -> Plan:
    tile_q = config.tile_q(problem.num_q_heads // problem.num_kv_heads)
    bands = torch.from_numpy(slices.bands())
    bands = bands[(bands[:, 0] < bands[:, 1]) & (bands[:, 2] < bands[:, 3])]
    bands = bands[bands[:, 2].argsort(stable=True)]
    cuts = torch.cat([bands[:, :2].flatten(), torch.tensor([0, total_q])]).unique()
    first = torch.searchsorted(cuts, bands[:, 0].contiguous())
    spans = torch.searchsorted(cuts, bands[:, 1].contiguous()) - first
    owner, number, _ = _expand(spans, int(spans.sum()))
    segment = (first[owner] if len(owner) else owner) + number
    by_segment = segment.argsort(stable=True)
    table = bands[owner[by_segment]]
    run_end = torch.bincount(segment, minlength=len(cuts)).cumsum(0)
    run_begin = torch.cat([run_end.new_zeros(1), run_end[:-1]])

    begin, end = cuts[:-1], cuts[1:]
    tile_counts = (end - begin + tile_q - 1) // tile_q
    seg, number, _ = _expand(tile_counts, int(tile_counts.sum()))
    q_begin = begin[seg] + number * tile_q
    q_len = (end[seg] - q_begin).clamp(max=tile_q)
    tile, which, _ = _expand((run_end - run_begin)[seg], int((run_end - run_begin)[seg].sum()))
    band = table[run_begin[seg][tile] + which] if len(tile) else table[:0]
    low = torch.maximum(band[:, 2], q_begin[tile] + band[:, 4])
    high = torch.minimum(band[:, 3], q_begin[tile] + q_len[tile] + band[:, 5])
    sees = low < high
    k_begin = torch.full_like(q_begin, UNBOUNDED).scatter_reduce(0, tile[sees], low[sees], "amin")
    k_end = torch.zeros_like(q_begin).scatter_reduce(0, tile[sees], high[sees], "amax")
    k_begin = torch.where(k_begin == UNBOUNDED, 0, k_begin)

    budget = split_budget(config, len(q_begin), head_blocks(problem, config), is_decode=False)
    tiles = (q_begin, q_len, run_begin[seg], run_end[seg], k_begin, k_end)
    items, reductions = _items(tiles, config, budget=budget, out=None)
    columns = [*table[:, 2:].unbind(1), torch.zeros_like(table[:, 0])]
    return Plan(config, _table(columns, None), items, reductions)


class PagedPlanner:
    """Plans batches of one shape of paged attention; owns the buffers that captured graphs read.

    Args:
        problem: heads, dims, dtypes and device; the kernel is chosen for it.
        max_tokens: most query rows of a batch of decodes.
        max_seqs: most sequences of a batch.
        device: where lengths will be.
        window: ``(left, right)`` counts of further keys, None for unlimited.
        kernel: a kernel's name to force it.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        *,
        max_tokens: int,
        max_seqs: int,
        device: torch.device,
        window: Window | None = None,
        kernel: str | None = None,
    ) -> None:
        from magi_serve.kernels.dispatch import choose_kernel

        self.window = normal_window(window)
        left_bound = self.window is not None and self.window[0] is not None
        self.problem = replace(problem, window=left_bound)
        self.spec = choose_kernel(self.problem, kernel)
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.device = device
        self._buffers: Buffers | None = None

    @property
    def groups(self) -> int:
        return self.problem.num_q_heads // self.problem.num_kv_heads

    def config(self, regime: Regime, max_q_len: int) -> TileConfig:
        """The kernel's tiling for a regime; `max_q_len` sizes decode tiles."""
        config: TileConfig = self.spec.load().tile_config(self.problem, regime, max_q_len)
        return config

    def buffers(self) -> Buffers:
        """Tables for batches of decodes, at addresses that never change."""
        if self._buffers is None:
            # One query row per tile is the finest cut, so it bounds the number of tiles.
            tiles = self.max_tokens + self.max_seqs + 1
            config = self.config("decode", 1)
            items = max(tiles, config.waves * config.programs)

            def table(rows: int) -> Tensor:
                return torch.zeros(rows, ROW, dtype=torch.int32, device=self.device)

            self._buffers = Buffers(table(self.max_seqs + 1), table(items), table(tiles))
        return self._buffers

    def plan(
        self,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        *,
        num_tokens: int,
        num_decodes: int,
        num_decode_tokens: int,
        max_decode_q_len: int,
        causal: bool | Tensor = True,
        max_seqlen_k: int | None = None,
        max_keys: int = UNBOUNDED,
    ) -> PagedPlan:
        """Plan one batch, on the device, without a synchronisation.

        Args:
            cu_seqlens_q: ``[num_seqs + 1]`` int32, non-decreasing, from 0.
            seqlens_k: ``[num_seqs]`` int32.
            num_tokens: rows of q; those past ``cu_seqlens_q[-1]`` come out as zeros.
            num_decodes: leading sequences of at most `max_decode_q_len` rows, cut into decode
                tiles.
            num_decode_tokens: rows of those; used only where other sequences follow.
            max_decode_q_len: see above.
            causal: bottom-right aligned; a bool, or a tensor ``[num_seqs]`` of them.
            max_seqlen_k: about the most keys of a sequence, where the host knows; orders work only.
            max_keys: what a row of the page table holds; keys past it are never read.

        Batches with as many sequences, all decodes, use the same buffers and launch the same grids.
        """
        num_seqs = seqlens_k.shape[0]

        def made(parts: list[Plan]) -> PagedPlan:
            p = self.problem
            shape = (p.num_q_heads, p.num_kv_heads, p.head_dim, p.head_dim_v)
            name, rows = self.spec.name, num_tokens
            return PagedPlan(tuple(parts), name, rows, num_seqs, self.window, causal, shape)

        if not self.spec.planned:
            return made([])
        begin, end, bands = paged_bands(
            cu_seqlens_q,
            seqlens_k,
            num_tokens=num_tokens,
            causal=causal,
            window=self.window,
            max_keys=max_keys,
        )
        only_decodes = num_decodes == num_seqs
        fits = num_seqs <= self.max_seqs and num_tokens <= self.max_tokens
        out = self.buffers() if only_decodes and fits else None
        table = _table(list(bands.unbind(1)), out.bands if out else None)

        problem = self.problem
        key_bytes = (problem.head_dim + problem.head_dim_v) * problem.kv_dtype.itemsize
        kv_bytes = (max_seqlen_k or num_tokens) * problem.num_kv_heads * key_bytes

        def part(regime: Regime, first: int, stop: int, rows: int, max_q_len: int) -> Plan:
            config = self.config(regime, max_q_len)
            tile_q = config.tile_q(self.groups)
            capacity = -(-rows // tile_q) + stop - first
            is_decode = regime == "decode"
            budget = split_budget(
                config,
                stop - first if is_decode else capacity,
                head_blocks(self.problem, config),
                is_decode=is_decode,
            )
            items, reductions = plan_rows(
                begin[first:stop],
                end[first:stop],
                bands,
                config,
                tile_q=tile_q,
                first_band=first,
                capacity=capacity,
                budget=budget,
                out=out,
            )
            return Plan(
                config,
                table,
                items,
                reductions,
                bounded_below=self.window is not None and self.window[0] is not None,
                head_major=kv_bytes > L2_BYTES,
            )

        if only_decodes:
            parts = [part("decode", 0, num_seqs + 1, num_tokens, max_decode_q_len)]
        else:
            parts = [
                part(
                    "prefill", num_decodes, num_seqs + 1, num_tokens - num_decode_tokens, num_tokens
                )
            ]
            if num_decodes:
                parts.append(part("decode", 0, num_decodes, num_decode_tokens, max_decode_q_len))
        return made(parts)
