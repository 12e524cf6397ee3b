"""Helpers for tests of attention kernels: poisoned memory, random problems, what accurate means.

Memory that a kernel must not read (unused pages, page tails, other layers, padding rows) and memory
that it must write (outputs) is filled with poison, so that a stray read or a missing write shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from magi_serve.kernels.ffa.api import ffa_attention, paged_attention
from magi_serve.kernels.ffa.plan import PagedPlan, Window
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.reference import ffa_attention_ref, paged_attention_ref
from magi_serve.kernels.paged.reference import write_slots
from magi_serve.masks import AttentionSlices, MaskType
from magi_serve.spans import BidirectionalSpans
from magi_serve.types import (
    LARGEST,
    AttentionOutput,
    AttentionProblem,
    PagedKV,
    ScaleKind,
    SinkSpec,
)

Layout = Literal["nhd", "hnd", "padded", "packed", "vllm", "pair", "layers"]
LAYOUTS: tuple[Layout, ...] = ("nhd", "hnd", "padded", "packed", "vllm", "pair", "layers")
"""How pages can lie in memory; see `make_pool`."""

NO_PAGE = 2**31 - 1
"""Stands in page tables where no page is: reading through it fails."""

Reference = Callable[[torch.dtype], AttentionOutput]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kernel runs, and how much work is affordable there."""

    kernel: str
    device: str
    dtype: torch.dtype
    max_q: int
    max_k: int
    examples: int


ON_CPU = Place("cpu", "cpu", torch.float32, max_q=140, max_k=350, examples=8)
IN_INTERPRETER = Place("triton", "cpu", torch.float16, max_q=40, max_k=130, examples=4)
ON_GPU = Place("triton", "cuda", torch.bfloat16, max_q=300, max_k=3000, examples=12)
ON_HOPPER = Place("hopper", "cuda", torch.bfloat16, max_q=300, max_k=3000, examples=12)


def examples(place: Place, times: float = 1.0) -> Any:
    """Hypothesis settings for a place: so many examples, the same ones each time.

    In the interpreter a failing example is not made smaller, which would take minutes.
    """
    from hypothesis import HealthCheck, Phase, settings

    phases = set(Phase) - ({Phase.shrink} if place is IN_INTERPRETER else set())
    return settings(
        max_examples=round(times * place.examples),
        derandomize=True,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )


def poisoned(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    value: float = math.nan,
) -> Tensor:
    """A tensor of `shape` that holds nothing but `value`; in 8 bits, NaN or the largest number."""
    if dtype in LARGEST:  # which have few operations; 0x7F is NaN as a float, 127 as int8
        largest = torch.tensor(LARGEST[dtype]).to(dtype).view(torch.int8)
        stored = 0x7F if math.isnan(value) else int(largest)
        return torch.full(tuple(shape), stored, dtype=torch.int8, device=device).view(dtype)
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def make_pool(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    *,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    poison: float = math.nan,
) -> tuple[Tensor, Tensor]:
    """Pages full of poison: k and v views ``[num_pages, page_size, num_kv_heads, head_dim(_v)]``.

    Args:
        layout: ``nhd``: each dense; ``hnd``: heads before a page's slots; ``padded``: poison after
            every head; ``packed``: k and v side by side in one tensor; ``vllm``: packed, heads
            before slots; ``pair``: one tensor with all of k before all of v; ``layers``: the second
            of three layers that share every page.
    """

    def full(*shape: int) -> Tensor:
        return poisoned(shape, dtype, device, poison)

    n, p, h, d, dv = num_pages, page_size, num_kv_heads, head_dim, head_dim_v
    if layout == "nhd":
        return full(n, p, h, d), full(n, p, h, dv)
    if layout == "hnd":
        return full(n, h, p, d).transpose(1, 2), full(n, h, p, dv).transpose(1, 2)
    if layout == "padded":
        return full(n, p, h, d + 8)[..., :d], full(n, p, h, dv + 8)[..., :dv]
    if layout == "packed":
        both = full(n, p, h, d + dv)
        return both[..., :d], both[..., d:]
    if layout == "vllm":
        both = full(n, h, p, d + dv).transpose(1, 2)
        return both[..., :d], both[..., d:]
    if layout == "pair":
        both = full(2, n, p, h, max(d, dv))
        return both[0, ..., :d], both[1, ..., :dv]
    layers = full(n, 3, 2, p, h, max(d, dv))
    return layers[:, 1, 0, ..., :d], layers[:, 1, 1, ..., :dv]


@dataclass(frozen=True, eq=False, slots=True)
class PagedBatch:
    """A batch for `paged_attention`; rows of q past the last sequence are poisoned padding."""

    q: Tensor
    kv: PagedKV
    cu_seqlens_q: Tensor
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of q, padding included."""
        return self.q.shape[0]

    def problem(self) -> AttentionProblem:
        """What a planner has to know."""
        arch = None
        if self.q.is_cuda:
            major, minor = torch.cuda.get_device_capability(self.q.device)
            arch = 10 * major + minor
        return AttentionProblem(
            device=self.q.device.type,
            q_dtype=self.q.dtype,
            kv_dtype=self.kv.k.dtype,
            num_q_heads=self.q.shape[1],
            num_kv_heads=self.kv.num_kv_heads,
            head_dim=self.q.shape[2],
            head_dim_v=self.kv.v.shape[-1],
            arch=arch,
            page_size=self.kv.page_size,
            kv_scales=self.kv.scale_kind,
        )

    def planner(
        self, kernel: str | None, window: Window | None = None, *, spans: bool = False
    ) -> PagedPlanner:
        """A planner whose buffers hold this batch."""
        return PagedPlanner(
            self.problem(),
            max_tokens=self.num_tokens,
            max_seqs=len(self.q_lens),
            device=self.q.device,
            window=window,
            kernel=kernel,
            spans=spans,
        )

    def plan(
        self,
        planner: PagedPlanner,
        num_decodes: int,
        causal: bool | Tensor = True,
        spans: BidirectionalSpans | None = None,
    ) -> PagedPlan:
        """A plan with the first `num_decodes` sequences as decodes."""
        decodes = self.q_lens[:num_decodes]
        return planner.plan(
            self.cu_seqlens_q,
            self.kv.seqlens_k,
            num_tokens=self.num_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=sum(decodes),
            max_decode_q_len=max(1, *decodes) if decodes else 1,
            causal=causal,
            spans=spans,
        )

    def to(self, dtype: torch.dtype) -> PagedBatch:
        """The same numbers in another dtype; quantised pages stay as they are."""
        kv = self.kv
        if kv.k.dtype not in LARGEST:
            kv = replace(kv, k=kv.k.to(dtype), v=kv.v.to(dtype))
        return replace(self, q=self.q.to(dtype), kv=kv)

    def poisoned_out(self) -> Tensor:
        """An output buffer of which every element must be written."""
        shape = (*self.q.shape[:2], self.kv.v.shape[-1])
        return poisoned(shape, self.q.dtype, self.q.device)


def make_paged(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    page_size: int = 16,
    layout: Layout = "nhd",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: float = math.nan,
    padding_rows: int = 0,
    fused_q: bool = False,
    kv_dtype: torch.dtype | None = None,
    kv_scales: ScaleKind = "none",
) -> PagedBatch:
    """A random batch whose pages lie anywhere in the pool, with poison wherever nothing belongs.

    Unused pages, slots past a sequence's end, and padding rows hold `poison`; table entries past a
    sequence's last page are `NO_PAGE`. With `fused_q`, q is a view into rows that also hold k and
    v. Pages are of `kv_dtype`, or `dtype`; quantised with scales that differ by head or token.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    random = torch.Generator(device).manual_seed(seed)
    pages_of = [-(-n // page_size) for n in k_lens]
    num_pages = sum(pages_of) + 3
    k, v = make_pool(
        num_pages,
        page_size,
        num_kv_heads,
        head_dim,
        head_dim_v,
        layout=layout,
        dtype=kv_dtype,
        device=device,
        poison=poison,
    )
    scales = make_scales(kv_scales, k, random)
    order = torch.randperm(num_pages, generator=random, device=device)
    # An odd number of columns, 3 or more: a stride of one kind, so that Triton specialises once.
    columns = (max(pages_of, default=0) + 2) | 1
    table = torch.full((len(k_lens), columns), NO_PAGE, dtype=torch.int32, device=device)
    first = 0
    for s, (num_keys, used) in enumerate(zip(k_lens, pages_of, strict=True)):
        pages = order[first : first + used]
        first += used
        table[s, :used] = pages
        key = torch.arange(num_keys, device=device)
        for pool, scale in zip((k, v), scales, strict=True):
            values = torch.randn(
                num_keys, num_kv_heads, pool.shape[-1], generator=random, device=device
            )
            write_slots(pool, scale, values, (pages[key // page_size], key % page_size))
    num_rows = sum(q_lens)
    heads = num_q_heads + 2 * num_kv_heads if fused_q else num_q_heads
    rows = poisoned((num_rows + padding_rows, heads, head_dim), dtype, device, poison)
    q = rows[:, :num_q_heads]
    values = torch.randn(num_rows, num_q_heads, head_dim, generator=random, device=device)
    q[:num_rows] = (2 * values).to(dtype)
    lengths = torch.tensor(list(k_lens), dtype=torch.int32, device=device)
    starts = [0, *itertools.accumulate(q_lens)]
    cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device=device)
    kv = PagedKV(k, v, table, lengths, *scales)
    return PagedBatch(q, kv, cu_seqlens_q, tuple(q_lens), tuple(k_lens))


def make_scales(
    kind: ScaleKind, pool: Tensor, random: torch.Generator
) -> tuple[Tensor | None, Tensor | None]:
    """Scales for keys and for values of `pool`; those of tokens are NaN until they are written."""
    if kind == "none":
        return None, None
    if kind == "token":
        # Beside the numbers of every slot, as a served cache keeps them: no stride is dense.
        beside = poisoned((*pool.shape[:3], 3), torch.float32, pool.device)
        return beside[..., 0], beside[..., 1]

    def around(largest: float) -> Tensor:
        factor = 1 + torch.rand(pool.shape[2], generator=random, device=pool.device)
        return factor * 5 / largest

    return around(LARGEST[pool.dtype]), around(min(LARGEST[pool.dtype], 448))


def make_dense(
    total_q: int,
    total_k: int,
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random packed q, k and v for `ffa_attention`."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q = 2 * normal(total_q, num_q_heads, head_dim)
    k = normal(total_k, num_kv_heads, head_dim)
    v = normal(total_k, num_kv_heads, head_dim_v)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_slices(total_q: int, total_k: int, *, seed: int, max_leaves: int = 12) -> AttentionSlices:
    """Random slices of all types with disjoint areas: several per row, gaps, empty ranges.

    The (query, key) rectangle is cut in two again and again, across or along; a piece becomes a
    slice, or a causal slice and the inverse-causal one that fills its rest, or nothing.
    """
    random = np.random.default_rng(seed)
    pieces = [(0, total_q, 0, total_k)]
    while len(pieces) < max_leaves:
        i = int(random.integers(len(pieces)))
        q0, q1, k0, k1 = pieces[i]
        if random.random() < 0.5:
            cut = int(random.integers(q0, q1 + 1))
            new = [(q0, cut, k0, k1), (cut, q1, k0, k1)]
        else:
            cut = int(random.integers(k0, k1 + 1))
            new = [(q0, q1, k0, cut), (q0, q1, cut, k1)]
        pieces[i : i + 1] = new
    found: list[tuple[tuple[int, int], tuple[int, int], int]] = []
    for q0, q1, k0, k1 in pieces:
        kind = int(random.integers(6))
        if kind < 4:
            found.append(((q0, q1), (k0, k1), kind))
        elif kind == 4:
            found.append(((q0, q1), (k0, k1), MaskType.CAUSAL))
            rest = k1 - (q1 - q0) + 1
            if k0 <= rest <= k1:
                found.append(((q0, q1), (rest, k1), MaskType.INV_CAUSAL))
    order = random.permutation(len(found))
    chosen = [found[i] for i in order]
    return AttentionSlices(
        [q for q, _, _ in chosen], [k for _, k, _ in chosen], [t for _, _, t in chosen]
    )


def make_sink(
    kind: str,
    num_tokens: int,
    num_q_heads: int,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SinkSpec | None:
    """Random sinks: ``none``, ``one`` per head, ``several``, ``per token``, ``strided`` bf16."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    if kind == "none":
        return None
    if kind == "one":
        return SinkSpec(normal(num_q_heads))
    if kind == "several":
        return SinkSpec(normal(3, num_q_heads))
    if kind == "per token":
        return SinkSpec(normal(num_tokens, 2, num_q_heads))
    assert kind == "strided", kind
    return SinkSpec(normal(2 * num_q_heads).bfloat16()[::2])


def assert_as_accurate_as_torch(
    result: AttentionOutput,
    reference: Reference,
    *,
    groups: Sequence[int] = (),
) -> None:
    """Fail unless `result` is about as close to the truth as plain torch is.

    The truth is the reference in float64. ``out`` may err by twice what the reference errs in
    out's own dtype, ``lse`` and ``max_logits``, which are fp32, by twice what it errs in fp32, each
    plus a floor of about one unit in the last place of the largest value. Rows without keys must be
    exactly 0, with ``lse`` exactly ``-inf`` where the truth is; nothing may be NaN.

    Args:
        result: what a kernel computed.
        reference: computes the same in the dtype that it is given, on the same inputs.
        groups: lengths of runs of rows to hold to account each by itself, such as sequences.
    """
    truth, own, fp32 = (reference(t) for t in (torch.float64, result.out.dtype, torch.float32))
    for name in ("out", "lse", "max_logits"):
        value = getattr(result, name)
        assert value is None or not bool(value.isnan().any()), f"{name} holds NaN"
    out, lse = result.out, result.lse
    assert lse.dtype == torch.float32
    step = max(torch.finfo(out.dtype).eps, 1e-5)
    sizes = [*groups, len(out) - sum(groups)]
    bounds = [0, *itertools.accumulate(sizes)]
    for i, part in enumerate(itertools.starmap(slice, itertools.pairwise(bounds))):
        hidden = truth.out[part].abs().amax(-1) == 0
        assert bool((out[part][hidden] == 0).all()), f"rows of group {i} that see no key are not 0"
        _assert_close(f"out of group {i}", out[part], truth.out[part], own.out[part], step)
        _assert_close(f"lse of group {i}", lse[part], truth.lse[part], fp32.lse[part], 1e-5)
    if result.max_logits is not None:
        assert truth.max_logits is not None and fp32.max_logits is not None
        _assert_close("max_logits", result.max_logits, truth.max_logits, fp32.max_logits, 1e-5)


def _assert_close(name: str, got: Tensor, truth: Tensor, plain: Tensor, step: float) -> None:
    if not got.numel():
        return
    finite = truth.isfinite()
    infinite = torch.equal(got[~finite].double(), truth[~finite])
    assert infinite, f"{name} is not infinite where it should be"
    got, truth, plain = got[finite].double(), truth[finite], plain[finite].double()
    if not got.numel():
        return
    allowed = 2 * float((plain - truth).abs().max()) + step * float(truth.abs().max())
    allowed += 1e-5 if step <= 1e-5 else float(torch.finfo(torch.float32).tiny)
    error = float((got - truth).abs().max())
    assert error <= allowed, f"{name} errs by {error:.3g}; plain torch allows {allowed:.3g}"


def check_paged(
    batch: PagedBatch,
    *,
    kernel: str | None,
    num_decodes: int | None = None,
    max_logits: bool = False,
    causal: bool | Tensor = True,
    window: Window | None = None,
    spans: BidirectionalSpans | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
) -> AttentionOutput:
    """Run `paged_attention` into a poisoned output and hold it to `assert_as_accurate_as_torch`.

    Args:
        num_decodes: leading sequences to plan as decodes; None leaves planning to the call.
    """
    plan = None
    if num_decodes is not None:
        planner = batch.planner(kernel, window, spans=spans is not None)
        plan = batch.plan(planner, num_decodes, causal, spans)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "spans": spans, "alibi_slopes": alibi_slopes,
        "softcap": softcap, "sink": sink,
    }  # fmt: skip
    out = batch.poisoned_out()
    result = paged_attention(
        batch.q,
        batch.kv,
        batch.cu_seqlens_q,
        out=out,
        return_max_logits=max_logits,
        kernel=kernel,
        plan=plan,
        **options,
    )
    assert result.out is out

    def reference(dtype: torch.dtype) -> AttentionOutput:
        same = batch.to(dtype)
        scale = batch.q.shape[-1] ** -0.5
        return paged_attention_ref(
            same.q, same.kv, same.cu_seqlens_q, softmax_scale=scale, **options
        )

    assert_as_accurate_as_torch(result, reference, groups=batch.q_lens)
    assert bool((out[sum(batch.q_lens) :] == 0).all()), "padding rows are not 0"
    return result


OPTIONS = ("sink", "window", "softcap", "spans", "alibi_slopes")
"""The options of `paged_attention` that change what is computed."""


def check_that_it_counts(
    option: str, batch: PagedBatch, *, kernel: str | None, num_decodes: int
) -> None:
    """`check_paged` with one of `OPTIONS` and without: the outputs must differ by over 5 %."""
    device = batch.q.device
    heads = batch.q.shape[1]
    # Of keys after a row or, where it is the last one, of keys that the window hides.
    ranges = [
        [(max(0, n - q_len - 20), n)] for q_len, n in zip(batch.q_lens, batch.k_lens, strict=True)
    ]
    value: dict[str, Any] = {
        "sink": SinkSpec(torch.full((heads,), 8.0, device=device)),
        "window": (5, 0),
        "softcap": 0.5,
        "spans": BidirectionalSpans(ranges),
        "alibi_slopes": torch.full((heads,), 0.5, device=device),
    }
    beside: dict[str, Any] = {"window": (5, 0)} if option == "spans" else {}
    how: dict[str, Any] = {"kernel": kernel, "num_decodes": num_decodes}
    plain = check_paged(batch, **how, **beside).out.float()
    changed = check_paged(batch, **how, **beside, **{option: value[option]}).out.float()
    change = float((changed - plain).norm() / plain.norm())
    assert change > 0.05, f"{option} changes the output by {change:.3g} only"


def check_slices(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttentionSlices,
    *,
    kernel: str | None,
    max_logits: bool = False,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
) -> AttentionOutput:
    """Run `ffa_attention` and hold it to `assert_as_accurate_as_torch`."""
    result = ffa_attention(
        q, k, v, slices, softcap=softcap, sink=sink, return_max_logits=max_logits, kernel=kernel
    )

    def reference(dtype: torch.dtype) -> AttentionOutput:
        return ffa_attention_ref(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            slices,
            softmax_scale=q.shape[-1] ** -0.5,
            softcap=softcap,
            sink=sink,
        )

    assert_as_accurate_as_torch(result, reference)
    return result


def fix_interpreter() -> None:
    """Make Triton's interpreter multiply bf16 matrices, and round to bf16, as a GPU does.

    It keeps bf16 as the raw 16 bits in uint16 and hands those to numpy's matmul as if they were
    integers: here they become fp32 first, which holds them exactly. And it converts fp32 to bf16 by
    cutting bits off, and to 8-bit floats without their smallest numbers: here it rounds to the
    nearest. Compiled kernels are as before.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder.create_dot, "widens_bf16", False):
        return
    create_dot, create_fp_to_fp = builder.create_dot, builder.create_fp_to_fp

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot_of_bf16(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *args)

    cast_impl = builder.cast_impl

    def cast_rounding_to_bf16(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast_impl(self, src, dst_type)
        values = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)

    in_torch = {
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
        tl.float8e5: (torch.float8_e5m2, np.uint8),
        tl.float16: (torch.float16, np.float16),
        tl.float32: (torch.float32, np.float32),
    }

    def convert_in_torch(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if not {src.dtype.scalar, dst_type.scalar} <= in_torch.keys():
            return create_fp_to_fp(self, src, dst_type, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(src.data))
        dtype, stored = in_torch[dst_type.scalar]
        values = values.view(in_torch[src.dtype.scalar][0]).to(dtype)
        data = values.view(torch.uint8).numpy() if stored == np.uint8 else values.numpy()
        return interpreter.TensorHandle(data, dst_type.scalar)

    create_dot_of_bf16.widens_bf16 = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot_of_bf16
    builder.cast_impl = cast_rounding_to_bf16
    builder.create_fp_to_fp = convert_in_torch
