"""Attention kernels beside named baselines, in one run: the table, the JSON lines, the chart."""

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magi_serve.bench.baselines import BASELINES, baselines_for
from magi_serve.bench.cases import Case, select
from magi_serve.bench.inputs import need_gpu
from magi_serve.bench.measure import Row, means, measure
from magi_serve.bench.report import add_commit, append_json, machine, table
from magi_serve.bench.targets import MEAN_TARGETS
from magi_serve.bench.timing import Rates, measure_rates
from magi_serve.errors import ArgumentError
from magi_serve.kernels.capabilities import KERNEL_NAMES

PAIRS, QUICK_PAIRS = 15, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="a group, a case's name or a pattern of names, or WORK/HEADS/LAYOUT[/windowN] as "
        "16x1@8k/32:8:128/page16; default: every case that has a target",
    )
    parser.add_argument("--kernel", help=f"one of {', '.join(KERNEL_NAMES)}; default: dispatch's")
    parser.add_argument(
        "--baseline",
        action="extend",
        nargs="+",
        metavar="NAME",
        help=f"{', '.join(BASELINES)} or all; default: those that a case has targets for",
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the ratios")
    parser.add_argument(
        "--pairs", type=int, help=f"turns that count; default {PAIRS}, {QUICK_PAIRS} with --quick"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the first case of each group and head shape only"
    )
    parser.add_argument("--list", action="store_true", help="show cases and targets, and end")
    add_commit(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 0, or 1 if our kernel was wrong or something failed in some case.

    Raises:
        ArgumentError: a name is unknown, or matplotlib is missing for a chart.
        DeviceError: there is no GPU.
    """
    cases = select(args.cases, quick=args.quick)
    beside = {case.name: baselines_for(case, args.baseline) for case in cases}
    if args.kernel is not None and args.kernel not in KERNEL_NAMES:
        raise ArgumentError(
            f"--kernel {args.kernel!r} is unknown; accepted: {', '.join(KERNEL_NAMES)}"
        )
    pairs = args.pairs if args.pairs is not None else QUICK_PAIRS if args.quick else PAIRS
    if pairs < 1:
        raise ArgumentError(f"--pairs {pairs} is not accepted; expected 1 or more")
    if args.list:
        print(table(listing(cases)))
        return 0
    pyplot = _pyplot() if args.plot else None
    need_gpu()
    rates = measure_rates()
    print(_rates_text(rates), file=sys.stderr, flush=True)
    rows: list[Row] = []
    facts = machine(args.commit)
    start = time.monotonic()
    for i, case in enumerate(cases, 1):

        def say(text: str, place: str = f"[{i}/{len(cases)}] {case.name}") -> None:
            print(f"{time.monotonic() - start:6.0f} s {place}: {text}", file=sys.stderr, flush=True)

        new = measure(
            case, beside[case.name], kernel=args.kernel, pairs=pairs, rates=rates, say=say
        )
        new = [row | facts for row in new]
        rows += new
        if args.json:
            append_json(args.json, new)
    print(report(rows, rates), flush=True)
    if pyplot is not None:
        plot(rows, args.plot, pyplot)
        print(f"wrote {args.plot}", file=sys.stderr)
    return int(any(row["status"] in ("wrong", "failed") for row in rows))


def _rates_text(rates: Rates) -> str:
    return (
        f"this run: copy {rates.copy_tb_per_s:.2f} TB/s, read {rates.read_tb_per_s:.2f} TB/s, "
        f"bf16 matmul {rates.matmul_tflops:.0f} TFLOP/s"
    )


def listing(cases: Sequence[Case]) -> list[list[str]]:
    """Rows of ``--list``."""
    shown = [["group", "case", "at least", "mean of the group"]]
    for case in cases:
        mean = MEAN_TARGETS.get(case.group, {})
        shown.append([case.group, case.name, _targets(case.targets), _targets(mean)])
    return shown


def _targets(targets: Any) -> str:
    each = [f"{v:.0%} of read" if k == "read" else f"{v:.2f} {k}" for k, v in targets.items()]
    return ", ".join(each) or "-"


def report(rows: Sequence[Row], rates: Rates) -> str:
    """The tables that are printed: every row, then the means of groups."""
    shown = [
        [
            "case",
            "baseline",
            "ratio (quartiles)",
            "target",
            "ours (ms)",
            "baseline (ms)",
            "rate",
            "share",
            "error",
            "",
        ]
    ]
    shown += [_shown(row) for row in rows]
    parts = [_rates_text(rates), table(shown)]
    of_groups = [["group", "baseline", "mean ratio", "target", "cases", ""]]
    for mean in means(rows):
        target = mean["target"]
        of_groups.append(
            [
                mean["group"],
                mean["baseline"],
                f"{mean['mean']:.3f}x",
                "-" if target is None else f"{target:.2f}x",
                f"{mean['timed']} of {mean['of']}",
                _verdict(mean["reached"]),
            ]
        )
    if len(of_groups) > 1:
        parts.append(table(of_groups))
    parts.append("A ratio is the baseline's time over ours: above 1 ours is faster.")
    return "\n\n".join(parts)


def _verdict(reached: bool | None) -> str:
    return "" if reached is None else "reached" if reached else "missed"


def _shown(row: Row) -> list[str]:
    error = f"{row['error']:.1e}" if "error" in row else "-"
    if "ratio" not in row:
        said = f"{row['status']}: {row['reason']}".replace("|", "\\|")
        goal = row["work"]["targets"].get(row["baseline"])
        target = "-" if goal is None else f"{goal:.2f}x"
        return [row["name"], row["baseline"], "-", target, "-", "-", "-", "-", error, said]
    ratio = row["ratio"]
    # What bounds the case decides which rate is shown.
    rates = row["rates"]
    compute = row["flops"] / rates["matmul_tflops"] > row["bytes"] / rates["read_tb_per_s"]
    rate = f"{row['tflops']:.0f} TFLOP/s" if compute else f"{row['tb_per_s']:.2f} TB/s"
    share = row["share_of_matmul"] if compute else row["share_of_read"]
    verdicts = [_verdict(row["reached"])]
    if (least := row["read_target"]) is not None:
        verdict = _verdict(row["share_of_read"] >= least)
        verdicts.append(f"{least:.0%} of read {verdict}")
    return [
        row["name"],
        row["baseline"],
        f"{ratio['median']:.3f}x ({ratio['low']:.3f}-{ratio['high']:.3f})",
        "-" if row["target"] is None else f"{row['target']:.2f}x",
        f"{row['ours_ms']['median']:.4f}",
        f"{row['baseline_ms']['median']:.4f}",
        rate,
        f"{share:.0%} of {'matmul' if compute else 'read'}",
        error,
        "; ".join(v for v in verdicts if v),
    ]


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ArgumentError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "--plot out and draw from the --json file"
        ) from error


def plot(rows: Sequence[Row], path: Path, pyplot: Any) -> None:
    """Ratios with quartiles as dots, targets as bars, one line per case; 1 is the baseline."""
    timed = [row for row in rows if "ratio" in row]
    names = list(dict.fromkeys(row["name"] for row in timed))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.25 * len(names)))
    for baseline in dict.fromkeys(row["baseline"] for row in timed):
        own = [row for row in timed if row["baseline"] == baseline]
        y = [names.index(row["name"]) for row in own]
        x = [row["ratio"]["median"] for row in own]
        low = [row["ratio"]["median"] - row["ratio"]["low"] for row in own]
        high = [row["ratio"]["high"] - row["ratio"]["median"] for row in own]
        axes.errorbar(x, y, xerr=[low, high], fmt="o", markersize=4, label=f"to {baseline}")
        goals = [(row["target"], i) for row, i in zip(own, y, strict=True) if row["target"]]
        if goals:
            axes.plot(*zip(*goals, strict=True), "|", color="black", markersize=9)
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("the baseline's time over ours (bars: targets)")
    if timed:
        axes.set_title(f"{timed[0].get('gpu', '')}, {timed[0].get('commit', '')}", fontsize=9)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
