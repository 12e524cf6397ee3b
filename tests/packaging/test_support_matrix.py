"""The page of what is supported says what the code says."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from magi_serve.kernels.capabilities import SPECS, triton_interprets

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/support-matrix.md"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(triton_interprets(), reason="asks what kernels do outside the interpreter"),
]


def test_the_page_is_what_make_matrix_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/support_matrix.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_no_has_its_reason_on_the_page() -> None:
    for part in PAGE.read_text().split("\n## ")[1:]:
        rows = [line for line in part.splitlines() if line.startswith("| ")]
        notes = [line for line in part.splitlines() if line[:1].isdigit()]
        assert len(rows) > 20
        used = {int(cell.split("(")[1].split(")")[0]) for cell in ours(part, rows)}
        assert used == set(range(1, len(notes) + 1))


def ours(part: str, rows: list[str]) -> list[str]:
    """Cells of ours that say no."""
    columns = slice(2, 3) if part.startswith("As a vLLM") else slice(2, -1)
    cells = [cell.strip() for row in rows for cell in row.split("|")[columns]]
    return [cell for cell in cells if cell.startswith("no (")]


def test_the_page_has_a_column_for_every_kernel() -> None:
    head = next(line for line in PAGE.read_text().splitlines() if line.startswith("| | hopper"))
    assert all(spec.name in head for spec in SPECS)
