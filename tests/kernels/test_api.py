"""Bad input: an error that names the argument, the value, what is accepted and the way out.

Nothing is launched then.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from magi_serve import (
    AttentionSlices,
    BidirectionalSpans,
    SinkSpec,
    ffa_attention,
    paged_attention,
)
from magi_serve.errors import ArgumentError, DeviceError, DTypeError, NoKernelError, ShapeError
from magi_serve.kernels.ffa import cpu, reference
from magi_serve.testing import make_dense, make_paged

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reaching a kernel fails the test."""

    def launched(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a kernel was launched")

    monkeypatch.setattr(cpu, "run", launched)
    monkeypatch.setattr(reference, "ffa_attention_ref", launched)
    monkeypatch.setattr(reference, "paged_attention_ref", launched)


def slices_call(**changes: Any) -> Callable[[], Any]:
    """A valid call of `ffa_attention` but for `changes`."""
    q, k, v = make_dense(10, 20, num_q_heads=4, num_kv_heads=2)
    arguments = {"q": q, "k": k, "v": v, "slices": AttentionSlices([(0, 10)], [(0, 20)]), **changes}
    return lambda: ffa_attention(**arguments)


def paged_call(**changes: Any) -> Callable[[], Any]:
    """A valid call of `paged_attention` but for `changes`; `kv_*` change the cache."""
    batch = make_paged([3, 1], [30, 8], num_q_heads=4, num_kv_heads=2)
    of_kv = {name.removeprefix("kv_"): x for name, x in changes.items() if name.startswith("kv_")}
    arguments = {"q": batch.q, "kv": replace(batch.kv, **of_kv), "cu_seqlens_q": batch.cu_seqlens_q}
    arguments |= {name: x for name, x in changes.items() if not name.startswith("kv_")}
    return lambda: paged_attention(**arguments)


def zeros(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def spread(*shape: int) -> torch.Tensor:
    """A tensor whose last stride is 2."""
    return zeros(*shape, 2)[..., 0]


BAD_OPERANDS = {
    "q of two dims": (
        ShapeError,
        {"q": zeros(10, 64)},
        r"q has shape \(10, 64\); expected \[tokens",
    ),
    "k of two dims": (
        ShapeError,
        {"k": zeros(20, 64)},
        r"k has shape \(20, 64\); expected \[tokens",
    ),
    "v of four dims": (ShapeError, {"v": zeros(1, 20, 2, 64)}, r"v has shape \(1, 20, 2, 64\)"),
    "k of other dtype": (
        DTypeError,
        {"k": zeros(20, 2, 64, dtype=FP16)},
        r"k is torch.float16 and q is torch.float32; expected q's dtype: convert",
    ),
    "v of other dtype": (DTypeError, {"v": zeros(20, 2, 64, dtype=FP16)}, r"v is torch.float16"),
    "k elsewhere": (
        DeviceError,
        {"k": zeros(20, 2, 64, device="meta")},
        r"k is on meta and q is on cpu; move one of them",
    ),
    "k of other head_dim": (ShapeError, {"k": zeros(20, 2, 32)}, r"k has head_dim 32 and q has 64"),
    "v of other heads": (ShapeError, {"v": zeros(20, 1, 64)}, r"k has 2 heads and v has 1"),
    "v of other keys": (ShapeError, {"v": zeros(19, 2, 64)}, r"k has 20 keys and v has 19"),
    "heads that do not divide": (
        ShapeError,
        {"q": zeros(10, 5, 64)},
        r"q has 5 heads and k has 2; expected query heads to be a multiple",
    ),
    "q spread out": (
        ArgumentError,
        {"q": spread(10, 4, 64)},
        r"q has strides .*; the last one must be 1: call q.contiguous\(\)",
    ),
    "k spread out": (ArgumentError, {"k": spread(20, 2, 64)}, r"call k.contiguous\(\)"),
    "v spread out": (ArgumentError, {"v": spread(20, 2, 64)}, r"call v.contiguous\(\)"),
    "out of other shape": (
        ShapeError,
        {"out": zeros(10, 4, 32)},
        r"out has shape \(10, 4, 32\); expected \[10, 4, 64\]",
    ),
    "out of other dtype": (DTypeError, {"out": zeros(10, 4, 64, dtype=FP16)}, r"out is .*float16"),
    "out elsewhere": (DeviceError, {"out": zeros(10, 4, 64, device="meta")}, r"out is on meta"),
    "out spread out": (ArgumentError, {"out": spread(10, 4, 64)}, r"out has strides"),
}


@pytest.mark.parametrize("case", BAD_OPERANDS)
def test_operands_that_disagree_are_refused(case: str) -> None:
    error, changes, match = BAD_OPERANDS[case]
    with pytest.raises(error, match=match):
        slices_call(**changes)()


BAD_CACHES = {
    "pages of other dtype": (
        DTypeError,
        {"kv_k": zeros(9, 16, 2, 64, dtype=FP16), "kv_v": zeros(9, 16, 2, 64, dtype=FP16)},
        r"kv.k is torch.float16 and q is torch.float32; expected q's dtype, or torch.float8_e4m3fn",
    ),
    "pages of other head_dim": (
        ShapeError,
        {"kv_k": zeros(9, 16, 2, 32), "kv_v": zeros(9, 16, 2, 32)},
        r"kv.k has head_dim 32 and q has 64",
    ),
    "heads that do not divide": (
        ShapeError,
        {"kv_k": zeros(9, 16, 3, 64), "kv_v": zeros(9, 16, 3, 64)},
        r"q has 4 heads and kv.k has 3; expected query heads to be a multiple",
    ),
    "pages elsewhere": (
        DeviceError,
        {"kv_k": zeros(9, 16, 2, 64, device="meta"), "kv_v": zeros(9, 16, 2, 64, device="meta")},
        r"kv.k is on meta and q is on cpu",
    ),
    "table elsewhere": (
        DeviceError,
        {"kv_page_table": zeros(2, 3, dtype=torch.int32, device="meta")},
        r"kv.page_table is on meta and q is on cpu",
    ),
    "lengths elsewhere": (
        DeviceError,
        {"kv_seqlens_k": zeros(2, dtype=torch.int32, device="meta")},
        r"kv.seqlens_k is on meta and q is on cpu",
    ),
    "too few starts": (
        ShapeError,
        {"cu_seqlens_q": zeros(2, dtype=torch.int32)},
        r"cu_seqlens_q has shape \(2,\); expected \[3\]: one more than the 2 sequences",
    ),
    "starts of int64": (
        DTypeError,
        {"cu_seqlens_q": zeros(3, dtype=torch.int64)},
        r"cu_seqlens_q is torch.int64; expected torch.int32",
    ),
    "starts elsewhere": (
        DeviceError,
        {"cu_seqlens_q": zeros(3, dtype=torch.int32, device="meta")},
        r"cu_seqlens_q is on meta",
    ),
    "causal of other length": (
        ShapeError,
        {"causal": zeros(3, dtype=torch.bool)},
        r"causal has shape \(3,\); expected \[2\] or a bool",
    ),
    "causal elsewhere": (
        DeviceError,
        {"causal": zeros(2, dtype=torch.bool, device="meta")},
        r"causal is on meta",
    ),
    "slopes in a list": (
        DTypeError,
        {"alibi_slopes": [0.5] * 4},
        r"alibi_slopes of type list is not accepted; expected a torch.Tensor: pass torch.as_tensor",
    ),
    "slopes of integers": (
        DTypeError,
        {"alibi_slopes": zeros(4, dtype=torch.int64)},
        r"alibi_slopes is torch.int64; expected floating-point numbers: call alibi_slopes.float",
    ),
    "slopes of other heads": (
        ShapeError,
        {"alibi_slopes": zeros(2)},
        r"alibi_slopes has shape \(2,\); expected \[4\], one slope per query head",
    ),
    "out of other shape": (
        ShapeError,
        {"out": zeros(4, 4, 32)},
        r"out has shape \(4, 4, 32\); expected \[4, 4, 64\]",
    ),
    "out of other dtype": (
        DTypeError,
        {"out": zeros(4, 4, 64, dtype=FP16)},
        r"out is torch.float16; expected q's torch.float32",
    ),
    "out elsewhere": (DeviceError, {"out": zeros(4, 4, 64, device="meta")}, r"out is on meta"),
    "out spread out": (ArgumentError, {"out": spread(4, 4, 64)}, r"out has strides"),
    "window of three": (
        ArgumentError,
        {"window": (1, 2, 3)},
        r"window=\(1, 2, 3\) is not accepted",
    ),
    "negative window": (
        ArgumentError,
        {"window": (-1, 0)},
        r"window=\(-1, 0\) is not accepted; expected None or \(left, right\)",
    ),
    "broken window": (ArgumentError, {"window": (1.5, 0)}, r"window=\(1.5, 0\) is not accepted"),
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_caches_and_batches_that_disagree_are_refused(case: str) -> None:
    error, changes, match = BAD_CACHES[case]
    with pytest.raises(error, match=match):
        paged_call(**changes)()


NOT_A_TENSOR = {"list": [[0.0]], "array": np.zeros((4, 4, 64), dtype=np.float32), "number": 3}


@pytest.mark.parametrize("wrong", NOT_A_TENSOR)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((slices_call, name) for name in ("q", "k", "v", "out")),
        *((paged_call, name) for name in ("q", "cu_seqlens_q", "out")),
    ],
)
def test_what_is_no_tensor_is_refused_with_how_to_make_one(
    call: Callable[..., Any], name: str, wrong: str
) -> None:
    value = NOT_A_TENSOR[wrong]
    with pytest.raises(DTypeError) as caught:
        call(**{name: value})()
    shown = {"list": " of type list", "array": " of type numpy.ndarray", "number": "=3"}[wrong]
    assert str(caught.value) == (
        f"{name}{shown} is not accepted; expected a torch.Tensor: pass torch.as_tensor({name})"
    )


WRONG_TYPES = {
    "slices in a list": (
        slices_call,
        {"slices": [(0, 10)]},
        r"slices of type list is not accepted; .* AttentionSlices\(q_ranges, k_ranges, mask_types",
    ),
    "pages in a tuple": (
        paged_call,
        {"kv": (zeros(9, 16, 2, 64), zeros(9, 16, 2, 64))},
        r"kv of type tuple is not accepted; expected PagedKV\(k, v, page_table, seqlens_k, ",
    ),
    "no pages": (paged_call, {"kv": None}, r"kv=None is not accepted; expected PagedKV\("),
    "causal of a word": (
        paged_call,
        {"causal": "yes"},
        r"causal='yes' is not accepted; expected a bool, or a bool tensor \[2\]",
    ),
    "causal of a number": (paged_call, {"causal": 1.5}, r"causal=1.5 is not accepted"),
    "causal in a list": (paged_call, {"causal": [True, False]}, r"causal of type list is not acc"),
    "causal of fractions": (
        paged_call,
        {"causal": zeros(2)},
        r"causal is torch.float32; expected torch.bool, or torch.int32 of 0 and 1: call causal.bo",
    ),
    "window of a number": (paged_call, {"window": 128}, r"window=128 is not accepted; expected N"),
    "spans in a list": (
        paged_call,
        {"spans": [[(0, 4)], []]},
        r"spans of type list is not accepted; expected BidirectionalSpans\(ranges, within_window\)",
    ),
    "plan of a word": (
        paged_call,
        {"plan": "cpu"},
        r"plan='cpu' is not accepted; expected what PagedPlanner.plan returned, or None",
    ),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_arguments_of_another_type_are_refused(case: str) -> None:
    call, changes, match = WRONG_TYPES[case]
    with pytest.raises(ArgumentError, match=match):
        call(**changes)()


BAD_OPTIONS = {
    "softcap of a word": ({"softcap": "30"}, r"softcap='30' is not accepted; expected a finite nu"),
    "softcap of nothing": ({"softcap": None}, r"softcap=None is not accepted"),
    "softcap of a bool": ({"softcap": True}, r"softcap=True is not accepted"),
    "softcap in a tensor": ({"softcap": zeros(1)}, r"softcap of type torch.Tensor is not accepted"),
    "huge softcap": ({"softcap": 10**400}, r"softcap=10+ is not accepted"),
    "softmax_scale of a word": (
        {"softmax_scale": "x"},
        r"softmax_scale='x' is not accepted; expected a finite number > 0, or None for head_dim",
    ),
    "softmax_scale of a complex": ({"softmax_scale": 1j}, r"softmax_scale of type complex is not"),
    "sink of a tensor": (
        {"sink": zeros(4)},
        r"sink of type torch.Tensor is not accepted; expected SinkSpec\(logits\)",
    ),
    "max-logits of a word": (
        {"return_max_logits": "no"},
        r"return_max_logits='no' is not accepted; expected a bool",
    ),
    "kernel of a number": ({"kernel": 3}, r"kernel=3 is unknown \(accepts .*cpu"),
    "kernels in a list": ({"kernel": ["cpu"]}, r"kernel of type list is unknown \(accepts .*cpu"),
    "negative softcap": ({"softcap": -1.0}, r"softcap=-1.0 is not accepted; expected a finite"),
    "softcap of nan": ({"softcap": math.nan}, r"softcap=nan is not accepted"),
    "softcap of inf": ({"softcap": math.inf}, r"softcap=inf is not accepted"),
    "softmax_scale of nan": ({"softmax_scale": math.nan}, r"softmax_scale=nan is not accepted"),
    "softmax_scale of inf": ({"softmax_scale": math.inf}, r"softmax_scale=inf is not accepted"),
    "softmax_scale of 0": ({"softmax_scale": 0.0}, r"softmax_scale=0.0 .*a finite number > 0"),
    "sink of other heads": (
        {"sink": SinkSpec(zeros(3))},
        r"sink has 3 heads .* and q has 4; expected one logit per query head, slice the logits",
    ),
    "sink of other tokens": (
        {"sink": SinkSpec(zeros(7, 1, 4))},
        r"sink has logits for 7 tokens and q has \d+; expected as many",
    ),
    "unknown kernel": (
        {"kernel": "flash"},
        r"kernel='flash' is unknown \(accepts .*cpu.*triton.*reference.*\); leave it out",
    ),
}


@pytest.mark.parametrize("call", [slices_call, paged_call])
@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_make_no_sense_are_refused(call: Callable[..., Any], case: str) -> None:
    changes, match = BAD_OPTIONS[case]
    with pytest.raises(ArgumentError, match=match):
        call(**changes)()


def test_slices_past_the_operands_are_refused() -> None:
    for q_end, k_end, match in (
        (11, 20, r"slices.q_ranges\[1\] = \[10, 11\] ends past the 10 rows of q; expected .* 10"),
        (10, 21, r"slices.k_ranges\[1\] = \[3, 21\] ends past the 20 rows of k; expected .* 20"),
    ):
        slices = AttentionSlices([(0, 10), (10, q_end)], [(0, 2), (3, k_end)])
        with pytest.raises(ArgumentError, match=match):
            slices_call(slices=slices)()


def test_a_plan_for_something_else_is_refused() -> None:
    batch = make_paged([3, 1], [30, 8])
    fewer = make_paged([4], [30])
    plan = batch.plan(batch.planner("cpu", (5, 0)), 0)
    arguments = {"q": batch.q, "kv": batch.kv, "cu_seqlens_q": batch.cu_seqlens_q, "plan": plan}
    for changes, match in (
        ({"q": batch.q[:3], "window": (5, 0)}, r"plan is for rows of q 4 and the call has 3; plan"),
        ({}, r"plan is for window \(5, 0\) and the call has None; plan this very batch"),
        (
            {"window": (5, 0), "q": torch.randn(4, 8, 64)},
            r"head_dim_v\) \(4, 2, 64, 64\) and the call has \(8, 2, 64, 64\)",
        ),
        (
            {"window": (5, 0), "kv": fewer.kv, "cu_seqlens_q": fewer.cu_seqlens_q},
            r"plan is for sequences 2 and the call has 1",
        ),
        ({"window": (5, 0), "causal": False}, r"plan is for causal=True and the call has causal=F"),
        (
            {"window": (5, 0), "spans": BidirectionalSpans([[], []])},
            r"plan is for other spans than the call has; pass the very BidirectionalSpans",
        ),
        (
            {"window": (5, 0), "kernel": "reference"},
            r"plan is for kernel cpu and the call has kernel='reference'; name it to PagedPlanner",
        ),
    ):
        with pytest.raises(ArgumentError, match=match):
            paged_attention(**{**arguments, **changes})


def test_a_kernel_forced_onto_what_it_cannot_do_says_why_and_what_can() -> None:
    q, k, v = make_dense(4, 4, dtype=FP64)
    slices = AttentionSlices([(0, 4)], [(0, 4)])
    with pytest.raises(NoKernelError) as caught:
        ffa_attention(q, k, v, slices, kernel="cpu")
    message = str(caught.value)
    assert "kernel cpu cannot do" in message
    assert "q dtype torch.float64 is not supported (accepts fp16, bf16, fp32)" in message
    assert "use kernel='reference' or leave kernel out" in message
    assert set(caught.value.reasons) == {"cpu"}


def test_a_problem_that_no_kernel_can_do_lists_all_reasons() -> None:
    q, k, v = (x.long() for x in make_dense(4, 4))
    slices = AttentionSlices([(0, 4)], [(0, 4)])
    for kernel in (None, "cpu"):
        with pytest.raises(NoKernelError) as caught:
            ffa_attention(q, k, v, slices, kernel=kernel)
        assert "torch.int64 is not supported" in str(caught.value)
    assert "no other kernel can do it either" in str(caught.value)


def test_argument_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="softcap"):
        slices_call(softcap=-1.0)()
    with pytest.raises(ValueError, match="kernel"):
        paged_call(kernel="flash")()


def test_a_valid_call_would_have_been_launched() -> None:
    numbers = {"softcap": 30, "softmax_scale": np.float32(0.1)}
    for call in (
        slices_call(),
        paged_call(),
        slices_call(kernel="reference"),
        slices_call(**numbers),
        paged_call(causal=zeros(2, dtype=torch.bool), **numbers),
        paged_call(causal=zeros(2, dtype=torch.int32)),
    ):
        with pytest.raises(pytest.fail.Exception, match="launched"):
            call()
