"""The public attention functions: check once, describe the problem, choose a kernel, launch.

Checks read shapes, dtypes and devices only, so nothing synchronises; a kernel may rely on them.
"""

import math
from numbers import Real

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from magi_serve.kernels.capabilities import KernelSpec
from magi_serve.kernels.dispatch import choose_kernel
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import PagedPlan, Plan, Window, normal_window
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.slices import plan_slices
from magi_serve.kernels.merge import check_sink
from magi_serve.masks import AttentionSlices
from magi_serve.spans import BidirectionalSpans
from magi_serve.types import (
    LARGEST,
    AttentionOutput,
    AttentionProblem,
    PagedKV,
    ScaleKind,
    SinkSpec,
    check_types,
    given,
)


def ffa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttentionSlices,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
    out: Tensor | None = None,
    return_max_logits: bool = False,
    kernel: str | None = None,
) -> AttentionOutput:
    """Flex-Flash-Attention: attention of packed q over packed k and v under a list of mask slices.

    ``out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + sum_t exp(sink_t))`` over the keys that the
    slices show to row ``i``, where ``s_ij = cap(softmax_scale * q_i·k_j)`` and
    ``cap(x) = softcap * tanh(x / softcap)``.

    Args:
        q: ``[total_q, num_q_heads, head_dim]``, fp16, bf16 or fp32, last stride 1.
        k: ``[total_k, num_kv_heads, head_dim]``, q's dtype; `num_kv_heads` divides `num_q_heads`.
        v: ``[total_k, num_kv_heads, head_dim_v]``, q's dtype.
        slices: which keys each row sees; rows in no slice see none.
        softmax_scale: None means ``head_dim ** -0.5``.
        softcap: tanh cap on scaled logits, 0 for none.
        sink: learnable sink logits, per head or per token and head.
        out: where to write, ``[total_q, num_q_heads, head_dim_v]`` in q's dtype, last stride 1.
        return_max_logits: also return the largest logit of each head.
        kernel: a kernel's name to force it, None to let dispatch choose.

    Returns:
        `AttentionOutput`; rows without a visible key are 0 with ``lse = -inf`` (or the sink).

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument disagrees with the above.
        NoKernelError: no kernel, or not the forced one, can do the problem; it lists the reasons.

    Source: MagiAttention's Flex-Flash-Attention; FlashAttention (arXiv:2205.14135).
    """
    check_types(Tensor, q=q, k=k, v=v)
    check_types(AttentionSlices, slices=slices)
    _check_heads(q, k, v, names=("q", "k", "v"), kv_ndim=3)
    if k.shape[0] != v.shape[0]:
        raise ShapeError(f"k has {k.shape[0]} keys and v has {v.shape[0]}; expected as many")
    _check_slices(slices, q.shape[0], k.shape[0])
    scale = _softmax_scale(softmax_scale, q)
    softcap = _softcap(softcap)
    if sink is not None:
        check_sink(sink, q.shape[0], q.shape[1])
    check_types(bool, return_max_logits=return_max_logits)
    _check_out(out, q, v)
    problem = _problem(q, k, v, sink=sink, softcap=softcap, max_logits=return_max_logits)
    spec = choose_kernel(problem, kernel)
    module = spec.load()
    if not spec.planned:
        result: AttentionOutput = module.ffa_attention_ref(
            q, k, v, slices, softmax_scale=scale, softcap=softcap, sink=_on(sink, q)
        )
        return _finish(result, out, return_max_logits)
    parts: tuple[Plan, ...] = ()
    if q.shape[0]:
        config = module.tile_config(problem, "slices", q.shape[0])
        parts = (plan_slices(slices, q.shape[0], config, problem, q.device),)
    return _launch(
        spec, q, k, v, None, parts, scale, softcap, sink, out=out, max_logits=return_max_logits
    )


def paged_attention(
    q: Tensor,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    *,
    causal: bool | Tensor = True,
    window: Window | None = None,
    spans: BidirectionalSpans | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: SinkSpec | None = None,
    out: Tensor | None = None,
    return_max_logits: bool = False,
    kernel: str | None = None,
    plan: PagedPlan | None = None,
) -> AttentionOutput:
    """Attention of a batch of sequences over a paged cache: prefill, extend and decode alike.

    The query rows of a sequence are its last tokens: row ``i`` of ``n`` sits at key position
    ``seqlens_k - n + i`` (bottom-right aligned).

    Args:
        q: ``[num_tokens, num_q_heads, head_dim]``, fp16, bf16 or fp32, last stride 1.
        kv: pages, page table and lengths; pages in q's dtype, or quantised ones (`PagedKV`).
        cu_seqlens_q: ``[num_seqs + 1]`` int32, non-decreasing from 0: rows of sequence ``s`` are
            ``[cu_seqlens_q[s], cu_seqlens_q[s + 1])``. Rows from ``cu_seqlens_q[-1]`` on are
            padding and come out as zeros.
        causal: whether keys after a row's position are hidden; a bool, or a tensor ``[num_seqs]``
            of bool, or of int32 0 and 1.
        window: ``(left, right)``: how many further keys to either side of its own position a row
            sees; None for unlimited. A model's causal sliding window of 128 is ``(127, 0)``.
        spans: spans of tokens that see each other both ways, in causal sequences (images).
        alibi_slopes: ``[num_q_heads]`` floating-point: ``slope * |key - position|`` is taken from
            the capped logit of a key, for rows at that position. None for no such bias.
        softmax_scale: None means ``head_dim ** -0.5``.
        softcap: tanh cap on scaled logits, 0 for none.
        sink: learnable sink logits, per head or per token and head.
        out: where to write, ``[num_tokens, num_q_heads, head_dim_v]`` in q's dtype, last stride 1.
        return_max_logits: also return the largest logit of each head.
        kernel: a kernel's name to force it, None to let dispatch choose.
        plan: a plan that `PagedPlanner` made for this very batch, `causal`, `window` and `spans`;
            saves planning again in every layer. It decides the kernel.

    Returns:
        `AttentionOutput`; rows without a visible key are 0 with ``lse = -inf`` (or the sink).

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument disagrees with the above.
        NoKernelError: no kernel, or not the forced one, can do the problem; it lists the reasons.

    Source: PagedAttention (arXiv:2309.06180); FlashDecoding (split KV); ALiBi (arXiv:2108.12409).
    """
    check_types(Tensor, q=q, cu_seqlens_q=cu_seqlens_q)
    check_types(PagedKV, kv=kv)
    _check_heads(q, kv.k, kv.v, names=("q", "kv.k", "kv.v"), kv_ndim=4)
    num_seqs = kv.seqlens_k.shape[0]
    if cu_seqlens_q.shape != (num_seqs + 1,):
        raise ShapeError(
            f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)}; expected [{num_seqs + 1}]: one "
            f"more than the {num_seqs} sequences of kv"
        )
    if cu_seqlens_q.dtype != torch.int32:
        raise DTypeError(f"cu_seqlens_q is {cu_seqlens_q.dtype}; expected torch.int32")
    for name, tensor in (
        ("cu_seqlens_q", cu_seqlens_q),
        ("kv.page_table", kv.page_table),
        ("kv.seqlens_k", kv.seqlens_k),
    ):
        _check_device(name, tensor, q)
    _check_causal(causal, num_seqs, q)
    _check_window(window)
    window = normal_window(window)
    if spans is not None:
        check_types(BidirectionalSpans, spans=spans)
        spans.check(num_seqs, causal)
    alibi = None if alibi_slopes is None else _alibi(alibi_slopes, q)
    scale = _softmax_scale(softmax_scale, q)
    softcap = _softcap(softcap)
    if sink is not None:
        check_sink(sink, q.shape[0], q.shape[1])
    check_types(bool, return_max_logits=return_max_logits)
    _check_out(out, q, kv.v)
    problem = _problem(
        q,
        kv.k,
        kv.v,
        page_size=kv.page_size,
        kv_scales=kv.scale_kind,
        sink=sink,
        softcap=softcap,
        alibi=alibi is not None,
        window=window is not None and window[0] is not None,
        max_logits=return_max_logits,
    )
    if plan is not None:
        _check_plan(plan, q, kv, causal, window, spans, kernel)
        kernel = plan.kernel
    spec = choose_kernel(problem, kernel)
    if not spec.planned:
        result: AttentionOutput = spec.load().paged_attention_ref(
            q,
            kv,
            cu_seqlens_q,
            causal=causal,
            window=window,
            spans=spans,
            alibi_slopes=alibi,
            softmax_scale=scale,
            softcap=softcap,
            sink=_on(sink, q),
        )
        return _finish(result, out, return_max_logits)
    if plan is None:
        plan = _plan_batch(problem, spec, q.shape[0], kv, cu_seqlens_q, causal, window, spans)
    return _launch(
        spec,
        q,
        kv.k,
        kv.v,
        kv,
        plan.parts,
        scale,
        softcap,
        sink,
        alibi,
        out=out,
        max_logits=return_max_logits,
    )


def _plan_batch(
    problem: AttentionProblem,
    spec: KernelSpec,
    num_tokens: int,
    kv: PagedKV,
    cu_seqlens_q: Tensor,
    causal: bool | Tensor,
    window: Window | None,
    spans: BidirectionalSpans | None,
) -> PagedPlan:
    """A plan for one call. Query lengths are on the device, so their mean picks the tiling."""
    num_seqs = kv.seqlens_k.shape[0]
    mean_q_len = -(-num_tokens // max(num_seqs, 1))
    groups = problem.num_q_heads // problem.num_kv_heads
    is_decode = mean_q_len * groups <= 64
    planner = PagedPlanner(
        problem,
        max_tokens=0,
        max_seqs=0,
        device=cu_seqlens_q.device,
        window=window,
        kernel=spec.name,
    )
    return planner.plan(
        cu_seqlens_q,
        kv.seqlens_k,
        num_tokens=num_tokens,
        num_decodes=num_seqs if is_decode else 0,
        num_decode_tokens=num_tokens if is_decode else 0,
        max_decode_q_len=mean_q_len,
        causal=causal,
        max_keys=kv.page_table.shape[1] * kv.page_size,
        spans=spans,
    )


def _launch(
    spec: KernelSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV | None,
    parts: tuple[Plan, ...],
    softmax_scale: float,
    softcap: float,
    sink: SinkSpec | None,
    alibi: Tensor | None = None,
    *,
    out: Tensor | None,
    max_logits: bool,
) -> AttentionOutput:
    out = q.new_empty(*q.shape[:2], v.shape[-1]) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    maxima = None
    if max_logits:
        maxima = torch.full(q.shape[1:2], float("-inf"), dtype=torch.float32, device=q.device)
    if q.shape[0]:
        sink_logits = None if sink is None else sink.combined().to(q.device).contiguous()
        call = AttentionCall(
            q,
            _addressable(k),
            _addressable(v),
            None if kv is None else _addressable(kv.page_table),
            parts,
            softmax_scale,
            softcap,
            sink_logits,
            out,
            lse,
            maxima,
            None if kv is None else kv.k_scale,
            None if kv is None else kv.v_scale,
            alibi,
        )
        with torch.cuda.device_of(q):  # kernels launch on the current device
            spec.load().run(call)
    return AttentionOutput(out, lse, maxima)


def _addressable(x: Tensor) -> Tensor:
    """`x`, or zeros in the place of one without elements: TMA wants an address even for nothing."""
    return x if x.numel() else x.new_zeros([max(n, 1) for n in x.shape])


def _finish(result: AttentionOutput, out: Tensor | None, max_logits: bool) -> AttentionOutput:
    if out is not None:
        out.copy_(result.out)
        result = AttentionOutput(out, result.lse, result.max_logits)
    return result if max_logits else AttentionOutput(result.out, result.lse)


def _on(sink: SinkSpec | None, q: Tensor) -> SinkSpec | None:
    return None if sink is None else SinkSpec(sink.logits.to(q.device))


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    page_size: int | None = None,
    kv_scales: ScaleKind = "none",
    sink: SinkSpec | None = None,
    softcap: float = 0.0,
    alibi: bool = False,
    window: bool = False,
    max_logits: bool = False,
) -> AttentionProblem:
    arch = None
    if q.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(q.device)
        arch = 10 * major + minor
    return AttentionProblem(
        device=q.device.type,
        arch=arch,
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[2],
        head_dim_v=v.shape[-1],
        page_size=page_size,
        kv_scales=kv_scales,
        sinks=0 if sink is None else sink.num_sinks,
        sink_per_token=sink is not None and sink.per_token,
        softcap=softcap > 0,
        alibi=alibi,
        window=window,
        max_logits=max_logits,
        even_rows=q.stride(1) == q.shape[2] and _even_rows(q, k, v),
    )


def _even_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v are rows of one stride, aligned to 16 bytes, and k laid out as v.

    What has no elements is not read, so any strides do.
    """
    if not q.numel():
        return True  # nothing will be launched
    for x in (q, k, v):
        unit = 16 // x.element_size()
        if x.numel() and (x.data_ptr() % 16 or any(s % unit for s in x.stride()[:-1])):
            return False
    if not (k.numel() and v.numel()):
        return True
    if k.stride() != v.stride():
        return False
    if k.ndim == 3:
        return True
    page, token, head, _ = k.stride()
    return (
        token > 0 and page % token == 0 and (k.shape[2] == 1 or head < token or head % token == 0)
    )


def _check_heads(
    q: Tensor, k: Tensor, v: Tensor, *, names: tuple[str, str, str], kv_ndim: int
) -> None:
    layout = "[tokens, heads, head_dim]" if kv_ndim == 3 else "[pages, page_size, heads, head_dim]"
    if q.ndim != 3:
        raise ShapeError(f"q has shape {tuple(q.shape)}; expected [tokens, heads, head_dim]")
    for name, x in zip(names[1:], (k, v), strict=True):
        if x.ndim != kv_ndim:
            raise ShapeError(f"{name} has shape {tuple(x.shape)}; expected {layout}")
        if x.dtype != q.dtype and not (kv_ndim == 4 and x.dtype in LARGEST):
            pages = f", or {', '.join(map(str, LARGEST))}" if kv_ndim == 4 else ""
            raise DTypeError(
                f"{name} is {x.dtype} and q is {q.dtype}; expected q's dtype{pages}: convert one "
                "of them"
            )
        _check_device(name, x, q)
    for name, x in zip(names, (q, k, v), strict=True):
        _check_dense(name, x)
    if k.shape[-1] != q.shape[-1]:
        raise ShapeError(
            f"{names[1]} has head_dim {k.shape[-1]} and q has {q.shape[-1]}; expected one"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ShapeError(
            f"{names[1]} has {k.shape[-2]} heads and {names[2]} has {v.shape[-2]}; expected one"
        )
    if k.shape[-2] < 1 or q.shape[1] < 1 or q.shape[1] % k.shape[-2]:
        raise ShapeError(
            f"q has {q.shape[1]} heads and {names[1]} has {k.shape[-2]}; expected query heads to "
            "be a multiple of kv heads"
        )


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise DeviceError(f"{name} is on {x.device} and q is on {q.device}; move one of them")


def _check_dense(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ArgumentError(
            f"{name} has strides {x.stride()}; the last one must be 1: call {name}.contiguous()"
        )


def _check_out(out: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out is None:
        return
    check_types(Tensor, out=out)
    expected = (*q.shape[:2], v.shape[-1])
    if out.shape != expected:
        raise ShapeError(f"out has shape {tuple(out.shape)}; expected {list(expected)}")
    if out.dtype != q.dtype:
        raise DTypeError(f"out is {out.dtype}; expected q's {q.dtype}")
    _check_device("out", out, q)
    _check_dense("out", out)


def _check_slices(slices: AttentionSlices, total_q: int, total_k: int) -> None:
    for name, ranges, total, of in (
        ("q_ranges", slices.q_ranges, total_q, "rows of q"),
        ("k_ranges", slices.k_ranges, total_k, "rows of k"),
    ):
        if len(ranges) and int(ranges[:, 1].max()) > total:
            i = int(ranges[:, 1].argmax())
            raise ArgumentError(
                f"slices.{name}[{i}] = {ranges[i].tolist()} ends past the {total} {of}; expected "
                f"an end of at most {total}"
            )


def _check_causal(causal: object, num_seqs: int, q: Tensor) -> None:
    if not isinstance(causal, Tensor):
        if not isinstance(causal, bool):
            raise ArgumentError(
                f"{given('causal', causal)} is not accepted; expected a bool, or a bool tensor "
                f"[{num_seqs}]"
            )
        return
    if causal.shape != (num_seqs,):
        raise ShapeError(f"causal has shape {tuple(causal.shape)}; expected [{num_seqs}] or a bool")
    if causal.dtype not in (torch.bool, torch.int32):
        raise DTypeError(
            f"causal is {causal.dtype}; expected torch.bool, or torch.int32 of 0 and 1: call "
            "causal.bool()"
        )
    _check_device("causal", causal, q)


def _check_window(window: object) -> None:
    if window is None:
        return
    sides = window if isinstance(window, tuple | list) else ()
    if len(sides) != 2 or any(w is not None and (type(w) is not int or w < 0) for w in sides):
        raise ArgumentError(
            f"window={window!r} is not accepted; expected None or (left, right), each a count of "
            "further keys >= 0 or None for unlimited"
        )


def _softcap(softcap: object) -> float:
    return _finite("softcap", softcap, 0.0, "a finite number >= 0, 0 for none")


def _softmax_scale(softmax_scale: object, q: Tensor) -> float:
    if softmax_scale is None:
        return float(q.shape[-1] ** -0.5)
    accepted = "a finite number > 0, or None for head_dim ** -0.5"
    return _finite("softmax_scale", softmax_scale, math.ulp(0.0), accepted)


def _alibi(slopes: object, q: Tensor) -> Tensor:
    """ALiBi's slopes on q's device, in fp32 and dense; its own where they are that already."""
    check_types(Tensor, alibi_slopes=slopes)
    assert isinstance(slopes, Tensor)
    if not slopes.is_floating_point():
        raise DTypeError(
            f"alibi_slopes is {slopes.dtype}; expected floating-point numbers: call "
            "alibi_slopes.float()"
        )
    if slopes.shape != (q.shape[1],):
        raise ShapeError(
            f"alibi_slopes has shape {tuple(slopes.shape)}; expected [{q.shape[1]}], one slope per "
            "query head"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    return slopes.to(q.device, dtype).contiguous()


def _finite(name: str, value: object, least: float, accepted: str) -> float:
    """`value` as a float; no tensor, which would have to be waited for."""
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not least <= number < math.inf:
        raise ArgumentError(f"{given(name, value)} is not accepted; expected {accepted}")
    return number


def _check_plan(
    plan: object,
    q: Tensor,
    kv: PagedKV,
    causal: bool | Tensor,
    window: Window | None,
    spans: BidirectionalSpans | None,
    kernel: str | None,
) -> None:
    if not isinstance(plan, PagedPlan):
        raise ArgumentError(
            f"{given('plan', plan)} is not accepted; expected what PagedPlanner.plan returned, or "
            "None"
        )
    shape = (q.shape[1], kv.num_kv_heads, q.shape[2], kv.v.shape[-1])
    for what, planned, called in (
        ("rows of q", plan.num_tokens, q.shape[0]),
        ("sequences", plan.num_seqs, kv.seqlens_k.shape[0]),
        ("(query heads, kv heads, head_dim, head_dim_v)", plan.shape, shape),
        ("window", plan.window, window),
    ):
        if planned != called:
            raise ArgumentError(
                f"plan is for {what} {planned} and the call has {called}; plan this very batch, "
                "with a planner for each window, or leave plan out"
            )
    tensors = isinstance(causal, Tensor) or isinstance(plan.causal, Tensor)
    if plan.causal is not causal if tensors else bool(plan.causal) != bool(causal):
        raise ArgumentError(
            f"plan is for causal={plan.causal} and the call has causal={causal}; pass the same"
        )
    if plan.spans is not spans:
        raise ArgumentError(
            "plan is for other spans than the call has; pass the very BidirectionalSpans that were "
            "planned, or None if none were"
        )
    if kernel is not None and kernel != plan.kernel:
        raise ArgumentError(
            f"plan is for kernel {plan.kernel} and the call has kernel={kernel!r}; name it to "
            "PagedPlanner"
        )
    plan.check_tables()
