"""A layer and its metadata builder, driven as vLLM drives them, against attention in float64."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
)

from magi_serve.backends.vllm import compat
from magi_serve.backends.vllm.backend import MagiAttentionBackend
from magi_serve.backends.vllm.impl import MagiAttentionImpl
from magi_serve.backends.vllm.metadata import MagiMetadataBuilder, leading_decodes
from magi_serve.errors import ArgumentError, NoKernelError, ShapeError
from magi_serve.kernels.ffa.reference import attend
from magi_serve.kernels.paged.reference import gather_pages
from magi_serve.testing import NO_PAGE, poisoned
from magi_serve.types import SinkSpec

pytestmark = pytest.mark.vllm

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 32, 16
# Physical order of (layers, blocks, heads, tokens, content), by vLLM's names.
LAYOUTS = {
    "LBNHC": (0, 1, 3, 2, 4),
    "LBHNC": (0, 1, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
MIXED = [(1, 40), (1, 1), (1, 17), (5, 21), (33, 33), (7, 100)]


def layer(scales: tuple[Tensor, Tensor] | None = None, **options: Any) -> SimpleNamespace:
    impl = MagiAttentionImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, **options)
    impl.process_weights_after_loading(torch.float32)
    k_scale, v_scale = scales or (torch.tensor(1.0), torch.tensor(1.0))
    return SimpleNamespace(impl=impl, _k_scale=k_scale, _v_scale=v_scale)


def builder(
    *layers: SimpleNamespace,
    spec_tokens: int | None = None,
    settings: dict[str, Any] | None = None,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    kind: type[AttentionSpec] = FullAttentionSpec,
    images: bool = False,
    cls: type[MagiMetadataBuilder] = MagiMetadataBuilder,
) -> MagiMetadataBuilder:
    names = [f"layer{i}" for i in range(len(layers))]
    speculative = spec_tokens and SimpleNamespace(
        num_speculative_tokens=spec_tokens, parallel_drafting=False
    )
    config = SimpleNamespace(
        additional_config={"magi_serve": settings} if settings else {},
        compilation_config=SimpleNamespace(
            static_forward_context=dict(zip(names, layers, strict=True))
        ),
        model_config=SimpleNamespace(dtype=torch.float32, is_mm_prefix_lm=images),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=512),
        speculative_config=speculative,
        use_v2_model_runner=False,
    )
    spec = kind(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=head_dim, dtype=dtype)
    return cls(spec, names, config, torch.device("cpu"))


class Batch:
    """Random sequences over a poisoned cache, and the metadata that vLLM would send for them.

    Args:
        lengths: (query tokens, keys) of each sequence.
        pad_seqs, pad_tokens: padding that the metadata counts in, as for full CUDA graphs.
        pad_rows: rows of q, k, v and output past `num_actual_tokens`, as for piecewise graphs.
        images: by sequence, first and last positions of what is read both ways.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        layout: str = "LBNHC",
        pad_seqs: int = 0,
        pad_tokens: int = 0,
        pad_rows: int = 0,
        causal: bool | Tensor = True,
        images: dict[int, list[tuple[int, int]]] | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(0)
        self.lengths = lengths
        query_lens, key_lens = map(list, zip(*lengths, strict=True))
        self.starts = [0, *np.cumsum(query_lens).tolist()]
        tokens = self.starts[-1]
        self.num_tokens = tokens + pad_tokens
        rows = self.num_tokens + pad_rows
        pages_of = [-(-n // PAGE) for n in key_lens]
        order = LAYOUTS[layout]
        shape = (2, sum(pages_of) + 3, KV_HEADS, PAGE, 2 * HEAD_DIM)
        physical = poisoned([shape[i] for i in order], torch.float32)
        self.cache = physical.permute(*np.argsort(order).tolist())[1]
        shuffled = (torch.randperm(sum(pages_of) + 2, generator=g) + 1).tolist()
        num_seqs = len(lengths) + pad_seqs
        self.table = torch.full((num_seqs, max(pages_of) + 1), NO_PAGE, dtype=torch.int32)
        self.q = poisoned([rows, HEADS, HEAD_DIM], torch.float32)
        self.k = poisoned([rows, KV_HEADS, HEAD_DIM], torch.float32)
        self.v = poisoned([rows, KV_HEADS, HEAD_DIM], torch.float32)
        self.slots = torch.full((rows,), -1, dtype=torch.int64)
        self.keys, self.values = [], []
        for s, (n, keys) in enumerate(lengths):
            pages = torch.tensor([shuffled.pop() for _ in range(pages_of[s])])
            self.table[s, : len(pages)] = pages
            k, v = torch.randn(2, keys, KV_HEADS, HEAD_DIM, generator=g)
            at = torch.arange(keys)
            page, offset, old = pages[at // PAGE], at % PAGE, keys - n
            self.cache[page[:old], :, offset[:old]] = torch.cat([k, v], -1)[:old]
            mine = slice(self.starts[s], self.starts[s + 1])
            self.q[mine] = torch.randn(n, HEADS, HEAD_DIM, generator=g)
            self.k[mine], self.v[mine] = k[old:], v[old:]
            self.slots[mine] = (page * PAGE + offset)[old:]
            self.keys.append(k)
            self.values.append(v)
        start = torch.tensor([*self.starts, *[tokens] * pad_seqs], dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start.clone(),
            seq_lens=torch.tensor([*key_lens, *[0] * pad_seqs], dtype=torch.int32),
            num_reqs=num_seqs,
            num_actual_tokens=self.num_tokens,
            max_query_len=max(query_lens),
            max_seq_len=max(key_lens),
            block_table_tensor=self.table,
            slot_mapping=self.slots[: self.num_tokens],
            causal=causal,
            mm_req_doc_ranges=images,
            seq_lens_cpu_upper_bound=torch.tensor([*key_lens, *[0] * pad_seqs]),
        )

    def run(self, layer: SimpleNamespace, metadata: Any) -> Tensor:
        impl, output = layer.impl, poisoned(self.q.shape, torch.float32)
        impl.do_kv_cache_update(layer, self.k, self.v, self.cache, metadata.slot_mapping)
        return impl.forward(layer, self.q, None, None, self.cache, metadata, output)

    def bias(self, impl: MagiAttentionImpl, ahead: Tensor) -> Tensor | None:
        slopes = impl._alibi_slopes
        return None if slopes is None else -slopes.double()[:, None] * ahead.abs()[:, None]

    def check(
        self,
        out: Tensor,
        impl: MagiAttentionImpl,
        sinks: Tensor | None = None,
        within_window: bool = False,
    ) -> None:
        for s, (n, keys) in enumerate(self.lengths):
            causal = self.common.causal
            is_causal = bool(causal[s]) if isinstance(causal, Tensor) else causal
            rows = slice(self.starts[s], self.starts[s + 1])
            position = torch.arange(keys - n, keys)[:, None]
            key = torch.arange(keys)[None]
            visible = key <= position if is_causal else torch.ones(n, keys, dtype=torch.bool)
            if impl.sliding_window is not None:
                visible &= (key - position).abs() < impl.sliding_window
            for first, last in (self.common.mm_req_doc_ranges or {}).get(s, []):
                both = (position >= first) & (position <= last) & (key >= first) & (key <= last)
                if within_window:
                    both &= position - key < impl.sliding_window
                visible |= both
            expected = attend(
                self.q[rows].double(),
                self.keys[s].double(),
                self.values[s].double(),
                visible,
                softmax_scale=impl.scale,
                softcap=impl.softcap,
                sink=None if sinks is None else SinkSpec(sinks.double()),
                bias=self.bias(impl, key - position),
            )
            torch.testing.assert_close(out[rows].double(), expected.out, atol=2e-5, rtol=0)
        assert (out[self.starts[-1] :] == 0).all()


class QuantisedBatch(Batch):
    """The same sequences over a cache of bytes, as vLLM hands it over; stale slots hold NaN.

    Keys and values become what the cache makes of them, so that attention over it is exact.
    """

    def __init__(self, kv_cache_dtype: str, one: SimpleNamespace, layout: str) -> None:
        super().__init__(MIXED, layout=layout)
        stored = compat.QUANTISED[kv_cache_dtype]
        blocks = self.cache.shape[0]
        shape = MagiAttentionBackend.get_kv_cache_shape(
            blocks, PAGE, KV_HEADS, HEAD_DIM, kv_cache_dtype
        )
        order = LAYOUTS[layout]
        physical = torch.full([(2, *shape)[i] for i in order], 0x7F, dtype=torch.uint8)
        physical = physical.view(torch.int8 if stored.dtype == torch.int8 else torch.uint8)
        self.cache = physical.permute(*np.argsort(order).tolist())[1]
        for s, (n, keys) in enumerate(self.lengths):
            at = torch.arange(keys)
            slots = self.table[s, at // PAGE].long() * PAGE + at % PAGE
            k, v = self.keys[s], self.values[s]
            one.impl.do_kv_cache_update(one, k, v, self.cache, slots)
            pages = one.impl._pages.of(self.cache, one)
            pages = replace(pages, page_table=self.table[s, None], seqlens_k=slots[:1].int())
            self.keys[s], self.values[s] = gather_pages(pages, 0, keys, torch.float32)
            assert 0 < (self.keys[s] - k).abs().max() < 0.6
            assert 0 < (self.values[s] - v).abs().max() < 0.6
            new = torch.full_like(slots, 0x7F, dtype=torch.int8)[-n:, None, None]
            new = new.expand(n, KV_HEADS, self.cache.shape[-1])
            bytes_ = self.cache.view(torch.int8)
            bytes_[slots[-n:] // PAGE, :, slots[-n:] % PAGE] = new  # written when it runs


SINKS = torch.linspace(-1, 2, HEADS)
FEATURES = {
    "plain": {},
    "sinks": {"sinks": SINKS},
    "window": {"sliding_window": 9},
    "alibi": {"sinks": SINKS, "alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "all": {"sinks": SINKS, "sliding_window": 9, "logits_soft_cap": 2.0},
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_over_a_stale_cache_is_exact(layout: str, features: str) -> None:
    one, batch = layer(**FEATURES[features]), Batch(MIXED, layout=layout)
    metadata = builder(one).build(0, batch.common)
    batch.check(batch.run(one, metadata), one.impl, FEATURES[features].get("sinks"))


PER_HEAD = torch.tensor([0.02, 0.011]), torch.tensor([0.015, 0.03])
PER_TENSOR = torch.tensor(0.5), torch.tensor(2.0)


@pytest.mark.parametrize("features", ["plain", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", [None, PER_TENSOR, PER_HEAD], ids=["one", "tensor", "head"])
@pytest.mark.parametrize("kv_cache_dtype", compat.QUANTISED)
def test_attention_over_quantised_pages_is_exact(
    kv_cache_dtype: str, scales: Any, layout: str, features: str
) -> None:
    if "token" in kv_cache_dtype and scales is not None:
        pytest.skip("scales are in the cache")
    one = layer(scales, kv_cache_dtype=kv_cache_dtype, **FEATURES[features])
    batch = QuantisedBatch(kv_cache_dtype, one, layout)
    metadata = builder(one, dtype=batch.cache.dtype).build(0, batch.common)
    assert metadata.plan_for(one.impl.variant).kernel == "cpu"
    batch.check(batch.run(one, metadata), one.impl, FEATURES[features].get("sinks"))


def test_scales_that_are_loaded_later_count() -> None:
    one = layer(kv_cache_dtype="fp8")
    batch = QuantisedBatch("fp8", one, "LBNHC")
    metadata = builder(one, dtype=torch.uint8).build(0, batch.common)
    before = batch.run(one, metadata).clone()
    one._v_scale = torch.tensor(2.0)  # as a reload makes a new buffer
    after = one.impl.forward(one, batch.q, None, None, batch.cache, metadata, before.clone())
    torch.testing.assert_close(after, 2 * before)
    one._v_scale.fill_(4.0)  # or fills it
    after = one.impl.forward(one, batch.q, None, None, batch.cache, metadata, before.clone())
    torch.testing.assert_close(after, 4 * before)


@pytest.mark.parametrize("lengths", [MIXED, [(1, 40), (1, 3)]], ids=["mixed", "decodes"])
def test_rows_past_the_actual_tokens_are_written_with_zeros(lengths: list[tuple[int, int]]) -> None:
    one, batch = layer(), Batch(lengths, pad_rows=6)
    batch.check(batch.run(one, builder(one).build(0, batch.common)), one.impl)


def test_padding_of_a_full_cuda_graph_is_written_with_zeros() -> None:
    one, batch = layer(sinks=SINKS), Batch([(1, 40), (1, 3)], pad_seqs=6, pad_tokens=6)
    batch.check(batch.run(one, builder(one).build(0, batch.common)), one.impl, SINKS)


def test_slots_below_zero_and_rows_without_a_slot_are_not_written() -> None:
    one, batch = layer(), Batch([(4, 4)], pad_rows=3)
    batch.slots[1] = -1
    one.impl.do_kv_cache_update(one, batch.k, batch.v, batch.cache, batch.slots[:3])
    written = batch.cache.isfinite().all(1).all(-1).flatten().nonzero().flatten()
    assert written.tolist() == sorted(batch.slots[[0, 2]].tolist())


def test_layers_of_one_group_may_differ_in_window_and_sinks() -> None:
    layers = [layer(), layer(sliding_window=5), layer(sliding_window=9, sinks=SINKS), layer()]
    group = builder(*layers)
    assert len(group.variants) == 3
    metadata = group.build(0, Batch(MIXED).common)
    for one, sinks in zip(layers, [None, None, SINKS, None], strict=True):
        batch = Batch(MIXED)
        batch.check(batch.run(one, metadata), one.impl, sinks)


def test_the_profile_run_fills_the_output_with_zeros() -> None:
    one = layer()
    out = poisoned([3, HEADS, HEAD_DIM], torch.float32)
    one.impl.forward(one, out, None, None, torch.empty(0), None, out)
    assert (out == 0).all()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [False, torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.int32)])
def test_sequences_may_look_ahead(causal: bool | Tensor, window: int | None) -> None:
    one, batch = layer(sliding_window=window), Batch(MIXED, causal=causal)
    batch.check(batch.run(one, builder(one).build(0, batch.common)), one.impl)


# By sequence of MIXED: first and last positions. Some are read already, or not reached.
IMAGES = {
    0: [(3, 12)],
    1: [],
    2: [(2, 3), (15, 19)],
    3: [(0, 9), (10, 16), (17, 20)],
    4: [(1, 1), (4, 14), (15, 30), (32, 40)],
    5: [(40, 60), (90, 96), (98, 120)],
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("within_window", [False, True], ids=["past window", "within window"])
def test_images_are_read_both_ways(within_window: bool, features: str) -> None:
    one, batch = layer(**FEATURES[features]), Batch(MIXED, images=IMAGES)
    one.mm_prefix_clamp_sliding_window = within_window
    group = builder(one, images=True)
    within_window &= one.impl.sliding_window is not None
    sinks = FEATURES[features].get("sinks")
    out = batch.run(one, group.build(0, batch.common))
    batch.check(out, one.impl, sinks, within_window)
    text = Batch(MIXED)
    blind = text.run(one, group.build(0, text.common))
    text.check(blind, one.impl, sinks)
    image = slice(batch.starts[4] + 4, batch.starts[4] + 14)
    assert (out[image] - blind[image]).norm() > 0.05 * out[image].norm()


def test_where_windows_bound_images_layers_without_a_window_are_causal() -> None:
    """As in Gemma 4, whatever the model clears in the metadata that all of them share."""
    full, windowed = layer(), layer(sliding_window=9)
    windowed.mm_prefix_clamp_sliding_window = True
    batch = Batch(MIXED, images=IMAGES)
    metadata = builder(full, windowed, images=True).build(0, batch.common)
    metadata.mm_prefix_range = None
    batch.check(Batch(MIXED).run(windowed, metadata), windowed.impl, within_window=True)
    text = Batch(MIXED)
    text.check(text.run(full, metadata), full.impl)


def test_layers_with_and_without_a_window_see_the_whole_image() -> None:
    """As in Gemma 3."""
    layers = [layer(), layer(sliding_window=9)]
    metadata = builder(*layers, images=True).build(0, Batch(MIXED, images=IMAGES).common)
    for one in layers:
        batch = Batch(MIXED, images=IMAGES)
        batch.check(batch.run(one, metadata), one.impl)
    metadata.mm_prefix_range = None
    with pytest.raises(ArgumentError, match="it hides them from this layer in a way that is not"):
        batch.run(layers[0], metadata)


def test_a_model_that_reads_no_images_both_ways_ignores_their_spans() -> None:
    one, batch, text = layer(), Batch(MIXED, images=IMAGES), Batch(MIXED)
    text.check(batch.run(one, builder(one).build(0, batch.common)), one.impl)


def test_spans_that_a_step_has_no_rows_in_are_left_out() -> None:
    common = Batch(MIXED, images=IMAGES).common
    assert compat.spans_of(common) == [
        [],
        [],
        [(15, 20)],
        [(10, 17), (17, 21)],
        [(1, 2), (4, 15), (15, 31), (32, 41)],
        [(90, 97), (98, 121)],
    ]
    assert compat.spans_of(Batch([(1, 40), (1, 3)], images={0: [(3, 12)], 1: []}).common) is None
    assert compat.spans_of(Batch(MIXED).common) is None


@pytest.mark.parametrize("spec_tokens", [None, 3])
def test_a_decode_within_an_image_fits_the_tables_that_graphs_read(spec_tokens: int | None) -> None:
    """A chunk may be as short as a decode: the launches of a captured graph have to do for it."""
    one = layer(sliding_window=9)
    group = builder(one, images=True, spec_tokens=spec_tokens)
    rows = 1 + (spec_tokens or 0)
    lengths = [(rows, 40)] * 16  # as many as the engine runs at a time
    text = group.build(0, Batch(lengths).common).plan_for(one.impl.variant)
    shapes = [(p.items.shape, p.items.data_ptr(), p.bands.data_ptr()) for p in text.parts]
    each = [(12, 40 - rows), *((at, at) for at in range(41 - rows, 40))]
    batch = Batch(lengths, images=dict.fromkeys(range(16), each))
    metadata = group.build(0, batch.common)
    plan = metadata.plan_for(one.impl.variant)
    assert shapes == [(p.items.shape, p.items.data_ptr(), p.bands.data_ptr()) for p in plan.parts]
    assert not plan.outgrown
    batch.check(batch.run(one, metadata), one.impl)


@pytest.mark.parametrize("features", ["plain", "sinks", "window", "softcap", "8-bit cache"])
def test_an_encoder_sees_its_new_tokens_both_ways(features: str) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "sinks": {"sinks": torch.linspace(-1, 3, HEADS)},
        "window": {"sliding_window": 4},
        "softcap": {"logits_soft_cap": 0.5},
        "8-bit cache": {"kv_cache_dtype": "fp8"},
    }[features]
    batch = Batch([(n, n) for n in (5, 1, 33, 100)], pad_rows=3, pad_seqs=2, causal=False)
    one = layer(attn_type=AttentionType.ENCODER_ONLY, **options)
    planner = builder(one, kind=EncoderOnlyAttentionSpec)
    assert one.impl.kernel_name == "cpu"
    none = torch.empty(0)
    metadata = planner.build(0, batch.common)
    output = poisoned(batch.q.shape, torch.float32)
    one.impl.do_kv_cache_update(one, batch.k, batch.v, none, metadata.slot_mapping)
    out = one.impl.forward(one, batch.q, batch.k, batch.v, none, metadata, output)
    batch.check(out, one.impl, options.get("sinks"))


@pytest.mark.parametrize("stored", ["auto", "fp8_per_token_head"])
def test_a_decoder_sees_all_of_its_encoder_and_again_from_the_cache(stored: str) -> None:
    crossing = create_cross_attention_backend(MagiAttentionBackend)
    impl = crossing.get_impl_cls()(
        HEADS,
        HEAD_DIM,
        HEAD_DIM**-0.5,
        KV_HEADS,
        kv_cache_dtype=stored,
        attn_type=AttentionType.ENCODER_DECODER,
    )
    one = SimpleNamespace(
        impl=impl,
        kv_sharing_target_layer_name=None,
        _k_scale=torch.tensor(1.0),
        _v_scale=torch.tensor(1.0),
    )
    planner = builder(one, kind=CrossAttentionSpec, cls=crossing.get_builder_cls())
    encoded = [40, 3, 17]  # tokens of each encoder: more, fewer, as many pages as a decoder's
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, sum(encoded), KV_HEADS, HEAD_DIM, generator=g)
    table = torch.tensor([[5, 2, 7], [3, 0, 0], [1, 4, 0]], dtype=torch.int32)
    if stored == "auto":
        shape, dtype = (8, KV_HEADS, PAGE, 2 * HEAD_DIM), torch.float32
    else:
        shape, dtype = (8, KV_HEADS, PAGE, 2 * HEAD_DIM + 8), torch.uint8
    cache = torch.full(shape, 0xFF if dtype == torch.uint8 else float("nan"), dtype=dtype)

    def step(query_lens: list[int], computed: list[int], new: bool) -> None:
        start = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32)
        tokens, num_seqs = int(start[-1]), len(query_lens)
        seq_lens = torch.tensor([a + b for a, b in zip(query_lens, computed, strict=True)])
        common = CommonAttentionMetadata(
            query_start_loc=start,
            query_start_loc_cpu=start.clone(),
            seq_lens=seq_lens.int(),
            seq_lens_cpu_upper_bound=seq_lens.int(),
            num_reqs=num_seqs,
            num_actual_tokens=tokens,
            max_query_len=max(query_lens),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.full((tokens,), -1),
            causal=True,
            encoder_seq_lens=torch.tensor(encoded, dtype=torch.int32),
            encoder_seq_lens_cpu=np.array(encoded, dtype=np.int32),
        )
        metadata = planner.build(0, common)
        q = torch.randn(tokens, HEADS, HEAD_DIM, generator=g)
        output = poisoned(q.shape, torch.float32)
        k, v = (keys, values) if new else (None, None)
        out = impl.forward(one, q, k, v, cache, metadata, output)
        ends = np.cumsum(encoded).tolist()
        for s, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            rows = slice(int(start[s]), int(start[s + 1]))
            visible = torch.ones(query_lens[s], encoded[s], dtype=torch.bool)
            expected = attend(
                q[rows].double(),
                keys[first:last].double(),
                values[first:last].double(),
                visible,
                softmax_scale=impl.scale,
            )
            error = 2e-5 if stored == "auto" else 0.2
            torch.testing.assert_close(out[rows].double(), expected.out, atol=error, rtol=0)

    step([4, 1, 30], [0, 0, 0], new=True)
    step([1, 1, 1], [4, 1, 30], new=False)


def test_an_encoder_asks_for_no_cuda_graphs() -> None:
    one = layer(attn_type=AttentionType.ENCODER_ONLY)
    made = builder(one, kind=EncoderOnlyAttentionSpec)
    support = MagiMetadataBuilder.get_cudagraph_support(made.vllm_config, made.kv_cache_spec)
    assert support == AttentionCGSupport.NEVER


def test_an_encoder_that_only_a_kernel_for_tests_can_do_is_refused() -> None:
    one = layer(attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(NoKernelError, match="reference, which is for tests"):
        builder(one, kind=EncoderOnlyAttentionSpec, head_dim=2048)


def test_verification_of_drafts_counts_as_decode() -> None:
    one = layer()
    group = builder(one, spec_tokens=3)
    assert group.reorder_batch_threshold == 4
    batch = Batch([(4, 40), (4, 9), (2, 30), (6, 6), (1, 4)])
    metadata = group.build(0, batch.common)
    batch.check(batch.run(one, metadata), one.impl)
    assert metadata.plan_for(one.impl.variant).num_tokens == 17


def test_decode_steps_with_as_many_sequences_use_the_same_memory() -> None:
    one = layer(sliding_window=9)
    group = builder(one)
    plans = []
    for keys in (3, 70):
        batch = Batch([(1, keys), (1, 2 * keys)], pad_seqs=2, pad_tokens=2)
        metadata = group.build(0, batch.common)
        plans.append(metadata.plan_for(one.impl.variant))
        batch.check(batch.run(one, metadata), one.impl)
    first, second = (plan.parts[0] for plan in plans)
    assert first.items.data_ptr() == second.items.data_ptr()
    assert first.items.shape == second.items.shape
    assert first.bands.data_ptr() == second.bands.data_ptr()


def test_capture_runs_over_short_sequences() -> None:
    one, batch = layer(), Batch([(1, 40), (1, 40)])
    metadata = builder(one).build_for_cudagraph_capture(batch.common)
    assert metadata.seqlens_k.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "expected"),
    [
        ([1, 1, 1], 1, (3, 3)),
        ([1, 1, 5, 1], 1, (2, 2)),
        ([5, 1], 1, (0, 0)),
        ([4, 2, 4, 9, 1], 4, (3, 10)),
        ([1, 1, 0, 0], 1, (4, 2)),
        ([1, 0, 7], 1, (2, 1)),
    ],
)
def test_decodes_are_the_leading_short_sequences(
    query_lens: list[int], threshold: int, expected: tuple[int, int]
) -> None:
    start = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    n = len(query_lens)
    found = leading_decodes(start, n, int(start[-1]), max(query_lens), threshold)
    assert found == expected


def test_metadata_survives_the_copy_that_fast_prefill_makes() -> None:
    one, batch = layer(), Batch([(1, 40), (1, 3)])
    group = builder(one)
    subclass = create_fast_prefill_custom_backend("Fast", MagiAttentionBackend).get_builder_cls()
    group.__class__ = subclass
    batch.common.logits_indices_padded = torch.arange(2)
    batch.common.num_logits_indices = 2
    batch.common.max_logits_per_req = 1
    metadata = group.build(0, batch.common)
    batch.check(batch.run(one, metadata), one.impl)


def test_a_setting_forces_the_kernel() -> None:
    one, batch = layer(), Batch(MIXED)
    group = builder(one, settings={"kernel": "reference"})
    assert one.impl.kernel_name == "reference"
    batch.check(batch.run(one, group.build(0, batch.common)), one.impl)
    support = MagiMetadataBuilder.get_cudagraph_support
    assert support(group.vllm_config, group.kv_cache_spec) == AttentionCGSupport.NEVER
    plain = builder(one)
    assert support(plain.vllm_config, plain.kv_cache_spec) == AttentionCGSupport.UNIFORM_BATCH


def test_a_kernel_that_is_only_for_tests_is_never_chosen() -> None:
    with pytest.raises(NoKernelError, match="for tests"):
        builder(layer(), head_dim=2048)


def test_sinks_are_kept_in_fp32_and_taken_over_again_in_place() -> None:
    weights = torch.nn.Parameter(SINKS.bfloat16())
    one = layer(sinks=weights)
    held = one.impl._sink.logits
    assert held.dtype == torch.float32
    weights.data.fill_(3.0)
    one.impl.process_weights_after_loading(torch.bfloat16)
    assert one.impl._sink.logits is held
    assert held.tolist() == [[3.0] * HEADS]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"alibi_slopes": [0.5] * HEADS, "use_alibi_sqrt": True}, "use_alibi_sqrt=True"),
        ({"alibi_slopes": [0.5] * HEADS, "attn_type": "encoder_only"}, "not in an encoder"),
        ({"attn_type": AttentionType.ENCODER}, "encoder"),
        ({"chunk_lookback": 1}, "chunk_lookback=1"),
        ({"novelty": torch.ones(2)}, "novelty"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named) as error:
        layer(**options)
    assert "--attention-backend auto" in str(error.value)


def test_options_that_are_off_are_accepted() -> None:
    layer(chunk_lookback=-1, novelty=None, other=False, third=0)


def test_sinks_or_slopes_of_another_head_count_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"sinks have shape \(3,\); expected \[4\]"):
        layer(sinks=torch.zeros(3))
    with pytest.raises(ShapeError, match=r"alibi_slopes have shape \(3,\); expected \[4\]"):
        layer(alibi_slopes=[0.5] * 3)


def test_quantised_output_is_refused() -> None:
    one = layer()
    out = torch.zeros(1, HEADS, HEAD_DIM)
    with pytest.raises(ArgumentError, match="output_scale"):
        one.impl.forward(one, out, None, None, torch.empty(0), None, out, torch.ones(1))
