"""Spans of tokens that see each other both ways: what is accepted, and how sequences are cut."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magi_serve import BidirectionalSpans
from magi_serve.errors import ArgumentError, ShapeError

many = settings(max_examples=80, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize(
    ("ranges", "error", "says"),
    [
        ([[(0, 4)], [(2, 3, 4)]], ShapeError, r"ranges\[1\] has \(2, 3, 4\)"),
        ([[(5, 4)]], ArgumentError, r"\(5, 4\), which is not a half-open range"),
        ([[(-1, 4)]], ArgumentError, r"\(-1, 4\), which is not"),
        ([[(0, 1 << 30)]], ArgumentError, "expected 0 <= start <= end < 1073741824"),
        ([[], [(8, 12), (2, 9)]], ArgumentError, r"ranges\[1\] has \(2, 9\) and \(8, 12\), which"),
    ],
)
def test_bad_ranges_are_named(ranges: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        BidirectionalSpans(ranges)


def test_ranges_are_kept_in_order_without_empty_ones() -> None:
    spans = BidirectionalSpans([[(7, 9), (3, 3), (0, 2)], []])
    assert spans.ranges == (((0, 2), (7, 9)), ())
    assert spans
    assert not BidirectionalSpans([[], [(4, 4)]])


def test_spans_are_of_as_many_causal_sequences() -> None:
    spans = BidirectionalSpans([[(0, 2)], []])
    spans.check(2, True)
    with pytest.raises(ShapeError, match="for 2 sequences and the batch has 3"):
        spans.check(3, True)
    with pytest.raises(ArgumentError, match="causal=False with spans is not accepted"):
        spans.check(2, False)
    with pytest.raises(ArgumentError, match="causal=a tensor with spans"):
        spans.check(2, torch.ones(2, dtype=torch.bool))


@many
@given(st.data())
def test_segments_show_what_the_definition_says(data: st.DataObject) -> None:
    """Of each row in one segment: its past within the window, or its span."""
    length = 30
    ends = sorted(data.draw(st.sets(st.integers(0, length + 5), max_size=8)))
    ranges = list(zip(ends[::2], ends[1::2], strict=False))
    left = data.draw(st.none() | st.integers(0, 12))
    within = data.draw(st.booleans())
    segments = BidirectionalSpans([[], ranges, []], within).segments(left)
    assert [s.seq for s in segments] == sorted(s.seq for s in segments)
    for position in range(length):
        (own,) = (s for s in segments if s.seq == 1 and s.begin <= position < s.end)
        for key in range(length):
            in_window = left is None or key >= position - left
            in_span = any(a <= position < b and a <= key < b for a, b in ranges)
            wanted = (key <= position and in_window) or (in_span and (in_window or not within))
            seen = own.k_begin <= key < own.k_end
            seen &= own.both_ways or key <= position
            seen &= not own.from_window or in_window
            assert seen == wanted, (position, key, own)
