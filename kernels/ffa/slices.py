"""Plans for masks of slices over packed q and k."""

from weakref import WeakKeyDictionary

import torch

from magi_serve.kernels.ffa.plan import (
    Plan,
    TileConfig,
    exceeds_l2,
    expand,
    head_blocks,
    make_items,
    split_budget,
    table_of,
)
from magi_serve.masks import UNBOUNDED, AttentionSlices
from magi_serve.types import AttentionProblem

_PLANS: WeakKeyDictionary[AttentionSlices, dict[tuple[object, ...], Plan]] = WeakKeyDictionary()
_KEPT = 8
"""Plans per mask: kernels, head counts and devices that it is used with in turn."""


def plan_slices(
    slices: AttentionSlices,
    total_q: int,
    config: TileConfig,
    problem: AttentionProblem,
    device: torch.device,
) -> Plan:
    """Plan for a list of slices; made on the host once, kept on the device while `slices` lives.

    Rows are cut where a slice begins or ends, so that all rows of a tile lie in the same slices; a
    tile's keys are split by position, whatever part of a range its slices cover.
    """
    dims = (problem.head_dim, problem.head_dim_v, problem.kv_dtype)
    key = (config, problem.num_q_heads, problem.num_kv_heads, *dims, total_q, device)
    kept = _PLANS.setdefault(slices, {})
    if key not in kept:
        plan = _plan_slices(slices, total_q, config, problem)
        if len(kept) == _KEPT:
            kept.pop(next(iter(kept)))
        kept[key] = Plan(
            config,
            plan.bands.to(device),
            plan.items.to(device),
            None if plan.reductions is None else plan.reductions.to(device),
            plan.bounded_below,
            plan.head_major,
        )
    return kept[key]


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
    owner, number, _ = expand(spans, int(spans.sum()))
    segment = (first[owner] if len(owner) else owner) + number
    by_segment = segment.argsort(stable=True)
    table = bands[owner[by_segment]]
    run_end = torch.bincount(segment, minlength=len(cuts)).cumsum(0)
    run_begin = torch.cat([run_end.new_zeros(1), run_end[:-1]])

    begin, end = cuts[:-1], cuts[1:]
    tile_counts = (end - begin + tile_q - 1) // tile_q
    seg, number, _ = expand(tile_counts, int(tile_counts.sum()))
    q_begin = begin[seg] + number * tile_q
    q_len = (end[seg] - q_begin).clamp(max=tile_q)
    tile, which, _ = expand((run_end - run_begin)[seg], int((run_end - run_begin)[seg].sum()))
    band = table[run_begin[seg][tile] + which] if len(tile) else table[:0]
    low = torch.maximum(band[:, 2], q_begin[tile] + band[:, 4])
    high = torch.minimum(band[:, 3], q_begin[tile] + q_len[tile] + band[:, 5])
    sees = low < high
    k_begin = torch.full_like(q_begin, UNBOUNDED).scatter_reduce(0, tile[sees], low[sees], "amin")
    k_end = torch.zeros_like(q_begin).scatter_reduce(0, tile[sees], high[sees], "amax")
    k_begin = torch.where(k_begin == UNBOUNDED, 0, k_begin)

    heads = head_blocks(problem.num_q_heads, problem.num_kv_heads, config)
    budget = split_budget(config, len(q_begin), heads, is_decode=False)
    tiles = (q_begin, q_len, run_begin[seg], run_end[seg], k_begin, k_end)
    items, reductions = make_items(tiles, config, budget=budget, out=None)
    columns = [*table[:, 2:].unbind(1), torch.zeros_like(table[:, 0])]
    bounded_below = bool((table[:, 4] > -UNBOUNDED).any())
    num_keys = int(table[:, 3].max()) if len(table) else 0
    head_major = exceeds_l2(problem, num_keys)
    return Plan(config, table_of(columns, None), items, reductions, bounded_below, head_major)
