"""What the service says about itself: ``/live``, ``/startup``, ``/ready`` and ``/version``."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from magi_serve.versions import versions

router = APIRouter(tags=["status"])


@router.get("/live")
async def live() -> JSONResponse:
    """200 as long as this process answers; the engine is not asked."""
    return JSONResponse({"status": "live"})


@router.get("/startup")
async def startup(request: Request) -> JSONResponse:
    """200 once the engine has been loaded and has answered a first request."""
    if hasattr(request.app.state, "magi_serve_lifecycle"):
        return JSONResponse({"status": "started"})
    return _not_ready("starting")


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 when requests are taken and the engine steps, 503 with the reason otherwise."""
    lifecycle = getattr(request.app.state, "magi_serve_lifecycle", None)
    reason = await lifecycle.why_not_ready() if lifecycle else "starting"
    return _not_ready(reason) if reason else JSONResponse({"status": "ready"})


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
