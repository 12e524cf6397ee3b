"""Compiling, before the first request, every kernel that a planner's batches can launch.

What selects a specialisation is known from host counts: the tiling of each part, and whether its
keys are split. Batches of growing size are planned, and one of each kind is launched on zeros.
"""

import logging
import time
from collections.abc import Iterator

import torch

from magi_serve.kernels.ffa.api import paged_attention
from magi_serve.kernels.ffa.plan import PagedPlan, PagedPlanner
from magi_serve.kernels.paged.store import write_kv
from magi_serve.types import PagedKV, SinkSpec

logger = logging.getLogger(__name__)


def warm_up(planner: PagedPlanner, *, max_tokens: int, max_decode_q_len: int = 1) -> int:
    """Launch one batch of every kind that `planner` can plan for causal attention.

    Args:
        planner: its problem says heads, dims, dtypes, page size, sinks and soft cap; kernels that
            are not compiled (`cpu`, `reference`) launch nothing.
        max_tokens: most query rows of a batch.
        max_decode_q_len: most query rows of a decode.

    Returns:
        How many kinds were launched.
    """
    problem = planner.problem
    if problem.page_size is None or problem.device != "cuda":
        return 0
    start = time.perf_counter()
    heads = (problem.page_size, problem.num_kv_heads)
    pages = torch.zeros(
        1,
        *heads,
        problem.head_dim + problem.head_dim_v,
        dtype=problem.kv_dtype,
        device=planner.device,
    )
    k, v = pages.split([problem.head_dim, problem.head_dim_v], dim=-1)
    logits = torch.zeros(problem.sinks, problem.num_q_heads, device=planner.device)
    sink = SinkSpec(logits) if problem.sinks else None
    launched: set[tuple[object, ...]] = set()
    for plan, cu_seqlens_q, seqlens_k in _batches(planner, max_tokens, max_decode_q_len):
        kind = tuple((part.config, part.reductions is None) for part in plan.parts)
        if kind in launched:
            continue
        launched.add(kind)
        q = torch.zeros(
            plan.num_tokens,
            problem.num_q_heads,
            problem.head_dim,
            dtype=problem.q_dtype,
            device=planner.device,
        )
        columns = -(-plan.num_tokens // problem.page_size)
        table = torch.zeros(plan.num_seqs, columns, dtype=torch.int32, device=planner.device)
        kv = PagedKV(k, v, table, seqlens_k)
        paged_attention(
            q,
            kv,
            cu_seqlens_q,
            window=planner.window,
            softcap=1.0 if problem.softcap else 0.0,
            sink=sink,
            plan=plan,
        )
    slots = torch.full((1,), -1, dtype=torch.int64, device=planner.device)
    write_kv(k[0, :1], v[0, :1], kv, slots)
    logger.info(
        "kernel %s: %d kinds of batches ready in %.1f s",
        planner.spec.name,
        len(launched),
        time.perf_counter() - start,
    )
    return len(launched)


def _batches(
    planner: PagedPlanner, max_tokens: int, max_decode_q_len: int
) -> Iterator[tuple[PagedPlan, torch.Tensor, torch.Tensor]]:
    """Plans of decodes, then of one prefill, of sizes that double up to the largest.

    Yields:
        The plan, ``cu_seqlens_q`` and ``seqlens_k``; sequences have as many keys as rows.
    """
    sizes = [1 << i for i in range(max(max_tokens, planner.max_seqs).bit_length())]
    for is_decode, most in ((True, planner.max_seqs), (False, max_tokens)):
        for size in sorted({min(size, most) for size in sizes}):
            q_lens = torch.tensor([1] * size if is_decode else [size], dtype=torch.int32)
            starts = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
            cu_seqlens_q, seqlens_k = starts.to(planner.device), q_lens.to(planner.device)
            plan = planner.plan(
                cu_seqlens_q,
                seqlens_k,
                num_tokens=size,
                num_decodes=size if is_decode else 0,
                num_decode_tokens=size if is_decode else 0,
                max_decode_q_len=max_decode_q_len,
            )
            yield plan, cu_seqlens_q, seqlens_k
