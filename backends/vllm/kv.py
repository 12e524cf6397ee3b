"""vLLM's cache tensor as our `PagedKV`: where its blocks become our pages."""

import torch
from torch import Tensor

from magi_serve.types import PagedKV


class LayerPages:
    """Views of one layer's cache, kept as long as vLLM hands over the same tensor.

    Making them takes three torch calls, which a layer would otherwise repeat in every step.
    """

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._cache: Tensor | None = None
        self._pages: PagedKV | None = None

    def of(self, kv_cache: Tensor) -> PagedKV:
        """Pages without sequences, as `write_kv` takes them.

        Args:
            kv_cache: ``[blocks, kv_heads, block_size, 2 * head_dim]``, K before V, any strides.
        """
        if self._pages is None or self._cache is not kv_cache:
            tokens_first = kv_cache.transpose(1, 2)
            none = torch.empty(0, dtype=torch.int32, device=kv_cache.device)
            self._cache = kv_cache
            self._pages = PagedKV(
                tokens_first[..., : self._head_dim],
                tokens_first[..., self._head_dim :],
                none[:, None],
                none,
            )
        return self._pages

    def release(self) -> None:
        """Forget the cache, so that vLLM can free it."""
        self._cache = self._pages = None
