"""Attention on Hopper in Gluon: prefill of whole warp-groups of query rows, and decode of packed
ones; Triton for what fills neither. All read the same items, so a plan holds parts for any.
"""

from typing import Any

import triton

from magi_serve.kernels.ffa import (
    hopper_decode,
    hopper_prefill,
    hopper_quantised,
    hopper_quantised_prefill,
    triton_attention,
    tuning,
)
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import Regime, TileConfig
from magi_serve.types import LARGEST, AttentionProblem


@tuning.cached
def tile_config(problem: AttentionProblem, regime: Regime, max_q_len: int) -> TileConfig:
    """Tuned Gluon tiles for decode, and for prefill of enough rows to fill the chip.

    Triton's tiles for other prefill: they split keys.
    """
    if regime == "decode":
        return _decode_config(problem, max_q_len)
    return _prefill_config(problem, regime, max_q_len)


def _decode_config(problem: AttentionProblem, max_q_len: int) -> TileConfig:
    """Tiles of 64 packed rows, whatever `max_q_len`: fewer would take as long.

    Over a quantised cache packed rows are the columns of a matrix: there as few as do.
    """
    rows = problem.num_q_heads // problem.num_kv_heads * max_q_len
    kinds = tuning.kinds(problem, "decode", wide=rows > 16)
    bits = 8 * problem.kv_dtype.itemsize
    row = tuning.row("hopper", problem, kinds, bits=bits, dim=problem.head_dim)
    if row is None or problem.kv_scales == "token":
        return triton_attention.tile_config(problem, "decode", max_q_len)
    numbers: dict[str, Any] = dict(row)
    page_size = problem.page_size or 1
    if numbers["block_n"] % page_size and page_size % numbers["block_n"]:
        numbers["block_n"] = 128  # of which every page size that is taken is a part or a multiple
    programs = numbers["programs_per_sm"] * triton_attention.num_sms(problem.device)
    most = 32 if problem.head_dim == 256 else 64  # registers of the accumulator
    block_m = 64 if bits == 16 else min(max(triton.next_power_of_2(rows), 8), most)
    return TileConfig(block_m=block_m, programs=programs, fused=True, **numbers)


def _prefill_config(problem: AttentionProblem, regime: Regime, max_q_len: int) -> TileConfig:
    """Windowed prefill has few blocks per item: one warp-group and several programs per
    multiprocessor hide each other's beginnings and ends.
    """
    kinds = tuning.kinds(problem, regime)
    bits = 8 * problem.kv_dtype.itemsize
    row = tuning.row("hopper", problem, kinds, bits=bits, dim=problem.head_dim)
    sms = triton_attention.num_sms(problem.device)
    if row is not None:
        block_m = 64 * int(row["consumers"])
        tiles = -(-max_q_len // block_m)
    per_token = problem.kv_scales == "token"
    if row is None or per_token or tiles * problem.num_q_heads < row["min_tiles_per_sm"] * sms:
        return triton_attention.tile_config(problem, regime, max_q_len)
    per_sm = int(row["programs_per_sm"])
    return TileConfig(
        block_m=block_m,
        block_n=int(row["block_n"]),
        num_stages=int(row["num_stages"]),
        packed=False,
        programs=per_sm * sms,
        programs_per_sm=per_sm,
        queued=True,
    )


def run(call: AttentionCall) -> None:
    """Launch `call`, each part with the kernel that its tiles are for."""
    for plan in call.parts:
        if plan.config.queued and call.k.dtype in LARGEST:
            hopper_quantised_prefill.run_part(call, plan)
        elif plan.config.queued:
            hopper_prefill.run_part(call, plan)
        elif plan.config.fused and call.k.dtype in LARGEST:
            hopper_quantised.run_part(call, plan)
        elif plan.config.fused:
            hopper_decode.run_part(call, plan)
        else:
            triton_attention.run_part(call, plan)
