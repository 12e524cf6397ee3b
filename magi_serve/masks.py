"""Masks as lists of slices: made once on the host, checked there, never synchronising a device."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from magi_serve.errors import ArgumentError, DTypeError, ShapeError

UNBOUNDED = 1 << 30
"""Stands for no bound in a band: larger than any row or key index; their sum fits int32."""


class MaskType(enum.IntEnum):
    """Which part of a slice's rectangle is visible; row ``i`` of ``[qs, qe)`` sees ``[lo, hi)``.

    Bit 0 is *causal* (bottom-right aligned): ``hi = ke - (qe - i - 1)``, else ``hi = ke``.
    Bit 1 is *inverse causal* (top-left aligned): ``lo = ks + (i - qs)``, else ``lo = ks``.

    Source: MagiAttention's AttnSlice (numbers and semantics).
    """

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


def _integers(name: str, value: Any) -> np.ndarray:
    """A copy of host data as int64; of no elements, in one dimension."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ArgumentError(
            f"{name} is on {value.device}; AttentionSlices takes host data (lists, numpy arrays "
            f"or CPU tensors), checked once without a device synchronisation: pass {name}.cpu()"
        )
    try:
        # As a list: numpy has not all of torch's dtypes.
        array = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
    except ValueError as error:
        raise ShapeError(f"{name} is ragged; expected rows of one length: {error}") from error
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(
            f"{name} has dtype {getattr(value, 'dtype', array.dtype)}; expected integers, in "
            "lists, a numpy array or a CPU tensor"
        )
    return array.astype(np.int64)


def _int_pairs(name: str, value: Any) -> np.ndarray:
    array = _integers(name, value)
    if array.size == 0:
        array = array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ShapeError(
            f"{name} has shape {array.shape}; expected [num_slices, 2]: (start, end) pairs"
        )
    bad = (array[:, 0] < 0) | (array[:, 1] < array[:, 0]) | (array[:, 1] >= UNBOUNDED)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ArgumentError(
            f"{name}[{i}] = {array[i].tolist()} is not a half-open range; expected 0 <= start <= "
            f"end < {UNBOUNDED}"
        )
    return array


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class AttentionSlices:
    """A mask as a list of slices whose (query, key) areas are disjoint.

    Args:
        q_ranges: ``[num_slices, 2]`` half-open query ranges, host data (list, numpy, CPU tensor).
        k_ranges: ``[num_slices, 2]`` half-open key ranges, host data.
        mask_types: ``[num_slices]`` values of `MaskType`; None means all `MaskType.FULL`.

    A query row may appear in any number of slices; a (query, key) cell in at most one. Rows in no
    slice see no key. The check runs here, once; device copies of the derived plan are cached.

    Raises:
        ShapeError: an array is not shaped as above, or has another length than the others.
        DTypeError: something else than integers is given.
        ArgumentError: a range is not half-open, not within ``[0, UNBOUNDED)``, a mask type is
            unknown, data is on a device, or two slices overlap (the message names both).
    """

    q_ranges: np.ndarray
    k_ranges: np.ndarray
    mask_types: np.ndarray

    def __init__(
        self,
        q_ranges: Sequence[Sequence[int]] | np.ndarray | Tensor,
        k_ranges: Sequence[Sequence[int]] | np.ndarray | Tensor,
        mask_types: Sequence[int] | np.ndarray | Tensor | None = None,
    ) -> None:
        q = _int_pairs("q_ranges", q_ranges)
        k = _int_pairs("k_ranges", k_ranges)
        if len(q) != len(k):
            raise ShapeError(
                f"q_ranges has {len(q)} slices and k_ranges has {len(k)}; expected as many"
            )
        if mask_types is None:
            types = np.zeros(len(q), dtype=np.int64)
        else:
            types = _integers("mask_types", mask_types)
            if types.shape != (len(q),):
                raise ShapeError(f"mask_types has shape {types.shape}; expected [{len(q)}]")
            unknown = ~np.isin(types, [int(t) for t in MaskType])
            if unknown.any():
                i = int(np.flatnonzero(unknown)[0])
                accepted = ", ".join(f"{t.name} = {int(t)}" for t in MaskType)
                raise ArgumentError(
                    f"mask_types[{i}] = {types[i]} is unknown; accepted: {accepted}"
                )
        for name, value in (("q_ranges", q), ("k_ranges", k), ("mask_types", types)):
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        self._check_disjoint()

    @classmethod
    def of_sequences(
        cls, cu_seqlens: Sequence[int] | np.ndarray | Tensor, window: int | None = None
    ) -> AttentionSlices:
        """Packed sequences whose tokens see each other both ways, as in an encoder.

        Args:
            cu_seqlens: ``[num_sequences + 1]`` host integers, non-decreasing from 0: sequence ``s``
                is the rows and the keys ``[cu_seqlens[s], cu_seqlens[s + 1])``.
            window: how many further keys to either side of its own a row sees; None for all.

        Raises:
            ArgumentError: `cu_seqlens` decreases or does not begin at 0; `window` is no count.
            DTypeError: something else than integers is given.
        """
        cu = _integers("cu_seqlens", cu_seqlens)
        if cu.ndim != 1 or not len(cu) or cu[0] or (np.diff(cu) < 0).any():
            raise ArgumentError(
                "cu_seqlens is not accepted; expected [num_sequences + 1] integers, non-decreasing "
                "from 0"
            )
        if window is not None and (type(window) is not int or window < 0):
            raise ArgumentError(
                f"window={window!r} is not accepted; expected a count of further keys >= 0, or "
                "None for all"
            )
        begin, end = cu[:-1], cu[1:]
        if window is None:
            ranges = np.stack([begin, end], 1)
            return cls(ranges, ranges)
        # Rows whose window is cut off by the sequence's start, by both ends, by none, by its end.
        head_end = np.minimum(begin + window, end)
        tail_begin = np.maximum(end - window, begin)
        first, second = np.minimum(head_end, tail_begin), np.maximum(head_end, tail_begin)
        inner = np.where(head_end < tail_begin, MaskType.BI_CAUSAL, MaskType.FULL)
        parts = (
            (begin, first, begin, first + window, MaskType.CAUSAL),
            (first, second, begin, end, inner),
            (second, end, second - window, end, MaskType.INV_CAUSAL),
        )
        rows = [
            np.stack([*np.broadcast_arrays(*part)], 1)[part[0] < part[1]].astype(np.int64)
            for part in parts
        ]
        table = np.concatenate(rows)
        return cls(table[:, :2], table[:, 2:4], table[:, 4])

    def __len__(self) -> int:
        return len(self.mask_types)

    def bands(self) -> np.ndarray:
        """The slices as ``[num_slices, 6]`` int64 bands ``(q_begin, q_end, k_begin, k_end, lo,
        hi)``.

        Row ``i`` of ``[q_begin, q_end)`` sees the keys of ``[k_begin, k_end)`` with
        ``i + lo <= key <= i + hi``; `UNBOUNDED` stands for no bound.
        """
        (qs, qe), (ks, ke) = self.q_ranges.T, self.k_ranges.T
        lo = np.where(self.mask_types & 2, ks - qs, -UNBOUNDED)
        hi = np.where(self.mask_types & 1, ke - qe, UNBOUNDED)
        return np.stack([qs, qe, ks, ke, lo, hi], axis=1)

    def _check_disjoint(self) -> None:
        found = _overlap(self.bands())
        if found is not None:
            i, j, (q0, q1, k0, k1) = found
            raise ArgumentError(
                f"slices {i} and {j} overlap: {self._describe(i)} and {self._describe(j)} both "
                f"hold queries of [{q0}, {q1}) with keys of [{k0}, {k1}); each (query, key) cell "
                "may be in one slice only: cut or drop one of them"
            )

    def _describe(self, i: int) -> str:
        q, k = self.q_ranges[i].tolist(), self.k_ranges[i].tolist()
        return f"(q {q}, k {k}, {MaskType(int(self.mask_types[i])).name})"


_PAIRS_AT_ONCE = 1 << 18


def _overlap(bands: np.ndarray) -> tuple[int, int, list[int]] | None:
    """Two bands that share a cell, and the rectangle ``[q0, q1) x [k0, k1)`` where they do.

    Two bands share a cell iff their rectangles intersect and some diagonal ``key - row`` that
    crosses the intersection lies within both: a closed form, for many pairs at once. Pairs come
    from a sweep along the axis on which fewer ranges meet.
    """
    sweeps = [_neighbours(bands[:, axis], bands[:, axis + 1]) for axis in (0, 2)]
    order, counts = min(sweeps, key=lambda sweep: int(sweep[1].sum()))
    ends = counts.cumsum()
    for first in range(0, int(ends[-1]) if len(ends) else 0, _PAIRS_AT_ONCE):
        pair = np.arange(first, min(first + _PAIRS_AT_ONCE, int(ends[-1])))
        a = np.searchsorted(ends, pair, side="right")
        b = a + 1 + pair - (ends - counts)[a]
        one, other = bands[order[a]].T, bands[order[b]].T
        q0, k0 = np.maximum(one[0], other[0]), np.maximum(one[2], other[2])
        q1, k1 = np.minimum(one[1], other[1]), np.minimum(one[3], other[3])
        lo = np.maximum(np.maximum(one[4], other[4]), k0 - (q1 - 1))
        hi = np.minimum(np.minimum(one[5], other[5]), (k1 - 1) - q0)
        hits = np.flatnonzero((q0 < q1) & (k0 < k1) & (lo <= hi))
        if hits.size:
            n = hits[0]
            i, j = sorted((int(order[a[n]]), int(order[b[n]])))
            return i, j, [int(x[n]) for x in (q0, q1, k0, k1)]
    return None


def _neighbours(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order by `begin`, and after how many of those next in it each range has not ended."""
    order = np.argsort(begin, kind="stable")
    last = np.searchsorted(begin[order], end[order], side="left")
    return order, np.maximum(last - np.arange(len(order)) - 1, 0)
