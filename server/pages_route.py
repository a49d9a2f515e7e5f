"""Entry point for people: `/` leads to the live page, or to the API's description without one."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from server.state import Server

READ = ["GET", "HEAD"]
"""Methods of a page: programs probe one with HEAD."""


def build_router(server: Server) -> APIRouter:
    """`/`, for browsers and for programs that ask whether a server is there."""
    router = APIRouter()
    page = "dashboard" if server.settings.dashboard else "docs"

    @router.api_route("/", methods=READ, include_in_schema=False)
    async def root() -> Response:
        """Redirect to a relative address, which also holds below a proxy's prefix."""
        return RedirectResponse(page)

    return router
