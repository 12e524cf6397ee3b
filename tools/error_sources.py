"""What the sources say of errors: exception classes, what clients are told, why nothing starts.

Read from the syntax of every module, so that an error which is added cannot be overlooked.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("magi_serve", "kernels", "backends", "server")

STATUS_OF = {"refuse": 400, "refusal": 503, "Problem": 400}
"""What makes an HTTP error, and its status where the call does not say it."""


class HttpError(NamedTuple):
    """One message that a client may be told."""

    status: int
    message: str


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
            raised = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(raised, ast.Call) and ast.unparse(raised.func) == "ServeError":
                found += _texts(raised.args[0], names)
    return sorted(text for text in dict.fromkeys(found) if re.search(r"[a-z]{3}", text))
