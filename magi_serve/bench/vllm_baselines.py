"""vLLM's own kernels, called as its attention backends call them."""

from typing import Any

import torch
from torch import Tensor

from magi_serve.bench.inputs import Inputs
from magi_serve.bench.prepared import Prepared, Refused, Run, need
from magi_serve.kernels.paged.reference import quantise

FP8_QUERY_ERROR = 0.06
"""How far quantised queries and probabilities may move a result, in the norm."""


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
    if case.stored not in (None, "e4m3"):
        raise Refused("FA3 takes no quantised keys but e4m3")
    splits = (32, 0) if case.num_tokens <= 512 else (0,)
    runs = {f"num_splits={n}": _fa3_run(flash, inputs, n) for n in splits}
    return Prepared(runs, error=FP8_QUERY_ERROR if case.stored else 0.0)


def _fa3_run(flash: Any, inputs: Inputs, num_splits: int) -> Run:
    case, window = inputs.case, list(inputs.window)
    dtype = torch.float8_e4m3fn if case.stored else torch.bfloat16
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
            qkv_dtype=dtype,
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

    queries = [buffer.q for buffer in inputs.buffers]
    if case.stored:
        # As vLLM: queries are quantised too, outside of attention, with one scale.
        one = torch.full((1,), 5.5 / 448, device=inputs.cu_seqlens_q.device)
        queries = [quantise(q, dtype, one.expand(q.shape[1])) for q in queries]
        shape = (len(case.q_lens), case.num_kv_heads)
        scales = zip("qkv", (one, *inputs.scales), strict=True)
        lengths |= {f"{x}_descale": scale.expand(shape) for x, scale in scales}

    def run(i: int) -> Tensor:
        buffer = inputs.buffers[i]
        flash.flash_attn_varlen_func(
            q=queries[i],
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

    if case.stored == "int8":
        raise Refused("vLLM's Triton kernel takes int8 only with scales per token")
    # One scale for all: it has no others.
    scales = [None if s is None else s[:1] for s in inputs.scales]

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
            k_descale=scales[0],
            v_descale=scales[1],
            sinks=inputs.sink,
            **options,
        )
        return buffer.out

    return Prepared({"as vLLM": run})
