"""Log lines: text for people, or one JSON object a line; `log_fields` adds fields."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

_PLAIN = re.compile(r"[!#-~]+")
"""A value that needs no quotes."""
_FOUR_DIGITS = 9999.5


def log_fields(**values: Any) -> dict[str, Any]:
    """Return `extra` of a log call: values to show by name, without those that are None."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def _value(value: Any) -> str:
    if isinstance(value, float):
        # No exponent: half a minute is total_ms=31860.
        return f"{value:.4g}" if abs(value) < _FOUR_DIGITS else f"{value:.0f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class TextFormatter(logging.Formatter):
    """Time, level, message, then `name=value` of the line's fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (named by logging)
        """Return the line without its traceback."""
        values = getattr(record, "fields", {})
        return " ".join([super().formatMessage(record), *(f"{name}={_value(value)}" for name, value in values.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, message, fields, and a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as a line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_log(level: str, form: Literal["text", "json"]) -> None:
    """Write the log to standard error in this format, from this level on.

    Libraries that are imported later show progress bars in a terminal alone, and never between
    lines of JSON.
    """
    # transformers reads the variable, too.
    if form == "json":
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    elif not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper())


def show_given_names(shown: Callable[[str], str]) -> None:
    """Pass the message of every later line through a function (`ModelConfig.shown`)."""

    def pass_through(record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), ()
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(pass_through)
