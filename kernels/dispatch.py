"""Choosing a kernel for a problem: the first row of the capability table that has no reason
against it."""

import functools
import logging

from magi_serve.errors import ArgumentError, NoKernelError
from magi_serve.kernels.capabilities import KERNEL_NAMES, SPECS, KernelSpec
from magi_serve.types import AttentionProblem, given

logger = logging.getLogger(__name__)


def choose_kernel(problem: AttentionProblem, kernel: str | None = None) -> KernelSpec:
    """The kernel that computes `problem`.

    Args:
        problem: what has to be done.
        kernel: a kernel's name to force it, None to let the order of `SPECS` decide.

    Raises:
        ArgumentError: `kernel` names no kernel.
        NoKernelError: the named kernel, or every kernel, has reasons against the problem; the
            message lists them.
    """
    if kernel is not None:
        _check_name(kernel)
    return _choose(problem, kernel)


def _check_name(kernel: object) -> None:
    if not isinstance(kernel, str) or kernel not in KERNEL_NAMES:
        raise ArgumentError(
            f"{given('kernel', kernel)} is unknown (accepts {', '.join(KERNEL_NAMES)}); leave it "
            "out to let dispatch choose"
        )


@functools.lru_cache(maxsize=4096)
def _choose(problem: AttentionProblem, kernel: str | None) -> KernelSpec:
    reasons: dict[str, list[str]] = {}
    for spec in SPECS:
        if kernel is not None and spec.name != kernel:
            continue
        against = spec.why_not(problem)
        if not against:
            passed_over = "; ".join(
                f"not {name}: {', '.join(why)}" for name, why in reasons.items()
            )
            logger.info(
                "kernel %s for %s%s", spec.name, problem, f" ({passed_over})" if passed_over else ""
            )
            return spec
        reasons[spec.name] = against
    listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
    if kernel is None:
        raise NoKernelError(f"no kernel can do {problem} ({listed})", reasons)
    able = [spec.name for spec in SPECS if not spec.why_not(problem)]
    way_out = (
        f"use kernel={able[0]!r} or leave kernel out"
        if able
        else "no other kernel can do it either"
    )
    raise NoKernelError(f"kernel {kernel} cannot do {problem} ({listed}); {way_out}", reasons)
