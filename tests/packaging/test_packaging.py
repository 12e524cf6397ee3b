"""The wheel, installed where nothing else of this repository is, and the linked folders.

`kernels/`, `backends/` and `server/` stand at the root and are imported as `magi_serve.kernels`
and so on through symlinks. What that could break is tried here: a wheel that lacks a folder, a
checkout that shadows someone else's package `kernels`, a kernel that needs pydantic to import.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "backends", "server")
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is blocked by the test", name=name)

sys.meta_path.insert(0, Blocker())
"""


def python(executable: Path | str, code: str, *, cwd: Path, **variables: str) -> str:
    """Run `code` as a user would: no PYTHONPATH, the folder it runs in on sys.path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [str(executable), "-c", code],
        cwd=cwd,
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources() -> list[Path]:
    """Python files of the package, relative to the checkout's root, as `magi_serve/...`."""
    found = [path.relative_to(ROOT) for path in (ROOT / "magi_serve").glob("**/*.py")]
    linked = [
        Path("magi_serve") / path.relative_to(ROOT)
        for folder in LINKED
        for path in (ROOT / folder).glob("**/*.py")
    ]
    return sorted({*found, *linked})


def module_names(paths: list[Path]) -> list[str]:
    names = [".".join(path.with_suffix("").parts) for path in paths if path.stem != "__main__"]
    return sorted(name.removesuffix(".__init__") for name in names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a stale `build/` in the checkout cannot slip into it."""
    copy = tmp_path_factory.mktemp("source") / "magi-serve"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("magi_serve", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--quiet", "--wheel-dir", str(built), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that holds the wheel and, behind it, this one's packages.

    A path in a .pth file is appended to sys.path, but the .pth files in it are not read: the
    editable install of this checkout stays out.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    executable = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(executable), "install", "--no-deps"]
    command += ["--no-index", "--quiet", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return executable


def test_wheel_holds_every_module_and_the_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {str(path) for path in sources()} <= names
    linked = {f"magi_serve/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").glob("**/*.json")}
    own = {str(p.relative_to(ROOT)) for p in (ROOT / "magi_serve").glob("**/*.json")}
    assert linked, "kernels/ holds no tuned/*.json"
    assert linked | own <= names
    assert "magi_serve/py.typed" in names
    assert not any(name.partition("/")[0] in {*LINKED, "tests", "tools"} for name in names)


def test_every_module_can_be_imported_from_the_wheel(clean: Path, tmp_path: Path) -> None:
    code = f"""
import importlib, magi_serve
for name in {module_names(sources())}:
    module = importlib.import_module(name)
    assert (module.__file__ or "").startswith({str(clean.parents[1])!r}), module
for name in magi_serve.__all__:
    getattr(magi_serve, name)
"""
    python(clean, code, cwd=tmp_path)


def test_wheel_declares_its_command_its_plugin_and_its_version(clean: Path, tmp_path: Path) -> None:
    code = """
import json
from importlib.metadata import distribution
import magi_serve
d = distribution("magi-serve")
points = {p.group: f"{p.name} = {p.value}" for p in d.entry_points}
for p in d.entry_points:
    assert callable(p.load())
print(json.dumps([points, d.version, magi_serve.__version__]))
"""
    points, version, stated = json.loads(python(clean, code, cwd=tmp_path).splitlines()[-1])
    assert points == {
        "console_scripts": "magi-serve = magi_serve.cli:main",
        "vllm.general_plugins": "magi_serve = magi_serve.backends.vllm.plugin:register",
    }
    assert version == stated
    command = [str(clean.parent / "magi-serve"), "--version"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said == f"magi-serve {version}\n"


def test_linked_folders_are_relative_links_without_init() -> None:
    for name in LINKED:
        link = ROOT / "magi_serve" / name
        assert link.is_symlink(), f"{link} must be a link, not a copy"
        assert os.readlink(link) == f"../{name}"
        assert not (ROOT / name / "__init__.py").exists(), (
            f"{name}/__init__.py would shadow the package {name} of someone else"
        )


def test_checkout_does_not_shadow_an_installed_package_kernels(clean: Path) -> None:
    (site,) = clean.parents[1].glob("lib/python*/site-packages")
    package = site / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("def get_kernel(name): return name\n")
    metadata = site / "kernels-0.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.0.1\n")
    try:
        code = f"""
import sys
assert sys.path[0] == "", sys.path
from kernels import get_kernel
import kernels, magi_serve.kernels.capabilities
assert kernels.__file__ == {str(package / "__init__.py")!r}, kernels.__file__
assert magi_serve.__file__ == {str(ROOT / "magi_serve" / "__init__.py")!r}
"""
        python(clean, code, cwd=ROOT)
    finally:
        shutil.rmtree(package)
        shutil.rmtree(metadata)


def test_kernels_can_be_imported_with_torch_triton_and_numpy_alone(tmp_path: Path) -> None:
    blocked = ("fastapi", "pydantic", "transformers", "uvicorn", "vllm")
    names = [name for name in module_names(sources()) if name.startswith("magi_serve.kernels")]
    code = f"""
import importlib, magi_serve
for name in {names}:
    importlib.import_module(name)
for name in magi_serve.__all__:
    getattr(magi_serve, name)
"""
    python(
        sys.executable, BLOCKER.format(blocked=blocked) + code, cwd=tmp_path, PYTHONPATH=str(ROOT)
    )


def test_imports_point_one_way(tmp_path: Path) -> None:
    code = """
import sys
from magi_serve import ffa_attention
import magi_serve.backends.vllm.plugin
upper = [name for name in sys.modules if name.startswith("magi_serve.server") or name == "fastapi"]
assert not upper, upper
"""
    python(sys.executable, code, cwd=tmp_path, PYTHONPATH=str(ROOT))
