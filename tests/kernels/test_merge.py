"""Merging partial results: associative, commutative, and at ease with parts that saw no key."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_serve import AttentionOutput, SinkSpec, merge
from magi_serve.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from magi_serve.kernels.merge import apply_sink
from magi_serve.testing import poisoned

few = settings(max_examples=50, derandomize=True, deadline=None, database=None)


def part(
    seed: int, *, tokens: int = 3, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float64
) -> AttentionOutput:
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens, heads, dim, generator=random, dtype=torch.float64)
    lse = 3 * torch.randn(tokens, heads, generator=random, dtype=torch.float64)
    return AttentionOutput(out.to(dtype), lse)


def without_keys(like: AttentionOutput, lse: float, out: float = 0.0) -> AttentionOutput:
    return AttentionOutput(torch.full_like(like.out, out), torch.full_like(like.lse, lse))


def assert_close(a: AttentionOutput, b: AttentionOutput) -> None:
    torch.testing.assert_close(a.out, b.out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(a.lse, b.lse, atol=1e-12, rtol=1e-12)


@few
@given(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_merging_is_a_softmax_over_the_parts(seeds: list[int], random: object) -> None:
    parts = [part(seed) for seed in seeds]
    weights = torch.softmax(torch.stack([p.lse for p in parts]), 0)
    out = (weights[..., None] * torch.stack([p.out for p in parts])).sum(0)
    lse = torch.logsumexp(torch.stack([p.lse for p in parts]), 0)
    assert_close(merge(parts), AttentionOutput(out, lse))


@few
@given(st.lists(st.integers(0, 99), min_size=3, max_size=5), st.integers(1, 2))
def test_merging_is_associative_and_commutative(seeds: list[int], cut: int) -> None:
    parts = [part(seed) for seed in seeds]
    whole = merge(parts)
    assert_close(merge([merge(parts[:cut]), merge(parts[cut:])]), whole)
    assert_close(merge(parts[::-1]), whole)


@pytest.mark.parametrize("infinite", [-math.inf, math.inf])
@pytest.mark.parametrize("junk", [0.0, math.nan, 1e4])
def test_parts_without_keys_change_nothing(infinite: float, junk: float) -> None:
    full = part(1, dtype=torch.float32)
    empty = without_keys(full, infinite, junk)
    for order in set(itertools.permutations([full, empty, empty])):
        merged = merge(order)
        assert torch.equal(merged.out, full.out)
        assert torch.equal(merged.lse, full.lse)


@pytest.mark.parametrize("infinite", [-math.inf, math.inf])
def test_only_parts_without_keys_give_zero_and_minus_infinity(infinite: float) -> None:
    empty = without_keys(part(0), infinite, math.nan)
    for parts in ([empty], [empty, empty], [merge([empty, empty]), empty]):
        merged = merge(parts)
        assert bool((merged.out == 0).all())
        assert bool((merged.lse == -math.inf).all())


def test_each_row_is_merged_for_itself() -> None:
    a, b = part(1), part(2)
    a.lse[0] = -math.inf
    a.out[0] = math.nan
    b.lse[1] = -math.inf
    merged = merge([a, b])
    torch.testing.assert_close(merged.out[0], b.out[0])
    torch.testing.assert_close(merged.out[1], a.out[1])


def test_the_sink_enters_once_after_merging() -> None:
    parts = [part(seed) for seed in range(4)]
    sink = SinkSpec(torch.randn(2, 2, dtype=torch.float64))
    merged = merge(parts, sink=sink)
    assert_close(merged, apply_sink(merge(parts), sink))
    assert_close(merged, merge([merge(parts[:2]), merge(parts[2:])], sink=sink))
    # The test has power: a sink in every part gives something else.
    wrong = merge([apply_sink(p, sink) for p in parts])
    assert not torch.allclose(wrong.lse, merged.lse, atol=1e-2)


def test_a_sink_on_rows_without_keys_gives_zero_and_the_sink() -> None:
    empty = without_keys(part(0), -math.inf)
    merged = merge([empty], sink=SinkSpec(torch.tensor([0.5, -2.0])))
    assert bool((merged.out == 0).all())
    torch.testing.assert_close(merged.lse, torch.tensor([0.5, -2.0]).double().expand(3, 2))


def test_huge_and_tiny_lse_do_not_overflow() -> None:
    a, b = part(1), part(2)
    for x, lse in ((a, 5e4), (b, -5e4)):
        x.lse.fill_(lse)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        parts = [AttentionOutput(x.out.to(dtype), x.lse.float()) for x in (a, b)]
        merged = merge(parts)
        assert torch.equal(merged.out, parts[0].out)
        assert merged.out.dtype == dtype


def test_max_logits_are_the_largest_of_all_parts_or_none() -> None:
    a, b = part(1), part(2)
    a = AttentionOutput(a.out, a.lse, torch.tensor([1.0, -3.0]))
    largest = merge([a, AttentionOutput(b.out, b.lse, torch.tensor([0.0, 5.0]))]).max_logits
    assert largest is not None
    assert largest.tolist() == [1.0, 5.0]
    assert merge([a, b]).max_logits is None


def test_merging_leaves_its_inputs_alone() -> None:
    parts = [part(1), part(2)]
    before = [(p.out.clone(), p.lse.clone()) for p in parts]
    first = merge(parts)
    kept = first.out.clone()
    merge([part(5), part(6)])
    for p, (out, lse) in zip(parts, before, strict=True):
        assert torch.equal(p.out, out)
        assert torch.equal(p.lse, lse)
    assert torch.equal(first.out, kept)


def test_no_rows_merge_to_no_rows() -> None:
    empty = part(0, tokens=0)
    assert merge([empty, empty]).out.shape == (0, 2, 4)


def test_no_parts_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"partials is empty; expected at least one"):
        merge([])


def test_parts_of_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"partials\[1\] has out \(4, 2, 4\)"):
        merge([part(0), part(0, tokens=4)])
    bad = AttentionOutput(part(0).out, poisoned((3, 5), torch.float32))
    with pytest.raises(ShapeError, match=r"partials\[0\].*lse \(3, 5\)"):
        merge([bad])


def test_a_sink_of_other_heads_or_tokens_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"sink has 3 heads.*q has 2"):
        merge([part(0)], sink=SinkSpec(torch.zeros(3)))
    with pytest.raises(ShapeError, match=r"logits for 5 tokens and q has 3"):
        merge([part(0)], sink=SinkSpec(torch.zeros(5, 1, 2)))


def test_a_partial_of_nan_is_not_taken_for_an_empty_one() -> None:
    good = AttentionOutput(torch.ones(2, 1, 4), torch.zeros(2, 1))
    bad = AttentionOutput(torch.full((2, 1, 4), math.nan), torch.full((2, 1), math.nan))
    merged = merge([good, bad])
    assert bool(merged.lse.isnan().all()) and bool(merged.out.isnan().all())


def test_partials_of_another_type_are_refused() -> None:
    good = part(0)
    array = np.zeros((3, 2))
    made = r"AttentionOutput\(out, lse, max_logits\)"
    for partials, error, match in (
        (good, ArgumentError, r"partials of type magi_serve.types.AttentionOutput is not accepted"),
        (iter([good]), ArgumentError, r"of type list_iterator is not accepted; expected a list or"),
        (None, ArgumentError, r"partials=None is not accepted; expected a list or tuple of Atten"),
        ([good, None], ArgumentError, rf"partials\[1\]=None is not accepted; expected {made}"),
        ([(good.out, good.lse)], ArgumentError, r"partials\[0\] of type tuple is not accepted"),
        (
            [AttentionOutput(good.out, array)],  # type: ignore[arg-type]
            DTypeError,
            r"partials\[0\].lse of type numpy.ndarray is .* torch.as_tensor\(partials\[0\].lse\)",
        ),
        (
            [good, AttentionOutput([1.0], good.lse)],  # type: ignore[arg-type]
            DTypeError,
            r"partials\[1\].out of type list is not accepted; expected a torch.Tensor",
        ),
        (
            [AttentionOutput(good.out, good.lse, [0.0, 1.0])],  # type: ignore[arg-type]
            DTypeError,
            r"partials\[0\].max_logits of type list is not accepted",
        ),
    ):
        with pytest.raises(error, match=match):
            merge(partials)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"sink of type torch.Tensor .* SinkSpec\(logits\)"):
        merge([good], sink=torch.zeros(2))  # type: ignore[arg-type]


def test_partials_that_cannot_be_put_together_are_refused() -> None:
    good = part(0)
    for bad, error, match in (
        (AttentionOutput(good.out[0], good.lse[0]), ShapeError, r"partials\[0\] has out \(2, 4\)"),
        (AttentionOutput(good.lse, good.lse), ShapeError, r"partials\[0\] has out \(3, 2\)"),
        (
            AttentionOutput(good.out, good.lse, torch.zeros(3)),
            ShapeError,
            r"partials\[0\].max_logits has shape \(3,\); expected \[2\]: one per query head",
        ),
        (
            AttentionOutput(good.out.long(), good.lse),
            DTypeError,
            r"partials\[0\].out is torch.int64; expected a floating-point dtype",
        ),
        (
            AttentionOutput(good.out, good.lse.int()),
            DTypeError,
            r"partials\[0\].lse is torch.int32; expected a floating-point dtype",
        ),
        (
            AttentionOutput(good.out, good.lse.to("meta")),
            DeviceError,
            r"partials\[0\].lse is on meta and partials\[0\].out is on cpu; move one of them",
        ),
    ):
        with pytest.raises(error, match=match):
            merge([bad, bad])
    there = AttentionOutput(good.out.to("meta"), good.lse.to("meta"))
    with pytest.raises(DeviceError, match=r"partials\[1\].out is on meta and partials\[0\].out is"):
        merge([good, there])
