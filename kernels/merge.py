"""Merging partial attention results, and folding sinks in: the one place where softmax states meet.

A partial result is normalised by its own softmax denominator ``exp(lse)`` and holds no sink.
Merging is associative and commutative, so the same two functions serve split keys, shared prefixes
and shards on other GPUs; a sink is folded in exactly once, at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from magi_serve.types import AttentionOutput, SinkSpec, check_types, given


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """``exp(lse - total)`` as a column over head_dim; 0 where a part saw no key, whatever it
    holds."""
    return torch.where(torch.isinf(lse), 0.0, torch.exp(lse - total))[..., None]


def merge(partials: Sequence[AttentionOutput], *, sink: SinkSpec | None = None) -> AttentionOutput:
    """Attention over the union of disjoint key sets, from attention over each of them.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) * out_i``.

    Args:
        partials: any number of sink-free results for the same query rows, in any order: ``out``
            ``[num_tokens, num_q_heads, head_dim_v]``, ``lse`` ``[num_tokens, num_q_heads]``
            (natural log). Rows that saw no key have an infinite `lse` of either sign; their `out`
            is ignored.
        sink: logits to fold in once, after merging.

    Returns:
        The merged result in the first partial's dtype; max-logits if every partial has them.

    Raises:
        ArgumentError: `partials` is empty, or not a list or tuple of `AttentionOutput`; `sink` is
            not a `SinkSpec`.
        ShapeError: partials, or the sink, disagree about rows or heads.
        DTypeError: what a partial holds is not a tensor, or not of floating-point numbers.
        DeviceError: partials are on different devices.

    Source: FlashAttention's split-KV reduction; MagiAttention's lse-merge.
    """
    _check_partials(partials)
    first = partials[0]
    lses = [torch.where(torch.isinf(p.lse), float("-inf"), p.lse) for p in partials]
    lse = torch.logsumexp(torch.stack(lses), dim=0)
    acc_dtype = torch.promote_types(first.out.dtype, torch.float32)
    out = torch.zeros(first.out.shape, dtype=acc_dtype, device=first.out.device)
    for part, part_lse in zip(partials, lses, strict=True):
        weight = _weight(part_lse, lse)
        out += torch.where(weight == 0, 0.0, part.out.to(acc_dtype)) * weight
    maxima = [p.max_logits for p in partials if p.max_logits is not None]
    max_logits = torch.stack(maxima).amax(0) if len(maxima) == len(partials) else None
    merged = AttentionOutput(out, lse, max_logits)
    if sink is not None:
        merged = apply_sink(merged, sink)
    return AttentionOutput(merged.out.to(first.out.dtype), merged.lse, max_logits)


def _check_partials(partials: object) -> None:
    if not isinstance(partials, Sequence):
        raise ArgumentError(
            f"{given('partials', partials)} is not accepted; expected a list or tuple of "
            "AttentionOutput"
        )
    if not partials:
        raise ArgumentError("partials is empty; expected at least one AttentionOutput")
    for i, part in enumerate(partials):
        check_types(AttentionOutput, **{f"partials[{i}]": part})
        held = {f"partials[{i}].out": part.out, f"partials[{i}].lse": part.lse}
        maxima = {f"partials[{i}].max_logits": part.max_logits}
        held |= {} if part.max_logits is None else maxima
        check_types(Tensor, **held)
        first = partials[0].out
        for name, x in held.items():
            if not x.is_floating_point():
                raise DTypeError(f"{name} is {x.dtype}; expected a floating-point dtype")
            if x.device != first.device:
                raise DeviceError(
                    f"{name} is on {x.device} and partials[0].out is on {first.device}; move one "
                    "of them"
                )
        rows = part.out.shape[:2]
        if part.out.ndim != 3 or part.out.shape != first.shape or part.lse.shape != rows:
            raise ShapeError(
                f"partials[{i}] has out {tuple(part.out.shape)} and lse {tuple(part.lse.shape)}; "
                "expected [num_tokens, num_q_heads, head_dim_v] and [num_tokens, num_q_heads], the "
                f"same for all partials (the first has out {tuple(first.shape)})"
            )
        if part.max_logits is not None and part.max_logits.shape != rows[1:]:
            raise ShapeError(
                f"partials[{i}].max_logits has shape {tuple(part.max_logits.shape)}; expected "
                f"{list(rows[1:])}: one per query head"
            )


def apply_sink(result: AttentionOutput, sink: SinkSpec) -> AttentionOutput:
    """Fold learnable sinks into a finished attention result.

    A sink adds ``exp(sink)`` to the softmax denominator and nothing to the numerator:
    ``lse' = log(exp(lse) + exp(sink))`` and ``out' = out * exp(lse - lse')``.

    Args:
        result: out ``[num_tokens, num_q_heads, head_dim_v]``, lse ``[num_tokens, num_q_heads]``.
        sink: logits per head, or per token and head.

    Returns:
        The rescaled result. Rows without a key keep ``out = 0`` and get ``lse = sink``.

    Raises:
        ShapeError: the sink has another number of heads or tokens than the result.

    Source: StreamingLLM (arXiv:2309.17453); gpt-oss; MagiAttention's sink correction.
    """
    check_sink(sink, *result.lse.shape)
    lse = torch.logaddexp(result.lse, sink.combined(result.lse.dtype).to(result.lse.device))
    weight = _weight(result.lse, lse)
    return AttentionOutput((result.out * weight).to(result.out.dtype), lse, result.max_logits)


def check_sink(sink: SinkSpec, num_tokens: int, num_q_heads: int) -> None:
    """Raise unless `sink` is a `SinkSpec` that fits ``[num_tokens, num_q_heads]`` rows.

    Raises:
        ArgumentError: it is something else.
        ShapeError: it has another number of heads or tokens.
    """
    check_types(SinkSpec, sink=sink)
    if sink.num_q_heads != num_q_heads:
        raise ShapeError(
            f"sink has {sink.num_q_heads} heads (logits of shape {tuple(sink.logits.shape)}) and "
            f"q has {num_q_heads}; expected one logit per query head, slice the logits for this "
            "rank"
        )
    if sink.per_token and sink.logits.shape[0] != num_tokens:
        raise ShapeError(
            f"sink has logits for {sink.logits.shape[0]} tokens and q has {num_tokens}; expected "
            "as many"
        )
