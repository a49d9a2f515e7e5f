"""Pages for people: `/`, the live page with its state, and the API's description at `/docs`.

Nothing is loaded from another host. Scripts and styles carry a nonce that changes with every
response, and browsers run no others.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from server.serving.engine_client import EngineClient
from server.start_lines import drafting
from server.state import Server
from server.version import VERSION

_STATIC = Path(__file__).parents[1] / "static"
_LIBRARIES = ("lezer", "temml")
"""Parsers of Markdown and code, and a writer of formulas, as npm's packages ship them (MIT)."""
_SWAGGER_UI = Path(fastapi_offline.__file__).parent / "static"
"""Swagger UI as its package ships it (Apache-2.0)."""
_NO_MARKUP = "require-trusted-types-for 'script'; trusted-types 'none'"
"""Policy that forbids scripts to turn text into markup."""
_INLINE_STYLES = "style-src-attr 'unsafe-inline'"
"""Policy for Swagger UI, which sets styles on elements."""


class _Page:
    """HTML file whose scripts and styles carry a nonce."""

    def __init__(self, name: str, policy: str) -> None:
        """policy: further directives of the content security policy."""
        self._html = (_STATIC / name).read_text()
        self._policy = policy

    async def response(self) -> Response:
        """Return the page with a new nonce."""
        nonce = secrets.token_urlsafe(16)
        policy = (
            "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"frame-ancestors 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; {self._policy}"
        )
        headers = {"content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-store"}
        return HTMLResponse(self._html.replace("{nonce}", nonce), headers={**headers, **_NO_SNIFFING})


class _Assets(StaticFiles):
    """Files of a page; browsers revalidate them."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        """Return a file with the headers that all of them have."""
        response = super().file_response(*args, **kwargs)
        response.headers.update({"cache-control": "no-cache", **_NO_SNIFFING})
        return response


_NO_SNIFFING = {"x-content-type-options": "nosniff"}


def install(app: FastAPI, server: Server) -> None:
    """Add the pages to the application, the live page only if it is enabled."""
    first = "dashboard" if server.settings.dashboard else "docs"

    async def root() -> Response:
        """Redirect to a relative address, which is also right below a proxy's prefix."""
        return RedirectResponse(first)

    _add(app, "/", root)
    _add(app, "/docs", _Page("docs.html", _INLINE_STYLES).response)
    _add_files(app, "/docs/static", _SWAGGER_UI)
    if server.settings.dashboard:
        _add_live_page(app, server)


def _add(app: FastAPI, path: str, page: Any) -> None:
    app.add_api_route(path, page, methods=["GET"], include_in_schema=False)


def _add_files(app: FastAPI, path: str, folder: Path) -> None:
    """Add the files of a folder. A mount would expect a proxy's prefix in the path."""
    assets = _Assets(directory=folder)

    async def file(name: str, request: Request) -> Response:
        return await assets.get_response(name, request.scope)

    _add(app, f"{path}/{{name}}", file)


def _add_live_page(app: FastAPI, server: Server) -> None:
    # It contains no state of the server.
    _add(app, "/dashboard", _Page("page.html", _NO_MARKUP).response)
    _add_files(app, "/dashboard/static", _STATIC)
    for name in _LIBRARIES:
        _add_files(app, f"/dashboard/static/{name}", _STATIC / name)

    @app.get("/dashboard/state")
    async def dashboard_state() -> dict[str, Any]:
        """Return model, totals and running requests, without text; needs a key if keys are set."""
        facts = server.client.facts
        about = None
        num_blocks = 0
        if facts is not None:
            num_blocks = facts.num_blocks
            about = {
                "version": VERSION,
                "speculation": drafting(facts, server.client.config.speculation),
                "dtype": facts.dtype,
                "device": facts.device,
                "architecture": facts.architecture,
                "max_model_len": facts.max_model_len,
                "sampling": asdict(server.defaults),
            }
        state = server.observer.live.state(num_blocks, server.client.num_held)
        return {"model": server.model_name, "status": _status(server.client), "about": about, **state}


def _status(client: EngineClient) -> str:
    """Return the state of the daemon in a word, or what it loads."""
    if not client.is_alive:
        return "stopped"
    if client.is_draining:
        return "draining"
    if not client.is_awake:
        return client.state.value
    if client.is_ready:
        return "ready"
    return client.loading
