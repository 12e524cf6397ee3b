"""One attention layer under vLLM: write new keys and values, then one attention call."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from magi_serve.backends.vllm import compat
from magi_serve.backends.vllm.kv import LayerPages
from magi_serve.backends.vllm.metadata import MagiMetadata, Variant
from magi_serve.errors import ArgumentError, ShapeError
from magi_serve.kernels.ffa.api import ffa_attention, paged_attention
from magi_serve.kernels.paged.store import write_kv
from magi_serve.types import SinkSpec


class MagiAttentionImpl(AttentionImpl):  # type: ignore[misc]  # vllm is untyped here
    """A layer's attention: over the cache, its own or an encoder's tokens; or, in an encoder, both
    ways among new tokens.

    Args:
        num_heads, head_size, scale, num_kv_heads: as in vLLM; `scale` multiplies q·k.
        alibi_slopes: one per query head of this rank; None for none.
        sliding_window: how many keys a row sees, its own included; None for all.
        logits_soft_cap: tanh cap on scaled logits; None or 0 for none.
        kv_sharing_target_layer_name: a layer whose cache this one reads; vLLM then writes nothing.
        sinks: ``[num_heads]`` learnable sink logits.

    Raises:
        ArgumentError: vLLM asks for something that no kernel of ours computes.
        ShapeError: `sinks` or `alibi_slopes` are not one per head.
    """

    can_return_lse_for_decode = False
    supports_pcp = False
    supports_dcp = False

    kernel_name: str | None = None
    """The kernel that was chosen for this layer, once its group's metadata builder exists."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if alibi_slopes is not None and attn_type == AttentionType.ENCODER_ONLY:
            raise _refusal("alibi_slopes", "ALiBi is computed over a cache only, not in an encoder")
        if attn_type not in compat.ATTENTION_TYPES:
            raise _refusal(
                f"attn_type={AttentionType(attn_type).value}",
                f"only layers of type {' or '.join(compat.ATTENTION_TYPES)} are computed",
            )
        if self.dcp_world_size > 1:
            raise _refusal(
                f"decode_context_parallel_size={self.dcp_world_size}", "keys are not sharded"
            )
        # vLLM passes 0, -1 or False for a feature that is off.
        if unknown := [k for k, v in extra.items() if isinstance(v, Tensor) or (v and v != -1)]:
            raise _refusal(", ".join(f"{k}={extra[k]!r}" for k in unknown), "unknown layer options")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ShapeError(
                f"sinks have shape {tuple(sinks.shape)}; expected [{num_heads}], one logit per "
                "query head of this rank: load this rank's slice"
            )
        self._alibi_slopes: Tensor | None = None
        if alibi_slopes is not None:
            self._alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
            if self._alibi_slopes.shape != (num_heads,):
                raise ShapeError(
                    f"alibi_slopes have shape {tuple(self._alibi_slopes.shape)}; expected "
                    f"[{num_heads}], one per query head of this rank"
                )
        self._sink_weights = sinks
        self._sink: SinkSpec | None = None
        is_encoder = attn_type == AttentionType.ENCODER_ONLY
        quantised = None if is_encoder else compat.QUANTISED.get(kv_cache_dtype)
        self._pages = LayerPages(head_size, quantised)
        self.variant = Variant(
            num_heads,
            sliding_window,
            int(sinks is not None),
            self.softcap > 0,
            quantised,
            alibi=alibi_slopes is not None,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the loaded sinks over in fp32; in place where captured graphs already read them."""
        if self._sink_weights is None:
            return
        logits = self._sink_weights.detach().float()
        if self._sink is None:
            self._sink = SinkSpec(logits.contiguous().clone())
        else:
            self._sink.logits.copy_(logits)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write `key` and `value` ``[rows, num_kv_heads, head_dim]``; slots below 0 get nothing.

        An encoder's layers have no cache.
        """
        if self.attn_type == AttentionType.ENCODER_ONLY:
            return
        write_kv(key, value, self._pages.of(kv_cache, layer), slot_mapping[: key.shape[0]])

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: MagiMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of `query` ``[rows, num_heads, head_dim]`` over the cache, into `output`.

        In an encoder it is over `key` and `value` ``[rows, num_kv_heads, head_dim]``. Rows
        past the batch's tokens pad a CUDA graph and come out as zeros; so do all rows in vLLM's
        profile run, which has no metadata.
        """
        if output_scale is not None or output_block_scale is not None:
            raise _refusal("output_scale", "output is not quantised")
        if attn_metadata is None:
            self._pages.release()
            return output.fill_(0)
        if self._sink is None:
            self.process_weights_after_loading(query.dtype)
        batch = attn_metadata
        rows = batch.num_tokens
        if rows < output.shape[0]:
            output[rows:].zero_()
        if batch.slices_for is not None:
            assert key is not None and value is not None
            ffa_attention(
                query[:rows],
                key[:rows],
                value[:rows],
                batch.slices_for(self.variant),
                softmax_scale=self.scale,
                softcap=self.softcap,
                sink=self._sink,
                out=output[:rows],
                kernel=batch.kernel,
            )
            return output
        pages = self._pages.of(kv_cache, layer)
        plan = batch.plan_for(self.variant)
        cleared = batch.mm_prefix_range is None
        if plan.spans is not None and cleared and self.variant.spans == "whole":
            raise _refusal(
                "a model that reads images both ways in some layers",
                "it hides them from this layer in a way that is not known",
            )
        if self._alibi_slopes is not None:
            self._alibi_slopes = self._alibi_slopes.to(query.device)
        paged_attention(
            query[:rows],
            replace(pages, page_table=batch.page_table, seqlens_k=batch.seqlens_k),
            batch.cu_seqlens_q,
            causal=batch.causal,
            window=plan.window,
            spans=plan.spans,
            alibi_slopes=self._alibi_slopes,
            softmax_scale=self.scale,
            softcap=self.softcap,
            sink=self._sink,
            out=output[:rows],
            plan=plan,
        )
        return output


def _refusal(what: str, why: str) -> ArgumentError:
    return ArgumentError(
        f"{what} is not supported by magi-serve (attention backend CUSTOM): {why}; {compat.WAY_OUT}"
    )
