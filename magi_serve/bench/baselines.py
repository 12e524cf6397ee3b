"""What our kernels are measured beside: each baseline is one function from inputs to calls.

A baseline plans, allocates and compiles while it is prepared, as it would once per step or at
start-up; its calls only launch. One that cannot do a case says why by raising `Refused`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from magi_serve.bench.cases import Case
from magi_serve.bench.inputs import Inputs
from magi_serve.bench.prepared import Prepared, Refused, need
from magi_serve.bench.vllm_baselines import fa3, triton_attn
from magi_serve.errors import ArgumentError


def flashinfer(inputs: Inputs, kernel: str | None) -> Prepared:
    """FlashInfer: its tensor-core decode for single rows, its FA3 template for everything else."""
    case = inputs.case
    if case.stored is not None:
        raise Refused("FlashInfer is called over bf16 here")
    if case.sink:
        raise Refused("FlashInfer's wrappers for Hopper take no sinks")
    if case.mask is not None:
        raise Refused("FlashInfer has no masks of slices")
    library = need("flashinfer", "flashinfer-python")
    device = inputs.cu_seqlens_q.device
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim)
    options = {"q_data_type": torch.bfloat16, "window_left": inputs.window[0]}
    if inputs.page_table is None:
        ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        ragged.plan(inputs.cu_seqlens_q, inputs.cu_seqlens_k, *heads, causal=True, **options)
        return Prepared(
            {"ragged": lambda i: ragged.run(*_operands(inputs, i), out=inputs.buffers[i].out)}
        )
    assert case.page_size is not None
    pages_of = [-(-n // case.page_size) for n in case.k_lens]
    table = torch.cat([row[:n] for row, n in zip(inputs.page_table, pages_of, strict=True)])
    ends = torch.tensor([0, *pages_of]).cumsum(0).to(torch.int32).to(device)
    last = ((inputs.seqlens_k - 1) % case.page_size + 1).to(torch.int32)
    if inputs.max_q == 1:
        name = "tensor-core decode"
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            ends, table, last, *heads, case.page_size, kv_data_type=torch.bfloat16, **options
        )
    else:
        name = "FA3 prefill"
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        wrapper.plan(
            inputs.cu_seqlens_q, ends, table, last, *heads, case.page_size, causal=True, **options
        )

    def run(i: int) -> Tensor:
        q, k, v = _operands(inputs, i)
        out: Tensor = wrapper.run(q, (k, v), out=inputs.buffers[i].out)
        return out

    return Prepared({name: run})


def _operands(inputs: Inputs, i: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.buffers[i].q, inputs.buffers[i].k, inputs.buffers[i].v


def _batched(inputs: Inputs, i: int) -> tuple[Tensor, ...]:
    """Operands of one sequence as ``[1, heads, tokens, head_dim]``."""
    return tuple(x.transpose(0, 1)[None] for x in _operands(inputs, i))


def cudnn(inputs: Inputs, kernel: str | None) -> Prepared:
    """PyTorch's scaled_dot_product_attention by cuDNN, for one causal prompt."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case = inputs.case
    if inputs.page_table is not None or case.mask is not None or case.sink:
        raise Refused("cuDNN is called by PyTorch here: no pages, sinks or masks of slices")
    if len(case.q_lens) > 1 or case.q_lens != case.k_lens:
        raise Refused("PyTorch's causal attention takes one prompt, as many rows as keys")

    def run(i: int) -> Tensor:
        q, k, v = _batched(inputs, i)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        return out[0].transpose(0, 1)

    return Prepared({"cuDNN": run})


def flex(inputs: Inputs, kernel: str | None) -> Prepared:
    """FlexAttention, compiled; a row's visible keys are intervals in tables that the mask reads."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = inputs.case
    if inputs.page_table is not None or case.sink:
        raise Refused("FlexAttention is called without pages and sinks")
    device = inputs.cu_seqlens_q.device
    begins, ends = (
        [torch.from_numpy(x).to(device) for x in side]
        for side in zip(*case.intervals(), strict=True)
    )

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = (key >= begins[0][row]) & (key < ends[0][row])
        for begin, end in zip(begins[1:], ends[1:], strict=True):
            seen = seen | ((key >= begin[row]) & (key < end[row]))
        return seen

    # Compiled, so that the mask of every cell is never in memory.
    block_mask = torch.compile(create_block_mask)(
        visible, None, None, case.num_tokens, sum(case.k_lens), device=str(device)
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(i: int) -> Tensor:
        q, k, v = _batched(inputs, i)
        out: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return Prepared({"compiled": run})


def causal(inputs: Inputs, kernel: str | None) -> Prepared:
    """Our own causal attention of as many tokens, compared by rate: what a mask costs."""
    from magi_serve import AttentionSlices, MaskType, ffa_attention

    case, n = inputs.case, inputs.case.num_tokens
    if case.mask is None:
        raise Refused("only for masks of slices: the others are causal themselves")
    slices = AttentionSlices([(0, n)], [(0, n)], [MaskType.CAUSAL])

    def run(i: int) -> Tensor:
        return ffa_attention(*_operands(inputs, i), slices, kernel=kernel).out

    flops = 4 * (n * (n + 1) // 2) * case.num_q_heads * case.head_dim
    return Prepared({"ours": run}, flops)


def bf16(inputs: Inputs, kernel: str | None) -> Prepared:
    """Our own attention over the same keys and values in bf16: what a quantised cache gives."""
    from magi_serve.bench.measure import prepare_ours

    if inputs.case.stored is None:
        raise Refused("only for quantised keys: the others are bf16 themselves")
    name, run = prepare_ours(inputs.in_bf16(), kernel)
    return Prepared({name: lambda i: run(i).out})


Baseline = Callable[[Inputs, str | None], Prepared]
BASELINES: dict[str, Baseline] = {
    f.__name__: f for f in (fa3, triton_attn, flashinfer, cudnn, flex, causal, bf16)
}
"""Every baseline by the name that ``--baseline`` takes."""


def baselines_for(case: Case, asked: list[str] | None) -> list[str]:
    """The baselines to measure a case beside: those asked for, else those of its targets.

    Raises:
        ArgumentError: one is unknown.
    """
    for name in asked or ():
        if name not in (*BASELINES, "all"):
            raise ArgumentError(
                f"baseline {name!r} is unknown; accepted: {', '.join(BASELINES)}, all"
            )
    if asked:
        return list(BASELINES) if "all" in asked else list(dict.fromkeys(asked))
    of_targets = [name for name in case.targets if name in BASELINES]
    return of_targets or (["fa3"] if case.mask is None else ["flex", "causal"])
