"""Writing new keys and values into their pages."""

import torch
from torch import Tensor

from magi_serve.errors import ArgumentError, DeviceError, DTypeError, NoKernelError, ShapeError
from magi_serve.kernels.paged.reference import write_slots
from magi_serve.types import PagedKV, check_types


def write_kv(k: Tensor, v: Tensor, kv: PagedKV, slot_mapping: Tensor) -> None:
    """Write one key and value per token into the cache.

    Token ``t`` goes to slot ``slot_mapping[t] = page * page_size + offset``; a negative slot writes
    nothing. Rows of k and v past the end of `slot_mapping` are ignored. Pages of 8-bit numbers get
    ``k / k_scale``, saturated, where scales are per head; scales per token and head are written
    too, each so that its head's largest number is the largest of the pages' dtype.

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]``, any dtype that converts to the pages', last
            stride 1.
        v: ``[num_tokens, num_kv_heads, head_dim_v]``, likewise.
        kv: the pages; its table and lengths are not used.
        slot_mapping: ``[<= num_tokens]`` int64 or int32. Slots must lie in the pool and not repeat.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: an argument disagrees with the above.
        NoKernelError: the pages are on a GPU, and no Triton that can write there is installed.
    """
    check_types(Tensor, k=k, v=v, slot_mapping=slot_mapping)
    check_types(PagedKV, kv=kv)
    for name, x, pool in (("k", k, kv.k), ("v", v, kv.v)):
        if x.ndim != 3 or x.shape[1:] != pool.shape[2:]:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}; expected [num_tokens, {pool.shape[2]}, "
                f"{pool.shape[3]}] as in the pages"
            )
        if x.device != pool.device:
            raise DeviceError(
                f"{name} is on {x.device} and the pages are on {pool.device}; move one of them"
            )
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ArgumentError(
                f"{name} has strides {x.stride()}; the last one must be 1: call {name}.contiguous()"
            )
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise DTypeError(
            f"slot_mapping is {slot_mapping.dtype}; expected torch.int64 or torch.int32"
        )
    num_tokens = slot_mapping.shape[0] if slot_mapping.ndim == 1 else -1
    if not 0 <= num_tokens <= min(len(k), len(v)):
        raise ShapeError(
            f"slot_mapping has shape {tuple(slot_mapping.shape)}; expected one slot per token, at "
            f"most [{min(len(k), len(v))}]"
        )
    if slot_mapping.device != kv.k.device:
        raise DeviceError(
            f"slot_mapping is on {slot_mapping.device} and the pages are on {kv.k.device}; move "
            "one of them"
        )
    if not num_tokens:
        return
    from magi_serve.kernels.capabilities import triton_interprets, triton_problem

    if kv.k.device.type == "cuda" or triton_interprets():
        if why := triton_problem():
            raise NoKernelError(f"write_kv cannot write to {kv.k.device}: {why}", {"triton": [why]})
        from magi_serve.kernels.paged.triton_store import write_kv_triton

        with torch.cuda.device_of(kv.k):  # kernels launch on the current device
            write_kv_triton(k, v, kv, slot_mapping.contiguous())
    else:
        slots = slot_mapping.long()
        written = slots >= 0
        pages, offsets = slots[written] // kv.page_size, slots[written] % kv.page_size
        write_slots(kv.k, kv.k_scale, k[:num_tokens][written], (pages, offsets))
        write_slots(kv.v, kv.v_scale, v[:num_tokens][written], (pages, offsets))
