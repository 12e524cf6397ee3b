"""Spans of causal sequences within which tokens see each other both ways: images, prefixes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from magi_serve.errors import ArgumentError, ShapeError
from magi_serve.masks import UNBOUNDED

Range = tuple[int, int]


class Segment(NamedTuple):
    """Positions ``[begin, end)`` of a sequence whose rows have one band of keys.

    Keys are those of ``[k_begin, k_end)`` that the sequence has, and that its window shows where
    `from_window`; up to the row itself, unless it is `both_ways`.
    """

    seq: int
    begin: int
    end: int
    k_begin: int
    k_end: int
    from_window: bool
    both_ways: bool


@dataclass(frozen=True, eq=False, slots=True)
class BidirectionalSpans:
    """Spans of causal sequences within which tokens see each other both ways.

    A row at a position of ``[start, end)`` sees, beside what it sees anyway, every key of
    ``[start, end)`` that its sequence has.

    Args:
        ranges: for each sequence of the batch, half-open ranges ``(start, end)`` of positions,
            counted from the sequence's first key; none of a sequence's may overlap. Host data.
        within_window: whether a sliding window also bounds what a row sees of its span's keys
            before it (Gemma 4), or not (Gemma 3, PaliGemma). Keys after it are always seen.

    Raises:
        ShapeError: a range is not a pair.
        ArgumentError: a range is not half-open, or two of a sequence overlap; it names them.

    Source: PrefixLM (arXiv:1910.10683); vLLM's ``mm_prefix``, with ends that are included.
    """

    ranges: tuple[tuple[Range, ...], ...]
    within_window: bool = False

    def __init__(
        self, ranges: Sequence[Sequence[Sequence[int]]], within_window: bool = False
    ) -> None:
        checked = tuple(_checked(s, of_seq) for s, of_seq in enumerate(ranges))
        object.__setattr__(self, "ranges", checked)
        object.__setattr__(self, "within_window", bool(within_window))

    def __bool__(self) -> bool:
        """Whether there is any span."""
        return any(self.ranges)

    def check(self, num_seqs: int, causal: bool | Tensor) -> None:
        """Raise unless these are spans of a batch of `num_seqs` causal sequences.

        Raises:
            ShapeError: there are spans for another number of sequences.
            ArgumentError: not all sequences are causal.
        """
        if len(self.ranges) != num_seqs:
            raise ShapeError(
                f"spans has ranges for {len(self.ranges)} sequences and the batch has {num_seqs}; "
                "expected a list for each, empty for none"
            )
        if isinstance(causal, Tensor) or not causal:
            given = "a tensor" if isinstance(causal, Tensor) else causal
            raise ArgumentError(
                f"causal={given} with spans is not accepted; expected causal=True: spans are what "
                "a causal sequence sees beside its past"
            )

    def segments(self, left: int | None) -> list[Segment]:
        """Every sequence cut where what its rows see changes, in order, from end to end.

        `left` is how many keys before its own a row's window shows; None for all.
        """
        found = []
        for seq, ranges in enumerate(self.ranges):
            at = -UNBOUNDED
            for start, end in ranges:
                found.append(Segment(seq, at, start, 0, UNBOUNDED, True, False))
                turn = end
                if left is not None and not self.within_window:
                    turn = min(start + left, end)  # from here on the window begins in the span
                found.append(Segment(seq, start, turn, 0, end, True, True))
                found.append(Segment(seq, turn, end, start, end, False, True))
                at = end
            found.append(Segment(seq, at, UNBOUNDED, 0, UNBOUNDED, True, False))
        return [segment for segment in found if segment.begin < segment.end]


def _checked(seq: int, ranges: Sequence[Sequence[int]]) -> tuple[Range, ...]:
    """The ranges of a sequence in order; empty ones are left out."""
    pairs = []
    for given in ranges:
        if len(given) != 2:
            raise ShapeError(f"spans.ranges[{seq}] has {given!r}; expected pairs (start, end)")
        start, end = int(given[0]), int(given[1])
        if not 0 <= start <= end < UNBOUNDED:
            raise ArgumentError(
                f"spans.ranges[{seq}] has ({start}, {end}), which is not a half-open range; "
                f"expected 0 <= start <= end < {UNBOUNDED}"
            )
        if start < end:
            pairs.append((start, end))
    pairs.sort()
    for one, other in itertools.pairwise(pairs):
        if other[0] < one[1]:
            raise ArgumentError(
                f"spans.ranges[{seq}] has {one} and {other}, which overlap; expected spans apart "
                "from each other: join or cut them"
            )
    return tuple(pairs)
