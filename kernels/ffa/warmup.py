"""Compiling, before the first request, every kernel that a planner's batches can launch.

What selects a specialisation is known from host counts (`planner.Cut`): the tiling of each part,
and whether its keys are split. A batch of each kind is launched on zeros.
"""

import logging
import time
from collections.abc import Iterator

import torch

from magi_serve.kernels.ffa.api import ffa_attention, paged_attention
from magi_serve.kernels.ffa.plan import PagedPlan, Regime, TileConfig
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.paged.layout import slot_size, split_slots
from magi_serve.kernels.paged.store import write_kv
from magi_serve.masks import AttentionSlices
from magi_serve.types import AttentionProblem, PagedKV, SinkSpec

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
    dims = problem.head_dim, problem.head_dim_v
    slots = torch.zeros(
        1,
        *heads,
        slot_size(*dims, problem.kv_scales),
        dtype=problem.kv_dtype,
        device=planner.device,
    )
    k, v, *scales = split_slots(slots, *dims, problem.kv_dtype, problem.kv_scales)
    if problem.kv_scales == "head":
        scales = [torch.ones((), device=planner.device)] * 2
    logits = torch.zeros(problem.sinks, problem.num_q_heads, device=planner.device)
    sink = SinkSpec(logits) if problem.sinks else None
    slopes = torch.zeros(problem.num_q_heads, device=planner.device) if problem.alibi else None
    launched = 0
    for plan, cu_seqlens_q, seqlens_k in _batches(planner, max_tokens, max_decode_q_len):
        launched += 1
        q = torch.zeros(
            plan.num_tokens,
            problem.num_q_heads,
            problem.head_dim,
            dtype=problem.q_dtype,
            device=planner.device,
        )
        columns = -(-plan.num_tokens // problem.page_size)
        table = torch.zeros(plan.num_seqs, columns, dtype=torch.int32, device=planner.device)
        kv = PagedKV(k, v, table, seqlens_k, *scales)
        paged_attention(
            q,
            kv,
            cu_seqlens_q,
            window=planner.window,
            alibi_slopes=slopes,
            softcap=1.0 if problem.softcap else 0.0,
            sink=sink,
            plan=plan,
        )
    new = torch.zeros(1, problem.num_kv_heads, sum(dims), dtype=problem.q_dtype, device=k.device)
    nowhere = torch.full((1,), -1, dtype=torch.int64, device=planner.device)
    new_k, new_v = new.split(dims, dim=-1)
    write_kv(new_k, new_v, kv, nowhere)
    logger.info(
        "kernel %s: %d kinds of batches ready in %.1f s",
        planner.spec.name,
        launched,
        time.perf_counter() - start,
    )
    return launched


def _batches(
    planner: PagedPlanner, max_tokens: int, max_decode_q_len: int
) -> Iterator[tuple[PagedPlan, torch.Tensor, torch.Tensor]]:
    """A plan of every kind, decodes first.

    Yields:
        The plan, ``cu_seqlens_q`` and ``seqlens_k``; sequences have as many keys as rows.
    """
    known: set[object] = set()
    for is_decode, q_lens in _sizes(planner, max_tokens, max_decode_q_len):
        rows, seqs = sum(q_lens), len(q_lens)
        regime: Regime = "decode" if is_decode else "prefill"
        most = max_decode_q_len if is_decode else rows
        kind = planner.cut(regime, rows=rows, seqs=seqs, max_q_len=most).kind
        if kind in known:
            continue
        known.add(kind)
        lengths = torch.tensor(q_lens, dtype=torch.int32)
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        cu_seqlens_q, seqlens_k = starts.to(planner.device), lengths.to(planner.device)
        plan = planner.plan(
            cu_seqlens_q,
            seqlens_k,
            num_tokens=rows,
            num_decodes=seqs if is_decode else 0,
            num_decode_tokens=rows if is_decode else 0,
            max_decode_q_len=max_decode_q_len,
        )
        yield plan, cu_seqlens_q, seqlens_k


def _sizes(
    planner: PagedPlanner, max_tokens: int, max_decode_q_len: int
) -> Iterator[tuple[bool, list[int]]]:
    """Whether decodes, and query lengths: between these batches no other kind can lie.

    Tiles only grow with the rows, and keys are split up to some number of sequences: so the kinds
    are met with the fewest and the most sequences, at the sizes where the tiles change.
    """
    for seqs in range(1, planner.max_seqs + 1):
        yield True, [1] * seqs

    def tiles(rows: int) -> TileConfig:
        return planner.config("prefill", rows)

    rows = 1
    while rows <= max_tokens:
        last, past = rows, max_tokens + 1
        if tiles(max_tokens) == tiles(rows):
            last = max_tokens
        else:
            while past - last > 1:  # tiles(last) are those of `rows`, tiles(past) are not
                middle = (last + past) // 2
                last, past = (middle, past) if tiles(middle) == tiles(rows) else (last, middle)
        for size in (rows, last):
            yield False, [size]
            few = min(size, planner.max_seqs)
            yield False, [*[1] * (few - 1), size - few + 1]
        rows = last + 1


def warm_up_sequences(
    problem: AttentionProblem,
    *,
    window: int | None,
    max_tokens: int,
    device: torch.device,
    kernel: str | None = None,
) -> int:
    """Launch attention of packed sequences, both ways, for numbers of rows up to `max_tokens`.

    Tiles and splits depend on how many rows there are: each power of two is launched once.

    Args:
        problem: heads, dims, dtypes, sinks and soft cap; kernels that are not compiled launch
            nothing.
        window: as in `AttentionSlices.of_sequences`.
        max_tokens: most rows of a batch.
        device: where they will be.
        kernel: a kernel's name to force it.

    Returns:
        How many batches were launched.
    """
    if problem.device != "cuda":
        return 0
    heads = problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads
    dims = problem.head_dim, problem.head_dim, problem.head_dim_v
    widths = [n * dim for n, dim in zip(heads, dims, strict=True)]
    logits = torch.zeros(problem.sinks, problem.num_q_heads, device=device)
    rows = [1 << n for n in range(max_tokens.bit_length()) if 1 << n < max_tokens] + [max_tokens]
    for count in rows:
        # Views of one product, as layers make them.
        qkv = torch.zeros(count, sum(widths), dtype=problem.q_dtype, device=device)
        q, k, v = (
            x.unflatten(-1, (n, dim))
            for x, n, dim in zip(qkv.split(widths, -1), heads, dims, strict=True)
        )
        ffa_attention(
            q,
            k,
            v,
            AttentionSlices.of_sequences([0, count], window),
            softcap=float(problem.softcap),
            sink=SinkSpec(logits) if problem.sinks else None,
            kernel=kernel,
        )
    return len(rows)
