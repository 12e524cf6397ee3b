"""Our side of vLLM's contract against the sources of every version that is installed.

Nothing of vLLM is imported. A version that changes something fails here with what changed, before
an engine fails somewhere else.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.backends.vllm import surface

ROOT = Path(__file__).parents[3]
OURS = ROOT / "backends/vllm"
PACKAGES = surface.installed_versions(ROOT / ".venv")
SUBCLASSES = (
    ("backend.py", "MagiAttentionBackend", ("AttentionBackend",)),
    ("metadata.py", "MagiMetadataBuilder", ("AttentionMetadataBuilder",)),
    ("impl.py", "MagiAttentionImpl", ("AttentionImpl", "AttentionImplBase")),
)
SINCE = {
    "vllm.v1.kv_cache_layout.KVCacheLayout": "0.30",
}
"""Names that older versions lack, which the code imports only where they are."""
UNTIL = {"vllm.v1.attention.backends.utils.get_kv_cache_layout": "0.28"}
"""Names that newer versions lack, likewise."""


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.parametrize("version", sorted(PACKAGES)),
]


def ours() -> Iterator[tuple[surface.Class, tuple[str, ...]]]:
    for file, name, bases in SUBCLASSES:
        yield surface.classes_of(OURS / file)[name], bases


@cache
def theirs(version: str) -> dict[str, surface.Class]:
    return surface.classes_of(PACKAGES[version] / surface.BACKEND)


def test_the_surface_is_known(version: str) -> None:
    known, present = surface.load(), set(surface.names(PACKAGES[version]))
    new = sorted(present - set(known))
    gone = sorted(n for n, v in known.items() if version in v and n not in present)
    assert not new and not gone, (
        f"vLLM {version} differs from surface.json. New: {new}. Gone: {gone}. Decide for each new "
        "name whether vLLM's default is right for us, or override it; then run "
        "tests/backends/vllm/surface.py"
    )


def test_our_methods_take_what_vllm_passes(version: str) -> None:
    wrong = []
    for own, bases in ours():
        for base in bases:
            for name in own.methods.keys() & theirs(version)[base].methods.keys():
                if name == "__init__" and base != "AttentionMetadataBuilder":
                    continue  # called with what test_the_layer_... reads
                mine, called = own.methods[name], theirs(version)[base].methods[name]
                if not mine.takes_any and (unknown := set(called.params) - set(mine.params)):
                    wrong.append(f"{name} does not take {sorted(unknown)}")
                if extra := set(mine.required) - set(called.params):
                    wrong.append(f"{name} needs {sorted(extra)}, which vLLM does not pass")
                shared = [p for p in mine.params if p in called.params]
                if shared != [p for p in called.params if p in shared]:
                    wrong.append(f"{name} has {shared} in another order")
    assert not wrong, f"vLLM {version}: {wrong}"


def test_nothing_abstract_is_left(version: str) -> None:
    left = [
        f"{base}.{name}"
        for own, bases in ours()
        for base in bases
        for name, method in theirs(version)[base].methods.items()
        if method.abstract and name not in own.methods
    ]
    assert not left, f"vLLM {version} has abstract methods that we do not implement: {left}"


def test_the_layer_makes_our_implementation_with_arguments_that_it_takes(version: str) -> None:
    impl = surface.classes_of(OURS / "impl.py")["MagiAttentionImpl"].methods["__init__"]
    base = theirs(version)["AttentionImpl"].methods["__init__"]
    positional, _ = surface.layer_arguments(PACKAGES[version])
    assert impl.params[:positional] == base.params[:positional]
    assert impl.takes_any, "options that vLLM adds are refused by name, which needs **extra"


def reads_of(file: Path, names: tuple[str, ...]) -> set[str]:
    """The attributes that a file reads of objects that it calls by these `names`."""
    return {
        node.attr
        for node in ast.walk(surface.parse(file))
        if isinstance(node, ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else None) in names
    }


@cache
def members(version: str, file: str, name: str) -> frozenset[str]:
    """The fields and properties of a class, with those of its bases in the same file."""
    made = surface.classes_of(PACKAGES[version] / file)
    inherited = (members(version, file, base) for base in made[name].bases if base in made)
    return made[name].values.union(*inherited)


def test_batches_have_the_fields_that_we_read(version: str) -> None:
    fields = members(version, surface.BACKEND, "CommonAttentionMetadata")
    read = reads_of(OURS / "metadata.py", ("batch", "common_attn_metadata"))
    read |= reads_of(OURS / "compat.py", ("batch",))
    assert {"seq_lens", "query_start_loc_cpu", "slot_mapping"} <= read, "reads are found"
    assert not read - fields, f"vLLM {version}'s batches lack {sorted(read - fields)}"


@pytest.mark.parametrize("spec", ["FullAttentionSpec", "SlidingWindowSpec", "CrossAttentionSpec"])
def test_specs_have_the_fields_that_we_read(version: str, spec: str) -> None:
    fields = members(version, surface.SPECS, spec)
    read = reads_of(OURS / "metadata.py", ("spec",)) - {"name", "planned", "why_not"}
    assert {"num_kv_heads", "head_size", "dtype", "block_size"} <= read, "reads are found"
    assert not read - fields, f"vLLM {version}'s {spec} lacks {sorted(read - fields)}"


def imports() -> Iterator[tuple[str, str]]:
    for folder in ("backends", "server", "magi_serve"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(surface.parse(file)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                    for alias in node.names:
                        yield node.module or "", alias.name


def test_every_name_that_we_import_is_there(version: str) -> None:
    found = set(imports())
    assert ("vllm.v1.attention.backend", "AttentionBackend") in found
    absent = [
        f"{module}.{name}"
        for module, name in sorted(found)
        if not surface.defines(PACKAGES[version], module, name)
    ]
    expected = [n for n in absent if SINCE.get(n, "0") > version or UNTIL.get(n, "9") < version]
    assert absent == expected, f"vLLM {version} lacks {sorted(set(absent) - set(expected))}"


def test_the_registry_takes_a_class_path_for_custom(version: str) -> None:
    registry = PACKAGES[version] / "v1/attention/backends/registry.py"
    assert "CUSTOM" in surface.classes_of(registry)["AttentionBackendEnum"].values
    (register,) = (
        node
        for node in surface.parse(registry).body
        if isinstance(node, ast.FunctionDef) and node.name == "register_backend"
    )
    assert [a.arg for a in register.args.args][:2] == ["backend", "class_path"]
