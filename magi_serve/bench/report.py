"""What every benchmark row carries, and how rows are shown."""

import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import magi_serve


def machine() -> dict[str, str]:
    """GPU, versions and commit: the part of a row that says where it was measured."""
    import torch

    facts = {
        "magi_serve": magi_serve.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    for package in ("triton", "vllm"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _commit() -> str:
    root = Path(magi_serve.__file__).parent
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


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
