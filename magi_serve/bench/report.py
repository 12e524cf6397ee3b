"""What every benchmark row carries, and how rows are shown."""

import argparse
import contextlib
import json
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import magi_serve
from magi_serve.versions import nvidia_driver, versions


def add_commit(parser: argparse.ArgumentParser) -> None:
    """The option ``--commit``, for machines that do not have the repository as it is measured."""
    parser.add_argument(
        "--commit",
        metavar="TEXT",
        help="the commit that rows name; default: that of the checkout, with -dirty if changed",
    )


def machine(commit: str | None = None) -> dict[str, str]:
    """GPU, versions and commit: the part of a row that says where it was measured.

    Args:
        commit: what to record; None for the checkout that the package runs from.
    """
    import torch

    found = {**versions(), "driver": nvidia_driver()}
    with contextlib.suppress(PackageNotFoundError):
        found["flashinfer"] = version("flashinfer-python")
    return {
        **{name: said or "not installed" for name, said in found.items()},
        "commit": commit or _commit() or "unknown",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _commit() -> str | None:
    """The commit of the checkout that this package is a part of, `-dirty` with changes; or None."""
    git = ["git", "-C", str(Path(magi_serve.__file__).parent)]
    commands = (
        ["ls-files", "--error-unmatch", "__init__.py"],
        ["describe", "--always", "--dirty", "--exclude=*"],
    )
    try:
        said = [
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in commands
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[-1].strip() or None


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table; the first one is the header."""
    header, *body = rows
    return "\n".join(
        ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        + ["| " + " | ".join(row) + " |" for row in body]
    )


def append_json(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to `path`, one JSON object per line."""
    with path.open("a") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
