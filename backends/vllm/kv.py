"""vLLM's cache tensor as our `PagedKV`: where its blocks become our pages."""

from typing import Any

import torch
from torch import Tensor

from magi_serve.backends.vllm.compat import Stored
from magi_serve.kernels.paged.layout import split_slots
from magi_serve.types import PagedKV, ScaleKind


class LayerPages:
    """Views of one layer's cache, kept as long as vLLM hands over the same tensors.

    Making them takes some torch calls, which a layer would otherwise repeat in every step.

    Args:
        head_dim: of keys and of values.
        stored: how they are quantised; None if they are not.
    """

    def __init__(self, head_dim: int, stored: Stored | None) -> None:
        self._head_dim = head_dim
        self._stored = stored
        self._from: tuple[Tensor | None, ...] = ()
        self._pages: PagedKV | None = None

    def of(self, kv_cache: Tensor, layer: Any) -> PagedKV:
        """Pages without sequences, as `write_kv` takes them.

        Args:
            kv_cache: ``[blocks, kv_heads, block_size, 2 * head_dim]``, K before V, any strides;
                each with its scale behind it where that is per token.
            layer: holds ``_k_scale`` and ``_v_scale``, ``[]`` or ``[num_kv_heads]`` fp32, where
                scales are per head.
        """
        stored = self._stored
        scales: tuple[Tensor | None, Tensor | None] = None, None
        if stored is not None and stored.scales == "head":
            scales = layer._k_scale, layer._v_scale
        made_from = kv_cache, *scales
        if self._pages is None or any(
            a is not b for a, b in zip(made_from, self._from, strict=True)
        ):
            dtype = kv_cache.dtype if stored is None else stored.dtype
            kind: ScaleKind = "none" if stored is None else stored.scales
            slots = kv_cache.transpose(1, 2)
            k, v, *inline = split_slots(slots, self._head_dim, self._head_dim, dtype, kind)
            none = torch.empty(0, dtype=torch.int32, device=kv_cache.device)
            self._from = made_from
            self._pages = PagedKV(
                k, v, none[:, None], none, *(inline if kind == "token" else scales)
            )
        return self._pages

    def release(self) -> None:
        """Forget the cache, so that vLLM can free it."""
        self._from, self._pages = (), None
