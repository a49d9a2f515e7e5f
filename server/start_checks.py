"""Checks of the models that a start names, before anything is loaded: by the names and the first bytes of files."""

from __future__ import annotations

import logging

from engine.api import EngineConfig, check_source

log = logging.getLogger("polydraft")

_HTTP_CLIENTS = ("httpx", "httpx2")


def check_sources(config: EngineConfig) -> None:
    """Raise ConfigError for a model that is not there, before anything is loaded."""
    if not log.isEnabledFor(logging.DEBUG):
        for client in _HTTP_CLIENTS:
            # A line for every question to the hub would hide the one about the answer.
            logging.getLogger(client).setLevel(logging.WARNING)
    check_source(config.model.target, config.model.revision)
    if config.model.draft is not None:
        check_source(config.model.draft, config.model.draft_revision)
