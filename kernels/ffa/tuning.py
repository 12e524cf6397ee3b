"""Tuned numbers: the tiles that a kernel takes, by GPU, kind of work, dtype width and head dim.

They are data (`tuned/*.json`, see `tuned_files`), written by hand or by ``magi-serve tune``;
serving never tunes. A row is looked for in the file that names the GPU, then in the one for its
architecture, then in the one for any GPU. Work of a special kind (`kinds`) takes the general kind's
row where a file has none for it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, TypeVar

import torch

from magi_serve.errors import ArgumentError
from magi_serve.kernels.ffa.plan import Regime
from magi_serve.kernels.ffa.tuned_files import Row, RowName, Tuned, loads
from magi_serve.types import AttentionProblem

T = TypeVar("T")


@functools.cache
def shipped() -> tuple[Tuned, ...]:
    """The files of the package, by name.

    Raises:
        ArgumentError: one is not as the module says.
    """
    folder = files("magi_serve.kernels.ffa") / "tuned"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".json"))
    return tuple(loads((folder / name).read_text(), f"tuned/{name}") for name in names)


_FIRST: list[Tuned] = []
"""What this process was told to take before the shipped files: nothing, or one."""
_CACHES: list["functools._lru_cache_wrapper[Any]"] = []


def cached(function: Callable[..., T]) -> "functools._lru_cache_wrapper[T]":
    """Remember what `function` made of tuned data, until other data are taken."""
    wrapped = functools.lru_cache(maxsize=1024)(function)
    _CACHES.append(wrapped)
    return wrapped


def use(tuned: Tuned | None) -> None:
    """Take `tuned` before the shipped files, in this process; None for the shipped ones alone.

    For the start of a process: planners that exist already keep buffers of the former sizes.
    """
    _FIRST[:] = [] if tuned is None else [tuned]
    for function in _CACHES:
        function.cache_clear()


@contextlib.contextmanager
def used(tuned: Tuned | None) -> Iterator[None]:
    """Inside, `tuned` is taken before the shipped files, in place of what was."""
    before = _FIRST[0] if _FIRST else None
    use(tuned)
    try:
        yield
    finally:
        use(before)


@functools.cache
def gpu_name() -> str | None:
    """The current GPU's name, None where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def kinds(problem: AttentionProblem, regime: Regime, *, wide: bool = False) -> tuple[str, ...]:
    """The kinds of rows that fit, the most special first.

    ``window`` is prefill where rows see a bounded number of keys, ``verify`` is decode with tiles
    of more than 16 matrix rows (`wide`): several drafts, or many query heads per kv head.
    """
    if regime == "prefill" and problem.window:
        return "window", "prefill"
    if regime == "decode" and wide:
        return "verify", "decode"
    return (regime,)


def row(
    kernel: str, problem: AttentionProblem, kinds: Sequence[str], *, bits: int, dim: int
) -> Row | None:
    """The row of tuned numbers for `problem`, or None.

    Raises:
        ArgumentError: a file was asked for that is for another architecture, or is not as the
            module says.
    """
    gpu = gpu_name() if problem.device == "cuda" else None
    return lookup(kernel, kinds, bits=bits, dim=dim, arch=problem.arch, gpu=gpu)


def lookup(
    kernel: str, kinds: Sequence[str], *, bits: int, dim: int, arch: int | None, gpu: str | None
) -> Row | None:
    """`row` for any GPU: one of architecture `arch` that is called `gpu`, None for no GPU."""
    first = [t for t in _FIRST if t.arch in (None, arch)]
    if _FIRST and not first and arch is not None:
        raise ArgumentError(
            f"{_FIRST[0].name} holds tuned data for sm_{_FIRST[0].arch} and this GPU is sm_{arch}; "
            "expected a file for it: make one by `magi-serve tune`, or leave it out"
        )
    ranked = sorted(shipped(), key=lambda t: -t.rank(arch, gpu))
    for tuned in (*first, *(t for t in ranked if t.rank(arch, gpu))):
        for kind in kinds:
            found = tuned.rows.get(RowName(kernel, kind, bits, dim))
            if found is not None:
                return found
    return None
