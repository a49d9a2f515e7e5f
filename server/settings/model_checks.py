"""Checks of the models' files before anything is loaded, from names and first bytes."""

from __future__ import annotations

import logging
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

log = logging.getLogger("polydraft")

_HTTP_CLIENTS = ("httpx", "httpx2")


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
