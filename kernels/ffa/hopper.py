"""Attention on Hopper: Gluon for prefill of whole warp-groups of query rows, Triton for the rest.

Both read the same items, so one plan can hold parts for either.
"""

from magi_serve.kernels.ffa import hopper_prefill, triton_attention, tuning
from magi_serve.kernels.ffa.call import AttentionCall
from magi_serve.kernels.ffa.plan import Regime, TileConfig
from magi_serve.types import AttentionProblem


@tuning.cached
def tile_config(problem: AttentionProblem, regime: Regime, max_q_len: int) -> TileConfig:
    """Tuned Gluon tiles for enough rows to fill the chip, else Triton's, which split keys.

    Windowed prefill has few blocks per item: one warp-group and several programs per multiprocessor
    hide each other's beginnings and ends.
    """
    kinds = tuning.kinds(problem, regime)
    row = tuning.row("hopper", problem, kinds, bits=16, dim=problem.head_dim)
    sms = triton_attention.num_sms(problem.device)
    if row is not None:
        block_m = 64 * int(row["consumers"])
        tiles = -(-max_q_len // block_m)
    if row is None or tiles * problem.num_q_heads < row["min_tiles_per_sm"] * sms:
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
        launch = hopper_prefill.run_part if plan.config.queued else triton_attention.run_part
        launch(call, plan)
