"""Writing keys and values into pages: the named slots change, and nothing else does."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from magi_serve import PagedKV, write_kv
from magi_serve.errors import ArgumentError, DeviceError, DTypeError, NoKernelError, ShapeError
from magi_serve.kernels import capabilities
from magi_serve.kernels.capabilities import triton_interprets
from magi_serve.kernels.paged.reference import gather_pages, write_kv_ref
from magi_serve.testing import (
    LAYOUTS,
    Layout,
    Place,
    examples,
    make_pool,
    make_scales,
    poisoned,
)
from magi_serve.types import LARGEST, ScaleKind

HEADS, DIM, DIM_V = 2, 24, 16


def pages_on(
    device: str,
    *,
    num_pages: int = 4,
    page_size: int = 16,
    layout: Layout = "nhd",
    dtype: torch.dtype = torch.float32,
) -> PagedKV:
    k, v = make_pool(
        num_pages, page_size, HEADS, DIM, DIM_V, layout=layout, dtype=dtype, device=device
    )
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    return PagedKV(k, v, table, torch.zeros(1, dtype=torch.int32, device=device))


def storage(x: torch.Tensor) -> torch.Tensor:
    """All memory behind a view."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(777.0), b.nan_to_num(777.0))


def assert_writes_like_reference(
    k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slots: torch.Tensor, make: object
) -> None:
    wanted = make()  # type: ignore[operator]
    write_kv_ref(k, v, wanted, slots)
    write_kv(k, v, kv, slots)
    for got, by_reference in ((kv.k, wanted.k), (kv.v, wanted.v)):
        assert equal_bits(storage(got), storage(by_reference))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 48])
def test_only_the_named_slots_change(place: Place, layout: Layout, page_size: int) -> None:
    def make() -> PagedKV:
        return pages_on(place.device, page_size=page_size, layout=layout)

    k = torch.randn(5, HEADS, DIM, device=place.device)
    v = torch.randn(5, HEADS, DIM_V, device=place.device)
    slots = torch.tensor([3, -1, 2 * page_size + 7, -1, -1], device=place.device)
    kv = make()
    assert_writes_like_reference(k, v, kv, slots, make)
    assert torch.equal(kv.k[0, 3], k[0])
    assert torch.equal(kv.v[2, 7], v[2])
    assert int(kv.k.isfinite().all(-1).all(-1).sum()) == 2


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_converted_to_the_dtype_of_the_pages(
    place: Place, dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    def make() -> PagedKV:
        return pages_on(place.device, dtype=pool_dtype)

    k = torch.randn(9, HEADS, DIM, device=place.device).to(dtype)
    v = torch.randn(9, HEADS, DIM_V, device=place.device).to(dtype)
    assert_writes_like_reference(k, v, make(), torch.arange(9, device=place.device) * 7, make)


@pytest.mark.parametrize("kind", ["none", "head", "token"])
@pytest.mark.parametrize("layout", ["vllm", "layers"])
@pytest.mark.parametrize("pool_dtype", LARGEST)
def test_quantised_pages_hold_the_same_bits_whoever_wrote_them(
    place: Place, pool_dtype: torch.dtype, layout: Layout, kind: ScaleKind
) -> None:
    def make() -> PagedKV:
        kv = pages_on(place.device, dtype=pool_dtype, layout=layout)
        scales = make_scales(kind, kv.k, torch.Generator(place.device).manual_seed(1))
        return replace(kv, k_scale=scales[0], v_scale=scales[1])

    # What is larger than the pages can store saturates, and a head of zeros stays one.
    k = 1e4 * torch.randn(9, HEADS, DIM, device=place.device).bfloat16() ** 5
    v = torch.randn(9, HEADS, DIM_V, device=place.device)
    k[3, 1] = 0
    slots = torch.tensor([5, -1, 63, 0, 17, 16, 40, 2, -7], device=place.device)
    kv, wanted = make(), make()
    write_kv(k, v, kv, slots)
    write_kv_ref(k, v, wanted, slots)
    for name in ("k", "v"):
        got, by_reference = (getattr(x, name).view(torch.int8) for x in (kv, wanted))
        assert torch.equal(got, by_reference)
        if kind != "none":
            got, by_reference = (getattr(x, f"{name}_scale") for x in (kv, wanted))
            assert equal_bits(got, by_reference)
    written = kv.k.float()[0, 0]
    assert not bool(written.isnan().any())
    assert not bool(written[1].any())


@pytest.mark.parametrize("pool_dtype", LARGEST)
def test_scales_of_tokens_follow_the_size_of_what_is_written(
    place: Place, pool_dtype: torch.dtype
) -> None:
    kv = pages_on(place.device, dtype=pool_dtype)
    scales = make_scales("token", kv.k, torch.Generator(place.device))
    kv = replace(kv, k_scale=scales[0], v_scale=scales[1])
    kv = replace(kv, page_table=torch.ones(1, 1, dtype=torch.int32, device=place.device))
    sizes = torch.logspace(-20, 20, 16, device=place.device)[:, None, None]
    k = sizes * torch.randn(16, HEADS, DIM, device=place.device)
    v = torch.randn(16, HEADS, DIM_V, device=place.device) / sizes
    write_kv(k, v, kv, torch.arange(16, 32, device=place.device))
    for got, x in zip(gather_pages(kv, 0, 16, torch.float32), (k, v), strict=True):
        largest = x.abs().amax(-1, keepdim=True)
        step = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 0.51 / 127}
        assert bool(((got - x).abs() <= step[pool_dtype] * largest).all())
        torch.testing.assert_close(got.abs().amax(-1, keepdim=True), largest, rtol=1e-5, atol=0)


def test_views_into_fused_projections_are_read_in_place(place: Place) -> None:
    fused = torch.randn(6, 4 + 2 * HEADS, DIM, device=place.device)
    k, v = fused[:, 4 : 4 + HEADS], fused[:, 4 + HEADS :, :DIM_V]
    kv, wanted = pages_on(place.device), pages_on(place.device)
    slots = torch.arange(20, 26, device=place.device, dtype=torch.int32)
    write_kv(k, v, kv, slots)
    write_kv_ref(k.contiguous(), v.contiguous(), wanted, slots)
    assert equal_bits(kv.k, wanted.k)
    assert equal_bits(kv.v, wanted.v)


def test_rows_past_the_slots_are_ignored(place: Place) -> None:
    k = poisoned((8, HEADS, DIM), torch.float32, place.device, 1.0)
    v = poisoned((8, HEADS, DIM_V), torch.float32, place.device, 2.0)
    kv = pages_on(place.device)
    write_kv(k, v, kv, torch.tensor([40, 41], device=place.device))
    assert int((kv.k == 1).all(-1).all(-1).sum()) == 2
    assert bool((kv.v[2, 8:10] == 2).all())


def test_slots_may_have_any_stride(place: Place) -> None:
    kv, wanted = pages_on(place.device), pages_on(place.device)
    k = torch.randn(3, HEADS, DIM, device=place.device)
    v = torch.randn(3, HEADS, DIM_V, device=place.device)
    slots = torch.tensor([[5, 1], [9, 1], [-1, 1]], device=place.device)[:, 0]
    write_kv(k, v, kv, slots)
    write_kv_ref(k, v, wanted, slots)
    assert equal_bits(kv.k, wanted.k)
    assert equal_bits(kv.v, wanted.v)


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -5]])
def test_no_slot_to_write_changes_nothing(place: Place, slots: list[int]) -> None:
    kv = pages_on(place.device)
    k = torch.zeros(3, HEADS, DIM, device=place.device)
    v = torch.zeros(3, HEADS, DIM_V, device=place.device)
    write_kv(k, v, kv, torch.tensor(slots, dtype=torch.int64, device=place.device))
    assert bool(kv.k.isnan().all())
    assert bool(kv.v.isnan().all())


def test_random_batches_are_written_as_the_reference_writes_them(place: Place) -> None:
    @examples(place, times=2)
    @given(
        st.sampled_from(LAYOUTS),
        st.lists(st.integers(0, 63), max_size=24, unique=True),
        st.randoms(use_true_random=False),
    )
    def run(layout: Layout, slots: list[int], random) -> None:  # type: ignore[no-untyped-def]
        slots = [slot if random.random() < 0.7 else -1 - slot for slot in slots]

        def make() -> PagedKV:
            return pages_on(place.device, layout=layout)

        k = torch.randn(len(slots) + 2, HEADS, DIM, device=place.device)
        v = torch.randn(len(slots) + 2, HEADS, DIM_V, device=place.device)
        at = torch.tensor(slots, dtype=torch.int64, device=place.device)
        assert_writes_like_reference(k, v, make(), at, make)

    run()


def test_what_is_written_is_what_attention_gathers(place: Place) -> None:
    kv = pages_on(place.device, layout="vllm")
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=place.device)
    kv = PagedKV(kv.k, kv.v, table, torch.tensor([20], dtype=torch.int32, device=place.device))
    k = torch.randn(20, HEADS, DIM, device=place.device)
    v = torch.randn(20, HEADS, DIM_V, device=place.device)
    slots = torch.tensor([32 + i if i < 16 else i - 16 for i in range(20)], device=place.device)
    write_kv(k, v, kv, slots)
    got_k, got_v = gather_pages(kv, 0, 20)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    assert math.isnan(float(kv.k[1, 0, 0, 0]))


def refused(error: type[Exception], match: str, **changes: object) -> None:
    kv = pages_on("cpu")
    given_ = {
        "k": torch.zeros(3, HEADS, DIM),
        "v": torch.zeros(3, HEADS, DIM_V),
        "kv": kv,
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
        **changes,
    }
    with pytest.raises(error, match=match):
        write_kv(**given_)  # type: ignore[arg-type]
    assert bool(kv.k.isnan().all()), "something was written"


def test_bad_input_is_refused_and_nothing_is_written() -> None:
    zeros = torch.zeros
    refused(
        ShapeError, r"k has shape \(3, 3, 24\); expected \[num_tokens, 2, 24\]", k=zeros(3, 3, 24)
    )
    refused(
        ShapeError, r"v has shape \(3, 2, 24\); expected \[num_tokens, 2, 16\]", v=zeros(3, 2, 24)
    )
    refused(ShapeError, r"k has shape \(2, 24\)", k=zeros(2, 24))
    refused(DeviceError, r"k is on meta and the pages are on cpu", k=zeros(3, 2, 24, device="meta"))
    refused(
        DTypeError, r"slot_mapping is torch.float32; expected torch.int64", slot_mapping=zeros(3)
    )
    long = torch.zeros(4, dtype=torch.int64)
    refused(ShapeError, r"slot_mapping has shape \(4,\).*at most \[3\]", slot_mapping=long)
    refused(ShapeError, r"slot_mapping has shape \(2, 2\)", slot_mapping=long.reshape(2, 2))
    away = torch.zeros(3, dtype=torch.int64, device="meta")
    refused(DeviceError, r"slot_mapping is on meta", slot_mapping=away)
    spread = zeros(3, HEADS, DIM, 2)[..., 0]
    refused(ArgumentError, r"k has strides .*the last one must be 1", k=spread)
    spread = zeros(3, HEADS, DIM_V, 2)[..., 0]
    refused(ArgumentError, r"v has strides .*the last one must be 1", v=spread)


@pytest.mark.parametrize("name", ["k", "v", "slot_mapping"])
def test_what_is_no_tensor_is_not_written(name: str) -> None:
    for wrong, shown in (
        ([0, 1, 2], f"{name} of type list"),
        (np.zeros((3, HEADS, DIM)), f"{name} of type numpy.ndarray"),
        (None, f"{name}=None"),
    ):
        match = re.escape(
            f"{shown} is not accepted; expected a torch.Tensor: pass torch.as_tensor({name})"
        )
        refused(DTypeError, match, **{name: wrong})


def test_pages_of_another_type_are_not_written() -> None:
    made = r"expected PagedKV\(k, v, page_table, seqlens_k, k_scale, v_scale\)"
    refused(ArgumentError, rf"kv of type tuple is not accepted; {made}", kv=(1, 2))
    refused(ArgumentError, rf"kv=None is not accepted; {made}", kv=None)


@pytest.mark.skipif(triton_interprets(), reason="the interpreter is a usable Triton")
def test_a_gpu_without_a_usable_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "triton 3.5.0 is installed, 3.6 or newer is needed: pip install 'triton>=3.6'"
    monkeypatch.setattr(capabilities, "triton_problem", lambda: why)
    with FakeTensorMode():
        pool = torch.empty(2, 16, HEADS, DIM, device="cuda")
        new = torch.empty(1, HEADS, DIM, device="cuda")
        table = torch.empty(1, 1, dtype=torch.int32, device="cuda")
        slots = torch.empty(1, dtype=torch.int32, device="cuda")
        with pytest.raises(NoKernelError) as caught:
            write_kv(new, new, PagedKV(pool, pool, table, slots), slots)
    assert str(caught.value) == f"write_kv cannot write to cuda:0: {why}"
    assert caught.value.reasons == {"triton": [why]}
