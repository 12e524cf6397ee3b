"""Settings and errors on their pages are those of the code, and of the service's answers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx

from magi_serve import complete, errors
from magi_serve.bench import tune

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")


def test_the_pages_are_what_make_pages_writes() -> None:
    path = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/reference_pages.py"), "--check"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_exception_is_on_the_page() -> None:
    found = [
        v for v in vars(errors).values() if isinstance(v, type) and v.__module__ == errors.__name__
    ]
    assert len(found) > 5
    for kind in found:
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        assert f"| `{kind.__name__}` | `magi_serve.errors` | {bases} |" in PAGE


def test_every_close_code_is_on_the_page() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    codes = set(re.findall(r'"websocket.close", "code": (\d+)', sources))
    assert codes == set(re.findall(r"^\| (1\d{3}) \|", PAGE, re.M))


def rows() -> list[tuple[int, str, str]]:
    """Status, type and message of each row, the message as a pattern."""
    found = []
    for status, kind, message in re.findall(r"^\| (\d{3}) \| `(\w+)` \| `(.+?)` \|", PAGE, re.M):
        pattern = re.sub(r"\b(?!JSON|UTF|KV|N\b)[A-Z][A-Z_]+(?: IS EXPECTED)?", "PART", message)
        pattern = re.escape(pattern).replace("PART", ".+").replace(r";\ \.\.\.", "(; .+)?")
        found.append((int(status), kind, re.sub(r"\bN\b", ".+", pattern)))
    return found


PROMPT: dict[str, Any] = {"model": "SmolLM2", "prompt": "x", "max_tokens": 1}
MISTAKES = {
    "prompts": PROMPT | {"prompt": ["x"] * 257},
    "n": PROMPT | {"n": 257, "prompt": []},
    "stop": PROMPT | {"stop": ["x"] * 65},
    "a long stop": PROMPT | {"stop": "x" * 1025},
    "bias": PROMPT | {"logit_bias": {str(i): 1 for i in range(1025)}},
    "progress": PROMPT | {"return_progress": "yes"},
    "length": PROMPT | {"prompt": "x " * 50, "max_tokens": 1000},
    "field": PROMPT | {"temperature": []},
    "not JSON": b"{",
    "deep": b"[" * 65 + b"]" * 65,
    "containers": b"[" + b"[]," * 100_000 + b"[]]",
    "bytes": b" " * (32 * 2**20 + 1),
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", MISTAKES)
def test_an_answer_is_as_its_row_says(name: str, service: Any) -> None:
    body = MISTAKES[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    url = f"{service.url}/v1/completions"
    answer = httpx.post(url, content=content, headers=headers, timeout=60)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    told = (answer.status_code, error["type"])
    fitting = [
        p for *kind, p in rows() if tuple(kind) == told and re.fullmatch(p, error["message"])
    ]
    assert fitting, (told, error["message"])


@pytest.mark.vllm
def test_answers_of_vllm_are_as_the_page_says(service: Any) -> None:
    unknown = httpx.post(f"{service.url}/v1/completions", json=PROMPT | {"model": "another"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    assert "| 404 | `NotFoundError` |" in PAGE
    nowhere = httpx.get(f"{service.url}/v1/nowhere")
    assert nowhere.status_code == 404 and nowhere.json().keys() & {"detail", "error"}


def test_exit_codes_are_as_the_page_says(tmp_path: Path) -> None:
    for command, module in (("complete", complete), ("tune", tune)):
        with pytest.raises(SystemExit) as ended:
            module.main(["--no-such-option"])
        assert ended.value.code == 2
        assert f"| `magi-serve {command}` | 1 |" in PAGE
    assert complete.main(["--url", "http://127.0.0.1:9/v1", "?"]) == 1
    assert tune.main(["--case", "no such case"]) == 1
    assert tune.main(["--list"]) == 0
