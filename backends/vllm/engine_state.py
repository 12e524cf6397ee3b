"""Pages and prompts in the engine: a question that its core process answers between two steps."""

import sys
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

METHOD = "magi_serve_engine_state"


def add_method() -> None:
    """Give vLLM's engine core, in the process that has loaded it, `engine_state` as `METHOD`."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        setattr(core.EngineCore, METHOD, engine_state)


def engine_state(engine_core: Any) -> dict[str, Any]:
    """Who holds the pages of the KV cache, and how much of the prompts is left to read.

    Args:
        engine_core: vLLM's, between two steps.

    Returns:
        ``pages`` and ``free_pages`` of all groups (free ones may hold a prefix cache); ``groups``:
        for each its ``kind`` (vLLM's name of the layers' spec), ``page_tokens`` and ``held``, the
        pages of its requests, where a page that requests share counts for each; and
        ``unread_tokens`` of the prompts of ``running`` and ``waiting`` requests.
    """
    scheduler = engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    groups = [
        {
            "kind": type(group.kv_cache_spec).__name__,
            "page_tokens": group.block_size,
            "held": sum(map(_held, group.req_to_blocks.values())),
        }
        for group in scheduler.kv_cache_manager.coordinator.single_type_managers
    ]
    return {
        "pages": pool.num_gpu_blocks - 1,  # one stands for those that a window has left behind
        "free_pages": pool.get_num_free_blocks(),
        "groups": groups,
        "unread_tokens": {
            "running": _unread(scheduler.running),
            "waiting": _unread(scheduler.waiting),
        },
    }


def _held(pages: list[Any]) -> int:
    """How many of a request's pages are there: those that a window has left come first."""
    return len(pages) - bisect_left(pages, True, key=lambda page: not page.is_null)


def _unread(requests: Iterable[Any]) -> int:
    return sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in requests)
