"""The values that travel through magi-serve: sinks, paged caches, problems and results.

Nothing here knows how attention is computed or what a request is. Tensors are held, never copied
without need; validation happens once, when a value is made, and never synchronises a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

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


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The dtypes of quantised keys and values, and the largest number that each stores."""

ScaleKind = Literal["none", "head", "token"]
"""What scales of quantised keys and values there are: one per kv head, or per token and head."""


def scale_kind(scale: Tensor | None) -> ScaleKind:
    """What a `PagedKV`'s scale is for."""
    if scale is None:
        return "none"
    return "token" if scale.ndim == 3 else "head"


@dataclass(frozen=True, eq=False, slots=True)
class PagedKV:
    """Keys and values in pages, and which pages each sequence owns.

    Pages of 8-bit numbers are quantised: a key is ``k * k_scale``, a value ``v * v_scale``.

    Args:
        k: ``[num_pages, page_size, num_kv_heads, head_dim]``, any strides but a unit last one.
        v: ``[num_pages, page_size, num_kv_heads, head_dim_v]``, likewise.
        page_table: ``[num_seqs, max_pages]`` int32; entries past a sequence's last page are never
            read.
        seqlens_k: ``[num_seqs]`` int32: keys of each sequence; what lies past them is never used.
        k_scale: fp32, for k of `LARGEST`'s dtypes only: a scalar or ``[1]`` for all keys,
            ``[num_kv_heads]``, or ``[num_pages, page_size, num_kv_heads]`` of any strides for one
            per token and head; None for 1.
        v_scale: likewise for v, of k_scale's kind.

    Raises:
        ShapeError: a tensor has other dimensions than above, k and v disagree in the first three,
            or seqlens_k and page_table in num_seqs; k_scale and v_scale are of two kinds.
        DTypeError: something is not a tensor, k and v differ in dtype, page_table or seqlens_k is
            not int32, or a scale not fp32; k and v that have scales are not of 8 bits.
        DeviceError: k, v and their scales are on different devices.
        ArgumentError: the last stride of k, v or page_table is not 1; there is one scale only.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    seqlens_k: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

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
        if self.k_scale is not None or self.v_scale is not None:
            self._check_scales()

    def _check_scales(self) -> None:
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        for name, scale in scales.items():
            if scale is None:
                raise ArgumentError(
                    f"{name}=None while the other scale is given; expected both: pass "
                    "torch.ones(1) for the one that is not needed"
                )
            check_types(Tensor, **{name: scale})
            if scale.dtype != torch.float32:
                raise DTypeError(f"{name} is {scale.dtype}; expected torch.float32")
            if scale.device != self.k.device:
                raise DeviceError(
                    f"{name} is on {scale.device} and k is on {self.k.device}; move one of them"
                )
            if self._kind(scale) is None:
                raise ShapeError(
                    f"{name} has shape {tuple(scale.shape)}; expected [1], [{self.num_kv_heads}] "
                    f"(one per kv head) or {list(self.k.shape[:3])} (one per token and head)"
                )
        if self.k.dtype not in LARGEST:
            raise DTypeError(
                f"k is {self.k.dtype} and has scales; expected 8-bit numbers "
                f"({', '.join(map(str, LARGEST))}): leave k_scale and v_scale out"
            )
        if self._kind(self.k_scale) != self._kind(self.v_scale):
            raise ShapeError(
                f"k_scale has shape {tuple(scales['k_scale'].shape)} and v_scale "  # type: ignore[union-attr]
                f"{tuple(scales['v_scale'].shape)}; expected both per head, or both per token "  # type: ignore[union-attr]
                "and head"
            )

    def _kind(self, scale: Tensor | None) -> ScaleKind | None:
        """What `scale` is for; None if for nothing that we know."""
        known = (), (1,), (self.num_kv_heads,), tuple(self.k.shape[:3])
        return scale_kind(scale) if scale is None or tuple(scale.shape) in known else None

    @property
    def scale_kind(self) -> ScaleKind:
        """What scales there are."""
        return scale_kind(self.k_scale)

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
    kv_scales: ScaleKind = "none"
    sinks: int = 0
    sink_per_token: bool = False
    softcap: bool = False
    alibi: bool = False
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
            + ("" if self.kv_scales == "none" else f", scales per {self.kv_scales}")
            + (f", {self.sinks} sink(s)" if self.sinks else "")
            + (" per token" if self.sink_per_token else "")
            + (", softcap" if self.softcap else "")
            + (", ALiBi" if self.alibi else "")
            + (", window" if self.window else "")
            + (", max-logits" if self.max_logits else "")
        )
