"""Merging partial attention results, and folding sinks in: the one place where softmax states meet.

A partial result is normalised by its own softmax denominator ``exp(lse)`` and holds no sink.
Merging is associative and commutative, so the same two functions serve split keys, shared prefixes
and shards on other GPUs; a sink is folded in exactly once, at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError, ShapeError
from magi_serve.types import AttentionOutput, SinkSpec


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
        ArgumentError: `partials` is empty.
        ShapeError: partials, or the sink, disagree about rows or heads.

    Source: FlashAttention's split-KV reduction; MagiAttention's lse-merge.
    """
    if not partials:
        raise ArgumentError("partials is empty; expected at least one AttentionOutput")
    first = partials[0]
    for i, part in enumerate(partials):
        if part.out.shape != first.out.shape or part.lse.shape != first.out.shape[:2]:
            raise ShapeError(
                f"partials[{i}] has out {tuple(part.out.shape)} and lse {tuple(part.lse.shape)}; "
                f"expected out {tuple(first.out.shape)} and lse {tuple(first.out.shape[:2])} as "
                "in partials[0]"
            )
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
    """Raise `ShapeError` unless `sink` fits ``[num_tokens, num_q_heads]`` rows."""
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
