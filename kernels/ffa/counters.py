"""Zeros for launches to count in: nothing is zeroed in between, since each launch leaves zeros.

Launches of one stream follow each other and share a counter. A captured graph may be replayed
beside anything, so each launch in it keeps a counter of its own, from a pool zeroed ahead.
"""

import torch
from torch import Tensor

from magi_serve.kernels.ffa.plan import capturing

WORDS = 2
"""int32 in a counter."""
POOL = 1 << 14
"""Counters of a device for captured launches; past them, the graph zeroes one for each launch."""

_OF_STREAM: dict[tuple[torch.device, int], Tensor] = {}
_POOLS: dict[torch.device, Tensor] = {}
"""The counters that no graph has taken."""


def _zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(*shape, WORDS, dtype=torch.int32, device=device)


def counter(device: torch.device) -> Tensor:
    """``[WORDS]`` int32 zeros for a launch on the current stream, which must leave zeros there.

    A capture comes after a synchronisation, so that its replays find the pool zeroed.
    """
    if capturing():
        left = _POOLS.get(device)
        if left is None or not len(left):
            return _zeros(device)
        _POOLS[device] = left[1:]
        return left[0]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    found = _OF_STREAM.get((device, stream))
    if found is None:
        _POOLS.setdefault(device, _zeros(device, POOL))
        found = _OF_STREAM[device, stream] = _zeros(device)
    return found
