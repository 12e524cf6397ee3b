"""``magi-serve bench CASE``: one module per case, each with `add_arguments` and `run`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from magi_serve.errors import MagiServeError

CASES = {
    "attention": ("magi_serve.bench.attention", "attention kernels beside others, in one run"),
    "serve": ("magi_serve.bench.serve", "vLLM end to end with dummy weights, by attention backend"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``magi-serve bench ARGV``; returns the exit code, 1 after an error that is explained."""
    parser = argparse.ArgumentParser(prog="magi-serve bench", description="Measure magi-serve.")
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, (module, summary) in CASES.items():
        case = cases.add_parser(name, help=summary, description=summary)
        importlib.import_module(module).add_arguments(case)
    args = parser.parse_args(argv)
    try:
        code: int = importlib.import_module(CASES[args.case][0]).run(args)
    except MagiServeError as error:
        print(f"magi-serve bench {args.case}: {error}", file=sys.stderr)
        return 1
    return code
