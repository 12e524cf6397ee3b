"""magi-serve: Flex-Flash-Attention for long-context LLM inference.

Names are loaded on first use, so ``import magi_serve`` needs neither torch's CUDA nor triton.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magi_serve.kernels.ffa.api import ffa_attention, paged_attention
    from magi_serve.kernels.merge import merge
    from magi_serve.kernels.paged.store import write_kv
    from magi_serve.masks import AttentionSlices, MaskType
    from magi_serve.spans import BidirectionalSpans
    from magi_serve.types import AttentionOutput, PagedKV, SinkSpec

__version__ = "0.1.0"

_HOMES = {
    "AttentionOutput": "magi_serve.types",
    "AttentionSlices": "magi_serve.masks",
    "BidirectionalSpans": "magi_serve.spans",
    "MaskType": "magi_serve.masks",
    "PagedKV": "magi_serve.types",
    "SinkSpec": "magi_serve.types",
    "ffa_attention": "magi_serve.kernels.ffa.api",
    "merge": "magi_serve.kernels.merge",
    "paged_attention": "magi_serve.kernels.ffa.api",
    "write_kv": "magi_serve.kernels.paged.store",
}

__all__ = [
    "AttentionOutput",
    "AttentionSlices",
    "BidirectionalSpans",
    "MaskType",
    "PagedKV",
    "SinkSpec",
    "__version__",
    "ffa_attention",
    "merge",
    "paged_attention",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'magi_serve' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
