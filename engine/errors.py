"""The errors of the engine, and who is to blame for each.

PolydraftError
├── RequestError     the caller's request cannot be served; ends that request (HTTP 400)
├── EngineBusy       the queue is full; the caller may try again (HTTP 429)
├── EngineStopped    the engine has died or is draining (HTTP 503)
├── DeadlineExceeded the request took too long (HTTP 504)
├── ConfigError      the operator's configuration is wrong (exit code 2)
└── LoadError        the models cannot be loaded or served correctly (exit code 1)
"""

from __future__ import annotations

from typing import Literal

NON_FINITE = "non_finite_logits"
"""A model computed NaN or infinity: a fault of the server."""

NO_END_TOKEN = "no_end_token"
"""The model's files name no end token, for structured output; the operator can correct it."""
DEAD_END = "grammar_dead_end"
"""A grammar allows no token of this model any more; no client can correct it."""
NOTHING_LEFT = "no_token_left"
"""A request's own masks (bad_words, allowed_token_ids, min_tokens) allow no token."""
GRAMMAR_UNAVAILABLE = "grammar_unavailable"
"""A grammar's process was killed, cannot start or gets no CPU; the client may try again."""
NO_VOCABULARY = "no_vocabulary"
"""The model has no tokenizer.json, for structured output; the operator can correct it."""
TEMPLATE_FAILED = "chat_template_failed"
"""The chat template fails on a conversation; the operator can correct it."""
SERVER_FAULTS = frozenset({NON_FINITE, NO_END_TOKEN, DEAD_END, NO_VOCABULARY, GRAMMAR_UNAVAILABLE, TEMPLATE_FAILED})
"""Codes that no client can correct."""


class PolydraftError(Exception):
    """Root of all errors that are raised on purpose."""


class RequestError(PolydraftError):
    """A request that cannot be served as asked.

    `param` names the offending field, `code` is the machine-readable reason.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineBusy(PolydraftError):
    """The waiting queue is full."""


class EngineStopped(PolydraftError):
    """The engine process has ended, is loading, or accepts no new requests.

    `rejects`: reason why a new request was not admitted; None if a running request was ended.
    """

    def __init__(self, message: str, rejects: Literal["loading", "draining", "engine_stopped"] | None = None) -> None:
        super().__init__(message)
        self.rejects = rejects


class DeadlineExceeded(PolydraftError):
    """A request has exceeded the operator's time limit."""


class ConfigError(PolydraftError):
    """A setting, or a combination of settings, that cannot work."""


class LoadError(PolydraftError):
    """A model that cannot be loaded, or would return wrong results."""


def first_line(error: BaseException) -> str:
    """Return the message of another library's error in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
