"""What the service says about itself: ``/live``, ``/ready`` and ``/version``."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from magi_serve.versions import versions

router = APIRouter(tags=["status"])


@router.get("/live")
async def live() -> JSONResponse:
    """200 as long as this process answers; the engine is not asked."""
    return JSONResponse({"status": "live"})


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 when requests are taken and the engine is healthy, 503 with the reason otherwise."""
    state = request.app.state
    server = getattr(state, "server", None)
    if server is None or not server.started:
        return _not_ready("starting")
    if server.should_exit:
        return _not_ready("stopping")
    try:
        await state.engine_client.check_health()
    except Exception as error:
        return _not_ready(f"the engine is not healthy ({type(error).__name__})")
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version(request: Request) -> JSONResponse:
    """Versions, and the attention classes that the engine's workers said they run.

    ``version`` is vLLM's, as in vLLM's own route of this path, so that its clients keep working.
    """
    found = versions()
    attention = dict(request.app.state.magi_serve_attention)
    device = attention.pop("device", None)
    return JSONResponse(
        {"version": found["vllm"], **found, "device": device, "attention": attention}
    )


def _not_ready(reason: str) -> JSONResponse:
    return JSONResponse({"status": reason}, status_code=503)
