"""Checks of the configured models before anything is loaded. They read file names and the first bytes of files."""

from __future__ import annotations

import logging

from engine.api import ConfigError, EngineConfig, check_source, model_file, read_object

log = logging.getLogger("polydraft")

_HTTP_CLIENTS = ("httpx", "httpx2")


def check_sources(config: EngineConfig) -> None:
    """Raise ConfigError if a model does not exist."""
    if not log.isEnabledFor(logging.DEBUG):
        for client in _HTTP_CLIENTS:
            # One log line per request to the hub would hide the important one.
            logging.getLogger(client).setLevel(logging.WARNING)
    check_source(config.model.target, config.model.revision)
    if config.model.draft_source is not None:
        check_source(*config.model.draft_source)


def check_quantization(config: EngineConfig, wanted: str | None) -> None:
    """Raise ConfigError unless the target's weights are quantised as configured.

    wanted: the method's name in checkpoints or in vLLM; None skips the check.
    """
    if wanted is None:
        return
    path = model_file(config.model.target, "config.json", config.model.revision)
    stored = {} if path is None else read_object(path).get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    if method is None:
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.target} are not quantised, and are not quantised "
            "while they are loaded; name a checkpoint that is, or leave the flag out (--dtype bfloat16 halves float32)"
        )
    if _method(str(method)) != _method(wanted):
        raise ConfigError(
            f"--quantization {wanted}: {config.model.target} is quantised by {method}; leave the flag out, the "
            "checkpoint decides"
        )


def _method(name: str) -> str:
    """Return a method's name without its kernel: awq for awq_marlin."""
    return name.lower().replace("_", "-").removesuffix("-marlin")
