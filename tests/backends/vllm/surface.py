"""What vLLM offers to and asks of attention backends, read from its sources without importing it.

Run as a script, it writes `surface.json`: every name of the surface, and the versions that have it.
`python tests/backends/vllm/surface.py FOLDER...` adds the versions that are installed in folders.
"""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

KNOWN = Path(__file__).with_name("surface.json")

BACKEND = "v1/attention/backend.py"
SPECS = "v1/kv_cache_interface.py"
LAYER = "model_executor/layers/attention/attention.py"

CLASSES = {
    BACKEND: (
        "AttentionBackend",
        "AttentionImplBase",
        "AttentionImpl",
        "AttentionMetadataBuilder",
        "CommonAttentionMetadata",
        "AttentionType",
        "AttentionCGSupport",
    ),
    SPECS: (
        "KVCacheSpec",
        "AttentionSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "CrossAttentionSpec",
        "EncoderOnlyAttentionSpec",
        "SinkFullAttentionSpec",
    ),
}
"""The classes that we derive from, or are handed instances of, by vLLM's file."""


class Method(NamedTuple):
    """How a method may be called, without the instance or class that it is called on."""

    params: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool
    """Whether further keyword arguments are taken."""
    abstract: bool


class Class(NamedTuple):
    """A class's own members, and the names of its bases."""

    bases: tuple[str, ...]
    methods: dict[str, Method]
    values: frozenset[str]


def installed_versions(folder: Path) -> dict[str, Path]:
    """vLLM's packages by version: the one that is importable, and those beside it in `folder`."""
    found = {}
    spec = importlib.util.find_spec("vllm")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    for package in [*map(Path, locations), *sorted(folder.glob("vllm-*/vllm"))]:
        if (package / BACKEND).is_file():
            found.setdefault(version_of(package), package)
    return found


def version_of(package: Path) -> str:
    """The version of the vLLM in this folder, as ``major.minor``."""
    infos = package.parent.glob("vllm*.dist-info")
    matches = [re.fullmatch(r"vllm(?:_cpu)?-(\d+\.\d+)\..*", info.name) for info in infos]
    (match,) = filter(None, matches)
    return match[1]


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def classes_of(file: Path) -> dict[str, Class]:
    """The classes that a file defines at its top level."""
    return {node.name: _class(node) for node in parse(file).body if isinstance(node, ast.ClassDef)}


def _class(node: ast.ClassDef) -> Class:
    methods, values = {}, set()
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            marks = {ast.unparse(d).split(".")[-1] for d in member.decorator_list}
            if marks & {"property", "cached_property"}:
                values.add(member.name)
            else:
                methods[member.name] = _method(member, marks)
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            values.add(member.target.id)
        elif isinstance(member, ast.Assign):
            values |= {target.id for target in member.targets if isinstance(target, ast.Name)}
    bases = (ast.unparse(base).split("[")[0] for base in node.bases)
    return Class(tuple(bases), methods, frozenset(values))


def _method(node: ast.FunctionDef, marks: set[str]) -> Method:
    args = node.args
    positional = [a.arg for a in (*args.posonlyargs, *args.args)]
    optional = positional[len(positional) - len(args.defaults) :]
    named = [a.arg for a in args.kwonlyargs]
    optional += [a for a, d in zip(named, args.kw_defaults, strict=True) if d is not None]
    params = [*positional, *named][0 if "staticmethod" in marks else 1 :]
    return Method(
        tuple(params),
        tuple(p for p in params if p not in optional),
        args.kwarg is not None,
        "abstractmethod" in marks,
    )


def layer_arguments(package: Path) -> tuple[int, tuple[str, ...]]:
    """How vLLM's attention layer makes the implementation: positional arguments, and named ones."""
    (call,) = (
        node
        for node in ast.walk(parse(package / LAYER))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "impl_cls"
    )
    return len(call.args), tuple(k.arg for k in call.keywords if k.arg is not None)


def names(package: Path) -> Iterator[str]:
    """The surface of one version, a line for every class member and every parameter."""
    for file, wanted in CLASSES.items():
        made = classes_of(package / file)
        for name in wanted:
            if name not in made:
                continue
            yield name
            yield from (f"{name}.{value}" for value in made[name].values if value[0] != "_")
            for method, signature in made[name].methods.items():
                if not method.startswith("_") or method == "__init__":
                    yield f"{name}.{method}"
                    yield from (f"{name}.{method}({param})" for param in signature.params)
    _, options = layer_arguments(package)
    yield from (f"Attention: impl_cls({option})" for option in options)


def defines(package: Path, module: str, name: str) -> bool:
    """Whether ``from module import name`` finds `name`, as far as the source tells."""
    base = package.parent.joinpath(*module.split("."))
    if any(base.joinpath(f"{name}{end}").exists() for end in (".py", "/__init__.py")):
        return True
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return False
    tree = parse(file)
    if any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body):
        return repr(name) in ast.unparse(tree)
    made = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    made |= {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {alias.asname or alias.name for alias in node.names}
    return name in made


def load() -> dict[str, list[str]]:
    """The committed surface: the versions of vLLM that have each name."""
    known: dict[str, list[str]] = json.loads(KNOWN.read_text())
    return known


def write(packages: dict[str, Path]) -> None:
    """Add versions to the committed surface, or renew what it says of them."""
    known = load() if KNOWN.exists() else {}
    for version, package in packages.items():
        present = set(names(package))
        for name in present | set(known):
            others = [v for v in known.get(name, []) if v != version]
            known[name] = sorted(others + [version] * (name in present))
    lines = (f"{json.dumps(n)}: {json.dumps(v)}" for n, v in sorted(known.items()) if v)
    KNOWN.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n")


if __name__ == "__main__":
    found = installed_versions(Path(__file__).parents[3] / ".venv")
    found |= {version_of(Path(folder) / "vllm"): Path(folder) / "vllm" for folder in sys.argv[1:]}
    write(found)
    print(f"{KNOWN}: vLLM {', '.join(sorted(found))}")
