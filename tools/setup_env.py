"""Make the private environment that `make serve` and `make test` run in. Standard library only.

    python3 tools/setup_env.py serve [--device cpu|cuda] [--venv DIR]
    python3 tools/setup_env.py test  [--venv DIR]

What goes in is pinned by `requirements/*.txt`: complete lists, so pip resolves nothing.
Each part leaves a stamp in the environment that holds a digest of what it was made from; a part
whose stamp fits is not touched again, so a second run takes less than a second.

`test` adds to the CPU's `serve`: the test tools; other versions of vLLM and Triton, each in a
folder of its own (`DIR/vllm-0.28`, ...: put one on PYTHONPATH to shadow the main version); and the
tests that vLLM ships in its source archive (`DIR/vllm-tests/tests`).
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# PyPI's builds of these want the CUDA build of PyTorch: beside the CPU build transformers fails to
# import them ("operator torchvision::nms does not exist"). Text models need none of them.
HARMFUL_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# Thousands of files that few runs import.
NOT_COMPILED = r"/(tests?|transformers/models)/"


class SetupError(Exception):
    """The environment could not be made; the message says why and what to do."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


@dataclass(frozen=True)
class Part:
    """One part of the environment: `made_from` decides when it is stale, `make` makes it."""

    name: str
    made_from: tuple[Path, ...]
    make: Callable[["Environment"], None]

    def digest(self, env: "Environment") -> str:
        digest = hashlib.sha256(f"{env.identity} {self.name}".encode())
        for path in self.made_from:
            digest.update(path.read_bytes())
        return digest.hexdigest()


class Environment:
    """A virtual environment that belongs to this checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / ".magi-serve"
        self.python = folder / "bin" / "python"
        # Scripts in an environment hold its absolute path and belong to one Python version.
        self.identity = f"{folder} python{sys.version_info.major}.{sys.version_info.minor}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one set-up at a time work on the folder."""
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another set-up is working on {self.folder}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def prepare(self) -> None:
        """Create the environment; start it anew if it was moved here or made by another Python."""
        identity = self.state / "identity"
        if identity.exists() and identity.read_text() != self.identity:
            say(f"removing what was made elsewhere or by another Python: {identity.read_text()}")
            for path in self.folder.iterdir():
                if path == self.state:
                    for stamp in path.glob("*.stamp"):
                        stamp.unlink()
                elif path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        if not self.python.exists():
            say(f"creating a virtual environment in {self.folder}")
            made = subprocess.run(
                [sys.executable, "-m", "venv", str(self.folder)], capture_output=True, text=True
            )
            if made.returncode:
                raise SetupError(
                    f"python3 -m venv failed; on Debian install the package python3-venv\n"
                    f"{made.stdout}{made.stderr}"
                )
        identity.write_text(self.identity)

    def is_current(self, part: Part) -> bool:
        stamp = self.state / f"{part.name}.stamp"
        return stamp.exists() and stamp.read_text() == part.digest(self) and self.python.exists()

    def make(self, part: Part) -> None:
        stamp = self.state / f"{part.name}.stamp"
        stamp.unlink(missing_ok=True)
        part.make(self)
        stamp.write_text(part.digest(self))

    def run(self, name: str, *arguments: str, total: int = 0, **variables: str) -> None:
        """Run the environment's Python, with its output in a log and progress on the screen.

        `total` is how many packages a pip command brings; each "Collecting" counts as one.
        """
        log_path = self.state / f"{name}.log"
        lines: list[str] = []
        seen, told = 0, time.monotonic()
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [str(self.python), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **variables},
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.append(line)
                collecting = line.startswith(("Collecting ", "Requirement already satisfied: "))
                seen += collecting
                if total and collecting and time.monotonic() - told > 5:
                    told = time.monotonic()
                    package = line.split(": ")[-1].removeprefix("Collecting ").split()[0]
                    say(f"  {name}: {seen} of {total} packages, now {package}")
                if total > 1 and line.startswith("Installing collected packages"):
                    say(f"  {name}: downloaded, now unpacking")
        if process.wait():
            tail = "".join(lines[-15:])
            raise SetupError(f"{name} failed; {log_path} has everything, and it ends with\n{tail}")

    def pip_install(self, name: str, *arguments: str, total: int = 0) -> None:
        """Install with pip as it is set up here and, if need be, with PyTorch's CPU index too."""
        command = (
            *("-m", "pip", "install", "--disable-pip-version-check", "--no-input"),
            *("--progress-bar", "off", "--no-deps", "--no-compile"),
            *arguments,
        )
        try:
            self.run(name, *command, total=total)
        except SetupError as error:
            if "No matching distribution found for torch==" not in str(error):
                raise
            say(f"pip finds no CPU build of PyTorch as it is; trying again with {TORCH_CPU_INDEX}")
            self.run(name, *command, "--extra-index-url", TORCH_CPU_INDEX, total=total)


def pins(lock: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return [line for line in lines if line]


def locked_packages(lock: Path) -> list[Part]:
    """The packages of a lock file; PyTorch apart, so that a missing CPU index shows at once."""
    torch = [pin for pin in pins(lock) if pin.startswith("torch==")]
    others = [pin for pin in pins(lock) if pin not in torch]

    def make_torch(env: Environment) -> None:
        say(f"installing {torch[0]}")
        env.pip_install("torch", *torch, total=1)

    def make_others(env: Environment) -> None:
        say(f"installing {len(others)} packages of {lock.relative_to(ROOT)}")
        listed = env.state / lock.name
        listed.write_text("".join(f"{pin}\n" for pin in others))
        env.pip_install(lock.stem, "-r", str(listed), total=len(others))

    parts = [Part(lock.stem, (lock,), make_others)]
    return [*parts, Part("torch", (lock,), make_torch)] if torch else parts


def side_by_side(lock: Path) -> Part:
    """Another version of a package, in a folder named after its lock file."""

    def make(env: Environment) -> None:
        (pin,) = pins(lock)
        folder, unfinished = env.folder / lock.stem, env.folder / f"{lock.stem}.unfinished"
        for old in (folder, unfinished):
            shutil.rmtree(old, ignore_errors=True)
        say(f"installing {pin} into {folder}")
        env.pip_install(lock.stem, "--target", str(unfinished), pin, total=1)
        unfinished.rename(folder)

    return Part(lock.stem, (lock,), make)


def upstream_tests(lock: Path) -> Part:
    """The tests in vLLM's source archive: `DIR/vllm-tests/tests`, and nothing else of it.

    (The archive's root holds a folder `vllm`, which must never come to stand on sys.path.)
    """

    def make(env: Environment) -> None:
        (pin,) = pins(lock)
        folder, unfinished = env.folder / lock.stem, env.folder / f"{lock.stem}.unfinished"
        for old in (folder, unfinished):
            shutil.rmtree(old, ignore_errors=True)
        unfinished.mkdir()
        say(f"fetching the tests in the source archive of {pin}")
        # pip asks the archive for its metadata: vLLM's set-up script answers at once for no device,
        # and with the version that pip expects only when told to.
        env.run(
            lock.stem,
            *("-m", "pip", "download", "--disable-pip-version-check", "--no-input"),
            *("--progress-bar", "off", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"),
            *("--dest", str(unfinished), pin),
            VLLM_TARGET_DEVICE="empty",
            VLLM_VERSION_OVERRIDE=pin.split("==")[1],
        )
        (archive,) = unfinished.glob("vllm-*.tar.gz")
        with tarfile.open(archive) as source:
            for member in source:
                inner = member.name.partition("/")[2]
                if member.isfile() and inner.startswith("tests/") and ".." not in inner:
                    target = unfinished / inner
                    target.parent.mkdir(parents=True, exist_ok=True)
                    content = source.extractfile(member)
                    assert content is not None
                    target.write_bytes(content.read())
        archive.unlink()
        unfinished.rename(folder)

    return Part(lock.stem, (lock,), make)


def this_package() -> Part:
    """magi-serve itself, editable: its command, its vLLM entry point, its folders as they stand."""

    def make(env: Environment) -> None:
        say("installing magi-serve itself, editable")
        env.pip_install("magi-serve", "--no-build-isolation", "--editable", str(ROOT))

    return Part("magi-serve", (ROOT / "pyproject.toml",), make)


def parts_of(profile: str, device: str) -> list[list[Part]]:
    """The parts of a profile in rounds; the parts of one round do not need each other."""
    packages = locked_packages(REQUIREMENTS / f"{device}.txt")
    if profile == "serve":
        return [packages, [this_package()]]
    names = ("vllm-0.28", "vllm-0.30", "triton-3.8")
    folders = [side_by_side(REQUIREMENTS / f"{name}.txt") for name in names]
    return [
        [*packages, *folders, *locked_packages(REQUIREMENTS / "dev.txt")],
        [upstream_tests(REQUIREMENTS / "vllm-tests.txt"), this_package()],
    ]


def set_up(profile: str, device: str, env: Environment) -> None:
    rounds = parts_of(profile, device)
    if all(env.is_current(part) for parts in rounds for part in parts):
        say(f"{env.folder} is up to date")
        return
    start = time.monotonic()
    with env.locked():
        env.prepare()
        for parts in rounds:
            stale = [part for part in parts if not env.is_current(part)]
            with ThreadPoolExecutor(2) as pool:
                for job in [pool.submit(env.make, part) for part in stale]:
                    job.result()
        if device == "cpu":
            env.run("uninstall", "-m", "pip", "uninstall", "--yes", *HARMFUL_ON_CPU)
        say("compiling Python files")
        # Some packages ship files for other Python versions: what does not compile is left alone.
        subprocess.run(
            [env.python, "-m", "compileall", "-q", "-j", "0", "-x", NOT_COMPILED, str(env.folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    say(f"{env.folder} is ready after {time.monotonic() - start:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", choices=("serve", "test"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args()
    if sys.hexversion < 0x030B0000:
        print(
            f"set-up: Python {sys.version.split()[0]} is too old; magi-serve needs 3.11 or newer: "
            "make PYTHON=python3.11 ...",
            file=sys.stderr,
        )
        return 1
    try:
        set_up(arguments.profile, arguments.device, Environment(arguments.venv.resolve()))
    except SetupError as error:
        print(f"set-up: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
