"""The daemon's listening socket, an address of TCP or a file."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from server.settings.settings import Serve

_BACKLOG = 2048


def bind(settings: Serve) -> socket.socket:
    """Return a listening socket, where clients queue; raise OSError if it cannot be bound."""
    address: str | tuple[str, int]
    if settings.uds:
        _remove_stale(Path(settings.uds))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = settings.uds
    else:
        listener = _tcp_socket(settings)
        address = (settings.host, settings.port)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def _tcp_socket(settings: Serve) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.send_timeout and hasattr(socket, "TCP_USER_TIMEOUT"):
        # Connections inherit the option: the system closes a connection whose client reads nothing.
        most_ms = max(1, round(1000 * settings.send_timeout))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)
    return listener


@contextmanager
def own_socket_file(settings: Serve) -> Iterator[None]:
    """Remove the socket file of `--uds` after the block, unless another daemon has replaced it."""
    if not settings.uds:
        yield
        return
    path = Path(settings.uds)
    number = path.stat().st_ino
    try:
        yield
    finally:
        with suppress(OSError):
            if path.stat().st_ino == number:
                path.unlink()


def bind_fault(settings: Serve, error: OSError) -> str:
    """Return why the address cannot be bound, and the flag that selects another one."""
    where = settings.uds or f"{settings.host}:{settings.port}"
    is_unknown_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    flag = "--uds" if settings.uds else "--port"
    if is_unknown_host:
        flag = "--host: an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
    return f"cannot listen on {where}: {error.strerror or error}; choose another {flag}"


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a daemon that has ended. Raises OSError if one still listens."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        path.unlink()
