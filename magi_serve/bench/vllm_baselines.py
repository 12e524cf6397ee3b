"""vLLM's own kernels, called as its attention backends call them."""

from typing import Any

import torch
from torch import Tensor

from magi_serve.bench.inputs import Inputs
from magi_serve.bench.prepared import Prepared, Refused, Run, need


def fa3(inputs: Inputs, kernel: str | None) -> Prepared:
    """FlashAttention 3 as vLLM's FLASH_ATTN calls it, its scheduler metadata precomputed.

    vLLM bounds splits by 32 in batches that full CUDA graphs hold (up to 512 tokens) and leaves
    them to FA3 in others; small batches are tried in both ways, and the faster one counts.
    """
    flash = need("vllm.vllm_flash_attn.flash_attn_interface", "vllm")
    if not flash.is_fa_version_supported(3):
        raise Refused(str(flash.fa_version_unsupported_reason(3)))
    case = inputs.case
    if case.mask is not None:
        raise Refused("FA3 has no masks of slices")
    splits = (32, 0) if case.num_tokens <= 512 else (0,)
    return Prepared({f"num_splits={n}": _fa3_run(flash, inputs, n) for n in splits})


def _fa3_run(flash: Any, inputs: Inputs, num_splits: int) -> Run:
    case, window = inputs.case, list(inputs.window)
    lengths: dict[str, Any] = {"cu_seqlens_k": inputs.cu_seqlens_k}
    if inputs.page_table is not None:
        metadata = flash.get_scheduler_metadata(
            batch_size=len(case.q_lens),
            max_seqlen_q=inputs.max_q,
            max_seqlen_k=inputs.max_k,
            num_heads_q=case.num_q_heads,
            num_heads_kv=case.num_kv_heads,
            headdim=case.head_dim,
            cache_seqlens=inputs.seqlens_k,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=inputs.cu_seqlens_q,
            page_size=case.page_size,
            causal=True,
            window_size=window,
            num_splits=num_splits,
        )
        lengths = {
            "seqused_k": inputs.seqlens_k,
            "block_table": inputs.page_table,
            "scheduler_metadata": metadata,
        }

    def run(i: int) -> Tensor:
        buffer = inputs.buffers[i]
        flash.flash_attn_varlen_func(
            q=buffer.q,
            k=buffer.k,
            v=buffer.v,
            out=buffer.out,
            max_seqlen_q=inputs.max_q,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_k=inputs.max_k,
            softmax_scale=case.head_dim**-0.5,
            causal=True,
            window_size=window,
            fa_version=3,
            num_splits=num_splits,
            s_aux=inputs.sink,
            **lengths,
        )
        return buffer.out

    return run


def triton_attn(inputs: Inputs, kernel: str | None) -> Prepared:
    """vLLM's Triton kernel as its TRITON_ATTN calls it, with the buffers of its split-KV path."""
    ops = need("vllm.v1.attention.ops.triton_unified_attention", "vllm")
    case = inputs.case
    if inputs.page_table is None:
        raise Refused("vLLM's Triton kernel reads pages only")
    # vLLM: a grid of 128 programs without splits, moved to the nearest size of a CUDA graph.
    sizes = (1, 2, 4, *range(8, 257, 8))
    threshold = min(sizes, key=lambda n: abs(n - 128 // case.num_kv_heads))
    segments, padded = 16, 1 << (case.head_dim - 1).bit_length()
    shape = (threshold, case.num_q_heads, segments)

    def scratch(*dims: int) -> Tensor:
        return torch.empty(dims, dtype=torch.float32, device=inputs.cu_seqlens_q.device)

    options = {
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": scratch(*shape, padded),
        "softmax_segm_max": scratch(*shape),
        "softmax_segm_expsum": scratch(*shape),
    }

    def run(i: int) -> Tensor:
        buffer = inputs.buffers[i]
        ops.unified_attention(
            q=buffer.q,
            k=buffer.k,
            v=buffer.v,
            out=buffer.out,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_q,
            seqused_k=inputs.seqlens_k,
            max_seqlen_k=inputs.max_k,
            softmax_scale=case.head_dim**-0.5,
            causal=True,
            window_size=inputs.window,
            block_table=inputs.page_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            sinks=inputs.sink,
            **options,
        )
        return buffer.out

    return Prepared({"as vLLM": run})
