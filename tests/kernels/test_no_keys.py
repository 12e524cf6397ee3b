"""Nothing to attend to: k, the pool of pages or the page table has no elements at all."""

import math

import pytest
import torch

from magi_serve import (
    AttentionOutput,
    AttentionSlices,
    PagedKV,
    SinkSpec,
    ffa_attention,
    paged_attention,
)
from magi_serve.kernels.ffa import api, cpu
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.testing import ON_CPU, Place, make_dense

SINKS = (None, SinkSpec(torch.tensor([0.5, -math.inf, 3.0, 0.0])))
KERNELS = ("reference", None)
"""None stands for the place's own."""


def no_keys(place: Place, num_pages: int, max_pages: int, num_seqs: int) -> PagedKV:
    pool = torch.zeros(num_pages, 16, 2, 64, dtype=place.dtype, device=place.device)
    table = torch.zeros(num_seqs, max_pages, dtype=torch.int32, device=place.device)
    return PagedKV(pool, pool, table, torch.zeros_like(table).sum(1, dtype=torch.int32))


def assert_empty(result: AttentionOutput, sink: SinkSpec | None) -> None:
    assert bool((result.out == 0).all())
    lse = torch.full((4,), -math.inf) if sink is None else sink.combined()
    assert torch.equal(result.lse.cpu(), lse.expand(result.lse.shape))
    assert result.max_logits is not None
    assert bool((result.max_logits == -math.inf).all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", SINKS, ids=["plain", "sink"])
@pytest.mark.parametrize("total_q", [0, 1, 200])
def test_slices_over_no_keys(
    any_place: Place, total_q: int, sink: SinkSpec | None, kernel: str | None
) -> None:
    q, k, v = make_dense(total_q, 0, dtype=any_place.dtype, device=any_place.device)
    for slices in (AttentionSlices([], []), AttentionSlices([(0, total_q)], [(0, 0)])):
        result = ffa_attention(
            q, k, v, slices, sink=sink, return_max_logits=True, kernel=kernel or any_place.kernel
        )
        assert_empty(result, sink)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", SINKS, ids=["plain", "sink"])
@pytest.mark.parametrize(("num_pages", "max_pages"), [(0, 0), (0, 2), (3, 0), (3, 2)])
@pytest.mark.parametrize("q_lens", [(), (0, 0), (1, 1), (200, 3)], ids=str)
def test_pages_without_keys(
    any_place: Place,
    q_lens: tuple[int, ...],
    num_pages: int,
    max_pages: int,
    sink: SinkSpec | None,
    kernel: str | None,
) -> None:
    kv = no_keys(any_place, num_pages, max_pages, len(q_lens))
    starts = torch.tensor([0, *q_lens], device=any_place.device).cumsum(0, dtype=torch.int32)
    padding = 2
    q, _, _ = make_dense(sum(q_lens) + padding, 0, dtype=any_place.dtype, device=any_place.device)
    result = paged_attention(
        q, kv, starts, sink=sink, return_max_logits=True, kernel=kernel or any_place.kernel
    )
    assert_empty(result, sink)


def test_kernels_get_operands_that_have_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionCall] = []
    monkeypatch.setattr(cpu, "run", calls.append)
    q, k, v = make_dense(8, 0)
    ffa_attention(q, k, v, AttentionSlices([], []), kernel="cpu")
    kv = no_keys(ON_CPU, 0, 0, 1)
    paged_attention(q, kv, torch.tensor([0, 8], dtype=torch.int32), kernel="cpu")
    assert len(calls) == 2
    for call in calls:
        assert call.k.data_ptr() and call.v.data_ptr()
        assert call.page_table is None or call.page_table.data_ptr()


@pytest.mark.parametrize("empty", ["k and v", "q"])
def test_what_has_no_elements_has_no_uneven_rows(empty: str) -> None:
    q, k, v = make_dense(0 if empty == "q" else 8, 0 if empty == "k and v" else 8)
    assert api._problem(q, k, v).even_rows
    pool = torch.zeros(0, 16, 2, 64)
    assert api._problem(q, pool, pool, page_size=16).even_rows
    uneven = torch.zeros(8, 4, 65)[..., :64]
    assert not api._problem(uneven, k[:0], v[:0]).even_rows
