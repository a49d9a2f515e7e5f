"""Checks before anything is loaded: the daemon's socket, and the models' files.

The checks of models read file names and the first bytes of files.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from engine.api import (
    ConfigError,
    EngineConfig,
    ModelConfig,
    Source,
    Weights,
    check_vocabularies,
    model_file,
    read_object,
    warn_of_adapter,
    with_folders,
)
from server.settings.settings import Serve

log = logging.getLogger("polydraft")

_HTTP_CLIENTS = ("httpx", "httpx2")
_BACKLOG = 2048


def with_sources(config: EngineConfig) -> EngineConfig:
    """Return a configuration whose models exist, with folders in place of GGUF files.

    Raise ConfigError if a model does not exist, LoadError for a GGUF file that cannot be served.
    """
    if not log.isEnabledFor(logging.DEBUG):
        for client in _HTTP_CLIENTS:
            # One log line per request to the hub would hide the important one.
            logging.getLogger(client).setLevel(logging.WARNING)
    return with_folders(config)


def check_pair(model: ModelConfig) -> None:
    """Raise ConfigError for a draft model with other tokens; warn of an unused adapter."""
    warn_of_adapter(model.target)
    source = model.draft_source
    if source is None or source[0] == model.target:
        return
    target = Path(model.target)
    draft = Path(source[0])
    # The engine compares models of the hub, after it has imported torch.
    if target.is_dir() and draft.is_dir() and _is_language_model(draft):
        check_vocabularies(Source(str(target)), Source(str(draft)))


def _is_language_model(folder: Path) -> bool:
    """Whether a draft model's configuration is not that of a trained head."""
    named = read_object(folder / "config.json").get("architectures")
    return isinstance(named, list) and all(str(name).endswith("ForCausalLM") for name in named)


def with_quantization(config: EngineConfig, wanted: str | None) -> EngineConfig:
    """Return a configuration that quantises the target, or reads it quantised.

    wanted: the method's name in checkpoints or in vLLM, or a format of `--weights`; None changes
    nothing. Raises ConfigError for a checkpoint of another method.
    """
    if wanted is None:
        return config
    method = _method_of(config.model)
    formats = [name for name in get_args(Weights) if name != "auto"]
    if method is None and wanted in formats:
        if config.model.weights not in ("auto", wanted):
            raise ConfigError(f"--quantization {wanted} contradicts --weights {config.model.weights}; leave one out")
        return replace(config, model=replace(config.model, weights=wanted))
    if method is None:
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.target} are not quantised, and are quantised while "
            f"they are loaded only by one of {', '.join(formats)} (--weights); name a checkpoint that is, or leave the "
            "flag out"
        )
    if _method(method) != _method(wanted):
        raise ConfigError(
            f"--quantization {wanted}: {config.model.target} is quantised by {method}; leave the flag out, the "
            "checkpoint decides"
        )
    return config


def _method_of(model: ModelConfig) -> str | None:
    """Return the method that the target's checkpoint names; None if it is plain."""
    if model.target in model.given_names:
        return "gguf"
    path = model_file(model.target, "config.json", model.revision)
    if path is None:
        return None
    stored = read_object(path).get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") is None:
        return None
    return str(stored["quant_method"])


def _method(name: str) -> str:
    """Return a method's name without its kernel: awq for awq_marlin."""
    return name.lower().replace("_", "-").removesuffix("-marlin")


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
