"""``/``: one page to try the service with; it brings all that it needs.

The page says nothing of models or clients: it asks for them with the key that its user types in.
"""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

PAGE = (files("magi_serve.server") / "pages" / "playground.html").read_text(encoding="utf-8")


def _hash(tag: str) -> str:
    """Content-Security-Policy's source for the one element `tag` of the page."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


POLICY = "; ".join(
    [
        "default-src 'none'",
        f"script-src {_hash('script')}",
        f"style-src {_hash('style')}",
        "style-src-attr 'unsafe-inline'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)


@router.get("/")
async def playground() -> HTMLResponse:
    """The page, which may load nothing and ask nobody but this service."""
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(PAGE, headers=headers)
