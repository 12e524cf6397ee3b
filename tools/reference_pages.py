"""Writes docs/settings.md and docs/errors.md from what the code says.

    python tools/reference_pages.py [--check]

Settings are the fields of the two classes in `magi_serve/settings.py`. Errors are read from the
sources: exception classes with their docstrings, every message of an HTTP error, every reason not
to start. What the sources do not say, when an answer comes and what to do, is in
`tools/error_notes.py`; an error without a note there, or a note without its error, is a mistake.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from error_notes import EXIT_CODES, FIELDS, HTTP, OF_VLLM, STREAMS, WEBSOCKETS, Note

from magi_serve.server.middleware.errors import _TYPES
from magi_serve.settings import ENV_PREFIX, ServiceSettings, Settings

ROOT = Path(__file__).resolve().parent.parent
SETTINGS, ERRORS = ROOT / "docs/settings.md", ROOT / "docs/errors.md"
FOLDERS = ("magi_serve", "kernels", "backends", "server")
MADE_BY = "Written by `make pages`, and compared with the code in every test run."

STATUS_OF = {"refuse": 400, "refusal": 503, "Problem": 400}
"""What makes an HTTP error, and its status where the call does not say it."""


class HttpError(NamedTuple):
    """One message that a client may be told."""

    status: int
    message: str


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines]


def quoted(text: str) -> str:
    """`text` as code, whether or not it has code in it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def settings_page() -> str:
    """The settings of an engine, and those of the HTTP service."""
    engine = [
        [f"`{name}`", f"`{ENV_PREFIX}{name.upper()}`", _default(field), _sentence(field)]
        for name, field in Settings.model_fields.items()
    ]
    service = []
    for name, field in ServiceSettings.model_fields.items():
        option = f"`--{name.replace('_', '-')}`"
        if name == "api_key":  # an option of vLLM's, which takes several
            option += " (vLLM's, takes several)"
        service.append([option, f"`{ENV_PREFIX}{name.upper()}`", _default(field), _sentence(field)])
    return "\n".join(
        [
            "# Settings",
            "",
            f"{MADE_BY} All else is an option of vLLM, under vLLM's own name.",
            "",
            "## Of an engine",
            "",
            "Read by every process of an engine, also under plain `vllm serve`. Given as a variable,",
            'or by key in vLLM\'s `--additional-config \'{"magi_serve": {"kernel": "triton"}}\'`, which',
            "wins. A name that is not below is refused, in either place.",
            "",
            *table(["key", "variable", "default", "what"], engine),
            "",
            "## Of the service",
            "",
            "Read by `magi-serve serve` alone. Given as an option, which wins, or as a variable.",
            "[Security](security.md) says what each limit answers.",
            "",
            *table(["option", "variable", "default", "what"], service),
            "",
        ]
    )


def _default(field: Any) -> str:
    return "none" if field.default is None else f"`{field.default}`"


def _sentence(field: Any) -> str:
    return str(field.description).replace("[", "\\[")


def sources() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the package, parsed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def exception_rows() -> list[list[str]]:
    """Class, module, bases and meaning of everything that derives from `MagiServeError`."""
    found: dict[str, tuple[str, list[str], str]] = {}
    classes = [
        (path, node)
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    names = {"MagiServeError"}
    while True:
        before = len(names)
        names |= {n.name for _, n in classes if names & {ast.unparse(base) for base in n.bases}}
        if len(names) == before:
            break
    for path, node in classes:
        if node.name in names:
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts if parts[0] == "magi_serve" else ("magi_serve", *parts))
            bases = [ast.unparse(base) for base in node.bases]
            said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            found[node.name] = (module, bases, said)
    order = sorted(found, key=lambda name: (found[name][0] != "magi_serve.errors",))
    return [
        [f"`{name}`", f"`{found[name][0]}`", _code(found[name][1]), found[name][2]]
        for name in order
    ]


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def http_errors() -> list[HttpError]:
    """What the service's own code answers, by the calls that make an error in `server/`."""
    found: dict[str, HttpError] = {}
    for _path, tree in (pair for pair in sources() if pair[0].is_relative_to(ROOT / "server")):
        constants = _assigned(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for error in _errors_of(node, constants):
                    # Raised as 400 through vLLM, and answered as what was noted beside it.
                    found[error.message] = max(error, found.get(error.message, error))
    return sorted(found.values())


def _errors_of(call: ast.Call, names: dict[str, list[ast.expr]]) -> Iterator[HttpError]:
    made_by = call.func.id if isinstance(call.func, ast.Name) else ""
    words = {word.arg: word.value for word in call.keywords}
    if made_by == "error_response":
        status, message = call.args[1], call.args[2]
    elif made_by == "Refusal":
        status, message = call.args[0], call.args[1]
    elif made_by in STATUS_OF:
        status = words.get("status", ast.Constant(STATUS_OF[made_by]))
        message = call.args[0]
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "cut" and call.args:
        status, message = ast.Constant(503), call.args[0]  # a request whose answer has not begun
    else:
        return
    if not isinstance(status, ast.Constant):
        return  # what another call has made, and is counted there
    for text in _texts(message, names):
        yield HttpError(int(status.value), text)


def _assigned(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What names are given in a module, and what its functions return.

    A message is often made in the line before, or by a function that gives a reason.
    """
    given: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.NamedExpr):
            given.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
            given.setdefault(f"{node.name}()", []).extend(value for value in returns if value)
    return given


def _texts(node: ast.expr, names: dict[str, list[ast.expr]]) -> list[str]:
    """The texts that a message may be, with `NAME` for what is filled in; none if it is passed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = (
            part.value if isinstance(part, ast.Constant) else _placeholder(part.value)
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
        return ["".join(str(part) for part in parts)]
    if isinstance(node, ast.Name):
        without = {name: values for name, values in names.items() if name.endswith("()")}
        found = [_texts(value, without) for value in names.get(node.id, [])]
        return [text for texts in found for text in texts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        found = [_texts(value, {}) for value in names.get(f"{node.func.attr}()", [])]
        return [text for texts in found for text in texts]
    if isinstance(node, ast.IfExp):
        return _texts(node.body, names) + _texts(node.orelse, names)
    return []


def _placeholder(node: ast.expr) -> str:
    """A word in capitals for what a message is filled with."""
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(node))
    words = [word for word in words if word not in ("self", "len", "str", "type", "join", "e")]
    return words[-1].strip("_").upper() if words else "N"


def start_errors() -> list[str]:
    """Every reason that `magi-serve serve` may give for not starting."""
    found = []
    for _path, tree in (pair for pair in sources() if pair[0].is_relative_to(ROOT / "server")):
        names = _assigned(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if ast.unparse(node.exc.func) == "ServeError":
                    found += _texts(node.exc.args[0], names)
    return sorted(text for text in dict.fromkeys(found) if re.search(r"[a-z]{3}", text))


def noted(errors: Sequence[HttpError]) -> list[tuple[HttpError, Note]]:
    """Each error with its note.

    Raises:
        SystemExit: an error has none or several, or a note has no error.
    """
    pairs, unused = [], set(HTTP)
    for error in errors:
        fitting = [part for part in HTTP if part in error.message]
        if len(fitting) != 1:
            sys.exit(f"tools/error_notes.py has {len(fitting)} notes for {error.message!r}")
        unused.discard(fitting[0])
        pairs.append((error, HTTP[fitting[0]]))
    if unused:
        sys.exit(f"tools/error_notes.py has notes of no error: {sorted(unused)}")
    return pairs


def http_rows() -> list[list[str]]:
    rows = []
    for error, note in noted(http_errors()):
        kind = _TYPES[error.status][0] if error.status in _TYPES else "ServiceUnavailableError"
        message = quoted(note.shown or error.message)
        rows.append([str(error.status), f"`{kind}`", message, note.when, note.way_out])
    return sorted([*rows, list(FIELDS)], key=lambda row: row[0])


def errors_page() -> str:
    """The catalogue of errors."""
    codes = [[f"`{command}`", code, when] for command, code, when in EXIT_CODES]
    return "\n".join(
        [
            "# Errors",
            "",
            MADE_BY,
            "",
            "## Over HTTP",
            "",
            "An error has OpenAI's form, under `/v1/messages` Anthropic's:",
            "",
            "```json",
            '{"error": {"message": "...", "type": "BadRequestError", "param": "n", "code": 400}}',
            '{"type": "error", "error": {"type": "invalid_request_error", "message": "..."}}',
            "```",
            "",
            "`code` is the status again; `param` is the field that it is about, or null. Messages have",
            "at most 500 characters and do not repeat what was sent. Words in capitals below are filled",
            "in. With each 429 and 503 below comes `Retry-After`, in seconds.",
            "",
            *table(["status", "type", "message", "when", "way out"], http_rows()),
            "",
            "Anthropic's types are "
            + ", ".join(f"`{theirs}` for {status}" for status, (_, theirs) in _TYPES.items())
            + ".",
            "",
            "### From vLLM",
            "",
            "vLLM's handlers answer with types and texts of their own, which are only shortened:",
            "",
            *table(["status", "type", "when"], OF_VLLM),
            "",
            "### In a stream",
            "",
            *STREAMS,
            "",
            "### WebSockets",
            "",
            *table(["close code", "when"], [[str(code), when] for code, when in WEBSOCKETS]),
            "",
            "## When the service does not start",
            "",
            "The last line says why, after `magi-serve: `, and the process ends with 1:",
            "",
            *[f"- {quoted(text)}" for text in start_errors()],
            "",
            "To these come the reasons of a setting (`SettingsError`, with the variable or option that",
            "is wrong) and of an attention backend that cannot serve the model, each with",
            "`--attention-backend auto leaves the choice to vLLM`.",
            "",
            "## Exit codes",
            "",
            *table(["command", "code", "when"], codes),
            "",
            "## Exceptions",
            "",
            "All that is raised on purpose derives from `MagiServeError`; mistakes in arguments also",
            "from `ValueError`. A message names the argument, the value, what is accepted and the way",
            "out.",
            "",
            *table(["class", "module", "bases", "meaning"], exception_rows()),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    for path, text in ((SETTINGS, settings_page()), (ERRORS, errors_page())):
        if not check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what the code says: make pages")


if __name__ == "__main__":
    main()
