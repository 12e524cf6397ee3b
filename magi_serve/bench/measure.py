"""One case from inputs to rows: right first, then timed in pairs beside each baseline."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from magi_serve.bench import accuracy
from magi_serve.bench.baselines import BASELINES
from magi_serve.bench.cases import Case
from magi_serve.bench.inputs import Inputs, make_inputs, num_buffers
from magi_serve.bench.prepared import Prepared, Refused
from magi_serve.bench.targets import MEAN_TARGETS
from magi_serve.bench.timing import Race, Rates, Replay, Spread, fastest, race
from magi_serve.kernels.dispatch import choose_kernel
from magi_serve.kernels.ffa.api import ffa_attention, paged_attention
from magi_serve.kernels.ffa.planner import PagedPlanner
from magi_serve.types import AttentionOutput, AttentionProblem, SinkSpec

Row = dict[str, Any]
Ours = Callable[[int], AttentionOutput]


def prepare_ours(inputs: Inputs, kernel: str | None) -> tuple[str, Ours]:
    """Our kernel's name, and its call for a buffer, planned once as for all layers of a step.

    Raises:
        NoKernelError, ArgumentError: no kernel, or not the named one, can do the case.
    """
    case = inputs.case
    sink = None if inputs.sink is None else SinkSpec(inputs.sink.float())
    device = inputs.buffers[0].q.device
    arch = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    problem = AttentionProblem(
        device=device.type,
        q_dtype=torch.bfloat16,
        kv_dtype=inputs.buffers[0].k.dtype,
        kv_scales="none" if case.stored is None else "head",
        num_q_heads=case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim,
        arch=arch,
        page_size=case.page_size,
        sinks=int(case.sink),
        window=case.window is not None,
    )
    if inputs.page_table is None:
        assert inputs.slices is not None
        slices = inputs.slices

        def packed(i: int) -> AttentionOutput:
            buffer = inputs.buffers[i]
            return ffa_attention(buffer.q, buffer.k, buffer.v, slices, sink=sink, kernel=kernel)

        return choose_kernel(problem, kernel).name, packed
    window = None if case.window is None else (case.window - 1, 0)
    decodes = case.q_lens[: case.num_decodes]
    planner = PagedPlanner(
        problem,
        max_tokens=case.num_tokens,
        max_seqs=len(case.q_lens),
        device=device,
        window=window,
        kernel=kernel,
    )
    plan = planner.plan(
        inputs.cu_seqlens_q,
        inputs.seqlens_k,
        num_tokens=case.num_tokens,
        num_decodes=len(decodes),
        num_decode_tokens=sum(decodes),
        max_decode_q_len=max(decodes, default=1),
        max_seqlen_k=inputs.max_k,
    )

    def paged(i: int) -> AttentionOutput:
        buffer = inputs.buffers[i]
        return paged_attention(
            buffer.q,
            inputs.kv(i),
            inputs.cu_seqlens_q,
            window=window,
            sink=sink,
            out=buffer.out,
            plan=plan,
        )

    return plan.kernel, paged


def measure(
    case: Case,
    baselines: Sequence[str],
    *,
    kernel: str | None,
    pairs: int,
    rates: Rates,
    say: Callable[[str], None],
    device: str = "cuda",
) -> list[Row]:
    """Check `case`, then time it beside every one of `baselines`; one row for each.

    Nothing raised by a kernel or a baseline ends the run: its row says `failed` and why.
    """
    row: Row = {
        "case": "attention",
        "name": case.name,
        "group": case.group,
        "work": asdict(case) | {"targets": dict(case.targets)},
        "flops": case.flops(),
        "bytes": case.bytes(),
        "kernel": kernel,
        "rates": asdict(rates),
    }

    def all_rows(status: str, reason: str) -> list[Row]:
        say(f"{status}: {reason}")
        return [row | {"baseline": b, "status": status, "reason": reason} for b in baselines]

    try:
        say("inputs")
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 1
        inputs = make_inputs(case, buffers=num_buffers(case, l2), device=device)
        row["buffers"] = len(inputs.buffers)
        row["kernel"], ours = prepare_ours(inputs, kernel)
        say(f"checking {row['kernel']}")
        result = ours(0)
        row["error"], wrong = accuracy.check(inputs, result)
        if wrong is not None:
            return all_rows("wrong", wrong)
        expected = result.out.clone()
        timer = Replay(ours, len(inputs.buffers))
    except Exception as error:
        return all_rows("failed", _reason(error))
    rows = []
    for name in baselines:
        say(name)
        found = row | {"baseline": name}
        try:
            found |= _beside(inputs, name, kernel, expected, timer, pairs, rates)
        except Refused as error:
            found |= {"status": "refused", "reason": str(error)}
        except Exception as error:
            found |= {"status": "failed", "reason": f"{name}: {_reason(error)}"}
        if "ratio" in found:
            say(f"{name} {found['ratio']['median']:.3f}x")
        else:
            say(f"{name} {found['status']}: {found['reason']}")
        rows.append(found)
    return rows


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _beside(
    inputs: Inputs,
    name: str,
    kernel: str | None,
    expected: torch.Tensor,
    ours: Replay,
    pairs: int,
    rates: Rates,
) -> Row:
    """What a row says about one baseline."""
    prepared: Prepared = BASELINES[name](inputs, kernel)
    errors = []
    for run in prepared.runs.values():
        if prepared.flops is None:
            inputs.buffers[0].out.fill_(float("nan"))
            errors.append(accuracy.distance(run(0), expected))
    if not all(e <= max(prepared.error, accuracy.MOST_ERROR) for e in errors):
        reason = f"its result is {max(errors, default=0):.3g} away from ours, which is right"
        return {"status": "baseline wrong", "reason": reason}
    timers = [(setting, Replay(run, ours.calls)) for setting, run in prepared.runs.items()]
    setting, timer = fastest(timers)
    case = inputs.case
    scale = 1.0 if prepared.flops is None else case.flops() / prepared.flops
    return {"setting": setting, "baseline_error": max(errors, default=None)} | result_row(
        case, name, race(timer, ours, pairs), rates, scale
    )


def result_row(case: Case, baseline: str, raced: Race, rates: Rates, scale: float = 1.0) -> Row:
    """Times, rates, shares and targets of a finished race; `scale` turns times into rates."""
    ms = raced.ours_ms.median
    tflops, tb_per_s = case.flops() / ms / 1e9, case.bytes() / ms / 1e9
    ratio = Spread(*(scale * x for x in (raced.ratio.median, raced.ratio.low, raced.ratio.high)))
    share_of_read = tb_per_s / rates.read_tb_per_s
    target = case.targets.get(baseline)
    return {
        "status": "ok",
        "pairs": raced.pairs,
        "ours_ms": asdict(raced.ours_ms),
        "baseline_ms": asdict(raced.baseline_ms),
        "ratio": asdict(ratio),
        "target": target,
        "reached": None if target is None else ratio.median >= target,
        "tflops": tflops,
        "tb_per_s": tb_per_s,
        "share_of_matmul": tflops / rates.matmul_tflops,
        "share_of_copy": tb_per_s / rates.copy_tb_per_s,
        "share_of_read": share_of_read,
        "read_target": case.targets.get("read"),
    }


def means(rows: Sequence[Row]) -> list[Row]:
    """Geometric means of the ratios, by group and baseline, with the targets that means have."""
    found: dict[tuple[str, str], list[float | None]] = {}
    for row in rows:
        ratio = row["ratio"]["median"] if "ratio" in row else None
        found.setdefault((row["group"], row["baseline"]), []).append(ratio)
    result = []
    for (group, baseline), values in found.items():
        timed = [v for v in values if v is not None]
        if len(values) < 2 or not timed:
            continue
        mean = math.exp(statistics.fmean(map(math.log, timed)))
        goals: Mapping[str, float] = MEAN_TARGETS.get(group, {})
        target = goals.get(baseline)
        result.append(
            {
                "group": group,
                "baseline": baseline,
                "mean": mean,
                "timed": len(timed),
                "of": len(values),
                "target": target,
                "reached": None if target is None else mean >= target and len(timed) == len(values),
            }
        )
    return result
