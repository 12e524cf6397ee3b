"""The command ``magi-serve``: one table of sub-commands, each loaded when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from magi_serve import __version__


class Command(NamedTuple):
    """A sub-command: where its ``main(argv) -> int`` is, the packages it needs, a line of help."""

    module: str
    needs: tuple[str, ...]
    summary: str


COMMANDS = {
    "serve": Command(
        "magi_serve.server.app",
        ("vllm", "fastapi"),
        "serve a model over HTTP, OpenAI-compatible; takes every option of `vllm serve`",
    ),
    "doctor": Command(
        "magi_serve.doctor",
        ("torch",),
        "say what this machine can run and why not the rest; --check runs it",
    ),
    "complete": Command(
        "magi_serve.complete",
        (),
        "ask a model on any OpenAI-compatible server about long files, with a progress bar",
    ),
    "bench": Command(
        "magi_serve.bench.cli",
        ("torch", "vllm"),
        "measure: `attention` kernels beside others, `serve` vLLM end to end by backend",
    ),
    "tune": Command(
        "magi_serve.bench.tune",
        ("torch",),
        "choose the kernels' tiles on this GPU by measuring, and write them to a file",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``magi-serve ARGV``.

    Args:
        argv: the words after ``magi-serve``; None takes the process's own.

    Returns:
        The exit code: the sub-command's, 1 if a package that it needs is missing. As with every
        argparse program, wrong usage exits with 2 and ``--help`` with 0.
    """
    parser = argparse.ArgumentParser(
        prog="magi-serve",
        description="Flex-Flash-Attention for long-context LLM inference.",
        epilog="commands:\n" + "\n".join(f"  {n:<8}  {c.summary}" for n, c in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"magi-serve {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=", ".join(COMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="see COMMAND --help")
    args = parser.parse_args(argv)
    command = COMMANDS[args.command]
    try:
        module = importlib.import_module(command.module)
        code: int = module.main(args.rest)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in command.needs:
            raise
        print(
            f"magi-serve {args.command} needs {missing}, which is not installed: "
            "pip install 'magi-serve[cuda]', or 'magi-serve[cpu]' without an NVIDIA GPU",
            file=sys.stderr,
        )
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
