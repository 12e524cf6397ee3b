"""What the API hands to a planned kernel: operands checked, plan made, outputs allocated."""

import math
from dataclasses import dataclass

from torch import Tensor

from magi_serve.kernels.ffa.plan import Plan


@dataclass(frozen=True, eq=False, slots=True)
class AttentionCall:
    """One attention call over a plan.

    Attributes:
        q: ``[num_tokens, num_q_heads, head_dim]``, last stride 1.
        k, v: ``[num_pages, page_size, num_kv_heads, head_dim(_v)]`` where `page_table` is given,
            else ``[num_keys, num_kv_heads, head_dim(_v)]``; last stride 1.
        page_table: ``[num_seqs, max_pages]`` int32, or None.
        parts: launches; together they cover every row of q once.
        softmax_scale, softcap: as in the public functions.
        sink: one combined logit per head ``[num_q_heads]``, or per token and head, fp32; or None.
        out, lse, max_logits: where results go (`AttentionOutput`); `max_logits` holds -inf, or is
            None.
        k_scale, v_scale: of paged keys and values, as in `PagedKV`; None for 1.
        alibi: slopes ``[num_q_heads]``, fp32, for paged attention only; or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None
    parts: tuple[Plan, ...]
    softmax_scale: float
    softcap: float
    sink: Tensor | None
    out: Tensor
    lse: Tensor
    max_logits: Tensor | None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    alibi: Tensor | None = None

    @property
    def logit_scale(self) -> float:
        """What ``q·k`` is multiplied with: towards base 2, or towards ``softcap * tanh``."""
        if self.softcap > 0:
            return self.softmax_scale / self.softcap
        return self.softmax_scale * math.log2(math.e)

    @property
    def stride_sink_t(self) -> int:
        """From one token's sinks to the next's; 0 where all have the same, or none."""
        return self.sink.stride(0) if self.sink is not None and self.sink.ndim == 2 else 0

    def pointer(self, x: Tensor | None) -> Tensor:
        """`x` for a launch; what a kernel will not touch where there is none."""
        return self.lse if x is None else x
