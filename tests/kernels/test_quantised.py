"""What must hold over quantised pages, beyond what the shared grid compares with the reference."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from magi_serve import AttentionOutput, merge, paged_attention
from magi_serve.testing import (
    LAYOUTS,
    OPTIONS,
    Layout,
    PagedBatch,
    Place,
    check_paged,
    check_that_it_counts,
    make_paged,
)
from magi_serve.types import LARGEST, ScaleKind

E4M3, E5M2, INT8 = LARGEST
PATHS: dict[str, tuple[list[int], list[int], bool]] = {
    "prefill": ([37], [37], False),
    "extend": ([21, 5], [90, 64], False),
    "decode": ([1, 1, 1], [33, 1, 60], True),
    "split decode": ([1], [900], True),
    "verify": ([3, 4], [70, 129], True),
}
"""Query lengths, key lengths, and whether the sequences are planned as decodes."""

STORED: dict[str, dict[str, Any]] = {
    "e4m3": {"kv_dtype": E4M3, "kv_scales": "head"},
    "e5m2": {"kv_dtype": E5M2, "kv_scales": "none"},
    "int8": {"kv_dtype": INT8, "kv_scales": "head"},
    "int8 per token": {"kv_dtype": INT8, "kv_scales": "token"},
}

paths = pytest.mark.parametrize("path", PATHS)
stored_as = pytest.mark.parametrize("stored", STORED)


def batch_on(place: Place, path: str, stored: str, **options: Any) -> PagedBatch:
    q_lens, k_lens, _ = PATHS[path]
    fixed = {"num_q_heads": 8, "num_kv_heads": 2, "dtype": place.dtype, "device": place.device}
    return make_paged(q_lens, k_lens, seed=3, **fixed, **STORED[stored], **options)


def num_decodes(path: str) -> int:
    q_lens, _, decode = PATHS[path]
    return len(q_lens) if decode else 0


def attend_on(place: Place, path: str, batch: PagedBatch, **options: Any) -> AttentionOutput:
    """Attention by that path, without comparison."""
    plan = batch.plan(batch.planner(place.kernel), num_decodes(path))
    return paged_attention(
        batch.q, batch.kv, batch.cu_seqlens_q, kernel=place.kernel, plan=plan, **options
    )


def assert_equal_bits(a: AttentionOutput, b: AttentionOutput) -> None:
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)


@paths
@stored_as
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_counts_on_every_path(
    any_place: Place, path: str, stored: str, option: str
) -> None:
    if option == "alibi_slopes" and any_place.kernel == "hopper":
        pytest.skip("is refused")
    batch = batch_on(any_place, path, stored)
    check_that_it_counts(option, batch, kernel=any_place.kernel, num_decodes=num_decodes(path))


@paths
@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("dtype", LARGEST)
def test_scales_count_on_every_path(
    any_place: Place, path: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    batch = batch_on(any_place, path, "int8" if dtype == INT8 else "e5m2")
    if dtype == E4M3:
        batch = batch_on(any_place, path, "e4m3")
    one = torch.full(shape, 0.25, device=any_place.device)
    if shape == (2,):
        one[1] = 0.0625
    results = {}
    for name, k_scale, v_scale in (("", one, one), ("k", 2 * one, one), ("v", one, 2 * one)):
        scaled = replace(batch, kv=replace(batch.kv, k_scale=k_scale, v_scale=v_scale))
        results[name] = check_paged(scaled, kernel=any_place.kernel, num_decodes=num_decodes(path))
    # Twice, but for what fp16 rounds below its least normal number.
    torch.testing.assert_close(results["v"].out, 2 * results[""].out, atol=2**-24, rtol=0)
    assert torch.equal(results["v"].lse, results[""].lse)
    seen = torch.tensor([n > 1 for n in PATHS[path][1]])
    change = (results["k"].lse - results[""].lse).abs().amax()
    assert bool(change > 0.05) == bool(seen.any())
    # A scale of keys is a factor of the logits, wherever it is applied.
    halved = attend_on(
        any_place, path, replace(batch, kv=replace(batch.kv, k_scale=2 * one, v_scale=one)),
        softmax_scale=0.5 * batch.q.shape[-1] ** -0.5,
    )  # fmt: skip
    assert_equal_bits(halved, results[""])


@paths
@stored_as
def test_what_lies_past_the_last_key_changes_nothing(
    any_place: Place, path: str, stored: str
) -> None:
    wanted = attend_on(any_place, path, batch_on(any_place, path, stored, poison=1e4))
    got = attend_on(any_place, path, batch_on(any_place, path, stored, poison=math.nan))
    assert_equal_bits(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", ["e4m3", "int8 per token"])
def test_pages_of_any_layout_give_the_same_bits(place: Place, layout: Layout, stored: str) -> None:
    for path in ("extend", "split decode"):
        wanted = attend_on(place, path, batch_on(place, path, stored))
        got = attend_on(place, path, batch_on(place, path, stored, layout=layout))
        assert_equal_bits(got, wanted)


@stored_as
@pytest.mark.parametrize("gain", [1e-20, 1e-6, 1e3, 1e20])
def test_queries_of_any_size_are_as_exact(any_place: Place, gain: float, stored: str) -> None:
    if any_place.dtype == torch.float16 and not 1e-6 < gain < 1e4:
        pytest.skip("beyond fp16")
    for path in ("extend", "decode"):
        batch = batch_on(any_place, path, stored)
        batch.q.mul_(gain)
        scale = batch.q.shape[-1] ** -0.5 / gain
        plain = attend_on(any_place, path, batch_on(any_place, path, stored))
        got = attend_on(any_place, path, batch, softmax_scale=scale)
        torch.testing.assert_close(got.lse, plain.lse, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got.out, plain.out, atol=2e-2, rtol=2e-2)


@stored_as
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_no_number_shows_in_its_row_and_head_alone(
    any_place: Place, value: float, stored: str
) -> None:
    for path in ("extend", "verify"):
        batch = batch_on(any_place, path, stored)
        wanted = attend_on(any_place, path, batch)
        batch.q[2, 3, 5] = value
        got = attend_on(any_place, path, batch)
        assert bool(got.out[2, 3].isnan().any())
        others = torch.ones(got.lse.shape, dtype=torch.bool, device=got.lse.device)
        others[2, 3] = False
        assert torch.equal(got.out[others], wanted.out[others])
        assert torch.equal(got.lse[others], wanted.lse[others])


@stored_as
def test_parts_of_the_keys_merge_to_the_whole(any_place: Place, stored: str) -> None:
    batch = batch_on(any_place, "split decode", stored)
    whole = attend_on(any_place, "split decode", batch)
    parts = []
    for first, last in ((0, 20), (20, 57)):
        kv = replace(
            batch.kv,
            page_table=batch.kv.page_table[:, first:last].contiguous(),
            seqlens_k=(batch.kv.seqlens_k - 16 * first).clamp(max=16 * (last - first)),
        )
        part = replace(batch, kv=kv)
        parts.append(attend_on(any_place, "split decode", part))
    merged = merge(parts)
    torch.testing.assert_close(merged.lse, whole.lse, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-2, rtol=1e-2)


def test_values_of_very_different_size_are_added_as_they_are(place: Place) -> None:
    kind: ScaleKind = "token"
    batch = make_paged(
        [1, 1], [300, 40], dtype=place.dtype, device=place.device, kv_dtype=E4M3, kv_scales=kind
    )
    assert batch.kv.v_scale is not None
    sizes = torch.logspace(-3, 3, batch.kv.v_scale.numel(), device=place.device)
    batch.kv.v_scale.copy_(batch.kv.v_scale * sizes.view(batch.kv.v_scale.shape))
    check_paged(batch, kernel=place.kernel, num_decodes=2)
    check_paged(batch, kernel=place.kernel, num_decodes=0)
