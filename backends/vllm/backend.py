"""What vLLM asks about our backend; every answer comes from the capability table of the kernels."""

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from magi_serve.backends.vllm import compat
from magi_serve.kernels.capabilities import SPECS
from magi_serve.kernels.paged.layout import slot_size
from magi_serve.types import AttentionProblem


def why_not(**fields: Any) -> list[str]:
    """Why no kernel that may serve can do a plain problem with these `fields`; empty means one can.

    Kernels without a plan are for tests and synchronise: only a setting that names one admits it.
    """
    device, arch = compat.platform()
    half = torch.bfloat16
    problem = AttentionProblem(
        device, half, half, num_q_heads=1, num_kv_heads=1, head_dim=64, head_dim_v=64, arch=arch
    )
    problem = replace(problem, **fields)
    kernel = compat.current_settings().kernel
    against = {
        spec.name: spec.why_not(problem)
        for spec in SPECS
        if spec.name == kernel or (kernel == "auto" and spec.planned)
    }
    if not all(against.values()):
        return []
    return [f"{name}: {', '.join(reasons)}" for name, reasons in against.items()]


class MagiAttentionBackend(AttentionBackend):  # type: ignore[misc]  # vllm is untyped here
    """FFA over vLLM's paged cache: causal decoders, with sinks, windows, soft cap, ALiBi, 8-bit
    caches, and images that are read both ways.

    Cross attention is over a cache of the encoder's tokens. Encoders have none: there it is over
    the packed new tokens. What we do not override keeps vLLM's refusing default: MLA, sparse
    attention, batch invariance, R-SWA, DCP and PCP.
    """

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up among the members of its registry.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        from magi_serve.backends.vllm.impl import MagiAttentionImpl

        return MagiAttentionImpl

    @staticmethod
    def get_builder_cls() -> Any:
        from magi_serve.backends.vllm.metadata import MagiMetadataBuilder

        return MagiMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(max(spec.page_multiple for spec in SPECS))]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return not why_not(head_dim=head_size, head_dim_v=head_size)

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return not why_not(q_dtype=dtype, kv_dtype=dtype)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        # Whether it fits the model's own dtype is for supports_combination, which knows both.
        known = compat.stored(kv_cache_dtype, torch.bfloat16)
        if known is None:
            return False
        q_dtype = known.dtype if known.scales == "none" else torch.bfloat16
        return not why_not(
            q_dtype=q_dtype, kv_dtype=known.dtype, kv_scales=known.scales, page_size=16
        )

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        mode = getattr(spec, "kv_quant_mode", None)
        if not getattr(mode, "is_per_token_head", False) or spec.state_content_bytes is not None:
            return spec
        content = slot_size(spec.head_size, spec.head_size_v, "token")
        return replace(spec, state_content_bytes=content)

    @classmethod
    def supports_sink(cls) -> bool:
        return not why_not(sinks=1)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return not why_not(window=True)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in compat.ATTENTION_TYPES

    @classmethod
    def supports_non_causal(cls) -> bool:
        # Bands hold every mask.
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return compat.tells_spans()

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return not why_not()

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        known = compat.stored(kv_cache_dtype, dtype)
        if known is None:
            return (
                f"kv_cache_dtype={kv_cache_dtype} is not supported (accepts auto, the model's "
                f"dtype, {', '.join(compat.QUANTISED)})"
            )
        reasons = why_not(
            q_dtype=dtype,
            kv_dtype=known.dtype,
            kv_scales=known.scales,
            head_dim=head_size,
            head_dim_v=head_size,
            page_size=block_size or 16,
            sinks=int(has_sink),
        )
        return "; ".join(reasons) or None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return compat.kv_cache_layouts()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        known = compat.QUANTISED.get(cache_dtype_str)
        content = slot_size(head_size, head_size, "none" if known is None else known.scales)
        return (num_blocks, num_kv_heads, block_size, content)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return compat.stride_order(include_num_layers_dimension)
