"""All settings of `polydraft serve`: flags, POLYDRAFT_* environment and --config file.

Precedence: flag, environment, file, default. The settings themselves are in `groups.py`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from engine.api import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GrammarConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from server.settings.foreign_flags import translate
from server.settings.groups import (
    BatchSettings,
    GeneralSettings,
    HttpSettings,
    MemorySettings,
    ModelSettings,
    ObservabilitySettings,
    SchedulingSettings,
    SpeculationSettings,
)
from server.wire.suggest import did_you_mean

EMBEDDED_NAME = "polydraft-demo"
_DEMO = Path(__file__).resolve().parents[1] / "demo"


class ConfigFileSource(PydanticBaseSettingsSource):
    """Settings from the file that `--config` or POLYDRAFT_CONFIG names."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if not path:
            return {}
        return read_config_file(str(path), self.settings_cls.model_fields)


def read_config_file(path: str, fields: Collection[str]) -> dict[str, Any]:
    """Return the settings in a TOML, JSON or YAML file; keys with dashes or underscores.

    Other servers' keys are translated. Raises ConfigError, also for a key that
    is not among `fields`.
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
    if path.suffix in (".yaml", ".yml"):
        return yaml.safe_load(text)
    return tomllib.loads(text)


class Serve(
    ObservabilitySettings,
    BatchSettings,
    HttpSettings,
    MemorySettings,
    SchedulingSettings,
    SpeculationSettings,
    ModelSettings,
    GeneralSettings,
    BaseSettings,
):
    """Serve a model over HTTP, OpenAI-compatible, with exact multi-draft speculative decoding.

    Without MODEL the embedded demonstration pair is served.
    """

    model_config = SettingsConfigDict(env_prefix="POLYDRAFT_", extra="ignore", protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  (named by pydantic-settings)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, ConfigFileSource(settings_cls))

    def served_name(self) -> str:
        """Name of the model in metrics and logs."""
        return self.served_names()[0]

    def served_names(self) -> list[str]:
        """Names of the model that requests may use."""
        adapter, _ = self.adapter()
        if adapter:
            return [adapter]
        return self.served_model_name or [self.model or EMBEDDED_NAME]

    def adapter(self) -> tuple[str, str]:
        """Name and folder of the adapter in the target's weights; empty without one."""
        name, _, folder = "".join(self.lora_modules).partition("=")
        if name and self.served_model_name:
            raise ConfigError("--served-model-name: --lora-modules gives the model its name; leave one of them out")
        return name, folder

    def target(self) -> str:
        """Folder or name of the target model."""
        return self.model or str(_DEMO / "target")

    def draft(self) -> str | None:
        """Folder or name of the draft model; None for plain decoding."""
        if self.draft_model:
            return self.draft_model
        if self.model:
            return None
        return str(_DEMO / "draft")

    def engine_config(self) -> EngineConfig:
        """Return the configuration of the engine process."""
        return EngineConfig(
            model=self._model_config(),
            grammars=GrammarConfig(
                start_timeout_s=self.grammar_start_timeout,
                mask_timeout_s=self.grammar_mask_timeout,
                memory_bytes=self.grammar_memory_bytes,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_gpu_blocks_override,
                memory_bytes=self.kv_cache_memory_bytes,
                device_share=self.gpu_memory_utilization or 0.0,
                prefix_caching=self.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                max_copied_tokens=self.max_copied_tokens,
                max_prompt_tokens=self.max_prompt_tokens_per_step,
            ),
            speculation=self._speculation_config(),
            calibrate=self.calibrate,
            profile_cache=self.profile_cache,
            self_check=self.selfcheck,
            log_format=self.log_format,
        )

    def _model_config(self) -> ModelConfig:
        return ModelConfig(
            target=self.target(),
            tokenizer=self.tokenizer or self.target(),
            draft=self.draft(),
            revision=self.revision,
            draft_revision=self.draft_revision,
            dtype=self.dtype,
            device=self.device,
            num_threads=self.num_threads,
            weights=self.weights,
            draft_weights=self.draft_weights,
            activations=self.activations,
            kv_dtype=self.kv_cache_dtype,
            enforce_eager=self.enforce_eager,
            adapter=self.adapter()[1],
            probe=self.probe,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    def _speculation_config(self) -> SpeculationConfig:
        num_drafts = self.num_drafts
        draft_length = self.draft_length
        _, _, fixed = self.spec_shape.partition(":")
        if fixed:
            num_drafts, draft_length = pair_of(fixed)
        tree = (self.draft_tree or "").split(",")
        seed_shape = None
        if self.seed_shape:
            seed_shape = pair_of(self.seed_shape)
        return SpeculationConfig(
            rule=self.spec_rule,
            num_drafts=num_drafts,
            draft_length=draft_length,
            adaptive=self.spec_shape == "adaptive",
            draft_method=self.draft_method or "",
            tree=tuple(int(width) for width in tree if width),
            drafters=tuple(dict.fromkeys(self.spec_drafters)),
            max_over_acceptance=self.max_over_acceptance,
            observed_share=self.spec_observed_share,
            max_num_drafts=self.max_num_drafts,
            max_draft_length=self.max_draft_length,
            draft_window=self.draft_window,
            seed_shape=seed_shape,
        )


GROUPS = Serve.__bases__[-2::-1]
"""Groups in the order of `--help`."""


def pair_of(shape: str) -> tuple[int, int]:
    """Return the two numbers of `K,L`."""
    num_drafts, draft_length = shape.split(",")
    return int(num_drafts), int(draft_length)
