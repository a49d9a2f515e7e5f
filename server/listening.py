"""The daemon's socket. It is bound before anything is loaded, so that an unusable address fails at once."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from server.settings import Serve

_BACKLOG = 2048


def bind(settings: Serve) -> socket.socket:
    """Return a listening socket; clients queue from now on. Raises OSError if the address cannot be bound."""
    if settings.uds:
        _remove_stale(Path(settings.uds))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address: str | tuple[str, int] = settings.uds
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.send_timeout and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit the option: the system closes those whose client reads nothing.
            most_ms = max(1, round(1000 * settings.send_timeout))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)
        address = (settings.host, settings.port)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def bind_fault(settings: Serve, error: OSError) -> str:
    """Return why the address cannot be bound, and the flag that selects another one."""
    where = settings.uds or f"{settings.host}:{settings.port}"
    flag = "--uds" if settings.uds else "--port"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        flag = "--host: an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
    return f"cannot listen on {where}: {error.strerror or error}; choose another {flag}"


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a daemon that has ended. Raises OSError if one still listens."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        path.unlink()
