"""Where vLLM 0.26 to 0.33 differ, and how we read its state: by feature detection, only here."""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from magi_serve.settings import CONFIG_KEY, Settings, load_settings
from magi_serve.types import ScaleKind

ATTENTION_TYPES = ("decoder", "encoder_only", "encoder_decoder")
"""vLLM's types of attention layers that we compute."""

WAY_OUT = "--attention-backend auto leaves the choice to vLLM"


def settings_of(vllm_config: Any) -> Settings:
    """The settings of an engine; those of the environment alone if vLLM has no current config."""
    additional = getattr(vllm_config, "additional_config", None)
    return load_settings(additional.get(CONFIG_KEY) if isinstance(additional, dict) else None)


def current_settings() -> Settings:
    """The settings of the engine whose config vLLM has set as current."""
    from vllm.config import get_current_vllm_config_or_none

    return settings_of(get_current_vllm_config_or_none())


def platform() -> tuple[str, int | None]:
    """Device type and, on CUDA, compute capability as ``10 * major + minor``."""
    from vllm.platforms import current_platform

    if current_platform.is_rocm():
        return "rocm", None
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return current_platform.device_type, None if capability is None else capability.to_int()


class Stored(NamedTuple):
    """How a cache keeps keys and values."""

    dtype: torch.dtype
    scales: ScaleKind


QUANTISED = {
    "fp8": Stored(torch.float8_e4m3fn, "head"),
    "fp8_e4m3": Stored(torch.float8_e4m3fn, "head"),
    "fp8_e5m2": Stored(torch.float8_e5m2, "head"),
    "fp8_per_token_head": Stored(torch.float8_e4m3fn, "token"),
    "int8_per_token_head": Stored(torch.int8, "token"),
}
"""vLLM's quantised kv-cache dtypes that we compute with. vLLM's tensors hold them as bytes."""


def stored(name: str | None, model_dtype: torch.dtype) -> Stored | None:
    """What vLLM's kv-cache dtype `name` stands for; None for one that we do not know."""
    if name in (None, "auto"):
        return Stored(model_dtype, "none")
    dtype = getattr(torch, str(name), None)
    return Stored(dtype, "none") if isinstance(dtype, torch.dtype) else QUANTISED.get(str(name))


def is_encoder(kv_cache_spec: Any) -> bool:
    """Whether the layers of this spec see each other's new tokens and have no cache."""
    from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

    return isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)


def tells_spans() -> bool:
    """Whether batches say which tokens see each other both ways (images); since vLLM 0.28."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    fields = dataclasses.fields(CommonAttentionMetadata)
    return "mm_req_doc_ranges" in {field.name for field in fields}


Spans = Literal["none", "whole", "windowed"]
"""What a layer sees of the image that a token belongs to: the keys before the token, the whole, or
of those before the token what its window shows."""


def spans_of_layer(layer: Any, vllm_config: Any) -> Spans:
    """What `layer` sees of images, in a model that may read them both ways.

    Where windows bound images in some layers (Gemma 4), the others are causal. vLLM tells its own
    backends so by clearing their metadata in each forward pass, which replays of graphs skip.
    """
    if not getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
        return "none"
    if _clamps(layer):
        return "windowed"
    made = vllm_config.compilation_config.static_forward_context.values()
    return "none" if any(map(_clamps, made)) else "whole"


def _clamps(layer: Any) -> bool:
    return bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))


def spans_of(batch: Any) -> list[list[tuple[int, int]]] | None:
    """Half-open spans of each sequence of a batch that this step has rows in; None for none.

    vLLM's have ends that are included, and stay with a request until it ends. Where it knows only
    how many keys a sequence may have, that is one whose spans are all read.
    """
    told = getattr(batch, "mm_req_doc_ranges", None)
    if not told:
        return None
    spans: list[list[tuple[int, int]]] = [[] for _ in range(batch.num_reqs)]
    starts, ends = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu_upper_bound.tolist()
    for seq, ranges in told.items():
        past = ends[seq]
        first = past - (starts[seq + 1] - starts[seq])
        spans[seq] = [(a, b + 1) for a, b in ranges if a < past and first <= b]
    return spans if any(spans) else None


def layers_of(vllm_config: Any, layer_names: Iterable[str]) -> list[Any]:
    """The attention layers of these names that vLLM has made so far."""
    made = vllm_config.compilation_config.static_forward_context
    return [made[name] for name in layer_names if name in made]


def kv_cache_layouts() -> tuple[Any, ...]:
    """Physical cache layouts in our order of preference; vLLM 0.30 and newer."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    # The kernels take any strides. With tokens before heads (NHD) the heads of a token lie
    # together, so that writing one token touches one run of memory.
    return tuple(sorted(KVCacheLayout, key=lambda layout: layout is not KVCacheLayout.LBNHC))


def stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
    """Physical order of ``(layers,) blocks, heads, tokens, content`` in the cache; before 0.30."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    heads_first = get_kv_cache_layout() == "HND"
    if include_num_layers_dimension:
        return (1, 2, 0, 3, 4) if heads_first else (1, 0, 3, 2, 4)
    return (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)


def show_our_logs() -> None:
    """Let our INFO lines through vLLM's log handlers, which else carry the ``vllm`` tree only."""
    ours, theirs = logging.getLogger("magi_serve"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.handlers, ours.propagate = list(theirs.handlers), theirs.propagate
        ours.setLevel(theirs.getEffectiveLevel())
