"""Checks the Host of requests to a daemon without a key that only this machine reaches.

A web page may name such a daemon through its own domain (DNS rebinding). The browser
then sends that domain.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers

from server.settings.settings import Serve
from server.wire.errors import ApiError, http_error


class HostCheck:
    """Names that requests may have in Host; None if every name is allowed."""

    def __init__(self, settings: Serve) -> None:
        is_open = bool(settings.uds or settings.api_key) or not _is_loopback(settings.host.lower())
        names = {name.lower() for name in settings.allowed_hosts}
        self._names = None if is_open or "*" in names else names

    def refusal(self, headers: Headers) -> ApiError | None:
        """Return the error for another name; a request without Host comes from no browser."""
        name = _name_of(headers.get("host", ""))
        if self._names is None or not name or _is_loopback(name) or name in self._names:
            return None
        way_out = f"set --allowed-hosts {name} if a proxy sends this name, or an --api-key"
        return http_error(403, f"Host {name!r} is not a name of this machine; {way_out}")


def _name_of(host: str) -> str:
    """Return the name or address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
