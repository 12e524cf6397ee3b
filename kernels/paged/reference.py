"""The paged key/value cache as its definition says: slot ``page * page_size + offset`` holds one
token."""

from torch import Tensor

from magi_serve.types import PagedKV


def gather_pages(kv: PagedKV, seq: int, num_keys: int) -> tuple[Tensor, Tensor]:
    """The first `num_keys` keys and values of sequence `seq`, densely.

    Returns:
        k ``[num_keys, num_kv_heads, head_dim]`` and v ``[num_keys, num_kv_heads, head_dim_v]``.
    """
    num_pages = -(-num_keys // kv.page_size)
    pages = kv.page_table[seq, :num_pages].long()
    return kv.k[pages].flatten(0, 1)[:num_keys], kv.v[pages].flatten(0, 1)[:num_keys]


def write_kv_ref(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """One token after the other; arguments as in `magi_serve.write_kv`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, kv.page_size)
            kv.k[page, offset] = k[token].to(kv.k.dtype)
            kv.v[page, offset] = v[token].to(kv.v.dtype)
