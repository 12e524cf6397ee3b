"""One grid of attention problems for every kernel, wherever it can run.

What selects a compiled specialisation comes from `SHAPES`, so that a GPU compiles a bounded number
of kernels; lengths and masks are drawn.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from magi_serve import (
    AttentionSlices,
    BidirectionalSpans,
    MaskType,
    ffa_attention,
    paged_attention,
)
from magi_serve.kernels.capabilities import SPECS
from magi_serve.kernels.ffa.reference import attend
from magi_serve.kernels.paged.reference import gather_pages
from magi_serve.testing import (
    LAYOUTS,
    Layout,
    PagedBatch,
    Place,
    assert_as_accurate_as_torch,
    check_paged,
    check_slices,
    examples,
    make_dense,
    make_paged,
    make_sink,
    make_slices,
)
from magi_serve.types import LARGEST, AttentionOutput, AttentionProblem, ScaleKind

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8 = LARGEST
SINKS = ("one", "several", "per token", "strided")


@dataclass(frozen=True)
class Shape:
    """What a kernel is specialised for."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    layout: Layout
    dtype: torch.dtype
    head_dim_v: int | None = None
    sink: bool = False
    softcap: float = 0.0
    max_logits: bool = False
    kv_dtype: torch.dtype | None = None
    kv_scales: ScaleKind = "none"
    alibi: bool = False

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + (f"-{self.head_dim_v}" if self.head_dim_v else "")
        flags = [
            "sink" * self.sink,
            f"cap{self.softcap:g}" * bool(self.softcap),
            "max" * self.max_logits,
            "alibi" * self.alibi,
            f"{self.kv_dtype}-{self.kv_scales}".removeprefix("torch.") if self.kv_dtype else "",
        ]
        dtype = str(self.dtype).removeprefix("torch.")
        words = [dtype, f"{self.num_q_heads}x{self.num_kv_heads}", dims, f"p{self.page_size}"]
        return "-".join([*words, self.layout, *filter(None, flags)])


SHAPES = [
    Shape(32, 8, 128, 16, "vllm", BF16),
    Shape(64, 8, 64, 16, "vllm", BF16, sink=True),
    Shape(8, 4, 256, 16, "nhd", BF16, softcap=50.0),
    Shape(40, 1, 64, 32, "hnd", BF16, max_logits=True),
    Shape(71, 1, 64, 16, "nhd", BF16),
    Shape(6, 6, 80, 48, "packed", BF16),
    Shape(12, 4, 96, 64, "padded", BF16),
    Shape(16, 1, 72, 272, "layers", BF16, sink=True),
    Shape(8, 8, 112, 128, "vllm", BF16, sink=True, softcap=20.0, max_logits=True),
    Shape(6, 2, 32, 256, "hnd", BF16),
    Shape(16, 2, 192, 64, "nhd", BF16, head_dim_v=128, sink=True),
    Shape(32, 8, 128, 64, "nhd", FP16, sink=True, max_logits=True),
    Shape(28, 4, 128, 16, "vllm", FP16),
    Shape(8, 2, 64, 16, "packed", FP16, head_dim_v=128, softcap=5.0),
    Shape(9, 3, 64, 16, "vllm", FP32),
    Shape(8, 2, 128, 32, "nhd", FP32, sink=True, softcap=30.0),
    Shape(4, 1, 256, 48, "hnd", FP32, max_logits=True),
    Shape(8, 1, 512, 16, "vllm", BF16, sink=True),
    Shape(6, 3, 320, 64, "nhd", FP16, head_dim_v=512, max_logits=True),
    Shape(4, 4, 512, 32, "hnd", FP32, softcap=20.0),
    Shape(16, 2, 512, 16, "vllm", BF16, kv_dtype=E4M3, kv_scales="token"),
    Shape(71, 1, 64, 16, "vllm", BF16, alibi=True),
    Shape(6, 6, 128, 64, "nhd", FP16, alibi=True, sink=True, softcap=20.0, max_logits=True),
    Shape(12, 2, 80, 16, "hnd", FP32, alibi=True, sink=True),
    Shape(16, 4, 64, 16, "vllm", BF16, alibi=True, kv_dtype=E4M3, kv_scales="token"),
    Shape(32, 8, 128, 16, "vllm", BF16, kv_dtype=E4M3, kv_scales="head"),
    Shape(64, 8, 64, 16, "vllm", BF16, sink=True, kv_dtype=E4M3, kv_scales="head"),
    Shape(8, 2, 256, 64, "nhd", BF16, softcap=30.0, kv_dtype=E5M2, max_logits=True),
    Shape(16, 2, 128, 64, "vllm", FP16, sink=True, kv_dtype=E5M2, kv_scales="head"),
    Shape(20, 4, 80, 16, "packed", BF16, sink=True, kv_dtype=E4M3, kv_scales="token"),
    Shape(32, 8, 128, 16, "vllm", FP16, softcap=20.0, kv_dtype=INT8, kv_scales="token"),
    Shape(12, 1, 64, 272, "layers", BF16, kv_dtype=INT8, kv_scales="head", max_logits=True),
    Shape(6, 3, 64, 32, "padded", FP32, sink=True, kv_dtype=E4M3, kv_scales="token"),
]
ALIKE = (SHAPES[4], SHAPES[9], SHAPES[12])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def skip_unless_able(place: Place, shape: Shape) -> None:
    """A kernel refuses what it cannot do, and says why: that is a skipped test."""
    problem = AttentionProblem(
        device=place.device,
        q_dtype=shape.dtype,
        kv_dtype=shape.kv_dtype or shape.dtype,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v or shape.head_dim,
        page_size=shape.page_size,
        kv_scales=shape.kv_scales,
        alibi=shape.alibi,
    )
    if place.kernel == "triton" and place.device == "cuda" and shape in ALIKE:
        pytest.skip("too like another shape to be worth the time to compile")
    spec = next(spec for spec in SPECS if spec.name == place.kernel)
    if reasons := spec.why_not(problem):
        pytest.skip("; ".join(reasons))


EDGES = sorted({n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1)} | {2, 3, 5, 7, 13, 97})


def lengths(most: int) -> st.SearchStrategy[int]:
    """Up to `most`, with a liking for 0, 1, primes, and edges of tiles and pages."""
    edges = [n for n in (0, 1, *EDGES) if n <= most]
    return st.sampled_from(edges) | st.integers(0, most)


@st.composite
def batches(draw: st.DrawFn, place: Place, shape: Shape) -> tuple[PagedBatch, int | None]:
    """A batch, and how many of its sequences to plan as decodes (None: no plan is made ahead)."""
    regime = draw(st.sampled_from(["prefill", "decode", "verify", "mixed"]))
    count = draw(st.integers(1, 5))
    num_decodes = {"prefill": 0, "mixed": count // 2}.get(regime, count)
    longest = {"decode": 1, "verify": 3, "mixed": 3}
    q_lens, k_lens = [], []
    for s in range(count):
        q_len = draw(lengths(longest[regime] if s < num_decodes else place.max_q))
        before = draw(lengths(place.max_k) | st.integers(-q_len, 0))
        q_lens.append(q_len)
        k_lens.append(draw(st.sampled_from([0, q_len + before, q_len + before, q_len + before])))
    batch = make_paged(
        q_lens,
        k_lens,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        page_size=shape.page_size,
        layout=shape.layout,
        dtype=shape.dtype,
        device=place.device,
        seed=draw(st.integers(0, 2**16)),
        poison=draw(st.sampled_from([float("nan"), 1e4])),
        padding_rows=draw(st.sampled_from([0, 0, 1, 5])),
        fused_q=draw(st.booleans()),
        kv_dtype=shape.kv_dtype,
        kv_scales=shape.kv_scales,
    )
    planned = regime in ("verify", "mixed") or draw(st.booleans())
    return batch, num_decodes if planned else None


@st.composite
def spans_of(draw: st.DrawFn, batch: PagedBatch) -> BidirectionalSpans:
    """Up to three spans in each sequence, most of them with rows of this batch in them."""
    ranges = []
    for q_len, k_len in zip(batch.q_lens, batch.k_lens, strict=True):
        first = draw(st.sampled_from([0, max(0, k_len - q_len - 9), max(0, k_len - q_len)]))
        at = st.integers(first, max(first, k_len) + 40)
        ends = sorted(draw(st.sets(at, max_size=6)))
        ranges.append(list(zip(ends[::2], ends[1::2], strict=False)))
    return BidirectionalSpans(ranges, draw(st.booleans()))


@st.composite
def masks(draw: st.DrawFn, batch: PagedBatch) -> dict[str, object]:
    """`causal`, `window` and `spans` for a batch."""
    side = st.none() | st.sampled_from([0, 1, 4, 15, 16, 63, 127]) | st.integers(0, 300)
    causal: object = draw(st.sampled_from([True, True, False, None]))
    if causal is None:
        of_each = st.lists(st.booleans(), min_size=len(batch.q_lens), max_size=len(batch.q_lens))
        causal = torch.tensor(draw(of_each), dtype=torch.bool, device=batch.q.device)
    window = draw(st.none() | st.tuples(side, side))
    spans = draw(st.none() | spans_of(batch)) if causal is True else None
    return {"causal": causal, "window": window, "spans": spans}


def slopes_of(shape: Shape, place: Place) -> Tensor | None:
    """ALiBi's slopes as models have them: from 2^-0.5 down, each head another."""
    if not shape.alibi:
        return None
    powers = torch.linspace(-0.5, -8, shape.num_q_heads, device=place.device)
    return torch.exp2(powers)


@shapes
def test_paged_attention_is_as_accurate_as_torch(any_place: Place, shape: Shape) -> None:
    skip_unless_able(any_place, shape)

    @examples(any_place)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        batch, num_decodes = data.draw(batches(any_place, shape))
        kind = data.draw(st.sampled_from(SINKS)) if shape.sink else "none"
        check_paged(
            batch,
            kernel=any_place.kernel,
            num_decodes=num_decodes,
            max_logits=shape.max_logits,
            softcap=shape.softcap,
            sink=make_sink(kind, batch.num_tokens, shape.num_q_heads, device=any_place.device),
            alibi_slopes=slopes_of(shape, any_place),
            **data.draw(masks(batch)),
        )

    run()


STORED: list[dict[str, Any]] = [
    *[{}] * 6,
    *({"kv_dtype": t, "kv_scales": s} for t in LARGEST for s in ("none", "head", "token")),
]


@st.composite
def any_shape(draw: st.DrawFn) -> Shape:
    """Shapes that `SHAPES` does not hold; for places where a new one costs nothing."""
    num_kv_heads = draw(st.integers(1, 3))
    dims = st.sampled_from([32, 64, 72, 80, 96, 112, 128, 160, 192, 256])
    return Shape(
        num_kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16])),
        num_kv_heads,
        draw(dims),
        draw(st.sampled_from([16, 32, 48, 64, 128, 256, 272])),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([BF16, FP16, FP32])),
        head_dim_v=draw(st.none() | dims),
        sink=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        max_logits=draw(st.booleans()),
        alibi=draw(st.booleans()),
        **draw(st.sampled_from(STORED)),
    )


def test_paged_attention_is_accurate_for_shapes_drawn_at_random(host_place: Place) -> None:
    @examples(host_place, times=10)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        shape = data.draw(any_shape())
        batch, num_decodes = data.draw(batches(host_place, shape))
        kind = data.draw(st.sampled_from(SINKS)) if shape.sink else "none"
        check_paged(
            batch,
            kernel=host_place.kernel,
            num_decodes=num_decodes,
            max_logits=shape.max_logits,
            softcap=shape.softcap,
            sink=make_sink(kind, batch.num_tokens, shape.num_q_heads),
            alibi_slopes=slopes_of(shape, host_place),
            **data.draw(masks(batch)),
        )

    run()


SLICE_SHAPES = [SHAPES[i] for i in (0, 1, 3, 8, 11, 13, 14)]


@pytest.mark.parametrize("shape", SLICE_SHAPES, ids=str)
def test_slices_are_as_accurate_as_torch(any_place: Place, shape: Shape) -> None:
    skip_unless_able(any_place, shape)

    fewest = 1 if any_place.kernel == "hopper" else 0  # no keys, no rows of even stride

    @examples(any_place)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        total_q = data.draw(lengths(any_place.max_q))
        total_k = max(fewest, data.draw(lengths(any_place.max_k)))
        slices = make_slices(
            total_q,
            total_k,
            seed=data.draw(st.integers(0, 2**16)),
            max_leaves=data.draw(st.sampled_from([1, 3, 10, 20])),
        )
        q, k, v = make_dense(
            total_q,
            total_k,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            head_dim_v=shape.head_dim_v,
            dtype=shape.dtype,
            device=any_place.device,
        )
        kind = data.draw(st.sampled_from(SINKS)) if shape.sink else "none"
        check_slices(
            q,
            k,
            v,
            slices,
            kernel=any_place.kernel,
            max_logits=shape.max_logits,
            softcap=shape.softcap,
            sink=make_sink(kind, total_q, shape.num_q_heads, device=any_place.device),
        )

    run()


# Full size, on a GPU only: the truth is computed for some of the rows.

FULL = {
    "one long prompt": ([8192], [8192], None),
    "a chunk on a long prefix": ([2048], [32768], None),
    "many short prompts": ([100] * 200, [100] * 200, None),
    "decode of one long sequence": ([1], [120000], 1),
    "decode of many sequences": ([1] * 64, [4096 + 61 * i for i in range(64)], 64),
    "verification of drafts": ([4] * 16, [9000 - 500 * i for i in range(16)], 16),
    "decodes beside prompts": ([1] * 30 + [700, 1200], [5000] * 30 + [9000, 1200], 30),
}


@pytest.mark.parametrize("work", FULL)
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 1, 11, 17, 18)], ids=str)
@pytest.mark.parametrize("window", [None, (127, 0)], ids=["full", "window"])
def test_full_size_batches_are_as_accurate_as_torch(
    gpu_place: Place, shape: Shape, work: str, window: tuple[int, int] | None
) -> None:
    q_lens, k_lens, num_decodes = FULL[work]
    batch = make_paged(
        q_lens,
        k_lens,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        layout=shape.layout,
        dtype=shape.dtype,
        device=gpu_place.device,
        fused_q=True,
        kv_dtype=shape.kv_dtype,
        kv_scales=shape.kv_scales,
    )
    sink = make_sink("one", batch.num_tokens, shape.num_q_heads, device=gpu_place.device)
    plan = None
    if num_decodes is not None:
        plan = batch.plan(batch.planner(gpu_place.kernel, window), num_decodes)
    result = paged_attention(
        batch.q,
        batch.kv,
        batch.cu_seqlens_q,
        window=window,
        sink=sink if shape.sink else None,
        out=batch.poisoned_out(),
        plan=plan,
        kernel=gpu_place.kernel,
    )
    assert not bool(result.out.isnan().any())
    for s in {0, len(q_lens) // 2, len(q_lens) - 1}:
        assert_sequence_is_accurate(batch, s, result, window, sink if shape.sink else None)


def assert_sequence_is_accurate(batch, s, result, window, sink) -> None:  # type: ignore[no-untyped-def]
    """Hold up to 16 rows of sequence `s` of a causal batch to the criterion."""
    q_len, k_len = batch.q_lens[s], batch.k_lens[s]
    step = max(1, q_len // 15)
    own = torch.arange(q_len - 1, -1, -step, device=batch.q.device)
    rows = own + int(batch.cu_seqlens_q[s])
    position = (own + k_len - q_len)[:, None]
    key = torch.arange(k_len, device=batch.q.device)
    visible = key <= position
    if window is not None:
        visible &= key >= position - window[0]

    def reference(dtype: torch.dtype) -> AttentionOutput:
        q = batch.q[rows].to(dtype)
        k, v = gather_pages(batch.kv, s, k_len, dtype)
        scale = q.shape[-1] ** -0.5
        return attend(q, k, v, visible, softmax_scale=scale, sink=sink)

    part = AttentionOutput(result.out[rows], result.lse[rows])
    assert_as_accurate_as_torch(part, reference)


def test_query_offsets_past_two_billion_elements_are_right(gpu_place: Place) -> None:
    shape = Shape(32, 2, 256, 16, "nhd", BF16)
    skip_unless_able(gpu_place, shape)
    q_lens = [64] * 4097
    batch = make_paged(
        [64],
        [64],
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=gpu_place.device,
    )
    repeated = batch.kv.page_table.expand(len(q_lens), -1).contiguous()
    kv = type(batch.kv)(
        batch.kv.k, batch.kv.v, repeated, batch.kv.seqlens_k.expand(len(q_lens)).contiguous()
    )
    q = batch.q.repeat(len(q_lens), 1, 1)
    assert q.numel() > 2**31
    cu_seqlens_q = 64 * torch.arange(len(q_lens) + 1, dtype=torch.int32, device=gpu_place.device)
    out = paged_attention(q, kv, cu_seqlens_q, kernel=gpu_place.kernel).out
    assert torch.equal(out[-64:], out[:64])
    alone = check_paged(batch, kernel=gpu_place.kernel)
    torch.testing.assert_close(out[-64:], alone.out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]], ids=str)
def test_long_packed_slices_are_as_accurate_as_torch(gpu_place: Place, shape: Shape) -> None:
    total = 6000
    q, k, v = make_dense(
        total,
        total,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=gpu_place.device,
    )
    # A causal document, one that also sees a shared prefix, and a band of keys around the diagonal.
    slices = AttentionSlices(
        [(0, 2500), (2500, 4000), (2500, 4000), (4000, 6000)],
        [(0, 2500), (0, 700), (2500, 4000), (3900, 6000)],
        [MaskType.CAUSAL, MaskType.FULL, MaskType.CAUSAL, MaskType.BI_CAUSAL],
    )
    result = ffa_attention(q, k, v, slices, kernel=gpu_place.kernel)
    assert not bool(result.out.isnan().any())
    rows = torch.arange(0, total, 250, device=gpu_place.device)
    row, key = rows[:, None], torch.arange(total, device=gpu_place.device)
    visible = (row < 2500) & (key <= row)
    visible |= (row >= 2500) & (row < 4000) & ((key < 700) | ((key >= 2500) & (key <= row)))
    visible |= (row >= 4000) & (key >= row - 100) & (key <= row)

    def reference(dtype: torch.dtype) -> AttentionOutput:
        scale = shape.head_dim**-0.5
        return attend(*(x.to(dtype) for x in (q[rows], k, v)), visible, softmax_scale=scale)

    assert_as_accurate_as_torch(AttentionOutput(result.out[rows], result.lse[rows]), reference)
