"""Attention on Hopper: Gluon for prefill of whole warp-groups of query rows, Triton for the rest.

Both read the same items, so one plan can hold parts for either.
"""

import functools

from magi_serve.kernels.ffa import hopper_prefill, triton_attention
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import Regime, TileConfig
from magi_serve.types import AttentionProblem


@functools.lru_cache(maxsize=1024)
def tile_config(problem: AttentionProblem, regime: Regime, max_q_len: int) -> TileConfig:
    """Gluon tiles for prefill with enough rows to fill the chip, else Triton's, which split keys.

    Windowed prefill has few blocks per item: one warp-group and three programs per multiprocessor
    hide each other's beginnings and ends.
    """
    sms = triton_attention.num_sms(problem.device)
    windowed = problem.head_dim == 64 and problem.window and regime == "prefill"
    consumers = 1 if windowed else {64: 3, 128: 2}[problem.head_dim]
    tiles = -(-max_q_len // (64 * consumers))
    if regime == "decode" or tiles * problem.num_q_heads < sms:
        return triton_attention.tile_config(problem, regime, max_q_len)
    per_sm = 3 if windowed else 1
    return TileConfig(
        block_m=64 * consumers,
        block_n=64 if windowed else 128,
        num_stages=3 if windowed else 2,
        packed=False,
        programs=per_sm * sms,
        programs_per_sm=per_sm,
        queued=True,
    )


def run(call: AttentionCall) -> None:
    """Launch `call`, each part with the kernel that its tiles are for."""
    for plan in call.parts:
        launch = hopper_prefill.run_part if plan.config.queued else triton_attention.run_part
        launch(call, plan)
