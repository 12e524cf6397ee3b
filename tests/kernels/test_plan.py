"""Plans: exactly one item computes each visible (row, key) cell, and each row is finished once."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from magi_serve import BidirectionalSpans, paged_attention
from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa import cpu, triton_attention
from magi_serve.kernels.ffa.plan import PagedPlan, Plan, TileConfig, head_blocks
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.reference import slices_mask
from magi_serve.kernels.ffa.slices import plan_slices
from magi_serve.masks import AttentionSlices
from magi_serve.testing import make_paged, make_slices
from magi_serve.types import AttentionProblem

many = settings(max_examples=80, derandomize=True, deadline=None, database=None)
CPU = torch.device("cpu")

configs = st.builds(
    TileConfig,
    block_m=st.sampled_from([4, 16, 32]),
    block_n=st.sampled_from([4, 16]),
    packed=st.booleans(),
    programs=st.sampled_from([0, 1, 8, 40]),
    queued=st.booleans(),
    waves=st.sampled_from([1, 4]),
    min_share=st.sampled_from([1, 2, 4]),
)


def problem(num_q_heads: int = 4, num_kv_heads: int = 2) -> AttentionProblem:
    dtype = torch.float32
    return AttentionProblem("cpu", dtype, dtype, num_q_heads, num_kv_heads, 64, 64, page_size=16)


class Planner(PagedPlanner):
    """Plans with the tiles of a test, decode ones of a single row per head group."""

    def __init__(self, tiles: TileConfig, **options: Any) -> None:
        super().__init__(problem(), device=CPU, kernel="cpu", **options)
        self.tiles = tiles

    def config(self, regime: str, max_q_len: int) -> TileConfig:  # type: ignore[override]
        return self.tiles


def plan_batch(
    planner: PagedPlanner, q_lens: list[int], k_lens: list[int], decodes: int, **options: Any
) -> PagedPlan:
    options.setdefault("num_tokens", sum(q_lens))
    return planner.plan(
        torch.tensor([0, *q_lens]).cumsum(0).int(),
        torch.tensor(k_lens, dtype=torch.int32),
        num_decodes=decodes,
        num_decode_tokens=sum(q_lens[:decodes]),
        max_decode_q_len=max([1, *q_lens[:decodes]]),
        **options,
    )


def count(parts: tuple[Plan, ...], num_rows: int, num_seqs: int, num_keys: int) -> Tensor:
    """How often items compute each (row, sequence, key); each row must be finished once."""
    cells = torch.zeros(num_rows, num_seqs, num_keys, dtype=torch.int64)
    finished = torch.zeros(num_rows, dtype=torch.int64)
    for part in parts:
        for table in (part.bands, part.items):
            assert table.dtype == torch.int32
        owner = {}
        reductions = [] if part.reductions is None else part.reductions.tolist()
        for tile, (q_begin, q_len, first, shares, *_) in enumerate(reductions):
            if shares >= 2 and q_len:
                finished[q_begin : q_begin + q_len] += 1
                owner |= dict.fromkeys(range(first, first + shares), (q_begin, q_len, tile))
        for i, item in enumerate(part.items.tolist()):
            q_begin, q_len, band_begin, band_end, k_begin, k_end, split_tile = item[:7]
            if not q_len:
                continue
            assert k_begin <= k_end
            if split_tile:
                assert owner.pop(i) == (q_begin, q_len, split_tile - 1)
            else:
                finished[q_begin : q_begin + q_len] += 1
            for band in part.bands[band_begin:band_end].tolist():
                first, last, lo, hi, seq = band[:5]
                for row in range(q_begin, q_begin + q_len):
                    low = max(first, k_begin, row + lo)
                    high = min(last, k_end, row + hi + 1)
                    cells[row, seq, low : max(low, high)] += 1
        assert not owner, "a reduction reads an item that is no part"
    assert finished.tolist() == [1] * num_rows
    return cells


def draw_ranges(data: st.DataObject, num_keys: int) -> list[tuple[int, int]]:
    """Up to three spans, some of them past the last key."""
    ends = sorted(data.draw(st.sets(st.integers(0, num_keys + 4), max_size=6)))
    return list(zip(ends[::2], ends[1::2], strict=False))


@many
@given(st.data())
def test_a_paged_plan_covers_every_cell_once(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), max_size=4))
    q_lens, k_lens = [n for n, _ in lens], [n for _, n in lens]
    side = st.none() | st.integers(0, 30)
    left, right = window = data.draw(st.tuples(side, side))
    each = st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))
    causal = data.draw(st.booleans() | each)
    padding = data.draw(st.integers(0, 3))
    ranges = [draw_ranges(data, k_len) for _, k_len in lens]
    spans = None
    if causal is True and data.draw(st.booleans()):
        spans = BidirectionalSpans(ranges, within_window=data.draw(st.booleans()))
    planner = Planner(
        data.draw(configs),
        max_tokens=data.draw(st.sampled_from([0, 100])),
        max_seqs=8,
        window=window,
        spans=data.draw(st.booleans()),
    )
    plan = plan_batch(
        planner,
        q_lens,
        k_lens,
        data.draw(st.integers(0, len(lens))),
        num_tokens=sum(q_lens) + padding,
        causal=torch.tensor(causal, dtype=torch.bool) if isinstance(causal, list) else causal,
        spans=spans,
    )
    width = max([1, *k_lens])
    wanted = torch.zeros(sum(q_lens) + padding, max(1, len(lens)), width, dtype=torch.int64)
    row = 0
    for s, (q_len, k_len) in enumerate(lens):
        for i in range(q_len):
            position = k_len - q_len + i
            for key in range(k_len):
                is_causal = causal[s] if isinstance(causal, list) else causal
                in_window = left is None or key >= position - left
                wanted[row, s, key] = (
                    (not is_causal or key <= position)
                    and in_window
                    and (right is None or key <= position + right)
                )
                if spans and (in_window or not spans.within_window):
                    wanted[row, s, key] |= any(
                        a <= position < b and a <= key < b for a, b in ranges[s]
                    )
            row += 1
    assert torch.equal(count(plan.parts, *wanted.shape), wanted)


@many
@given(st.data())
def test_a_plan_of_slices_covers_every_cell_once(data: st.DataObject) -> None:
    total_q, total_k = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 60))
    slices = make_slices(
        total_q,
        total_k,
        seed=data.draw(st.integers(0, 999)),
        max_leaves=data.draw(st.sampled_from([1, 4, 15])),
    )
    plan = plan_slices(slices, total_q, data.draw(configs), problem(), CPU)
    wanted = slices_mask(slices, total_q, total_k, CPU).long()[:, None]
    assert torch.equal(count((plan,), total_q, 1, total_k), wanted)


def test_a_plan_of_slices_is_made_once_for_each_use() -> None:
    slices = AttentionSlices([(0, 30)], [(0, 30)], [1])
    config = TileConfig(16, 16)
    first = plan_slices(slices, 30, config, problem(), CPU)
    assert plan_slices(slices, 30, config, problem(), CPU) is first
    assert plan_slices(slices, 31, config, problem(), CPU) is not first
    assert plan_slices(slices, 30, config, problem(8, 2), CPU) is not first


@many
@given(st.data())
def test_table_sizes_depend_on_host_counts_only(data: st.DataObject) -> None:
    num_seqs = data.draw(st.integers(1, 5))
    decodes = data.draw(st.integers(0, num_seqs))
    config = data.draw(configs)
    buffers = data.draw(st.booleans())
    shapes = []
    for _ in range(2):
        # As many rows, of decodes and in all, spread over the sequences anyhow.
        q_lens = [0] * num_seqs
        for _ in range(12):
            q_lens[data.draw(st.integers(0, num_seqs - 1))] += 1
        if 0 < decodes < num_seqs:
            q_lens[0] += 6 - sum(q_lens[:decodes])
            q_lens[-1] += 12 - sum(q_lens)
            if min(q_lens) < 0:
                return
        k_lens = [data.draw(st.integers(0, 300)) for _ in q_lens]
        planner = Planner(config, max_tokens=20 if buffers else 0, max_seqs=8)
        plan = plan_batch(planner, q_lens, k_lens, decodes, num_tokens=14)
        shapes.append(
            [
                (p.items.shape, p.bands.shape, p.reductions is None or p.reductions.shape)
                for p in plan.parts
            ]
        )
    assert shapes[0] == shapes[1]


def used(plan: Plan) -> Tensor:
    return plan.items[plan.items[:, 1] > 0].long()


def blocks(items: Tensor, config: TileConfig) -> Tensor:
    """Key blocks that each item touches."""
    begin, end = items[:, 4] // config.block_n, -(-items[:, 5] // config.block_n)
    return torch.where(items[:, 5] > items[:, 4], end - begin, 0)


@many
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12))
def test_shares_of_split_decodes_are_about_equal(k_lens: list[int]) -> None:
    config = TileConfig(4, 16, programs=64, min_share=2)
    planner = Planner(config, max_tokens=16, max_seqs=16)
    (part,) = plan_batch(planner, [1] * len(k_lens), k_lens, len(k_lens)).parts
    items = used(part)
    work = blocks(items, config)
    total = int(work.sum())
    budget = 64 // 2 * (1 if 2 * (len(k_lens) + 1) <= 32 else config.waves)
    assert len(items) <= max(budget, len(k_lens))
    # No share is larger than twice what an even split over the budget would give.
    assert int(work.max()) <= max(2 * math.ceil(total / budget) + 1, config.min_share)
    # Within a sequence, all shares but the last are of one size, the same for all sequences.
    sizes = set()
    for reduction in part.reductions.tolist() if part.reductions is not None else []:
        first, shares = reduction[2:4]
        if shares > 1:
            sizes |= set(blocks(part.items[first : first + shares - 1].long(), config).tolist())
    assert len(sizes) <= 1


def test_tiles_that_could_be_but_are_not_make_no_share_larger() -> None:
    # Two rows fit a tile: beside prefills, four decodes of a row each leave two tiles unused.
    config = TileConfig(4, 16, programs=64, min_share=1)
    lens = ([1, 1, 1, 1, 9], [100, 40, 3000, 5000, 9])
    prefill, decode = plan_batch(Planner(config, max_tokens=0, max_seqs=0), *lens, 4).parts
    size = max(blocks(used(decode), config).tolist())
    total = sum(-(-n // 16) for n in lens[1][:4])
    assert decode.items.shape[0] == 32
    assert size <= math.ceil(total / 32 * 1.25)
    assert not bool((decode.items[decode.items[:, 1] == 0] != 0).any())
    assert not bool((prefill.items[prefill.items[:, 1] == 0] != 0).any())


def test_shares_are_counted_in_whole_numbers() -> None:
    # A quarter of these blocks, the first size tried, is rounded down in fp32: too small to fit.
    total = (1 << 26) + 2
    config = TileConfig(4, 1, programs=8, min_share=1)
    (part,) = plan_batch(Planner(config, max_tokens=0, max_seqs=0), [1], [total], 1).parts
    size = -(-total // 4)
    assert blocks(used(part), config).tolist() == [size, size, size, total - 3 * size]


def test_decode_of_one_long_sequence_uses_the_whole_chip() -> None:
    config = TileConfig(4, 16, programs=64, min_share=2)
    planner = Planner(config, max_tokens=4, max_seqs=4)
    (part,) = plan_batch(planner, [1], [100_000], 1).parts
    assert 28 <= len(used(part)) <= 32


def test_prefill_starts_with_the_longest_tiles() -> None:
    config = TileConfig(16, 16)
    planner = Planner(config, max_tokens=0, max_seqs=0)
    (part,) = plan_batch(planner, [50, 3, 200, 0], [50, 400, 200, 7], 0).parts
    work = blocks(part.items.long(), config)
    assert work.tolist() == sorted(work.tolist(), reverse=True)
    assert part.reductions is None


def test_unused_entries_have_no_rows_and_come_last() -> None:
    planner = Planner(TileConfig(4, 16, programs=64), max_tokens=64, max_seqs=16)
    (part,) = plan_batch(planner, [1, 1, 0], [100, 40, 0], 3).parts
    has_rows = (part.items[:, 1] > 0).tolist()
    assert has_rows == sorted(has_rows, reverse=True)
    assert not bool((part.items[:, 1] < 0).any())


def test_buffers_of_decodes_keep_their_addresses_and_forget_larger_batches() -> None:
    planner = Planner(TileConfig(4, 16, programs=64, min_share=1), max_tokens=16, max_seqs=8)
    fresh = Planner(planner.tiles, max_tokens=16, max_seqs=8)
    large = plan_batch(planner, [1] * 8, [5000] * 8, 8, num_tokens=16)
    addresses = [t.data_ptr() for t in (large.parts[0].items, large.parts[0].bands)]
    small_lens = ([1, 1, 1, 0, 0, 0, 0, 0], [9, 30, 1, 0, 0, 0, 0, 0])
    small = plan_batch(planner, *small_lens, 8, num_tokens=16).parts[0]
    assert [t.data_ptr() for t in (small.items, small.bands)] == addresses
    wanted = plan_batch(fresh, *small_lens, 8, num_tokens=16).parts[0]
    assert torch.equal(small.items, wanted.items)
    assert torch.equal(small.bands, wanted.bands)
    assert small.reductions is not None and wanted.reductions is not None
    assert torch.equal(small.reductions, wanted.reductions)


def test_a_smaller_batch_leaves_no_work_behind_in_the_tables_of_a_larger_one() -> None:
    planner = Planner(TileConfig(4, 16, programs=64, min_share=1), max_tokens=16, max_seqs=8)
    large = plan_batch(planner, [1] * 8, [5000] * 8, 8).parts[0]
    small = plan_batch(planner, [1] * 2, [9, 30], 2).parts[0]
    assert used(large).tolist() == used(small).tolist()
    assert large.reductions is not None and small.reductions is not None
    assert int(large.reductions[:, 3].sum()) == int(small.reductions[:, 3].sum())


def test_batches_larger_than_the_buffers_get_tables_of_their_own() -> None:
    planner = Planner(TileConfig(4, 16, programs=64), max_tokens=4, max_seqs=4)
    kept = plan_batch(planner, [1] * 4, [50] * 4, 4).parts[0]
    before = kept.items.clone()
    larger = plan_batch(planner, [1] * 5, [60] * 5, 5).parts[0]
    assert larger.items.data_ptr() != kept.items.data_ptr()
    assert torch.equal(kept.items, before)


def test_mixed_batches_leave_the_buffers_of_decodes_alone() -> None:
    planner = Planner(TileConfig(4, 16, programs=64), max_tokens=64, max_seqs=4)
    kept = plan_batch(planner, [1] * 4, [50] * 4, 4).parts[0]
    before = kept.items.clone()
    plan_batch(planner, [1, 1, 20, 3], [50, 60, 20, 70], 2)
    assert torch.equal(kept.items, before)


def test_a_plan_of_decodes_is_refused_once_its_tables_hold_another() -> None:
    planner = Planner(TileConfig(4, 16, programs=64), max_tokens=8, max_seqs=4)
    first = plan_batch(planner, [1, 1], [50, 60], 2)
    # None of these plans lies in the same tables.
    others = [
        plan_batch(planner, [1, 9], [50, 60], 1),
        plan_batch(planner, [1] * 5, [50] * 5, 5),
        plan_batch(Planner(planner.tiles, max_tokens=8, max_seqs=4), [1], [50], 1),
    ]
    for plan in (first, *others):
        plan.check_tables()
    second = plan_batch(planner, [1], [70], 1)
    with pytest.raises(ArgumentError, match=r"number 1 .* number 2 has overwritten its tables"):
        first.check_tables()
    for plan in (second, *others):
        plan.check_tables()


def test_a_call_with_a_plan_whose_tables_hold_another_is_refused() -> None:
    batch = make_paged([1, 1], [50, 60])
    planner = batch.planner("cpu")
    first, _second = batch.plan(planner, 2), batch.plan(planner, 2)
    with pytest.raises(ArgumentError, match=r"number 1 .* number 2 has overwritten its tables"):
        paged_attention(batch.q, batch.kv, batch.cu_seqlens_q, plan=first)


@pytest.mark.parametrize("kernel", ["hopper", "triton"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (64, 8, 64), (8, 4, 256), (64, 1, 128)])
def test_plans_and_states_of_split_keys_take_little_memory(
    kernel: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the keys' lengths: their number is not in the plan."""
    num_q_heads, num_kv_heads, dim = heads
    bf16 = torch.bfloat16
    monkeypatch.setattr(triton_attention, "num_sms", lambda device: 132)
    planner = PagedPlanner(
        AttentionProblem("cuda", bf16, bf16, num_q_heads, num_kv_heads, dim, dim, 90, 16),
        max_tokens=8192,
        max_seqs=1024,
        device=CPU,
        kernel=kernel,
    )
    buffers = planner.buffers()
    tables = (buffers.bands, buffers.items, buffers.reductions, buffers.counters)
    states = [0]
    for seqs in range(1, 1025):
        for q_len in (1, 2, 4, 8):
            cut = planner.cut("decode", rows=seqs * q_len, seqs=seqs, max_q_len=q_len)
            if cut.budget:
                programs = max(cut.capacity, cut.budget) * head_blocks(
                    num_q_heads, num_kv_heads, cut.config
                )
                states.append(programs * cut.config.block_m * (dim + 2) * 4)
    assert len(states) > 10
    assert sum(t.nbytes for t in tables) + max(states) < 64 << 20


def test_decodes_launch_the_same_grids_with_spans_and_without() -> None:
    planner = Planner(TileConfig(16, 16, programs=64), max_tokens=12, max_seqs=4, spans=True)
    assert planner.tiles.tile_q(planner.groups) > 4
    spans = BidirectionalSpans([[(46, 47), (47, 48), (48, 49), (49, 50)]] * 3)
    shapes = set()
    for of_batch in (None, spans):
        (part,) = plan_batch(planner, [4] * 3, [50] * 3, 3, spans=of_batch).parts
        assert part.reductions is not None
        shapes.add((part.items.shape, part.items.data_ptr(), part.reductions.shape))
        cells = count((part,), 12, 3, 50)
    assert len(shapes) == 1
    assert int(cells.max()) == 1


def test_captured_graphs_get_no_tables_that_are_gone_at_their_replays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = Planner(TileConfig(4, 16, programs=64), max_tokens=8, max_seqs=4)
    larger = plan_batch(planner, [1] * 5, [50] * 5, 5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for q_lens, counts in (([1] * 5, "5 decodes with 5 rows"), ([3] * 3, "3 decodes with 9 rows")):
        with pytest.raises(ArgumentError, match=f"{counts} is larger .* max_seqs=4, max_tokens=8"):
            plan_batch(planner, q_lens, [50] * len(q_lens), len(q_lens))
    with pytest.raises(ArgumentError, match="5 decodes with 5 rows is larger than its planner's"):
        larger.check_tables()
    plan_batch(planner, [1] * 4, [50] * 4, 4).check_tables()
    plan_batch(planner, [1] * 4 + [9], [50] * 5, 4).check_tables()
    spans = BidirectionalSpans([[(40, 60)]] * 4)
    with pytest.raises(ArgumentError, match=r"4 rows, in spans is larger .* spans=False, and"):
        plan_batch(planner, [1] * 4, [50] * 4, 4, spans=spans)
    roomy = Planner(planner.tiles, max_tokens=8, max_seqs=4, spans=True)
    plan_batch(roomy, [1] * 4, [50] * 4, 4, spans=spans).check_tables()
    # Without buffers, a captured plan is made anew at each replay, in memory of the graph's own.
    plan_batch(Planner(planner.tiles, max_tokens=0, max_seqs=0), [1], [50], 1).check_tables()


@pytest.mark.parametrize("regime", ["prefill", "decode", "slices"])
def test_cpu_tiles_hold_whole_head_groups(regime: Any) -> None:
    config = cpu.tile_config(problem(71, 1), regime, 1)
    assert config.tile_q(71) == (1 if regime == "decode" else 64)
    assert config.group_rows(71) == 71


def test_a_small_batch_launches_small_grids_whatever_its_buffers_hold() -> None:
    batch = make_paged([1], [700])
    planner = PagedPlanner(
        batch.problem(), max_tokens=512, max_seqs=512, device=batch.q.device, kernel="cpu"
    )
    (part,) = batch.plan(planner, num_decodes=1).parts
    assert part.items.shape[0] <= 3
    assert part.items.data_ptr() == planner.buffers().items.data_ptr()
