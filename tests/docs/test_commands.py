"""Every command on the pages is run; what cannot be run here says why, and is parsed all the same.

A block of commands or Python is run in an empty folder, with a `book.txt` in it, and with the
service that all tests share in place of the one on port 8000. A block that needs a GPU, a network
or hours has a comment before it, ``<!-- not run: REASON -->``: of that one, programs, sub-commands,
options, targets of make and files of the repository have to exist.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("bash", "sh", "console", "python")
OTHERS = ("", "json")
MARKER = re.compile(r"<!-- not run: (.+) -->")
OF_THE_SERVICE = ("http://127.0.0.1:8000", "magi-serve complete")
MODEL_ON_THE_PAGES = "SmolLM2-135M-Instruct"
PROGRAMS = {"magi-serve", "vllm", "make", "pip", "docker", "kubectl", "printf", "sed", "curl"}
FOREIGN_OPTIONS = {
    "docker": "--build-arg --provenance --read-only --sbom --secret --shm-size --tmpfs --user",
    "pip": "--extra-index-url",
}
"""Options of other programs that the pages' text names, none of which can be asked here."""

BOOK = "Call me Ishmael. Some years ago, having little money, I thought I would sail about. " * 8


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `reason` is why it is not run."""

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def asks_the_service(self) -> bool:
        return any(part in self.text for part in OF_THE_SERVICE)


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a page, with the line after each fence."""
    lines = text.splitlines()
    start, language = 0, None
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if language is None:
            start, language = number, line.removeprefix("```")
            continue
        marker = MARKER.fullmatch(lines[start - 2]) if start > 1 else None
        body = "\n".join(lines[start : number - 1])
        yield Block(page, start + 1, language, body, marker[1] if marker else None)
        language = None
    assert language is None, f"{page}:{start} is not closed"


def all_blocks() -> list[Block]:
    return [
        block
        for path in PAGES
        for block in blocks_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]


BLOCKS = [block for block in all_blocks() if block.language in COMMANDS]
RUN = [block for block in BLOCKS if block.reason is None]
NOT_RUN = [block for block in BLOCKS if block.reason is not None]


def marked(block: Block) -> Any:
    needs_vllm = block.asks_the_service or " bench " in block.text
    marks = [pytest.mark.vllm] if needs_vllm else []
    return pytest.param(block, marks=marks, id=str(block))


def test_commands_stand_in_blocks_that_say_so() -> None:
    """In a fence of another kind nothing is tried: no command may hide there."""
    assert len(RUN) > 8 and len(NOT_RUN) > 8
    for block in all_blocks():
        assert block.language in COMMANDS + OTHERS, f"{block}: what is {block.language}?"
        if block.language in OTHERS:
            assert not re.search(r"^\W*(magi-serve|make|curl|vllm|pip) ", block.text, re.M), block
            assert block.reason is None, f"{block} is never run, whatever its comment says"


def test_every_comment_is_of_a_block() -> None:
    said = sum(len(MARKER.findall(path.read_text(encoding="utf-8"))) for path in PAGES)
    assert said == len(NOT_RUN)


# What is run


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``magi-serve``, of this checkout and this Python."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "magi-serve"
    # An answer may be as long as the context, which takes a CPU minutes.
    short = 'if [ "$1" = complete ]; then set -- "$@" --max-tokens 8; fi'
    program.write_text(f'#!/bin/sh\n{short}\nexec {sys.executable} -m magi_serve.cli "$@"\n')
    program.chmod(0o755)
    return folder


def run(block: Block, folder: Path, programs: Path, env: dict[str, str], url: str) -> str:
    """What the block prints; it fails as a shell or Python would, and as HTTP would.

    Raises:
        AssertionError: it failed.
    """
    text = block.text.replace("http://127.0.0.1:8000", url).replace(MODEL_ON_THE_PAGES, "SmolLM2")
    (folder / "book.txt").write_text(BOOK)
    expected: list[str] = []
    if block.language == "console":
        lines = text.splitlines()
        expected = [line for line in lines if not line.startswith("$ ")]
        text = "\n".join(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
    command = [sys.executable, "-c", text]
    if block.language != "python":
        strict = 'set -euo pipefail\ncurl() { command curl --fail-with-body "$@"; }\n'
        command = ["bash", "-c", strict + text]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | {"PATH": f"{programs}{os.pathsep}{env['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block}\n{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert '"error":' not in done.stdout, f"{block}\n{done.stdout[-3000:]}"
    for line in expected:
        assert line in done.stdout, f"{block}: {line!r} is not in\n{done.stdout[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("block", [marked(block) for block in RUN])
def test_a_block_runs(
    block: Block,
    tmp_path: Path,
    programs: Path,
    command: Callable[..., dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:
    url, env = "", command()["env"]
    if block.asks_the_service:
        pytest.importorskip("fastapi")
        if "curl" in block.text and shutil.which("curl") is None:
            assert os.environ.get("CI") != "true", "curl is missing"
            pytest.skip("curl is missing")
        url = request.getfixturevalue("service").url
        env |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    said = run(block, tmp_path, programs, env, url)
    if block.language != "python":
        assert said.strip(), f"{block} prints nothing"


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "magi-serve tune --lits"),
        ("sh", "magi-serve tnue --list"),
        ("sh", "false; echo"),
        ("sh", "echo '{\"error\": {}}'"),
        ("sh", "curl -s URL/no-such-path"),
        ("python", "from magi_serve import fffa_attention"),
        ("console", "$ echo 1\n2"),
    ],
)
def test_a_broken_block_does_not_run(
    language: str,
    text: str,
    tmp_path: Path,
    programs: Path,
    command: Callable[..., dict[str, Any]],
) -> None:
    """So that this file's silence means something. (No server listens on port 9.)"""
    block = Block("page", 1, language, text.replace("URL", "http://127.0.0.1:9"), None)
    with pytest.raises(AssertionError, match="page:1"):
        run(block, tmp_path, programs, command()["env"], "")


# What is not run


def lines_of(block: Block) -> list[list[str]]:
    """The words of each command, without comments and variables set in front."""
    found, text = [], ""
    one_word = re.sub(r"\$\([^)]*\)", "WORD", block.text.replace("\\\n", " "))
    for line in one_word.splitlines():
        text = f"{text}\n{line}" if text else line
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quote goes on in the next line
            continue
        text = ""
        while words and re.match(r"\w+=", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    assert not text, f"{block}: a quote is not closed"
    return found


def our_words(words: list[str]) -> list[str] | None:
    """What ``magi-serve`` would be told, for it reads all that ``vllm serve`` does."""
    return words[1:] if words[0] == "magi-serve" or words[:2] == ["vllm", "serve"] else None


def parsed(lines: list[list[str]], env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("parse_commands.py"))],
        input=json.dumps(lines),
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


BROKEN = (
    ["serve", "MODEL", "--max-modle-len", "9"],
    ["sevre", "MODEL"],
    ["serve", "MODEL", "--tensor-parallel-size", "two"],
    ["bench", "atention"],
    ["complete", "--file"],
)
ASKED = (["doctor"], ["complete", "?"], ["tune"], ["bench", "serve"], ["serve", "MODEL"])


@pytest.fixture(scope="module")
def said(command: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What the parsers say to each line of `NOT_RUN`, and to `BROKEN`, by the line."""
    known = [words for b in NOT_RUN for line in lines_of(b) if (words := our_words(line))]
    lines = [*known, *BROKEN, *ASKED]
    found = parsed(lines, command()["env"])
    errors = {shlex.join(line): error for line, error in zip(lines, found["errors"], strict=True)}
    return {"errors": errors, "options": set(found["options"])}


def make_problems(words: list[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = rf"^{name} \?= *" if is_variable else rf"^{name}:"
        if not re.search(known, makefile, re.M):
            yield f"the Makefile has no {name}"


def problems(words: list[str], errors: dict[str, str]) -> Iterator[str]:
    """What is wrong with a command that cannot be run."""
    if words[0] not in PROGRAMS:
        yield f"{words[0]} is a program that no page needs"
    if ours := our_words(words):
        if error := errors[shlex.join(ours)]:
            yield error
    elif words[0] == "make":
        yield from make_problems(words[1:])
    for word in words:
        if word.startswith("deploy/") and not (ROOT / word).exists():
            yield f"there is no {word}"
    if "--target" in words:
        stage = words[words.index("--target") + 1]
        if f" AS {stage}\n" not in (ROOT / "deploy/Dockerfile").read_text():
            yield f"the Dockerfile has no stage {stage}"


@pytest.mark.vllm
@pytest.mark.parametrize("block", NOT_RUN, ids=str)
def test_a_block_that_is_not_run_is_right_as_far_as_can_be_seen(
    block: Block, said: dict[str, Any]
) -> None:
    if block.language == "python":
        compile(block.text, str(block), "exec")
    else:
        found = [p for line in lines_of(block) for p in problems(line, said["errors"])]
        assert not found, f"{block}: {found}"
    pytest.skip(f"{block} was read, and not run: {block.reason}")


@pytest.mark.vllm
@pytest.mark.parametrize("words", BROKEN, ids=shlex.join)
def test_a_broken_line_is_noticed(words: list[str], said: dict[str, Any]) -> None:
    assert said["errors"][shlex.join(words)]


@pytest.mark.parametrize(
    "line",
    ["make no-such-target", "make serve MODLE=x", "mkae serve", "kubectl apply -k deploy/nowhere",
     "docker build -f deploy/Dockerfile --target ampere ."],
)  # fmt: skip
def test_a_broken_line_of_another_program_is_noticed(line: str) -> None:
    assert list(problems(line.split(), {}))


# What the text names


def named() -> list[tuple[str, str]]:
    """Code within the text of the pages: the page, and what is between the backticks."""
    found = []
    for path in PAGES:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
        codes = re.findall(r"``(.+?)``|`([^`\n]+(?:\n[^`\n]+)?)`", text)
        found += [(path.name, " ".join("".join(code).split())) for code in codes]
    return found


def test_targets_and_commands_that_the_text_names_exist() -> None:
    from magi_serve.cli import COMMANDS as SUB_COMMANDS

    for page, code in named():
        words = code.split()
        if words[0] == "make" and len(words) > 1:
            target = [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)]
            assert not list(make_problems(target)), (page, code)
        if words[0] == "magi-serve" and len(words) > 1 and words[1][0].isalpha():
            assert words[1] in SUB_COMMANDS or words[1] == "COMMAND", (page, code)


@pytest.mark.vllm
def test_options_that_the_text_names_exist(said: dict[str, Any]) -> None:
    foreign = {option for options in FOREIGN_OPTIONS.values() for option in options.split()}
    unknown = [
        (page, option)
        for page, code in named()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?![a-z0-9.-]*\.\.\.)", code)
        if option not in said["options"] | foreign
    ]
    assert not unknown
