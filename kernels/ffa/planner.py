"""Plans for batches of paged attention: made on the device, once per step, for many layers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError
from magi_serve.kernels.capabilities import KernelSpec
from magi_serve.kernels.ffa.plan import (
    ROW,
    Batch,
    Buffers,
    Cut,
    PagedPlan,
    Part,
    Plan,
    Regime,
    Segments,
    Tables,
    TileConfig,
    Window,
    capturing,
    exceeds_l2,
    head_blocks,
    normal_window,
    paged_tables,
    split_budget,
)
from magi_serve.masks import UNBOUNDED
from magi_serve.spans import BidirectionalSpans
from magi_serve.types import AttentionProblem


def _tables_for(spec: KernelSpec) -> Callable[[Batch, list[Part], Buffers | None], Tables]:
    """What makes the tables for a kernel: Triton where that runs the kernel too, else torch.

    Batches with spans are planned by torch: few steps have any, and those read an image.

    Where there is no GPU, a kernel that needs Triton runs in its interpreter: so does its planner.
    """
    if not spec.needs_triton:
        return paged_tables
    from magi_serve.kernels.ffa import triton_planner

    return triton_planner.paged_tables


class PagedPlanner:
    """Plans batches of one shape of paged attention; owns the buffers that captured graphs read.

    Args:
        problem: heads, dims, dtypes and device; the kernel is chosen for it.
        max_tokens: most query rows of a batch of decodes; 0 for a planner that keeps no buffers.
        max_seqs: most sequences of a batch of decodes.
        device: where lengths will be.
        window: ``(left, right)`` counts of further keys, None for unlimited.
        kernel: a kernel's name to force it.
        spans: whether batches of decodes may have spans, for which the buffers are made larger.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        *,
        max_tokens: int,
        max_seqs: int,
        device: torch.device,
        window: Window | None = None,
        kernel: str | None = None,
        spans: bool = False,
    ) -> None:
        from magi_serve.kernels.dispatch import choose_kernel

        self.window = normal_window(window)
        left_bound = self.window is not None and self.window[0] is not None
        self.problem = replace(problem, window=left_bound)
        self.spec = choose_kernel(self.problem, kernel)
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.device = device
        self.spans = spans
        self.paged_tables = _tables_for(self.spec)
        self._buffers: Buffers | None = None

    @property
    def groups(self) -> int:
        return self.problem.num_q_heads // self.problem.num_kv_heads

    def config(self, regime: Regime, max_q_len: int) -> TileConfig:
        """The kernel's tiling for a regime; `max_q_len` sizes decode tiles."""
        config: TileConfig = self.spec.load().tile_config(self.problem, regime, max_q_len)
        return config

    def _head_blocks(self, config: TileConfig) -> int:
        return head_blocks(self.problem.num_q_heads, self.problem.num_kv_heads, config)

    def cut(
        self, regime: Regime, *, rows: int, seqs: int, max_q_len: int, segments: int | None = None
    ) -> Cut:
        """How `rows` query rows of `seqs` sequences, and what pads the batch, are cut.

        `segments` is how many those sequences are in; None for one each. Decodes that may have
        spans are always cut as if each row were a segment, so that equal grids are launched.
        """
        config = self.config(regime, max_q_len)
        tile_q = config.tile_q(self.groups)
        is_decode = regime == "decode"
        if self.spans and is_decode:
            segments = rows
        capacity = min(-(-rows // tile_q) + (seqs if segments is None else segments), rows) + 1
        tiles = seqs * -(-max_q_len // tile_q) if is_decode else capacity
        budget = split_budget(config, tiles, self._head_blocks(config), is_decode=is_decode)
        return Cut(config, tile_q, capacity, budget)

    def buffers(self) -> Buffers:
        """Tables for batches of decodes, at addresses that never change."""
        if self._buffers is None:
            # One query row per tile is the finest cut, so it bounds the number of tiles.
            tiles = self.max_tokens + self.max_seqs + 1
            # A span with a row in it adds up to three segments.
            bands = self.max_seqs + 3 * self.max_tokens * self.spans + 1
            config = self.config("decode", 1)
            items = max(tiles, config.waves * config.programs)

            def table(rows: int) -> Tensor:
                return torch.zeros(rows, ROW, dtype=torch.int32, device=self.device)

            self._buffers = Buffers(
                table(bands),
                table(items),
                table(tiles),
                self._counters(tiles, config) if config.fused else table(0),
            )
        return self._buffers

    def _counters(self, tiles: int, config: TileConfig) -> Tensor:
        return torch.zeros(tiles * self._head_blocks(config), dtype=torch.int32, device=self.device)

    def plan(
        self,
        cu_seqlens_q: Tensor,
        seqlens_k: Tensor,
        *,
        num_tokens: int,
        num_decodes: int,
        num_decode_tokens: int,
        max_decode_q_len: int,
        causal: bool | Tensor = True,
        max_seqlen_k: int | None = None,
        max_keys: int = UNBOUNDED,
        spans: BidirectionalSpans | None = None,
    ) -> PagedPlan:
        """Plan one batch, on the device, without a synchronisation.

        Args:
            cu_seqlens_q: ``[num_seqs + 1]`` int32, non-decreasing, from 0.
            seqlens_k: ``[num_seqs]`` int32.
            num_tokens: rows of q; those past ``cu_seqlens_q[-1]`` come out as zeros.
            num_decodes: leading sequences of at most `max_decode_q_len` rows, cut into decode
                tiles.
            num_decode_tokens: rows of those; used only where other sequences follow.
            max_decode_q_len: see above.
            causal: bottom-right aligned; a bool, or a tensor ``[num_seqs]`` of them.
            max_seqlen_k: about the most keys of a sequence, where the host knows; orders work only.
            max_keys: what a row of the page table holds; keys past it are never read.
            spans: what causal sequences see beside their past.

        Batches with as many sequences, all decodes, use the same buffers and launch the same grids:
        each overwrites the plan before it, which is then refused (`PagedPlan.check_tables`).

        Raises:
            ArgumentError: a CUDA graph is being captured, and a batch of decodes has more rows,
                sequences or spans than the planner was made for; or `spans` are not for causal
                sequences.
            ShapeError: `spans` are of another number of sequences.
        """
        num_seqs = seqlens_k.shape[0]
        problem = self.problem
        plans: list[Plan] = []
        out, outgrown = None, False
        segments = None
        if spans is not None:
            spans.check(num_seqs, causal)
            if spans:
                left = self.window[0] if self.window else None
                segments = Segments.of(spans, left, cu_seqlens_q.device)
        if self.spec.planned:
            if num_decodes == num_seqs:
                fits = num_seqs <= self.max_seqs and num_tokens <= self.max_tokens
                if segments is not None and fits:
                    fits = self.spans and len(segments) <= self.buffers().bands.shape[0]
                out = self.buffers() if fits else None
                outgrown = not fits and 0 not in (self.max_seqs, self.max_tokens)
            if outgrown and capturing():
                raise ArgumentError(
                    f"a batch of {num_seqs} decodes with {num_tokens} rows"
                    f"{', in spans' if segments else ''} is larger than the "
                    f"buffers, made for max_seqs={self.max_seqs}, max_tokens={self.max_tokens} and "
                    f"spans={self.spans}, and the CUDA graph being captured would hold temporary "
                    "tables; make PagedPlanner with larger ones, or capture a smaller batch"
                )
            decodes = (num_decodes, num_decode_tokens, max_decode_q_len)
            parts = self._parts(num_seqs, num_tokens, *decodes, segments)
            batch = Batch(
                cu_seqlens_q, seqlens_k, num_tokens, causal, self.window, max_keys, segments
            )
            make = self.paged_tables if segments is None else paged_tables
            bands, tables = make(batch, parts, out)
            if out is not None:
                out.plans += 1
            beyond_l2 = exceeds_l2(problem, max_seqlen_k or num_tokens)
            for part, (items, reductions) in zip(parts, tables, strict=True):
                config, counters = part.cut.config, None
                if config.fused and reductions is not None:
                    tiles = reductions.shape[0]
                    counters = out.counters if out else self._counters(tiles, config)
                plans.append(
                    Plan(
                        config,
                        bands,
                        items,
                        reductions,
                        counters=counters,
                        bounded_below=self.window is not None and self.window[0] is not None,
                        head_major=beyond_l2,
                    )
                )
        return PagedPlan(
            tuple(plans),
            self.spec.name,
            num_tokens,
            num_seqs,
            self.window,
            causal,
            spans,
            (problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.head_dim_v),
            out,
            0 if out is None else out.plans,
            outgrown,
        )

    def _parts(
        self,
        num_seqs: int,
        num_tokens: int,
        num_decodes: int,
        num_decode_tokens: int,
        max_decode_q_len: int,
        segments: Segments | None,
    ) -> list[Part]:
        """One part of decodes, or one of the sequences after them, and one of them if any.

        Rows past the last sequence belong to the first part.
        """

        def part(regime: Regime, first: int, stop: int, rows: int, max_q_len: int) -> Part:
            seqs = min(stop, num_seqs) - first
            pieces = None if segments is None else segments.first[stop] - segments.first[first]
            cut = self.cut(regime, rows=rows, seqs=seqs, max_q_len=max_q_len, segments=pieces)
            return Part(first, stop, cut)

        if num_decodes == num_seqs:
            return [part("decode", 0, num_seqs + 1, num_tokens, max_decode_q_len)]
        rows = num_tokens - num_decode_tokens
        parts = [part("prefill", num_decodes, num_seqs + 1, rows, rows)]
        if num_decodes:
            parts.append(part("decode", 0, num_decodes, num_decode_tokens, max_decode_q_len))
        return parts
