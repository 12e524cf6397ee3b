"""``/magi/v1/topology``: what the service runs on, and how full it is."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

router = APIRouter(tags=["status"])

_SIZES = {
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "data": "data_parallel_size",
    "decode_context": "decode_context_parallel_size",
    "prefill_context": "prefill_context_parallel_size",
}


def parallel_sizes(config: Any) -> dict[str, int]:
    """Sizes by kind of parallelism; `config` is vLLM's, some of whose versions lack some kinds."""
    return {name: int(getattr(config, field, 1)) for name, field in _SIZES.items()}


@router.get("/magi/v1/topology")
async def topology(request: Request) -> JSONResponse:
    """Device, workers and parallelism, attention by KV group, pages and prompts.

    ``kv`` is what the engine said last, null before it has: it is asked between two of its steps,
    at most every 5 s.
    """
    figures = request.app.state.magi_serve_figures
    attention = figures.attention
    if figures.engine is not None:
        figures.engine.refresh()
    return JSONResponse(
        {
            "device": attention.get("device"),
            "workers": attention.get("workers"),
            "parallel": request.app.state.magi_serve_parallel,
            "groups": attention.get("groups", []),
            "kv": figures.engine.state if figures.engine else None,
            "requests": {"open": figures.tally.open, "refused": figures.tally.refused},
            "long_prompts": {
                "reading": len(figures.queue.running),
                "waiting": len(figures.queue.waiting),
            },
        }
    )
