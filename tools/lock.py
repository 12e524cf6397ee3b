"""Write `requirements/{cpu,dev,cuda}.txt`: every package that a `.in` file leads to, pinned.

    python3 tools/lock.py cpu dev     # or cuda; `make lock` writes all three

pip resolves (`--dry-run`) in an empty environment; nothing is installed. Run it with the Python
that the environments will use (3.11) on Linux x86-64. Old pins stay unless --upgrade is given.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Beside PyTorch's CPU build PyPI's builds of these break transformers (tools/setup_env.py).
LEFT_OUT = {"cpu": {"torchvision", "torchaudio", "torchcodec"}, "dev": set(), "cuda": set()}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: Path) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in lock.read_text().splitlines())
    return {normal(line.split("==")[0]): line for line in lines if line}


def resolve(python: Path, profile: str, upgrade: bool, report: Path) -> dict[str, str]:
    lock = REQUIREMENTS / f"{profile}.txt"
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--disable-pip-version-check", "--report", str(report)]
    command += ["-r", str(REQUIREMENTS / f"{profile}.in")]
    if lock.exists() and not upgrade:
        command += ["-c", str(lock)]
    for extra in ([], ["--extra-index-url", TORCH_CPU_INDEX] if profile != "cuda" else []):
        if subprocess.run(command + extra).returncode == 0:
            break
    else:
        raise SystemExit(f"pip could not resolve {profile}.in")
    packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {normal(p["name"]): f"{p['name']}=={p['version']}" for p in packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profiles", nargs="+", choices=tuple(LEFT_OUT))
    parser.add_argument("--upgrade", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        for profile in arguments.profiles:
            found = resolve(python, profile, arguments.upgrade, Path(folder) / "report.json")
            left_out = set(LEFT_OUT[profile])
            if profile == "dev":
                left_out |= set(pins(REQUIREMENTS / "cpu.txt"))
            kept = [found[name] for name in sorted(found) if name not in left_out]
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            header = (
                f"# Made by tools/lock.py from {profile}.in with Python {version}: "
                "change that and run `make lock`.\n"
            )
            lock = REQUIREMENTS / f"{profile}.txt"
            lock.write_text(header + "".join(f"{pin}\n" for pin in kept))
            print(f"{lock}: {len(kept)} packages")


if __name__ == "__main__":
    main()
