"""The values that travel through magi-serve: sinks, paged caches, problems and results.

Nothing here knows how attention is computed or what a request is. Tensors are held, never copied
without need; validation happens once, when a value is made, and never synchronises a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError, DeviceError, DTypeError, ShapeError


def given(name: str, value: object) -> str:
    """An argument as an error names it: with its value where that is short, else with its type."""
    if value is None or isinstance(value, str | int | float):
        return f"{name}={value!r}"
    kind = type(value)
    return f"{name} of type {kind.__module__}.{kind.__qualname__}".replace(" builtins.", " ")


def check_types(kind: type[Any], **arguments: object) -> None:
    """Raise unless every argument is a `kind`; a message says how to make one.

    Raises:
        DTypeError: something else is given for a tensor.
        ArgumentError: something else is given for another `kind`.
    """
    for name, value in arguments.items():
        if isinstance(value, kind):
            continue
        if kind is Tensor:
            raise DTypeError(
                f"{given(name, value)} is not accepted; expected a torch.Tensor: pass "
                f"torch.as_tensor({name})"
            )
        wanted = f"a {kind.__name__}"
        if is_dataclass(kind):
            wanted = f"{kind.__name__}({', '.join(field.name for field in fields(kind))})"
        raise ArgumentError(f"{given(name, value)} is not accepted; expected {wanted}")


@dataclass(frozen=True, eq=False, slots=True)
class SinkSpec:
    """Learnable sink logits: each adds ``exp(logit)`` to the softmax denominator and no value.

    Args:
        logits: ``[num_sinks, num_q_heads]``, or ``[num_tokens, num_sinks, num_q_heads]`` for logits
            per token; any floating dtype and strides, in the units of ``softmax_scale * q·k``.
            Never scaled or soft-capped. ``[num_q_heads]`` is taken as one sink per head.

    Raises:
        ShapeError: logits have no dimension, or more than three.
        DTypeError: logits are not a tensor, or not of floating-point numbers.

    Source: StreamingLLM (arXiv:2309.17453); gpt-oss; MagiAttention's "sh" and "ssh" layouts.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        logits = self.logits
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise DTypeError(
                f"sink logits have type {got}; expected a floating-point tensor: pass "
                "torch.as_tensor(logits, dtype=torch.float32)"
            )
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
        ShapeError: a tensor has other dimensions than above, k and v disagree in the first three,
            or seqlens_k and page_table in num_seqs.
        DTypeError: something is not a tensor, k and v differ in dtype, or page_table or seqlens_k
            is not int32.
        DeviceError: k and v are on different devices.
        ArgumentError: the last stride of k, v or page_table is not 1.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    seqlens_k: Tensor

    def __post_init__(self) -> None:
        check_types(
            Tensor, k=self.k, v=self.v, page_table=self.page_table, seqlens_k=self.seqlens_k
        )
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
        if self.k.device != self.v.device:
            raise DeviceError(
                f"k is on {self.k.device} and v is on {self.v.device}; move one of them"
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
