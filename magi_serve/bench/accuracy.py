"""Correctness before speed: rows of a result against the reference in float64."""

import torch
from torch import Tensor

from magi_serve.bench.inputs import Inputs
from magi_serve.kernels.ffa.reference import attend
from magi_serve.kernels.paged.reference import gather_pages
from magi_serve.testing import assert_as_accurate_as_torch
from magi_serve.types import AttentionOutput, SinkSpec

ROWS = 16
"""Rows checked of each of three sequences."""
MOST_ERROR = 0.02
"""How far a baseline's result may be from ours, in the norm."""


def check(inputs: Inputs, result: AttentionOutput) -> tuple[float, str | None]:
    """Hold rows of the first, middle and last sequence to what plain torch reaches.

    Args:
        inputs: of the case; `result` is for its first buffer.
        result: out and lse of all rows.

    Returns:
        The largest ``|out - ref| / |ref|`` in the norm over rows of a sequence, and what is wrong,
        or None.
    """
    case = inputs.case
    if bool(result.out.isnan().any()):
        return float("nan"), "out holds NaN, or was not written everywhere"
    intervals = [(torch.from_numpy(b), torch.from_numpy(e)) for b, e in case.intervals()]
    worst = 0.0
    for s in sorted({0, len(case.q_lens) // 2, len(case.q_lens) - 1}):
        first_row, first_key = sum(case.q_lens[:s]), sum(case.k_lens[:s])
        # From the last row on, which sees the most keys.
        step = max(1, case.q_lens[s] // (ROWS - 1))
        rows = first_row + torch.arange(case.q_lens[s] - 1, -1, -step)
        key = first_key + torch.arange(case.k_lens[s])
        visible = torch.zeros(len(rows), len(key), dtype=torch.bool)
        for begin, end in intervals:
            visible |= (key >= begin[rows, None]) & (key < end[rows, None])
        visible = visible.to(result.out.device)
        rows = rows.to(result.out.device)
        q = inputs.buffers[0].q[rows]
        sink = None if inputs.sink is None else SinkSpec(inputs.sink.float())

        def reference(
            dtype: torch.dtype,
            q: Tensor = q,
            s: int = s,
            visible: Tensor = visible,
            sink: SinkSpec | None = sink,
        ) -> AttentionOutput:
            scale = q.shape[-1] ** -0.5
            k, v = _keys(inputs, s, dtype)
            return attend(q.to(dtype), k, v, visible, softmax_scale=scale, sink=sink)

        part = AttentionOutput(result.out[rows], result.lse[rows])
        worst = max(worst, distance(part.out, reference(torch.float64).out))
        try:
            assert_as_accurate_as_torch(part, reference)
        except AssertionError as error:
            return worst, f"sequence {s}: {error}"
    return worst, None


def distance(out: Tensor, reference: Tensor) -> float:
    """``|out - reference| / |reference|``, in float64 where that is small, else in fp32."""
    dtype = torch.float64 if out.numel() < 1 << 24 else torch.float32
    difference = torch.linalg.vector_norm(out.to(dtype) - reference.to(dtype))
    return float(difference / torch.linalg.vector_norm(reference.to(dtype)))


def _keys(inputs: Inputs, s: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of sequence `s` in `dtype`, one after the other."""
    buffer, case = inputs.buffers[0], inputs.case
    first, count = sum(case.k_lens[:s]), case.k_lens[s]
    if inputs.page_table is None:
        mine = slice(first, first + count)
        return buffer.k[mine].to(dtype), buffer.v[mine].to(dtype)
    return gather_pages(inputs.kv(0), s, count, dtype)
