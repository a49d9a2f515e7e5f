"""Checks of the configured models before anything is loaded. They read file names and the first bytes of files."""

from __future__ import annotations

import logging
from typing import get_args

from msgspec.structs import replace

from engine.api import ConfigError, EngineConfig, Weights, check_source, model_file, read_object

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


def with_quantization(config: EngineConfig, wanted: str | None) -> EngineConfig:
    """Return a configuration that quantises the target as requested, or reads it quantised; raise ConfigError if the
    checkpoint is quantised by another method.

    wanted: the method's name in checkpoints or in vLLM, or a format of `--weights`; None changes nothing.
    """
    if wanted is None:
        return config
    path = model_file(config.model.target, "config.json", config.model.revision)
    stored = {} if path is None else read_object(path).get("quantization_config")
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    formats = [name for name in get_args(Weights) if name != "auto"]
    if method is None:
        if wanted in formats and config.model.weights in ("auto", wanted):
            return replace(config, model=replace(config.model, weights=wanted))
        if wanted in formats:
            raise ConfigError(f"--quantization {wanted} contradicts --weights {config.model.weights}; leave one out")
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.target} are not quantised, and are quantised while "
            f"they are loaded only by one of {', '.join(formats)} (--weights); name a checkpoint that is, or leave the "
            "flag out"
        )
    if _method(str(method)) != _method(wanted):
        raise ConfigError(
            f"--quantization {wanted}: {config.model.target} is quantised by {method}; leave the flag out, the "
            "checkpoint decides"
        )
    return config


def _method(name: str) -> str:
    """Return a method's name without its kernel: awq for awq_marlin."""
    return name.lower().replace("_", "-").removesuffix("-marlin")
