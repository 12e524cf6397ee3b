"""What must hold of attention whatever the numbers are, and the delta tests: an option that a path
accepts must also change what that path computes.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from magi_serve import (
    AttentionOutput,
    AttentionSlices,
    BidirectionalSpans,
    MaskType,
    PagedKV,
    SinkSpec,
    ffa_attention,
    merge,
    paged_attention,
)
from magi_serve.testing import (
    IN_INTERPRETER,
    LAYOUTS,
    OPTIONS,
    Layout,
    PagedBatch,
    Place,
    check_paged,
    check_slices,
    check_that_it_counts,
    examples,
    make_dense,
    make_paged,
    make_sink,
    make_slices,
    poisoned,
)

Attend = Callable[..., AttentionOutput]

PATHS: dict[str, tuple[list[int], list[int], bool]] = {
    "prefill": ([37], [37], False),
    "extend": ([21, 5], [90, 64], False),
    "decode": ([1, 1, 1], [33, 1, 60], True),
    "split decode": ([1], [900], True),
    "verify": ([3, 4], [70, 129], True),
}
"""Query lengths, key lengths, and whether the sequences are planned as decodes."""

paths = pytest.mark.parametrize("path", PATHS)


def batch_on(place: Place, path: str, **options: Any) -> PagedBatch:
    """The batch of a path, with 4 query heads per kv head."""
    q_lens, k_lens, _ = PATHS[path]
    heads = {"num_q_heads": 8, "num_kv_heads": 2}
    return make_paged(
        q_lens, k_lens, **heads, dtype=place.dtype, device=place.device, seed=3, **options
    )


def attend_on(place: Place, path: str, batch: PagedBatch, **options: Any) -> AttentionOutput:
    """Attention by that path, without comparison."""
    window = options.get("window")
    plan = batch.plan(batch.planner(place.kernel, window), num_decodes(path))
    return paged_attention(
        batch.q, batch.kv, batch.cu_seqlens_q, kernel=place.kernel, plan=plan, **options
    )


def num_decodes(path: str) -> int:
    return len(PATHS[path][0]) if PATHS[path][2] else 0


def assert_bit_equal(a: AttentionOutput, b: AttentionOutput) -> None:
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)


# Splitting and merging


def test_splitting_keys_anywhere_and_merging_changes_nothing(place: Place) -> None:
    q, k, v = make_dense(7, 80, dtype=torch.float32, device=place.device)

    def part(begin: int, end: int, sink: SinkSpec | None = None) -> AttentionOutput:
        slices = AttentionSlices([(0, 7)], [(begin, end)], [MaskType.FULL])
        return ffa_attention(
            q, k, v, slices, kernel=place.kernel, return_max_logits=True, sink=sink
        )

    sink = make_sink("several", 7, 4, device=place.device)
    whole, with_sink = part(0, 80), part(0, 80, sink)

    @examples(place, times=1.5)
    @given(st.lists(st.integers(0, 80), max_size=4), st.randoms(use_true_random=False))
    def run(cuts: list[int], random: Any) -> None:
        bounds = [0, *sorted(cuts), 80]
        partials = [part(a, b) for a, b in itertools.pairwise(bounds)]
        random.shuffle(partials)
        for merged, wanted in (
            (merge(partials), whole),
            (merge(partials, sink=sink), with_sink),
        ):
            torch.testing.assert_close(merged.out, wanted.out, atol=2e-6, rtol=2e-5)
            torch.testing.assert_close(merged.lse, wanted.lse, atol=2e-6, rtol=2e-6)
            assert merged.max_logits is not None and wanted.max_logits is not None
            torch.testing.assert_close(merged.max_logits, wanted.max_logits)

    run()


def test_a_prompt_in_chunks_equals_the_prompt_at_once(place: Place) -> None:
    whole = make_paged([60], [60], dtype=torch.float32, device=place.device)
    wanted = check_paged(whole, kernel=place.kernel, window=(20, 0))
    for cuts in ([0, 1, 60], [0, 17, 33, 60]):
        for a, b in itertools.pairwise(cuts):
            ends = torch.tensor([0, b - a], dtype=torch.int32, device=place.device)
            length = torch.tensor([b], dtype=torch.int32, device=place.device)
            chunk = paged_attention(
                whole.q[a:b],
                replace(whole.kv, seqlens_k=length),
                ends,
                window=(20, 0),
                kernel=place.kernel,
            )
            torch.testing.assert_close(chunk.out, wanted.out[a:b], atol=2e-6, rtol=2e-5)
            torch.testing.assert_close(chunk.lse, wanted.lse[a:b], atol=2e-6, rtol=2e-6)


@paths
def test_the_same_call_gives_the_same_bits(any_place: Place, path: str) -> None:
    batch = batch_on(any_place, path)
    first = attend_on(any_place, path, batch)
    assert_bit_equal(first, attend_on(any_place, path, batch))


@pytest.fixture
def many_programs(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a chip with more multiprocessors than a reduction takes shares at once."""
    if place.kernel != "triton":
        yield
        return
    from magi_serve.kernels.ffa import triton_attention

    monkeypatch.setattr(triton_attention, "num_sms", lambda device: 30)
    triton_attention.tile_config.cache_clear()
    yield
    triton_attention.tile_config.cache_clear()


@pytest.mark.usefixtures("many_programs")
def test_any_number_of_shares_is_put_together(place: Place) -> None:
    batch = make_paged(
        [1], [7000], num_q_heads=8, num_kv_heads=1, dtype=place.dtype, device=place.device
    )
    plan = batch.plan(batch.planner(place.kernel), 1)
    shares = int((plan.parts[0].items[:, 1] > 0).sum())
    assert shares > 20 or place.kernel == "cpu"
    for sink in (None, make_sink("one", 1, 8, device=place.device)):
        check_paged(batch, kernel=place.kernel, num_decodes=1, sink=sink)


# Sinks


@paths
@pytest.mark.parametrize("value", [-math.inf, -1e30])
def test_a_sink_of_no_weight_equals_no_sink_bit_for_bit(
    any_place: Place, path: str, value: float
) -> None:
    batch = batch_on(any_place, path)
    plain = attend_on(any_place, path, batch)
    for shape in ((8,), (batch.num_tokens, 2, 8)):
        sink = SinkSpec(poisoned(shape, torch.float32, any_place.device, value))
        assert_bit_equal(attend_on(any_place, path, batch, sink=sink), plain)


@paths
def test_a_huge_sink_takes_all_the_weight(any_place: Place, path: str) -> None:
    batch = batch_on(any_place, path)
    result = attend_on(any_place, path, batch, sink=SinkSpec(torch.full((8,), 100.0)))
    assert float(result.out.abs().max()) < 1e-20
    torch.testing.assert_close(result.lse, torch.full_like(result.lse, 100.0))


@paths
def test_the_sink_enters_once_however_keys_are_split(any_place: Place, path: str) -> None:
    for kind in ("one", "several", "per token"):
        batch = batch_on(any_place, path)
        sink = make_sink(kind, batch.num_tokens, 8, device=any_place.device)
        check_paged(batch, kernel=any_place.kernel, num_decodes=num_decodes(path), sink=sink)


def test_sinks_of_any_dtype_and_stride_give_the_same_bits(any_place: Place) -> None:
    batch = batch_on(any_place, "extend")
    logits = torch.tensor([0.5, -1.25, 2.0, 0.0, 3.5, -0.75, 1.5, -2.0], device=any_place.device)
    wanted = attend_on(any_place, "extend", batch, sink=SinkSpec(logits))
    spread = poisoned((8, 3), torch.float32, any_place.device)
    spread[:, 1] = logits
    strided = spread[:, 1]
    per_token = strided.expand(batch.num_tokens, 1, 8)
    across = strided[:, None, None].expand(8, 1, batch.num_tokens).contiguous().permute(2, 1, 0)
    for other in (logits.bfloat16(), logits.half(), logits.double(), logits[None], strided):
        assert_bit_equal(attend_on(any_place, "extend", batch, sink=SinkSpec(other)), wanted)
    for other in (strided.half(), per_token, per_token.contiguous(), across):
        assert_bit_equal(attend_on(any_place, "extend", batch, sink=SinkSpec(other)), wanted)


@pytest.mark.parametrize("value", [0.5, 100.0, -1e30])
def test_rows_without_keys_get_zero_and_the_sink(any_place: Place, value: float) -> None:
    options = {"dtype": any_place.dtype, "device": any_place.device, "num_q_heads": 8}
    sink = SinkSpec(torch.full((8,), value))
    for q_lens, k_lens, count in (([2, 5], [0, 3], 0), ([1, 1], [0, 0], 2), ([1, 1], [0, 700], 2)):
        batch = make_paged(q_lens, k_lens, **options)
        result = check_paged(batch, kernel=any_place.kernel, num_decodes=count, sink=sink)
        assert bool((result.out[: q_lens[0]] == 0).all())
        torch.testing.assert_close(
            result.lse[: q_lens[0]], torch.full((q_lens[0], 8), value, device=any_place.device)
        )
        plain = check_paged(batch, kernel=any_place.kernel, num_decodes=count)
        assert bool((plain.lse[: q_lens[0]] == -math.inf).all())


# Memory


def shuffled(batch: PagedBatch, seed: int) -> PagedBatch:
    """The same batch with its pages elsewhere in the pool."""
    order = torch.randperm(len(batch.kv.k), generator=torch.Generator().manual_seed(seed))
    order = order.to(batch.q.device)
    k, v = batch.kv.k[order.argsort()], batch.kv.v[order.argsort()]
    used = batch.kv.page_table < len(batch.kv.k)
    table = torch.where(used, order[batch.kv.page_table.clamp(max=len(order) - 1).long()], -7)
    return replace(batch, kv=PagedKV(k, v, table.int(), batch.kv.seqlens_k))


@paths
def test_permuting_pages_with_their_table_changes_nothing(any_place: Place, path: str) -> None:
    batch = batch_on(any_place, path)
    wanted = attend_on(any_place, path, batch)
    for seed in range(3):
        assert_bit_equal(attend_on(any_place, path, shuffled(batch, seed)), wanted)


@paths
@pytest.mark.parametrize("poison", [math.nan, 1e4])
def test_what_lies_past_the_last_key_changes_nothing(
    any_place: Place, path: str, poison: float
) -> None:
    clean = batch_on(any_place, path, poison=0.0, padding_rows=2)
    wanted = attend_on(any_place, path, clean)
    dirty = batch_on(any_place, path, poison=poison, padding_rows=2)
    assert_bit_equal(attend_on(any_place, path, dirty), wanted)
    for kv in (replace(dirty.kv, v=clean.kv.v), replace(dirty.kv, k=clean.kv.k)):
        assert_bit_equal(attend_on(any_place, path, replace(clean, kv=kv)), wanted)


@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 31, 63, 65, 129])
@pytest.mark.parametrize("page_size", [16, 64])
def test_poison_in_a_page_tail_never_reaches_the_output(
    any_place: Place, num_keys: int, page_size: int
) -> None:
    for q_len in (1, num_keys):
        batch = make_paged(
            [q_len], [num_keys], page_size=page_size, dtype=any_place.dtype, device=any_place.device
        )
        check_paged(batch, kernel=any_place.kernel, num_decodes=1 if q_len == 1 else 0)


@pytest.mark.parametrize("num_keys", [1000, 1003])
@pytest.mark.parametrize("q_len", [1, 64])
def test_pages_wholly_left_of_the_window_may_be_gone(
    any_place: Place, num_keys: int, q_len: int
) -> None:
    batch = make_paged([q_len], [num_keys], dtype=any_place.dtype, device=any_place.device)
    window = (127, 0)
    wanted = check_paged(batch, kernel=any_place.kernel, window=window, num_decodes=q_len == 1)
    gone = (num_keys - q_len - 127) // 16
    table = batch.kv.page_table.clone()
    table[0, :gone] = int(table[0, 0])
    batch.kv.k[int(table[0, 0])] = math.nan
    batch.kv.v[int(table[0, 0])] = math.nan
    freed = replace(batch, kv=replace(batch.kv, page_table=table))
    plan = freed.plan(freed.planner(any_place.kernel, window), int(q_len == 1))
    got = paged_attention(
        freed.q, freed.kv, freed.cu_seqlens_q, window=window, plan=plan, kernel=any_place.kernel
    )
    assert_bit_equal(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_pages_of_any_layout_give_the_same_bits(
    host_place: Place, layout: Layout, num_kv_heads: int
) -> None:
    def attend(layout: Layout) -> AttentionOutput:
        batch = make_paged(
            [9, 1],
            [40, 17],
            num_q_heads=2,
            num_kv_heads=num_kv_heads,
            head_dim_v=32,
            layout=layout,
            dtype=host_place.dtype,
        )
        return check_paged(batch, kernel=host_place.kernel)

    assert_bit_equal(attend(layout), attend("nhd"))


@pytest.mark.parametrize(("width", "page_size"), [(1, 64), (3, 64), (5, 32), (295, 16)])
def test_page_tables_of_any_width_may_be_full(
    host_place: Place, width: int, page_size: int
) -> None:
    num_keys = width * page_size
    batch = make_paged(
        [1], [num_keys], page_size=page_size, head_dim=32, num_q_heads=2, dtype=host_place.dtype
    )
    table = batch.kv.page_table[:, :width].contiguous()
    batch = replace(batch, kv=replace(batch.kv, page_table=table))
    for num_decodes in (0, 1):
        check_paged(batch, kernel=host_place.kernel, num_decodes=num_decodes)


def test_lengths_and_tables_may_be_views(place: Place) -> None:
    batch = batch_on(place, "extend")
    wanted = attend_on(place, "extend", batch)
    wide = torch.zeros(5, 90, dtype=torch.int32, device=place.device)
    table = wide[1::2, 3 : 3 + batch.kv.page_table.shape[1]]
    table.copy_(batch.kv.page_table)
    lengths = torch.stack([batch.kv.seqlens_k, batch.kv.seqlens_k * 0 + 999], 1)[:, 0]
    ends = torch.stack([batch.cu_seqlens_q, batch.cu_seqlens_q * 0 + 999], 1)[:, 0]
    kv = replace(batch.kv, page_table=table, seqlens_k=lengths)
    assert_bit_equal(attend_on(place, "extend", replace(batch, kv=kv, cu_seqlens_q=ends)), wanted)


def test_views_of_fused_projections_equal_dense_tensors(place: Place) -> None:
    total = 40
    fused = torch.randn(total, 12, 64, device=place.device).to(place.dtype)
    slices = make_slices(total, total, seed=5)
    views = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    wanted = ffa_attention(*(x.contiguous() for x in views), slices, kernel=place.kernel)
    assert_bit_equal(ffa_attention(*views, slices, kernel=place.kernel), wanted)


def test_only_the_output_is_written(place: Place) -> None:
    batch = batch_on(place, "extend")
    wanted = attend_on(place, "extend", batch)
    around = poisoned((batch.num_tokens + 2, 10, 80), place.dtype, place.device)
    out = around[1:-1, 1:9, :64]
    attend_on(place, "extend", batch, out=out)
    assert torch.equal(out, wanted.out)
    inside = torch.zeros_like(around, dtype=torch.bool)
    inside[1:-1, 1:9, :64] = True
    assert bool(around[~inside].isnan().all())


def test_padded_batches_leave_zeros_in_every_padded_row(any_place: Place) -> None:
    options = {"dtype": any_place.dtype, "device": any_place.device, "num_q_heads": 8}
    # Padded as a captured graph pads: sequences without keys, of no rows or of one, then no owner.
    for q_lens in ([1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [2, 2, 1, 0, 0, 0, 1, 0]):
        batch = make_paged(q_lens, [40, 7, 90, 0, 0, 0, 0, 0], padding_rows=3, **options)
        for count in (8, 3, None) if any_place is not IN_INTERPRETER else (8, 3):
            result = check_paged(batch, kernel=any_place.kernel, num_decodes=count)
            rows = sum(q_lens[:3])
            assert bool((result.out[rows:] == 0).all())
            assert bool((result.lse[rows:] == -math.inf).all())


def test_empty_batches_are_fine(any_place: Place) -> None:
    options = {"dtype": any_place.dtype, "device": any_place.device, "num_q_heads": 8}
    for q_lens, k_lens in (([], []), ([0], [0]), ([0, 0], [5, 40])):
        for padding in (0, 3):
            batch = make_paged(q_lens, k_lens, padding_rows=padding, **options)
            for count in (None, 0, len(q_lens)):
                check_paged(batch, kernel=any_place.kernel, num_decodes=count, max_logits=True)
    sizes = [(0, 0), (0, 9), (9, 0)]
    if any_place.kernel == "hopper":  # no keys, no rows of even stride
        sizes.remove((9, 0))
    for total_q, total_k in sizes:
        q, k, v = make_dense(total_q, total_k, dtype=any_place.dtype, device=any_place.device)
        for slices in (
            AttentionSlices([], []),
            AttentionSlices([(0, total_q)], [(0, total_k)], [MaskType.CAUSAL]),
        ):
            check_slices(q, k, v, slices, kernel=any_place.kernel, max_logits=True)


# Masks


def shares(place: Place, q_len: int, num_keys: int, decode: bool, **mask: Any) -> Tensor:
    """How each row weighs each key when all logits are equal: ``[q_len, num_keys]``."""
    width = -(-num_keys // 32) * 32
    batch = make_paged(
        [q_len],
        [num_keys],
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=32,
        head_dim_v=width,
        dtype=torch.float32,
        device=place.device,
    )
    batch.q.zero_()
    page = batch.kv.page_table[0].long()
    key = torch.arange(num_keys, device=place.device)
    batch.kv.v[page[key // 16], key % 16, 0] = torch.eye(num_keys, width, device=place.device)
    planner = batch.planner(place.kernel, mask.get("window"))
    plan = batch.plan(planner, int(decode), mask.get("causal", True), mask.get("spans"))
    out = paged_attention(
        batch.q, batch.kv, batch.cu_seqlens_q, kernel=place.kernel, plan=plan, **mask
    ).out
    return out[:, 0, :num_keys].cpu()


def even(visible: Tensor) -> Tensor:
    return visible / visible.sum(1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("width", [1, 4, 16, 17])
def test_a_window_of_w_means_the_key_itself_and_w_minus_1_before(place: Place, width: int) -> None:
    for num_keys in {width - 1, width, width + 1, 33} - {0}:
        for q_len in {1, num_keys - 1, num_keys} - {0}:
            row = torch.arange(num_keys - q_len, num_keys)[:, None]
            key = torch.arange(num_keys)[None]
            wanted = even((key <= row) & (key > row - width))
            got = shares(place, q_len, num_keys, q_len == 1, window=(width - 1, 0))
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("q_len", [1, 40, 130])
@pytest.mark.parametrize("within_window", [False, True], ids=["past window", "within window"])
def test_an_image_may_be_larger_than_the_window(
    place: Place, within_window: bool, q_len: int
) -> None:
    """And a chunk may begin or end within it: rows see what there is of it."""
    ranges = [(1, 7), (7, 12), (20, 120), (125, 140)]
    for num_keys in (119, 130):
        rows = min(q_len, num_keys)
        row, key = torch.arange(num_keys - rows, num_keys)[:, None], torch.arange(num_keys)[None]
        in_window = key > row - 16
        wanted = (key <= row) & in_window
        for first, end in ranges:
            both = (row >= first) & (row < end) & (key >= first) & (key < end)
            wanted |= both & (in_window | (not within_window))
        spans = BidirectionalSpans([ranges], within_window)
        got = shares(place, rows, num_keys, rows == 1, window=(15, 0), spans=spans)
        torch.testing.assert_close(got, even(wanted), atol=1e-6, rtol=1e-5)


def test_windows_have_a_left_and_a_right_side(place: Place) -> None:
    row, key = torch.arange(40)[:, None], torch.arange(40)[None]
    for left, right in ((3, 5), (None, 2), (7, None), (0, 0), (100, 100)):
        wanted = (key >= row - (99 if left is None else left)) & (
            key <= row + (99 if right is None else right)
        )
        got = shares(place, 40, 40, False, causal=False, window=(left, right))
        torch.testing.assert_close(got, even(wanted), atol=1e-6, rtol=1e-5)
        got = shares(place, 40, 40, False, causal=True, window=(left, right))
        torch.testing.assert_close(got, even(wanted & (key <= row)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [(2**31, 0), (2**40, 2**40), (2**30, 2**31 - 1)])
def test_a_huge_window_is_no_window(any_place: Place, window: tuple[int, int]) -> None:
    batch = batch_on(any_place, "extend")
    wanted = attend_on(any_place, "extend", batch)
    assert_bit_equal(attend_on(any_place, "extend", batch, window=window), wanted)


@pytest.mark.parametrize("decode", [False, True])
def test_more_rows_than_keys_leave_the_first_rows_empty(place: Place, decode: bool) -> None:
    row, key = torch.arange(-2, 3)[:, None], torch.arange(3)[None]
    got = shares(place, 5, 3, decode)
    torch.testing.assert_close(got, even(key <= row), atol=1e-6, rtol=1e-5)


def test_equal_requests_of_one_key_get_equal_bits(any_place: Place) -> None:
    batch = make_paged([1, 1], [1, 1], dtype=any_place.dtype, device=any_place.device)
    batch.q[1] = batch.q[0]
    pages = batch.kv.page_table[:, 0].long()
    for pool in (batch.kv.k, batch.kv.v):
        pool[pages[1]] = pool[pages[0]]
    result = check_paged(batch, kernel=any_place.kernel, num_decodes=2)
    assert torch.equal(result.out[0], result.out[1])


def test_causal_can_differ_by_sequence(any_place: Place) -> None:
    batch = make_paged(
        [20, 20], [50, 50], dtype=any_place.dtype, device=any_place.device, num_q_heads=8
    )
    flags = torch.tensor([True, False], device=any_place.device)
    mixed = check_paged(batch, kernel=any_place.kernel, causal=flags)
    plain = check_paged(batch, kernel=any_place.kernel, causal=True)
    full = check_paged(batch, kernel=any_place.kernel, causal=False)
    assert torch.equal(mixed.out[:20], plain.out[:20])
    assert torch.equal(mixed.out[20:], full.out[20:])


# Logits


def test_soft_cap_never_overflows_and_comes_before_the_mask(place: Place) -> None:
    raw = torch.tensor([4400.0, 5000.0, 10000.0, -10000.0, 0.0], device=place.device)
    q = torch.zeros(1, 2, 32, dtype=torch.float32, device=place.device)
    q[..., 0] = 1
    k = torch.zeros(5, 2, 32, dtype=torch.float32, device=place.device)
    k[..., 0] = raw[:, None]
    v = torch.eye(5, 32, device=place.device)[:, None].expand(5, 2, 32).contiguous()

    def attend(num_keys: int, sink: float | None = None) -> AttentionOutput:
        return ffa_attention(
            q,
            k,
            v,
            AttentionSlices([(0, 1)], [(0, num_keys)]),
            softmax_scale=1.0,
            softcap=50.0,
            sink=None if sink is None else SinkSpec(torch.full((2,), sink)),
            return_max_logits=True,
            kernel=place.kernel,
        )

    capped = torch.tensor([50.0, 50, 50, -50, 0], device=place.device)
    result = attend(5)
    assert result.max_logits is not None
    torch.testing.assert_close(result.max_logits, torch.full_like(result.max_logits, 50.0))
    torch.testing.assert_close(result.out[0, 0, :5], torch.softmax(capped, 0), atol=1e-6, rtol=1e-5)
    # The sink is not capped.
    torch.testing.assert_close(attend(3, 200.0).lse, torch.full((1, 2), 200.0, device=place.device))
    # What a row does not see does not count, capped or not.
    torch.testing.assert_close(
        attend(1).lse, torch.full((1, 2), 50.0, device=place.device), atol=1e-4, rtol=0
    )


def test_logits_of_any_size_give_finite_results(any_place: Place) -> None:
    for gain in (1e-6, 30.0, 300.0):
        batch = batch_on(any_place, "extend")
        batch.q.mul_(gain)
        result = attend_on(any_place, "extend", batch)
        assert bool(result.out.isfinite().all())
        assert bool(result.lse.isfinite().all())


def test_lse_is_a_natural_logarithm(place: Place) -> None:
    batch = make_paged([1], [100], dtype=torch.float32, device=place.device)
    batch.q.zero_()
    result = check_paged(batch, kernel=place.kernel)
    torch.testing.assert_close(
        result.lse, torch.full_like(result.lse, math.log(100)), atol=1e-5, rtol=0
    )


# Delta tests


@paths
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_counts_on_every_path(any_place: Place, path: str, option: str) -> None:
    if option == "alibi_slopes" and any_place.kernel == "hopper":
        pytest.skip("is refused")
    batch = batch_on(any_place, path)
    check_that_it_counts(option, batch, kernel=any_place.kernel, num_decodes=num_decodes(path))


@pytest.mark.parametrize("option", ["sink", "softcap"])
def test_every_option_counts_under_slices(any_place: Place, option: str) -> None:
    value: dict[str, Any] = {"sink": SinkSpec(torch.full((8,), 8.0)), "softcap": 0.5}
    q, k, v = make_dense(33, 70, num_q_heads=8, dtype=any_place.dtype, device=any_place.device)
    slices = AttentionSlices([(0, 33), (10, 33)], [(0, 20), (30, 70)], [0, 1])
    plain = check_slices(q, k, v, slices, kernel=any_place.kernel)
    chosen = {option: value[option]}
    changed = check_slices(q, k, v, slices, kernel=any_place.kernel, **chosen)
    change = (changed.out - plain.out).float().norm() / plain.out.float().norm()
    assert float(change) > 0.05


# Plans and graphs


def test_one_plan_serves_many_layers(any_place: Place) -> None:
    q_lens, k_lens, _ = PATHS["extend"]
    batch = batch_on(any_place, "extend")
    plan = batch.plan(batch.planner(any_place.kernel), 0)
    for layer in range(2):
        other = make_paged(
            q_lens,
            k_lens,
            num_q_heads=8,
            dtype=any_place.dtype,
            device=any_place.device,
            seed=layer,
        )
        wanted = attend_on(any_place, "extend", other)
        got = paged_attention(
            other.q, other.kv, other.cu_seqlens_q, kernel=any_place.kernel, plan=plan
        )
        assert_bit_equal(got, wanted)


def test_a_plan_follows_its_buffers_to_a_smaller_batch(any_place: Place) -> None:
    options = {"dtype": any_place.dtype, "device": any_place.device, "num_q_heads": 8}
    large = make_paged([1, 1, 1, 1], [300, 20, 700, 64], **options)
    small = make_paged([1, 1, 0, 0], [33, 500, 0, 0], padding_rows=2, **options)
    planner = large.planner(any_place.kernel)
    first = large.plan(planner, 4)
    check_paged(large, kernel=any_place.kernel, num_decodes=4)
    second = small.plan(planner, 4)
    assert [p.items.data_ptr() for p in first.parts] == [p.items.data_ptr() for p in second.parts]
    assert [p.items.shape for p in first.parts] == [p.items.shape for p in second.parts]
    # What a captured graph does, which runs no check: the first plan's tables, filled anew.
    captured = replace(first, number=second.number)
    out = small.poisoned_out()
    replayed = paged_attention(
        small.q, small.kv, small.cu_seqlens_q, plan=captured, out=out, kernel=any_place.kernel
    )
    wanted = check_paged(small, kernel=any_place.kernel, num_decodes=4)
    assert_bit_equal(replayed, wanted)


def test_captured_graphs_replay_over_other_batches(gpu_place: Place) -> None:
    place = gpu_place
    options = {"dtype": place.dtype, "device": place.device, "num_q_heads": 8}
    batches = [
        make_paged([1] * 6, [5000, 1, 300, 64, 2000, 9], seed=1, **options),
        make_paged([1, 1, 1, 0, 0, 0], [70, 900, 3, 0, 0, 0], padding_rows=3, seed=2, **options),
        make_paged([1] * 6, [16, 17, 15, 1, 1, 9000], seed=3, **options),
    ]
    most = max(b.kv.k.shape[0] for b in batches)
    columns = max(b.kv.page_table.shape[1] for b in batches)
    pages = [poisoned((most, *batches[0].kv.k.shape[1:]), place.dtype, "cuda") for _ in "kv"]
    table = torch.zeros(6, columns, dtype=torch.int32, device="cuda")
    lengths = torch.ones(6, dtype=torch.int32, device="cuda")
    static = PagedBatch(
        torch.zeros_like(batches[0].q),
        PagedKV(*pages, table, lengths),
        batches[0].cu_seqlens_q.clone(),
        batches[0].q_lens,
        batches[0].k_lens,
    )
    planner = static.planner(place.kernel)
    out = static.poisoned_out()

    def attend() -> AttentionOutput:
        return paged_attention(
            static.q, static.kv, static.cu_seqlens_q, plan=plan, out=out, kernel=place.kernel
        )

    plan = static.plan(planner, 6)
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attend()
    for batch in [*batches, batches[0]]:
        static.q.copy_(batch.q)
        static.cu_seqlens_q.copy_(batch.cu_seqlens_q)
        lengths.copy_(batch.kv.seqlens_k)
        table[:, : batch.kv.page_table.shape[1]].copy_(batch.kv.page_table)
        pages[0][: len(batch.kv.k)].copy_(batch.kv.k)
        pages[1][: len(batch.kv.v)].copy_(batch.kv.v)
        static.plan(planner, 6)
        out.fill_(math.nan)
        graph.replay()
        wanted = check_paged(batch, kernel=place.kernel, num_decodes=6)
        assert_bit_equal(AttentionOutput(out, result.lse), wanted)


def test_nothing_synchronises_with_the_gpu(gpu_place: Place) -> None:
    batch = make_paged([1, 1, 30], [300, 40, 700], device="cuda", dtype=gpu_place.dtype)
    planner = batch.planner(gpu_place.kernel)
    sink = make_sink("one", batch.num_tokens, 4, device="cuda")

    def attend() -> None:
        plan = batch.plan(planner, 2)
        for given_plan in (plan, None):
            paged_attention(
                batch.q,
                batch.kv,
                batch.cu_seqlens_q,
                sink=sink,
                plan=given_plan,
                kernel=gpu_place.kernel,
            )

    attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sequences_longer_than_the_page_table_stop_at_its_edge() -> None:
    batch = make_paged([2, 3], [64, 48], page_size=16)
    table = batch.kv.page_table[:, :4]
    kv = replace(batch.kv, page_table=table, seqlens_k=torch.tensor([100, 48], dtype=torch.int32))
    got = paged_attention(batch.q, kv, batch.cu_seqlens_q, causal=False, kernel="cpu")
    kv = replace(batch.kv, page_table=table, seqlens_k=torch.tensor([64, 48], dtype=torch.int32))
    wanted = paged_attention(batch.q, kv, batch.cu_seqlens_q, causal=False, kernel="cpu")
    assert torch.equal(got.out, wanted.out)
