"""A NaN that a row sees in q or k comes out as NaN; rows that do not see it keep their bits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from magi_serve import (
    AttentionOutput,
    AttentionSlices,
    MaskType,
    SinkSpec,
    ffa_attention,
    paged_attention,
)
from magi_serve.testing import PagedBatch, Place, make_dense, make_paged

HEADS = {"num_q_heads": 4, "num_kv_heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sink": {"sink": SinkSpec(torch.tensor([0.5, -math.inf, 30.0, 0.0]))},
    "softcap": {"softcap": 5.0},
}
KERNELS = ("reference", None)
"""None stands for the place's own."""


def assert_nan_exactly_where(seen: Tensor, got: AttentionOutput, clean: AttentionOutput) -> None:
    """`seen`: ``[num_tokens, num_q_heads]``, which rows see a NaN."""
    assert bool(clean.out.isfinite().all())
    assert torch.equal(got.lse.isnan(), seen)
    assert bool(got.out[seen].isnan().all())
    assert torch.equal(got.out[~seen], clean.out[~seen])
    assert torch.equal(got.lse[~seen], clean.lse[~seen])


def attend(place: Place, batch: PagedBatch, kernel: str | None, **options: Any) -> AttentionOutput:
    kernel = kernel or place.kernel
    return paged_attention(batch.q, batch.kv, batch.cu_seqlens_q, kernel=kernel, **options)


def slot_of(batch: PagedBatch, seq: int, key: int) -> tuple[int, int]:
    page_size = batch.kv.page_size
    return int(batch.kv.page_table[seq, key // page_size]), key % page_size


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("q_lens", [(9, 1), (1, 1)], ids=["prefill", "decode"])
def test_a_nan_in_a_query_shows_in_its_row_and_head_alone(
    any_place: Place, q_lens: tuple[int, int], option: str, kernel: str | None
) -> None:
    batch = make_paged(q_lens, (100, 40), **HEADS, dtype=any_place.dtype, device=any_place.device)
    row = sum(q_lens) - 1
    q = batch.q.clone()
    q[row, 2, 5] = math.nan
    seen = torch.zeros(q.shape[:2], dtype=torch.bool, device=any_place.device)
    seen[row, 2] = True
    clean = attend(any_place, batch, kernel, **OPTIONS[option])
    got = attend(any_place, replace(batch, q=q), kernel, **OPTIONS[option])
    assert_nan_exactly_where(seen, got, clean)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("key", [0, 35, 95, 99])
@pytest.mark.parametrize("q_len", [9, 1], ids=["prefill", "decode"])
def test_a_nan_in_a_key_shows_in_the_rows_that_see_it(
    any_place: Place, q_len: int, key: int, option: str, kernel: str | None
) -> None:
    batch = make_paged(
        (q_len, 1), (100, 40), **HEADS, dtype=any_place.dtype, device=any_place.device
    )
    clean = attend(any_place, batch, kernel, **OPTIONS[option])
    position = torch.arange(100 - q_len, 100, device=any_place.device)
    seen = torch.zeros(clean.lse.shape, dtype=torch.bool, device=any_place.device)
    seen[:q_len, 2:] = (position >= key)[:, None]  # kv head 1 serves query heads 2 and 3
    batch.kv.k[(*slot_of(batch, 0, key), 1, 7)] = math.nan
    assert_nan_exactly_where(seen, attend(any_place, batch, kernel, **OPTIONS[option]), clean)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_outside_the_window_changes_nothing(any_place: Place, kernel: str | None) -> None:
    batch = make_paged((9,), (100,), **HEADS, dtype=any_place.dtype, device=any_place.device)
    clean = attend(any_place, batch, kernel, window=(10, 0))
    seen = torch.zeros(clean.lse.shape, dtype=torch.bool, device=any_place.device)
    seen[:3] = True  # rows 91 to 93 see key 83, those after them do not
    batch.kv.k[slot_of(batch, 0, 83)] = math.nan
    batch.kv.k[slot_of(batch, 0, 80)] = math.nan
    assert_nan_exactly_where(seen, attend(any_place, batch, kernel, window=(10, 0)), clean)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_query_of_nan_without_keys_is_a_row_without_keys(
    any_place: Place, option: str, kernel: str | None
) -> None:
    q, k, v = make_dense(6, 40, **HEADS, dtype=any_place.dtype, device=any_place.device)
    slices = AttentionSlices([(0, 2), (3, 6)], [(0, 40), (0, 3)], [MaskType.FULL, MaskType.CAUSAL])
    options = {"kernel": kernel or any_place.kernel, **OPTIONS[option]}
    clean = ffa_attention(q, k, v, slices, **options)
    nan = torch.zeros(clean.lse.shape, dtype=torch.bool, device=any_place.device)
    nan[1] = nan[2] = nan[4] = True
    q[1], q[2], q[4] = math.nan, math.nan, math.nan
    seen = nan.clone()
    seen[2] = False
    got = ffa_attention(q, k, v, slices, **options)
    assert bool((got.out[2] == 0).all())
    assert_nan_exactly_where(seen, got, clean)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_in_a_sink_shows_in_its_head(any_place: Place, kernel: str | None) -> None:
    batch = make_paged((9, 1), (100, 40), **HEADS, dtype=any_place.dtype, device=any_place.device)
    logits = torch.tensor([0.5, math.nan, 0.0, -2.0])
    clean = attend(any_place, batch, kernel, sink=SinkSpec(logits.nan_to_num(1.0)))
    seen = logits.isnan().to(any_place.device).expand(clean.lse.shape)
    assert_nan_exactly_where(seen, attend(any_place, batch, kernel, sink=SinkSpec(logits)), clean)
