"""What a baseline gives back: calls ready to be timed, or the reason why there are none."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from magi_serve.errors import MagiServeError

Run = Callable[[int], Tensor]
"""Attention of the buffer of that number, returned as ``[num_tokens, num_q_heads, head_dim]``."""


class Refused(MagiServeError):
    """A baseline is not installed, or cannot do a case; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A baseline ready to be timed.

    Attributes:
        runs: calls by the name of a setting; the fastest setting counts.
        flops: of one call, where it computes something else than the case, to be compared by rate.
        error: how far its result may be from ours in the norm, where that is more than rounding.
    """

    runs: Mapping[str, Run]
    flops: int | None = None
    error: float = 0.0


def need(module: str, package: str) -> Any:
    """A module of a package that need not be installed.

    Raises:
        Refused: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise Refused(f"{package} is not installed or does not load here: {error}") from error
