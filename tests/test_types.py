"""Central types: what they accept, what they refuse, and what the refusal says."""

import dataclasses
import math
import pickle
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_serve import AttentionSlices, MaskType, PagedKV, SinkSpec, ffa_attention
from magi_serve.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from magi_serve.kernels.ffa.reference import slices_mask
from magi_serve.masks import UNBOUNDED
from magi_serve.testing import make_slices
from magi_serve.types import AttentionProblem

many = settings(max_examples=300, derandomize=True, deadline=None, database=None)


def cells(q: tuple[int, int], k: tuple[int, int], kind: int) -> set[tuple[int, int]]:
    """The (query, key) cells of a slice, by MagiAttention's definition."""
    found = set()
    for i in range(*q):
        low = k[0] + ((i - q[0]) if kind & 2 else 0)
        high = k[1] - ((q[1] - i - 1) if kind & 1 else 0)
        found |= {(i, j) for j in range(low, high)}
    return found


ranges = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda r: (min(r), max(r)))


@many
@given(st.lists(st.tuples(ranges, ranges, st.integers(0, 3)), max_size=4))
def test_slices_are_refused_exactly_if_a_cell_is_in_two_of_them(slices: list[Any]) -> None:
    areas = [cells(*s) for s in slices]
    overlap = sum(map(len, areas)) != len(set().union(*areas))
    arguments = ([s[0] for s in slices], [s[1] for s in slices], [s[2] for s in slices])
    if not overlap:
        assert len(AttentionSlices(*arguments)) == len(slices)
        return
    with pytest.raises(ArgumentError, match=r"slices \d+ and \d+ overlap") as caught:
        AttentionSlices(*arguments)
    i, j = (int(word) for word in str(caught.value).split() if word.isdigit())
    assert areas[i] & areas[j]


@many
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 999))
def test_bands_show_the_same_cells_as_the_slices(num_q: int, num_k: int, seed: int) -> None:
    slices = make_slices(num_q, num_k, seed=seed)
    wanted = [
        cells(tuple(q), tuple(k), int(kind))
        for q, k, kind in zip(slices.q_ranges, slices.k_ranges, slices.mask_types, strict=True)
    ]
    got = [
        {(i, j) for i in range(q0, q1) for j in range(k0, k1) if i + lo <= j <= i + hi}
        for q0, q1, k0, k1, lo, hi in slices.bands().tolist()
    ]
    assert got == wanted


def test_overlapping_slices_are_named_with_the_way_out() -> None:
    with pytest.raises(ArgumentError) as caught:
        AttentionSlices([(0, 4), (8, 9), (2, 6)], [(0, 4), (0, 9), (3, 8)], [1, 0, 0])
    message = str(caught.value)
    for part in (
        "slices 0 and 2 overlap",
        "(q [0, 4], k [0, 4], CAUSAL)",
        "(q [2, 6], k [3, 8], FULL)",
        "queries of [2, 4) with keys of [3, 4)",
        "each (query, key) cell may be in one slice only: cut or drop one of them",
    ):
        assert part in message


def test_touching_slices_are_accepted() -> None:
    AttentionSlices([(0, 4), (4, 8), (0, 4)], [(0, 4), (0, 4), (4, 8)])
    # A causal triangle and the inverse-causal one that fills the square.
    AttentionSlices([(0, 4), (0, 4)], [(0, 4), (1, 4)], [1, 2])
    with pytest.raises(ArgumentError, match="overlap"):
        AttentionSlices([(0, 4), (0, 4)], [(0, 4), (0, 4)], [1, 2])


def test_slices_that_show_nothing_never_overlap() -> None:
    # Bi-causal with more rows than keys, and empty ranges.
    AttentionSlices(
        [(0, 4), (0, 4), (2, 2), (0, 4)], [(0, 4), (0, 2), (0, 4), (3, 3)], [0, 3, 0, 0]
    )


def test_many_slices_are_checked_quickly() -> None:
    start = np.arange(20_000) * 10
    rows = np.stack([start, start + 10], 1)
    shared = np.stack([start * 0, start * 0 + 10], 1)
    began = time.process_time()
    AttentionSlices(rows, rows, np.ones(20_000, dtype=np.int64))
    AttentionSlices(rows, shared)
    AttentionSlices(shared, rows)
    assert time.process_time() - began < 2
    with pytest.raises(ArgumentError, match="slices 3 and 20000 overlap"):
        AttentionSlices([*shared, (2, 5)], [*rows, (33, 36)])


def test_a_mask_can_be_pickled_after_its_use() -> None:
    slices = AttentionSlices([(0, 4)], [(0, 4)], [MaskType.CAUSAL])
    q = torch.randn(4, 1, 8)
    out = ffa_attention(q, q, q, slices).out
    again: AttentionSlices = pickle.loads(pickle.dumps(slices))
    assert torch.equal(ffa_attention(q, q, q, again).out, out)


@pytest.mark.parametrize(
    "convert",
    [list, np.array, lambda x: np.array(x, dtype=np.int32), torch.tensor],
    ids=["list", "int64", "int32", "tensor"],
)
def test_slices_take_lists_arrays_and_cpu_tensors(convert: Any) -> None:
    slices = AttentionSlices(convert([(0, 4)]), convert([(0, 9)]), convert([3]))
    assert slices.q_ranges.tolist() == [[0, 4]]
    assert slices.k_ranges.tolist() == [[0, 9]]
    assert slices.mask_types.tolist() == [MaskType.BI_CAUSAL]


def test_slices_may_be_none_at_all() -> None:
    for empty in ([], np.zeros((0, 2), dtype=np.int32), torch.zeros(0, 2, dtype=torch.int32)):
        assert len(AttentionSlices(empty, empty)) == 0
    assert AttentionSlices([], [], []).bands().shape == (0, 6)


@many
@given(
    lengths=st.lists(st.integers(0, 12), max_size=5),
    window=st.none() | st.integers(0, 14),
)
def test_packed_sequences_see_their_own_keys_within_the_window(
    lengths: list[int], window: int | None
) -> None:
    cu_seqlens = np.cumsum([0, *lengths])
    total = int(cu_seqlens[-1])
    slices = AttentionSlices.of_sequences(cu_seqlens, window)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=int))
    at = torch.arange(total)
    expected = owner[:, None] == owner[None]
    if window is not None:
        expected &= (at[:, None] - at[None]).abs() <= window
    assert torch.equal(slices_mask(slices, total, total, torch.device("cpu")), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 3, 2],), ArgumentError, "cu_seqlens is not accepted; expected .* non-decreasing"),
        (([1, 3],), ArgumentError, "from 0"),
        (([],), ArgumentError, "num_sequences"),
        (([[0, 1]],), ArgumentError, "num_sequences"),
        (([0, 1.5],), DTypeError, "cu_seqlens has dtype float64"),
        (([0, 2], -1), ArgumentError, "window=-1 is not accepted"),
        (([0, 2], 1.5), ArgumentError, "window=1.5 is not accepted"),
    ],
)
def test_sequences_that_make_no_sense_are_refused(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AttentionSlices.of_sequences(*arguments)


def test_slices_are_full_unless_told_otherwise() -> None:
    assert AttentionSlices([(0, 1)], [(0, 1)]).mask_types.tolist() == [MaskType.FULL]


def test_slices_cannot_change_after_their_check() -> None:
    mine = np.array([[0, 4]])
    slices = AttentionSlices(mine, [(0, 4)])
    with pytest.raises(ValueError, match="read-only"):
        slices.q_ranges[0, 0] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        slices.q_ranges = mine  # type: ignore[misc]
    mine[0] = (0, 400)
    assert slices.q_ranges.tolist() == [[0, 4]]


def test_slices_on_a_device_are_refused() -> None:
    there = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    for arguments in ((there, [(0, 1)]), ([(0, 1)], there)):
        with pytest.raises(ArgumentError, match=r"_ranges is on meta; .* host data .*\.cpu\(\)"):
            AttentionSlices(*arguments)
    with pytest.raises(ArgumentError, match=r"mask_types is on meta"):
        AttentionSlices([(0, 1)], [(0, 1)], torch.zeros(1, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([(0, 1), (2,)], [(0, 1)]), ShapeError, r"q_ranges is ragged; expected rows of one leng"),
        (([(0, 1)], [(0, 1)], [[0], 1]), ShapeError, r"mask_types is ragged; expected rows of"),
        ((None, [(0, 1)]), DTypeError, r"q_ranges has dtype object; expected integers"),
        (([(0, 1)], "ab"), DTypeError, r"k_ranges has dtype <U2; expected integers, in lists, a n"),
        (([(0, 1)], {(0, 1)}), DTypeError, r"k_ranges has dtype object; expected integers"),
        (([(0, 1 << 64)], [(0, 1)]), DTypeError, r"q_ranges has dtype object; expected integers"),
        (([(True, True)], [(0, 1)]), DTypeError, r"q_ranges has dtype bool; expected integers"),
        (
            (torch.zeros(1, 2, dtype=torch.bfloat16), [(0, 1)]),
            DTypeError,
            r"q_ranges has dtype torch.bfloat16; expected integers",
        ),
        (
            (torch.zeros(1, 2, requires_grad=True), [(0, 1)]),
            DTypeError,
            r"q_ranges has dtype torch.float32; expected integers",
        ),
        (([(0, 1)], [(0, 1)], MaskType.FULL), ShapeError, r"mask_types has shape \(\); expected"),
        (
            ([(0, 1, 2)], [(0, 1)]),
            ShapeError,
            r"q_ranges has shape \(1, 3\); expected \[num_slices, 2\]",
        ),
        (([0, 1], [(0, 1)]), ShapeError, r"q_ranges has shape \(2,\)"),
        (([(0.5, 1.0)], [(0, 1)]), DTypeError, r"q_ranges has dtype float64; expected integers"),
        (
            ([(0, 1)], [(-1, 1)]),
            ArgumentError,
            r"k_ranges\[0\] = \[-1, 1\] is not a half-open range",
        ),
        (
            ([(0, 1), (5, 2)], [(0, 1)] * 2),
            ArgumentError,
            r"q_ranges\[1\] = \[5, 2\] is not a half",
        ),
        (([(0, UNBOUNDED)], [(0, 1)]), ArgumentError, r"expected 0 <= start <= end < 1073741824"),
        (([(0, 1)], [(0, 1), (2, 3)]), ShapeError, r"q_ranges has 1 slices and k_ranges has 2"),
        (([(0, 1)], [(0, 1)], [0, 1]), ShapeError, r"mask_types has shape \(2,\); expected \[1\]"),
        (
            ([(0, 1)], [(0, 1)], [4]),
            ArgumentError,
            r"mask_types\[0\] = 4 is unknown; accepted: FULL = 0, CAUSAL = 1, INV_CAUSAL = 2, BI_C",
        ),
        (
            ([(0, 1)], [(0, 1)], [0.5]),
            DTypeError,
            r"mask_types has dtype float64; expected integers",
        ),
    ],
)
def test_ranges_and_types_that_make_no_sense_are_refused(
    arguments: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        AttentionSlices(*arguments)


# Sinks


def test_one_logit_per_head_is_one_sink() -> None:
    sink = SinkSpec(torch.zeros(8))
    assert (sink.num_sinks, sink.num_q_heads, sink.per_token) == (1, 8, False)
    sink = SinkSpec(torch.zeros(5, 3, 8))
    assert (sink.num_sinks, sink.num_q_heads, sink.per_token) == (3, 8, True)


def test_several_sinks_combine_to_their_logsumexp() -> None:
    logits = torch.randn(5, 3, 8)
    torch.testing.assert_close(SinkSpec(logits).combined(), torch.logsumexp(logits, 1))
    assert SinkSpec(logits.bfloat16()).combined().dtype == torch.float32
    assert SinkSpec(torch.full((3, 2), -math.inf)).combined().tolist() == [-math.inf] * 2


@pytest.mark.parametrize(
    ("logits", "error", "match"),
    [
        (
            torch.zeros(3, dtype=torch.int64),
            DTypeError,
            r"sink logits have type torch.int64; expected",
        ),
        ([0.0, 1.0], DTypeError, r"sink logits have type list; expected a floating-point tensor"),
        (
            np.zeros(3),
            DTypeError,
            r"have type ndarray; expected .*: pass torch.as_tensor\(logits, ",
        ),
        (None, DTypeError, r"sink logits have type NoneType; expected a floating-point tensor"),
        (torch.zeros(()), ShapeError, r"sink logits have shape \(\); expected \[num_sinks"),
        (torch.zeros(1, 2, 3, 4), ShapeError, r"sink logits have shape \(1, 2, 3, 4\)"),
    ],
)
def test_sinks_that_are_no_logits_are_refused(
    logits: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        SinkSpec(logits)


# Pages


def pages(**changes: Any) -> PagedKV:
    arguments = {
        "k": torch.zeros(5, 16, 2, 64),
        "v": torch.zeros(5, 16, 2, 32),
        "page_table": torch.zeros(3, 4, dtype=torch.int32),
        "seqlens_k": torch.zeros(3, dtype=torch.int32),
    }
    return PagedKV(**{**arguments, **changes})


def test_pages_say_their_size() -> None:
    assert (pages().page_size, pages().num_kv_heads) == (16, 2)


@pytest.mark.parametrize("name", ["k", "v", "page_table", "seqlens_k"])
def test_pages_that_are_no_tensors_are_refused(name: str) -> None:
    for wrong, shown in (
        ([[0]], f"{name} of type list"),
        (np.zeros((3, 4), dtype=np.int32), f"{name} of type numpy.ndarray"),
        (None, f"{name}=None"),
        (3, f"{name}=3"),
    ):
        with pytest.raises(DTypeError) as caught:
            pages(**{name: wrong})
        assert str(caught.value) == (
            f"{shown} is not accepted; expected a torch.Tensor: pass torch.as_tensor({name})"
        )


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"v": torch.zeros(5, 16, 2, 64, device="meta")},
            DeviceError,
            r"k is on cpu and v is on meta; move one of them",
        ),
        (
            {"k": torch.zeros(5, 16, 64)},
            ShapeError,
            r"k has shape \(5, 16, 64\); expected \[num_pages",
        ),
        ({"v": torch.zeros(5, 16, 64)}, ShapeError, r"v has shape \(5, 16, 64\)"),
        (
            {"v": torch.zeros(4, 16, 2, 64)},
            ShapeError,
            r"k has shape \(5, 16, 2, 64\) and v \(4, 16, 2, 64\); they must agree in",
        ),
        (
            {"v": torch.zeros(5, 16, 2, 64).half()},
            DTypeError,
            r"k is torch.float32 and v is torch.f",
        ),
        (
            {"k": torch.zeros(5, 16, 2, 64, 2)[..., 0]},
            ArgumentError,
            r"k has strides .*; the last one must be 1: lay head_dim out densely",
        ),
        (
            {"page_table": torch.zeros(3, dtype=torch.int32)},
            ShapeError,
            r"page_table has shape \(3,\); expected \[num_seqs, max_pages\]",
        ),
        ({"page_table": torch.zeros(3, 4)}, DTypeError, r"page_table is torch.float32; expected t"),
        (
            {"page_table": torch.zeros(4, 3, dtype=torch.int32).t()},
            ArgumentError,
            r"page_table has strides \(1, 3\); the last one must be 1: call page_table.contiguous",
        ),
        (
            {"seqlens_k": torch.zeros(2, dtype=torch.int32)},
            ShapeError,
            r"seqlens_k has shape \(2,\); expected \[3\], one length per row of page_table",
        ),
        (
            {"seqlens_k": torch.zeros(3, dtype=torch.int64)},
            DTypeError,
            r"seqlens_k is torch.int64; expected torch.int32",
        ),
    ],
)
def test_pages_that_disagree_are_refused(changes: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        pages(**changes)


QUANTISED = {
    "k": torch.zeros(5, 16, 2, 64, dtype=torch.int8),
    "v": torch.zeros(5, 16, 2, 32, dtype=torch.int8),
}


@pytest.mark.parametrize(
    ("shape", "kind"), [((), "head"), ((1,), "head"), ((2,), "head"), ((5, 16, 2), "token")]
)
def test_scales_are_per_head_or_per_token(shape: tuple[int, ...], kind: str) -> None:
    made = pages(**QUANTISED, k_scale=torch.ones(shape), v_scale=torch.ones(shape))
    assert made.scale_kind == kind
    assert pages(**QUANTISED).scale_kind == "none"


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"k_scale": ONE, "v_scale": ONE}, DTypeError, "k is torch.float32 and has scales"),
        ({**QUANTISED, "k_scale": ONE}, ArgumentError, "v_scale=None while the other scale is"),
        ({**QUANTISED, "k_scale": 0.5, "v_scale": ONE}, DTypeError, "k_scale=0.5 is not accepted"),
        (
            {**QUANTISED, "k_scale": ONE.half(), "v_scale": ONE},
            DTypeError,
            "k_scale is torch.float16; expected torch.float32",
        ),
        (
            {**QUANTISED, "k_scale": ONE, "v_scale": torch.ones(1, device="meta")},
            DeviceError,
            "v_scale is on meta and k is on cpu",
        ),
        (
            {**QUANTISED, "k_scale": ONE, "v_scale": torch.ones(3)},
            ShapeError,
            r"v_scale has shape \(3,\); expected \[1\], \[2\] \(one per kv head\) or \[5, 16, 2\]",
        ),
        (
            {**QUANTISED, "k_scale": torch.ones(5, 16, 2), "v_scale": ONE},
            ShapeError,
            r"k_scale has shape \(5, 16, 2\) and v_scale \(1,\); expected both per head, or both",
        ),
    ],
)
def test_scales_that_fit_no_pages_are_refused(
    changes: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        pages(**changes)


# Problems


def test_a_problem_is_a_key_and_reads_like_one() -> None:
    problem = AttentionProblem(
        "cuda",
        torch.bfloat16,
        torch.int8,
        num_q_heads=64,
        num_kv_heads=8,
        head_dim=64,
        head_dim_v=32,
        arch=90,
        page_size=16,
        kv_scales="token",
        sinks=1,
        softcap=True,
        window=True,
    )
    assert len({problem, dataclasses.replace(problem)}) == 1
    for part in (
        "cuda sm_90",
        "torch.int8 page 16",
        "scales per token",
        "64/8 heads",
        "head_dim_v 32",
        "1 sink",
        "softcap, window",
    ):
        assert part in str(problem)
