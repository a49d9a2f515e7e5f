"""Settings from the file that `--config` names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import PydanticBaseSettingsSource

from engine.api import ConfigError
from server.foreign_flags import translate
from server.suggest import did_you_mean


class ConfigFileSource(PydanticBaseSettingsSource):
    """Settings from the file that `--config` or POLYDRAFT_CONFIG names."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        return read_config_file(str(path), self.settings_cls.model_fields) if path else {}


def read_config_file(path: str, fields: Collection[str]) -> dict[str, Any]:
    """Return the settings in a TOML, JSON or YAML file; keys with dashes or underscores.

    Other servers' keys are translated. Raises ConfigError, also for a key that is not among `fields`.
    """
    try:
        values = _parse(Path(path))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: not valid ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold a table of settings")
    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    try:
        known = translate(named, "{}")
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    for key in known:
        if key not in fields:
            raise ConfigError(f"--config {path}: unknown setting {key!r}{did_you_mean(key, fields)}")
    return known


def _parse(path: Path) -> Any:
    """Return the values in a file. Its suffix selects the parser; TOML is the default."""
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    return yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
