"""The error tree of magi-serve.

Everything raised on purpose derives from `MagiServeError`. Mistakes in arguments also derive from
`ValueError`, so that callers who know nothing of this package still catch them. A message names the
argument, the value received, what is accepted, and the way out.
"""

from collections.abc import Mapping, Sequence


class MagiServeError(Exception):
    """Base class of every error that magi-serve raises on purpose."""


class ArgumentError(MagiServeError, ValueError):
    """An argument has a value that is not accepted."""


class ShapeError(ArgumentError):
    """A tensor's shape disagrees with another argument or with what the function takes."""


class DTypeError(ArgumentError):
    """A tensor's dtype is not accepted."""


class DeviceError(ArgumentError):
    """Tensors of one call live on different devices, or on one that is not accepted."""


class SettingsError(ArgumentError):
    """A setting is unknown or has a value that is not accepted."""


class NoKernelError(ArgumentError):
    """No kernel, or not the kernel asked for, can do the problem; `reasons` says why, by kernel."""

    def __init__(self, message: str, reasons: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.reasons = reasons


class PluginError(MagiServeError):
    """The vLLM plugin cannot do what it was asked to, for a reason outside our arguments."""
