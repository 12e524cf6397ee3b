"""The values that travel through magi-serve: masks, sinks, paged caches, problems and results.

Nothing here knows how attention is computed or what a request is. Tensors are held, never copied
without need; validation happens once, when a value is made, and never synchronises a device.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
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
    array = np.asarray(value.numpy() if isinstance(value, Tensor) else value)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise DTypeError(f"{name} has dtype {array.dtype}; expected integers")
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


@dataclass(frozen=True, eq=False, slots=True)
class AttentionSlices:
    """A mask as a list of slices whose (query, key) areas are disjoint.

    Args:
        q_ranges: ``[num_slices, 2]`` half-open query ranges, host data (list, numpy, CPU tensor).
        k_ranges: ``[num_slices, 2]`` half-open key ranges, host data.
        mask_types: ``[num_slices]`` values of `MaskType`; None means all `MaskType.FULL`.

    A query row may appear in any number of slices; a (query, key) cell in at most one. Rows in no
    slice see no key. The check runs here, once; device copies of the derived plan are cached.

    Raises:
        ShapeError, DTypeError: the arrays are not shaped or typed as above.
        ArgumentError: a range is not half-open and non-negative, a mask type is unknown, data is on
            a device, or two slices overlap (the message names both).
    """

    q_ranges: np.ndarray
    k_ranges: np.ndarray
    mask_types: np.ndarray
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

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
        object.__setattr__(self, "cache", {})
        self._check_disjoint()

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
        """Refuse overlapping slices.

        Two bands share a cell iff their rectangles intersect and some diagonal ``key - row`` that
        crosses the intersection lies within both bands: a closed form, checked for many pairs at
        once.
        """
        bands = self.bands()
        order = np.argsort(bands[:, 0], kind="stable")
        s = bands[order]
        last = np.searchsorted(s[:, 0], s[:, 1], side="left")
        counts = np.maximum(last - np.arange(len(s)) - 1, 0)
        limit = 4_000_000
        start = 0
        while start < len(s):
            stop = start + 1
            total = int(counts[start])
            while stop < len(s) and total + counts[stop] <= limit:
                total += int(counts[stop])
                stop += 1
            a = np.repeat(np.arange(start, stop), counts[start:stop])
            within = np.arange(total) - np.repeat(
                np.cumsum(counts[start:stop]) - counts[start:stop], counts[start:stop]
            )
            b = a + 1 + within
            low = np.maximum(s[a], s[b])
            high = np.minimum(s[a], s[b])
            q0, q1, k0, k1 = low[:, 0], high[:, 1], low[:, 2], high[:, 3]
            lo = np.maximum(low[:, 4], k0 - (q1 - 1))
            hi = np.minimum(high[:, 5], (k1 - 1) - q0)
            hit = np.flatnonzero((q0 < q1) & (k0 < k1) & (lo <= hi))
            if hit.size:
                i, j = sorted((int(order[a[hit[0]]]), int(order[b[hit[0]]])))
                raise ArgumentError(
                    f"slices {i} and {j} overlap: {self._describe(i)} and {self._describe(j)} "
                    f"both hold queries of [{q0[hit[0]]}, {q1[hit[0]]}) with keys of "
                    f"[{k0[hit[0]]}, {k1[hit[0]]}); each (query, key) cell may be in one slice "
                    "only: cut or drop one of them"
                )
            start = stop

    def _describe(self, i: int) -> str:
        q, k = self.q_ranges[i].tolist(), self.k_ranges[i].tolist()
        return f"(q {q}, k {k}, {MaskType(int(self.mask_types[i])).name})"


@dataclass(frozen=True, eq=False, slots=True)
class SinkSpec:
    """Learnable sink logits: each adds ``exp(logit)`` to the softmax denominator and no value.

    Args:
        logits: ``[num_sinks, num_q_heads]``, or ``[num_tokens, num_sinks, num_q_heads]`` for logits
            per token; any floating dtype and strides, in the units of ``softmax_scale * q·k``.
            Never scaled or soft-capped. ``[num_q_heads]`` is taken as one sink per head.

    Raises:
        ShapeError, DTypeError: logits are not shaped or typed as above.

    Source: StreamingLLM (arXiv:2309.17453); gpt-oss; MagiAttention's "sh" and "ssh" layouts.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        logits = self.logits
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise DTypeError(f"sink logits have type {got}; expected a floating-point tensor")
        if logits.ndim == 1:
            object.__setattr__(self, "logits", logits[None])
        elif logits.ndim not in (2, 3):
            raise ShapeError(
                f"sink logits have shape {tuple(logits.shape)}; expected [num_sinks, num_q_heads] "
                "or [num_tokens, num_sinks, num_q_heads]"
            )

    @property
    def num_sinks(self) -> int:
        return self.logits.shape[-2]

    @property
    def num_q_heads(self) -> int:
        return self.logits.shape[-1]

    @property
    def per_token(self) -> bool:
        return self.logits.ndim == 3

    def combined(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All sinks of a head as one logit: ``logsumexp`` over sinks, ``[(num_tokens,)
        num_q_heads]``."""
        logits = self.logits.to(dtype)
        if self.num_sinks == 1:
            return logits.squeeze(-2)
        return torch.logsumexp(logits, dim=-2)


@dataclass(frozen=True, eq=False, slots=True)
class PagedKV:
    """Keys and values in pages, and which pages each sequence owns.

    Args:
        k: ``[num_pages, page_size, num_kv_heads, head_dim]``, any strides but a unit last one.
        v: ``[num_pages, page_size, num_kv_heads, head_dim_v]``, likewise.
        page_table: ``[num_seqs, max_pages]`` int32; entries past a sequence's last page are never
            read.
        seqlens_k: ``[num_seqs]`` int32: keys of each sequence; what lies past them is never used.

    Raises:
        ShapeError, DTypeError, ArgumentError: tensors are not shaped, typed or placed as above.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    seqlens_k: Tensor

    def __post_init__(self) -> None:
        for name in ("k", "v"):
            pool = getattr(self, name)
            if pool.ndim != 4:
                raise ShapeError(
                    f"{name} has shape {tuple(pool.shape)}; expected [num_pages, page_size, "
                    "num_kv_heads, head_dim]"
                )
            if pool.stride(-1) != 1 and pool.shape[-1] > 1:
                raise ArgumentError(
                    f"{name} has strides {pool.stride()}; the last one must be 1: lay head_dim "
                    "out densely"
                )
        if self.k.shape[:3] != self.v.shape[:3]:
            raise ShapeError(
                f"k has shape {tuple(self.k.shape)} and v {tuple(self.v.shape)}; they must agree "
                "in num_pages, page_size and num_kv_heads"
            )
        if self.k.dtype != self.v.dtype:
            raise DTypeError(
                f"k is {self.k.dtype} and v is {self.v.dtype}; they must have one dtype"
            )
        if self.page_table.ndim != 2:
            raise ShapeError(
                f"page_table has shape {tuple(self.page_table.shape)}; expected [num_seqs, "
                "max_pages]"
            )
        if self.seqlens_k.shape != self.page_table.shape[:1]:
            raise ShapeError(
                f"seqlens_k has shape {tuple(self.seqlens_k.shape)}; expected "
                f"[{self.page_table.shape[0]}], one length per row of page_table"
            )
        if self.page_table.stride(1) != 1 and self.page_table.shape[1] > 1:
            raise ArgumentError(
                f"page_table has strides {self.page_table.stride()}; the last one must be 1: call "
                "page_table.contiguous()"
            )
        for name in ("page_table", "seqlens_k"):
            if getattr(self, name).dtype != torch.int32:
                raise DTypeError(f"{name} is {getattr(self, name).dtype}; expected torch.int32")

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, eq=False, slots=True)
class AttentionOutput:
    """What attention returns.

    Attributes:
        out: ``[num_tokens, num_q_heads, head_dim_v]`` in q's dtype; 0 for rows that see no key.
        lse: ``[num_tokens, num_q_heads]`` fp32, natural log of the softmax denominator, with the
            sink where one was given; for rows that see no key ``-inf``, or the sink.
        max_logits: ``[num_q_heads]`` fp32: the largest scaled and soft-capped logit of each head
            before sinks, ``-inf`` if it saw none; None unless asked for.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What a kernel must be able to do: hashable and free of tensors, the key of dispatch and
    messages."""

    device: str
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    arch: int | None = None
    page_size: int | None = None
    """Keys per page; None for contiguous keys."""
    sinks: int = 0
    sink_per_token: bool = False
    softcap: bool = False
    window: bool = False
    """Whether rows see a bounded number of keys before them."""
    max_logits: bool = False
    even_rows: bool = True
    """Whether TMA can read q, k and v: rows of one stride, aligned to 16 bytes."""

    def __str__(self) -> str:
        kv = "contiguous" if self.page_size is None else f"page {self.page_size}"
        arch = "" if self.arch is None else f" sm_{self.arch}"
        return (
            f"{self.device}{arch}, {self.q_dtype} q, {self.kv_dtype} {kv}, "
            f"{self.num_q_heads}/{self.num_kv_heads} heads, head_dim {self.head_dim}"
            + (f", head_dim_v {self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
            + (f", {self.sinks} sink(s)" if self.sinks else "")
            + (" per token" if self.sink_per_token else "")
            + (", softcap" if self.softcap else "")
            + (", window" if self.window else "")
            + (", max-logits" if self.max_logits else "")
        )
