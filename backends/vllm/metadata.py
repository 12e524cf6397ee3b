"""Once per step and group of layers: vLLM's batch description becomes plans that layers reuse.

Plans are made on the device and, for batches of decodes, live in buffers that never move, so that
captured CUDA graphs replay over them. Nothing here waits for the device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from magi_serve.backends.vllm import compat
from magi_serve.backends.vllm.plan_time import plan_time
from magi_serve.errors import NoKernelError
from magi_serve.kernels.capabilities import SPECS, KernelSpec
from magi_serve.kernels.dispatch import choose_kernel
from magi_serve.kernels.ffa.plan import PagedPlan, Window
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.kernels.ffa.warmup import warm_up, warm_up_sequences
from magi_serve.masks import AttentionSlices
from magi_serve.spans import BidirectionalSpans
from magi_serve.types import AttentionProblem


class Variant(NamedTuple):
    """What layers of one group may differ in: each variant has a plan of its own."""

    num_q_heads: int
    window: int | None
    """vLLM's sliding window: how many keys a causal row sees, its own included."""
    sinks: int
    softcap: bool
    quantised: compat.Stored | None
    """How the cache keeps keys and values, where not as its spec says."""
    alibi: bool = False
    spans: compat.Spans = "none"
    """What is seen of spans of tokens that are read both ways."""

    def band(self, causal: bool | Tensor) -> Window | None:
        """The window as our kernels take it; both ways where rows see what follows, as in vLLM."""
        if self.window is None:
            return None
        return (self.window - 1, 0 if causal is True else self.window - 1)


@dataclass
class MagiMetadata(AttentionMetadata):  # type: ignore[misc]  # vllm is untyped here
    """One step of one group of layers. Mutable, because vLLM copies its fields one by one."""

    num_tokens: int
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor
    plan_for: Callable[[Variant], PagedPlan]
    slices_for: Callable[[Variant], AttentionSlices] | None = None
    """Masks over the packed new tokens, for layers without a cache; None for those with one."""
    kernel: str | None = None
    """The kernel that the settings force, for layers without a cache."""
    mm_prefix_range: list[list[tuple[int, int]]] | None = None
    """The spans that were planned for, under the name by which models clear them for some layers.
    Variants know of that beforehand, so it is only checked."""


class MagiMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vllm is untyped here
    """Builds `MagiMetadata`; owns one planner per variant among the group's layers.

    Raises:
        NoKernelError: no kernel can do what the layers need; it lists the reasons.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._kernel = compat.settings_of(vllm_config).forced_kernel
        self._planners: dict[tuple[Variant, Window | None], PagedPlanner] = {}
        self.variants: set[Variant] = set()
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._is_encoder = compat.is_encoder(kv_cache_spec)
        if self._is_encoder:
            self._prepare_encoder(compat.layers_of(vllm_config, layer_names))
            return
        for layer in compat.layers_of(vllm_config, layer_names):
            spans = compat.spans_of_layer(layer, vllm_config)
            layer.impl.variant = layer.impl.variant._replace(spans=spans)
            self.variants.add(layer.impl.variant)
            layer.impl.kernel_name = self._planner(layer.impl.variant, True).spec.name
        for planner in self._planners.values():
            warm_up(
                planner,
                max_tokens=self._max_tokens,
                max_decode_q_len=self.reorder_batch_threshold,
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if compat.is_encoder(kv_cache_spec):
            return AttentionCGSupport.NEVER  # masks are made on the host
        kernel = compat.settings_of(vllm_config).kernel
        planned = all(spec.planned for spec in SPECS if spec.name == kernel)
        return cls._cudagraph_support if planned else AttentionCGSupport.NEVER

    def _planner(self, variant: Variant, causal: bool | Tensor) -> PagedPlanner:
        key = (variant, variant.band(causal))
        if key not in self._planners:
            max_seqs = self.vllm_config.scheduler_config.max_num_seqs
            planner = PagedPlanner(
                self._problem(variant),
                max_tokens=max_seqs * self.reorder_batch_threshold,
                max_seqs=max_seqs,
                device=self.device,
                window=key[1],
                kernel=self._kernel,
                spans=variant.spans != "none",
            )
            self._check_served(planner.spec, planner.problem)
            self._planners[key] = planner
        return self._planners[key]

    def _check_served(self, chosen: KernelSpec, problem: AttentionProblem) -> None:
        """Refuse a kernel that is for tests, unless the settings name it."""
        if self._kernel is None and not chosen.planned:
            raise NoKernelError(
                f"only the kernel {chosen.name}, which is for tests, can do {problem}; "
                f"{compat.WAY_OUT}",
                {spec.name: spec.why_not(problem) for spec in SPECS},
            )

    def _prepare_encoder(self, layers: list[Any]) -> None:
        """Choose and warm up what an encoder's layers launch: attention under slices."""
        for layer in layers:
            variant = layer.impl.variant
            problem = replace(self._problem(variant), page_size=None, window=False)
            chosen = choose_kernel(problem, self._kernel)
            self._check_served(chosen, problem)
            layer.impl.kernel_name = chosen.name
            if variant not in self.variants:
                self.variants.add(variant)
                warm_up_sequences(
                    problem,
                    window=_beside(variant.window),
                    max_tokens=self._max_tokens,
                    device=self.device,
                    kernel=self._kernel,
                )

    def _problem(self, variant: Variant) -> AttentionProblem:
        device, arch = compat.platform()
        spec = self.kv_cache_spec
        stored = variant.quantised or compat.Stored(spec.dtype, "none")
        dense = getattr(spec, "page_size_padded", None) is None and stored.scales != "token"
        return AttentionProblem(
            device=device,
            arch=arch,
            q_dtype=self.vllm_config.model_config.dtype,
            kv_dtype=stored.dtype,
            kv_scales=stored.scales,
            num_q_heads=variant.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            head_dim_v=getattr(spec, "head_size_v", None) or spec.head_size,
            page_size=spec.block_size,
            sinks=variant.sinks,
            softcap=variant.softcap,
            alibi=variant.alibi,
            window=variant.window is not None,
            even_rows=dense,
        )

    @plan_time
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MagiMetadata:
        batch = common_attn_metadata
        num_seqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
        if self._is_encoder:
            return self._build_encoder(batch)
        num_decodes, num_decode_tokens = leading_decodes(
            batch.query_start_loc_cpu,
            num_seqs,
            num_tokens,
            batch.max_query_len,
            self.reorder_batch_threshold,
        )
        cu_seqlens_q = batch.query_start_loc[: num_seqs + 1]
        seqlens_k = batch.seq_lens[:num_seqs]
        ranges = compat.spans_of(batch)
        plans: dict[Variant, PagedPlan] = {}

        @functools.cache
        def spans(kind: compat.Spans) -> BidirectionalSpans | None:
            if ranges is None or kind == "none":
                return None
            return BidirectionalSpans(ranges, within_window=kind == "windowed")

        def plan_for(variant: Variant) -> PagedPlan:
            if variant not in plans:
                plans[variant] = self._planner(variant, batch.causal).plan(
                    cu_seqlens_q,
                    seqlens_k,
                    num_tokens=num_tokens,
                    num_decodes=num_decodes,
                    num_decode_tokens=num_decode_tokens,
                    max_decode_q_len=self.reorder_batch_threshold,
                    causal=batch.causal,
                    max_seqlen_k=batch.max_seq_len,
                    max_keys=batch.block_table_tensor.shape[1] * self.kv_cache_spec.block_size,
                    spans=spans(variant.spans),
                )
            return plans[variant]

        for variant in self.variants:
            plan_for(variant)
        return MagiMetadata(
            num_tokens=num_tokens,
            cu_seqlens_q=cu_seqlens_q,
            seqlens_k=seqlens_k,
            page_table=batch.block_table_tensor[:num_seqs],
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
            plan_for=plan_for,
            mm_prefix_range=ranges,
        )

    def _build_encoder(self, batch: Any) -> MagiMetadata:
        """An encoder's sequences are new as a whole: a mask over their rows, made on the host."""
        cu_seqlens = batch.query_start_loc_cpu[: batch.num_reqs + 1]

        @functools.cache
        def slices_for(variant: Variant) -> AttentionSlices:
            return AttentionSlices.of_sequences(cu_seqlens, _beside(variant.window))

        def plan_for(variant: Variant) -> PagedPlan:
            raise AssertionError("an encoder's layers have no pages")

        return MagiMetadata(
            num_tokens=batch.num_actual_tokens,
            cu_seqlens_q=batch.query_start_loc,
            seqlens_k=batch.seq_lens,
            page_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=False,
            plan_for=plan_for,
            slices_for=slices_for,
            kernel=self._kernel,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MagiMetadata:
        # Capture runs the kernels: with sequences of max_model_len that would take minutes.
        common_attn_metadata.seq_lens.fill_(max(1, common_attn_metadata.max_query_len))
        return self.build(0, common_attn_metadata)


def _beside(window: int | None) -> int | None:
    """How many further keys to either side vLLM's `window` means, which counts the row's own."""
    return None if window is None else window - 1


def leading_decodes(
    query_start_loc_cpu: Tensor, num_seqs: int, num_tokens: int, max_query_len: int, threshold: int
) -> tuple[int, int]:
    """How many sequences at the front have at most `threshold` query tokens, and their tokens.

    Both model runners put such sequences first, though not all of them: V2 orders by what it will
    verify, and a short extend may follow a longer one. Sequences that pad a CUDA graph are empty.
    """
    if max_query_len <= threshold:
        return num_seqs, num_tokens
    start = query_start_loc_cpu[: num_seqs + 1]
    long = (torch.diff(start) > threshold).nonzero()
    num_decodes = int(long[0]) if len(long) else num_seqs
    return num_decodes, int(start[num_decodes])
