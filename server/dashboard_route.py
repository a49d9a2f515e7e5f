"""The live page: one file that asks this server alone, and the state that it asks for every second."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from server.pages_route import READ
from server.state import Server

_PAGE = Path(__file__).parent / "static" / "dashboard.html"


def _hashes(page: str, tag: str) -> str:
    """The sources of a content security policy that allow the page's own elements of a kind."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def build_router(server: Server) -> APIRouter:
    """`/dashboard` and its state; the state needs an API key where there are any."""
    router = APIRouter()
    page = _PAGE.read_text()
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {_hashes(page, 'script')}; style-src {_hashes(page, 'style')}"
    )
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}

    @router.api_route("/dashboard", methods=READ, include_in_schema=False)
    async def dashboard() -> Response:
        """The page; it holds nothing of what is served."""
        return HTMLResponse(page, headers=headers)

    @router.get("/dashboard/state")
    async def dashboard_state() -> dict[str, Any]:
        """Totals and running requests, without any text."""
        client = server.client
        facts = client.facts
        state = server.observer.live.state(facts.num_blocks if facts else 0)
        what = "draining" if client.is_draining else "ready" if client.is_ready else client.loading
        return {"model": server.model_name, "status": what if client.is_alive else "stopped", **state}

    return router
