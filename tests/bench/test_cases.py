"""Cases: how they are written, which are selected, and how much work they are counted as."""

import numpy as np
import pytest

from magi_serve.bench.cases import (
    Case,
    lognormal_lengths,
    make_slices,
    parse,
    select,
    slice_intervals,
    standard_cases,
)
from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa.reference import slices_mask
from magi_serve.testing import make_slices as random_slices


def test_a_case_is_what_its_name_says() -> None:
    case = parse("1x2k@128k/64:8:64s/page16/window128")
    assert (case.q_lens, case.k_lens) == ((2048,), (131072,))
    assert (case.num_q_heads, case.num_kv_heads, case.head_dim, case.sink) == (64, 8, 64, True)
    assert (case.page_size, case.window, case.mask) == (16, 128, None)


def test_parts_of_a_batch_follow_each_other() -> None:
    case = parse("2x1@8k+3x100+lognormal4/32:8:128/contiguous")
    assert case.q_lens == (1, 1, 100, 100, 100, *lognormal_lengths(4))
    assert case.k_lens == (8192, 8192, 100, 100, 100, *lognormal_lengths(4))
    assert case.num_decodes == 2 and case.page_size is None and not case.sink


def test_mixed_lengths_are_log_normal_between_64_and_16k() -> None:
    lengths = lognormal_lengths(1001)
    assert min(lengths) >= 64 and max(lengths) <= 16384
    assert np.median(lengths) == 1024  # the geometric mean of both ends
    assert abs(np.log(lengths).std() - np.log(256) / 5) < 0.02
    assert lengths == lognormal_lengths(1001)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1x8k", "expected WORK/HEADS/LAYOUT"),
        ("1x8q/32:8:128/page16", "'1x8q' of case"),
        ("1x8k/32:8/page16", "expected WORK/HEADS/LAYOUT"),
        ("1x8k/32:5:128/page16", "no multiple of kv heads"),
        ("1x8k/32:8:128/page0", "a size of 0"),
        ("0x8k/32:8:128/page16", "0 rows over 0 keys"),
        ("1x8k+1x0/32:8:128/page16", "0 rows over 0 keys"),
        ("1x8k@4k/32:8:128/page16", "8192 rows over 4096 keys"),
        ("1x8k/32:8:128/contiguous/window128", "windows need pages"),
        ("band-8k/32:8:128/page16", "slices need packed keys"),
        ("band-8/32:8:128/contiguous", "32 for a mask of slices"),
    ],
)
def test_a_case_that_is_not_written_right_says_what_is_accepted(text: str, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse(text)
    assert said in str(error.value) and text in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "1x50/4:2:16/page16",
        "1x50/4:2:16/contiguous",
        "2x7@40+3x20/4:2:16/page16",
        "2x7@40+3x20/4:2:16/contiguous",
        "1x50/4:2:16/page16/window9",
        "4x1@33+1x20@50/8:2:16s/page16/window12",
        "blockcausal-160/4:2:16/contiguous",
        "prefix-160/4:2:16/contiguous",
        "band-160/4:2:16/contiguous",
    ],
)
def test_flops_and_bytes_are_those_of_the_visible_pairs(name: str) -> None:
    case = parse(name)
    visible = _visible(case)
    intervals = np.zeros_like(visible)
    for begin, end in case.intervals():
        for row, (first, stop) in enumerate(zip(begin, end, strict=True)):
            assert not intervals[row, first:stop].any()
            intervals[row, first:stop] = True
    assert np.array_equal(intervals, visible)
    assert case.visible_pairs() == visible.sum()
    assert case.flops() == 2 * 2 * visible.sum() * case.num_q_heads * case.head_dim
    rows = 2 * len(visible) * case.num_q_heads
    keys = 2 * visible.any(0).sum() * case.num_kv_heads
    assert case.bytes() == 2 * (rows + keys) * case.head_dim


def _visible(case: Case) -> np.ndarray:
    """The dense mask, cell by cell."""
    mask = np.zeros((sum(case.q_lens), sum(case.k_lens)), dtype=bool)
    if case.mask is not None:
        n = len(mask)
        for row in range(n):
            for key in range(n):
                mask[row, key] = _sees(case.mask, n, row, key)
        return mask
    row = first = 0
    for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True):
        for position in range(k_len - q_len, k_len):
            begin = 0 if case.window is None else max(0, position - case.window + 1)
            mask[row, first + begin : first + position + 1] = True
            row += 1
        first += k_len
    return mask


def _sees(mask: str, n: int, row: int, key: int) -> bool:
    if mask == "band":
        return row - n // 8 <= key <= row
    if mask == "prefix":
        part = [-1 if x < n // 2 else (x - n // 2) // (n // 16) for x in (row, key)]
        return key <= row and part[1] in (-1, part[0])
    bounds = [0, n // 10, 3 * n // 10, 6 * n // 10, n]
    begin = max(b for b in bounds if b <= row)
    end = min(b for b in bounds if b > row)
    block = n // 32
    return begin <= key < min(end, begin + ((row - begin) // block + 1) * block)


@pytest.mark.parametrize("seed", range(5))
def test_slices_of_any_kind_become_intervals(seed: int) -> None:
    slices = random_slices(60, 90, seed=seed)
    mask = np.zeros((60, 90), dtype=bool)
    for begin, end in slice_intervals(slices, 60):
        for row in range(60):
            mask[row, begin[row] : end[row]] = True
    assert np.array_equal(mask, slices_mask(slices, 60, 90, "cpu").numpy())  # type: ignore[arg-type]


def test_every_row_of_the_table_of_targets_has_cases() -> None:
    cases = standard_cases()
    assert len({c.name for c in cases}) == len(cases)
    count = {g: sum(c.group == g for c in cases) for g in dict.fromkeys(c.group for c in cases)}
    assert count == {
        "prefill": 8,
        "prefill-sink": 3,
        "window": 3,
        "mixed": 2,
        "chunk": 3,
        "decode-one": 8,
        "decode": 31,
        "verify": 8,
        "prefill-e4m3": 6,
        "decode-e4m3": 12,
        "slices": 3,
    }
    assert all(c.targets for c in cases)
    decodes = [c for c in cases if c.group == "decode"]
    assert max(c.kv_bytes for c in decodes) == 64 << 30
    assert all(("read" in c.targets) == (c.kv_bytes >= 10**9) for c in decodes)
    for case in cases:
        if case.page_size is None and case.num_tokens <= 32768:
            make_slices(case)


def test_groups_names_patterns_and_written_cases_are_selected_once() -> None:
    standard = standard_cases()
    assert select([]) == list(standard)
    assert select(["chunk"]) == [c for c in standard if c.group == "chunk"]
    name = "16x1@8k/32:8:128/page16"
    assert select([name, "16x1@8k/*"])[0].targets["fa3"] == 1.0
    assert len(select([name, "16x1@8k/*"])) == 4
    assert select(["3x5/4:2:64/page16"])[0].group == "own"
    shapes = [(c.group, c.head_dim) for c in select([], quick=True)]
    assert len(shapes) == len(set(shapes)) == 16


@pytest.mark.parametrize("text", ["prefil", "2x", "*nothing*"])
def test_an_unknown_case_is_told_the_groups(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"prefill, .* slices, names and patterns"):
        select([text])
