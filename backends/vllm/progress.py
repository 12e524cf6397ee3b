"""How far the engine is with prompts: a question that its core process answers between two steps.

vLLM tells the process that serves HTTP nothing of a prompt before its last token is computed. Our
plugin gives the engine core one more method, which nothing calls but a request that asks for it.
"""

import sys
import time
from collections.abc import Iterable
from typing import Any

METHOD = "magi_serve_prompt_progress"


def add_method() -> None:
    """Give vLLM's engine core, in the process that has loaded it, `prompt_progress` as `METHOD`."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        setattr(core.EngineCore, METHOD, prompt_progress)


def prompt_progress(engine_core: Any, request_ids: Iterable[str]) -> dict[str, list[float]]:
    """How much of each prompt is computed.

    Args:
        engine_core: vLLM's, between two steps.
        request_ids: the engine's own.

    Returns:
        By request id: the prompt's tokens, those found in a cache, those computed (with the cached
        ones), and the seconds since its first step began, -1 where vLLM keeps no statistics. A
        request that has not begun, or is unknown, is left out.
    """
    now = time.monotonic()
    found: dict[str, list[float]] = {}
    for request_id in request_ids:
        request = engine_core.scheduler.requests.get(request_id)
        if request is None:
            continue
        stats = request.prefill_stats  # None once the first token is out
        if stats is None or not stats.num_prompt_tokens:
            continue
        total, cached = request.num_prompt_tokens, stats.num_cached_tokens
        # The scheduler counts a step's tokens when it starts the step.
        under_way = sum(
            scheduled.num_scheduled_tokens.get(request_id, 0)
            for _, scheduled, *_ in engine_core.batch_queue or ()
        )
        computed = min(total, max(cached, request.num_computed_tokens - under_way))
        begun_s = [event.timestamp for event in request.events if event.type.name == "SCHEDULED"]
        found[request_id] = [total, cached, computed, now - begun_s[0] if begun_s else -1]
    return found
