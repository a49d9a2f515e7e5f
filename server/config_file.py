"""Settings from the file that `--config` names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Container
from pathlib import Path
from typing import Any

from pydantic_settings import PydanticBaseSettingsSource

from engine.api import ConfigError


class ConfigFileSource(PydanticBaseSettingsSource):
    """Settings from the file that `--config` or POLYDRAFT_CONFIG names."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        return read_config_file(str(path), self.settings_cls.model_fields) if path else {}


def read_config_file(path: str, fields: Container[str]) -> dict[str, Any]:
    """Settings in a TOML or JSON file; keys with dashes or underscores. Raises ConfigError, also for one that is not
    among `fields`."""
    try:
        text = Path(path).read_text()
        values = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not valid ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold a table of settings")
    known = {key.replace("-", "_"): value for key, value in values.items()}
    if unknown := sorted(key for key in known if key not in fields):
        raise ConfigError(f"--config {path}: unknown setting {unknown[0]!r}")
    return known
