"""``magi-serve tune``: choose the kernels' tiles on this GPU, and write them to a file.

Candidates of a short list are held against the reference, then take turns with the present row on
the same inputs; a row is replaced only where another is faster by more than the noise. The file is
written after every decision. Serving never tunes: it reads `kernels/ffa/tuned/*.json`.
"""

import argparse
import contextlib
import multiprocessing
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from magi_serve.bench.report import add_commit, append_json, machine, table
from magi_serve.bench.tune_bench import GpuBench
from magi_serve.bench.tune_compile import Gpu
from magi_serve.bench.tune_run import Clock, Outcome, Tuning, shown
from magi_serve.bench.tune_targets import Target, select
from magi_serve.errors import ArgumentError, MagiServeError
from magi_serve.kernels.ffa import tuning
from magi_serve.kernels.ffa.tuned_files import Tuned, loads, normal_name, read

PAIRS, QUICK_PAIRS = 11, 5
BUDGET_S = 480.0
GRACE_S = 60.0
"""How long past the budget a kernel that does not end is waited for."""


def main(argv: Sequence[str]) -> int:
    """Run ``magi-serve tune ARGV``.

    Returns:
        0, or 1 if something failed: the present row of a target, the GPU, an argument.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return run(args, "magi-serve tune " + shlex.join(argv))
    except MagiServeError as error:
        print(f"magi-serve tune: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="magi-serve tune",
        description="Choose the kernels' tiles on this GPU by measuring, and write them to a file.",
    )
    parser.add_argument(
        "--case",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what to tune: names that --list shows, or patterns of them; default: everything",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="what to improve, and write; default: the package's own file for this GPU",
    )
    parser.add_argument(
        "--json", type=Path, metavar="LOG", help="append what was measured, a line each"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"the most that it takes; default {BUDGET_S:.0f}",
    )
    parser.add_argument(
        "--pairs", type=int, help=f"turns that count; default {PAIRS}, {QUICK_PAIRS} with --quick"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the most important rows, on two cases of each"
    )
    parser.add_argument("--list", action="store_true", help="show what can be tuned, and end")
    add_commit(parser)
    return parser


def run(args: argparse.Namespace, command: str) -> int:
    """Tune; returns the exit code.

    Raises:
        ArgumentError: a name or number is not accepted, a file cannot be read or written.
        DeviceError: there is no GPU.
    """
    chosen = select(args.case, quick=args.quick)
    pairs = args.pairs if args.pairs is not None else QUICK_PAIRS if args.quick else PAIRS
    for name, value in (("--pairs", pairs), ("--budget", args.budget)):
        if not value >= 1:
            raise ArgumentError(f"{name} {value} is not accepted; expected 1 or more")
    if args.list:
        print(table(listing(chosen)))
        return 0
    clock = Clock(args.budget)
    with _bench(clock) as bench:
        path = args.out or _own_file(bench.gpu)
        base = start_from(path, bench.gpu)
        _check_writable(path)
        facts = {"how": command, **machine(args.commit), "date": _now()}

        def say(text: str) -> None:
            print(f"{clock.spent_s():6.0f} s {text}", file=sys.stderr, flush=True)

        def log(record: dict[str, Any]) -> None:
            if args.json:
                append_json(args.json, [record | facts])

        def save(tuned: Tuned) -> None:
            if tuned.made_by:
                write(path, tuned)

        tuner = Tuning(
            bench, base, facts=facts, pairs=pairs, clock=clock, say=say, log=log, save=save
        )
        outcomes = tuner.run(chosen)
    print(report(outcomes), flush=True)
    decided = any(outcome.status in ("changed", "kept") for outcome in outcomes)
    print(f"wrote {path}" if decided and tuner.base.made_by else f"{path} was not written")
    return int(any(outcome.status == "failed" for outcome in outcomes))


@contextlib.contextmanager
def _bench(clock: Clock) -> Iterator[GpuBench]:
    """The GPU, for as long as the budget and the grace last: a kernel that hangs ends the process.

    Nothing else ends it: the host waits for the GPU outside of Python.
    """
    bench = GpuBench(clock.left_s)

    def give_up() -> None:
        print("magi-serve tune: a kernel does not end; what was decided is kept", file=sys.stderr)
        for process in multiprocessing.active_children():
            process.terminate()
        os._exit(1)

    watch = threading.Timer(clock.budget_s + GRACE_S, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield bench
    finally:
        watch.cancel()
        bench.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _own_file(gpu: Gpu) -> Path:
    """The package's file for `gpu`."""
    return Path(tuning.__file__).parent / "tuned" / f"{normal_name(gpu.name)}.json"


def start_from(path: Path, gpu: Gpu) -> Tuned:
    """What is to be improved: the content of `path`, else of the shipped file that names `gpu`,
    else nothing.

    Raises:
        ArgumentError: `path` is not a file of tuned data, or is for other GPUs.
    """
    if path.exists():
        found = read(path)
        if found.rank(gpu.arch, gpu.name) < 3:
            what = ", ".join(found.gpus) or (f"sm_{found.arch}" if found.arch else "any GPU")
            raise ArgumentError(
                f"--out {path} is for {what}, and this GPU is {gpu.name} (sm_{gpu.arch}); expected "
                "a file that names it, or that is not there yet"
            )
        return found
    for tuned in tuning.shipped():
        if tuned.rank(gpu.arch, gpu.name) == 3:
            return replace(tuned, name=str(path))
    return Tuned(str(path), (gpu.name,), gpu.arch)


def _check_writable(path: Path) -> None:
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(
            f"{path} cannot be written: its folder is missing or not ours; name another by --out"
        )


def write(path: Path, tuned: Tuned) -> None:
    """Write `tuned` to `path`, whole or not at all."""
    text = tuned.dumps()
    loads(text, str(path))  # what could not be read back is never written
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def listing(chosen: Sequence[Target]) -> list[list[str]]:
    """Rows of ``--list``."""
    rows = [["name", "tries", "measured on"]]
    for target in chosen:
        tries = f"{sum(map(len, target.rounds))} rows"
        if target.sizes:
            tries = f"{len(target.sizes)} sizes"
        rows.append([target.name, tries, ", ".join(target.cases)])
    return rows


def report(outcomes: Sequence[Outcome]) -> str:
    """The table at the end."""
    rows = [["name", "", "gain (quartiles)", "row", "formerly", "why"]]
    for outcome in outcomes:
        changed = outcome.status == "changed"
        rows.append(
            [
                outcome.target.name,
                outcome.status,
                f"{outcome.gain}x" if outcome.gain else "-",
                shown(outcome.after) or "-",
                shown(outcome.before) if changed else "-",
                outcome.said.replace("|", "\\|"),
            ]
        )
    return table(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
