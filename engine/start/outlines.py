"""Outlines of models: facts that their configurations state, and refusals before weights are read.

Not for: reading weights (`loading.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import MODEL, MTP, ModelConfig
from engine.errors import ConfigError
from engine.heads.config import HeadConfig, check_target
from engine.heads.loading import head_config, mtp_config
from engine.models.adapter import read_adapter
from engine.models.checkpoint import Source, check_vocabularies, context_length
from engine.models.files import check_source
from engine.models.gguf.file import GgufFile
from engine.models.gguf.weights import file_behind
from engine.models.quantising import check_quantised, stored_method
from engine.models.rope import limit_reason, original_length
from engine.models.weight_files import check_weight_files
from engine.models.wrappers import placeholders_of
from engine.start.architectures import check_config, check_ranks, read_config
from engine.start.number_formats import by_torchao, choose_device, draft_model_config, file_dtype


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Facts of a checkpoint's configuration, known before its weights are read."""

    name: str
    model_type: str
    vocab_size: int
    max_positions: int
    max_draft_length: int | None = None
    """Most tokens of a head's chain; None is no limit."""
    short_context: int | None = None
    """Longest context of a longrope model's short factors; None for others."""
    placeholder_ids: tuple[int, ...] = ()
    """Tokens that stand for images, videos and audio, which are not served."""
    limit_reason: str = ""
    """Reason for `max_positions`, for messages."""
    drafter: str = MODEL
    """Name of the model's facts as a drafter (`speculation.conditions`)."""


def outline_of(name: str, config: Any) -> Outline:
    """Return the outline of a language model; config: transformers' of the model."""
    return Outline(
        name=name,
        model_type=config.model_type,
        vocab_size=int(config.vocab_size),
        max_positions=context_length(config),
        short_context=original_length(config),
        placeholder_ids=placeholders_of(config),
        limit_reason=limit_reason(config),
    )


def outline_pair(config: ModelConfig) -> list[Outline]:
    """Return the outlines of target and draft, checked before weights are read.

    Raise ConfigError or LoadError for models that their configurations show to be unservable.
    """
    _check_formats(config)
    if config.adapter:
        _check_adapter(config)
    target = _outline(config.target, config.revision, config, config.tensor_parallel_size)
    if config.draft is None:
        return [target]
    head = find_head(config)
    if head is not None:
        return [target, _outline_head(config, head, target)]
    draft = _outline_draft(config, config.draft)
    _check_pair(config, target, draft)
    return [target, draft]


def find_head(config: ModelConfig) -> HeadConfig | None:
    """Return the configuration of a trained head; None for a language model."""
    if config.draft_source is None:
        return None
    check_source(*config.draft_source)
    if config.draft == MTP:
        return mtp_config(*config.draft_source)
    return head_config(*config.draft_source)


def head_facts(head: HeadConfig) -> dict[str, Any]:
    """Return the fields of an `Outline` that differ between a head and its target."""
    return {
        "name": head.name,
        "model_type": head.kind,
        "max_draft_length": head.max_draft_length,
        "drafter": head.kind,
    }


def _outline(name: str, revision: str | None, wanted: ModelConfig, num_ranks: int) -> Outline:
    """Return the outline of a language model that is served with the number formats of `wanted`."""
    device = choose_device(wanted.device)
    config = read_config(name, revision)
    check_config(name, config)
    check_ranks(name, config, num_ranks)
    is_by_torchao = by_torchao(wanted.weights, config, device)
    check_quantised(name, config, wanted, num_ranks, device, is_by_torchao)
    if Path(name).is_dir():
        check_weight_files(Path(name))
    file = file_behind(name)
    if file is not None:
        _check_file(name, file, wanted, num_ranks)
    return outline_of(name, config)


def _outline_draft(config: ModelConfig, name: str) -> Outline:
    try:
        return _outline(name, config.draft_revision, draft_model_config(config), 1)
    except ConfigError as error:
        if config.draft_weights == "auto":
            raise
        raise ConfigError(str(error).replace("--weights", "--draft-weights")) from error


def _outline_head(config: ModelConfig, head: HeadConfig, target: Outline) -> Outline:
    _check_format_of_head(config, head)
    if Path(head.name).is_dir():
        check_weight_files(Path(head.name))
    check_target(head, read_config(config.target, config.revision), config.target)
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"{head.name}: heads are not served with --tensor-parallel-size; leave it out, or the head")
    return replace(target, **head_facts(head))


def _check_formats(config: ModelConfig) -> None:
    """Raise ConfigError for number formats that would change nothing."""
    if config.draft_weights != "auto" and config.draft is None:
        raise ConfigError(f"--draft-weights {config.draft_weights}: there is no draft model; leave the flag out")
    if config.activations == "auto":
        return
    if choose_device(config.device).type != "cpu":
        raise ConfigError("--activations is for a CPU; leave the flag out")
    rounding = {config.weights, config.draft_weights} & {"int8", "int4"}
    if rounding:
        raise ConfigError(
            f"--activations float32: rows are rounded to 8 bits for weights in {sorted(rounding)[0]}; leave one out"
        )


def _check_adapter(config: ModelConfig) -> None:
    """Raise ConfigError for an adapter that cannot be merged, or not into such a target."""
    adapter = read_adapter(config.adapter)
    target = config.target
    if file_behind(target) is not None or stored_method(read_config(target, config.revision)) is not None:
        raise ConfigError(f"{adapter.name}: {target} is quantised, and adapters are merged into plain weights alone")
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"{adapter.name}: a split model takes no adapter; leave --tensor-parallel-size out")
    if config.weights != "auto" and choose_device(config.device).type != "cpu":
        raise ConfigError(f"--weights {config.weights}: not with an adapter on this device; leave one of the two out")


def _check_format_of_head(config: ModelConfig, head: HeadConfig) -> None:
    """Raise ConfigError for a number format that a head cannot have."""
    has_formats = choose_device(config.device).type == "cpu" and config.draft != MTP
    if config.draft_weights in ("int8", "int4") and has_formats:
        return
    if config.draft_weights != "auto":
        raise ConfigError(
            f"--draft-weights {config.draft_weights}: {head.name} is a head; only heads on a CPU "
            "that are no MTP module have other numbers, int8 or int4; leave the flag out"
        )


def _check_file(name: str, file: GgufFile, wanted: ModelConfig, num_ranks: int) -> None:
    """Raise LoadError for a GGUF file that is not served, ConfigError for wrong formats."""
    file_dtype(file, wanted.dtype, choose_device(wanted.device))  # refuses types that are not served
    if wanted.weights != "auto":
        raise ConfigError(
            f"--weights {wanted.weights}: the weights of {name} are quantised already, and nothing "
            "is quantised twice; leave the flag out, or choose another of the model's files"
        )
    if wanted.activations == "float32" and wanted.dtype == "auto":
        raise ConfigError(
            f"--activations float32: rows are rounded to 8 bits for the weights of {name}; leave the "
            "flag out, or dequantise the weights: --dtype float32"
        )
    if num_ranks > 1:
        raise ConfigError(f"{name}: GGUF files are not split; leave --tensor-parallel-size out")


def _check_pair(config: ModelConfig, target: Outline, draft: Outline) -> None:
    """Raise ConfigError if the two models do not have the same tokens."""
    target_source = Source(target.name, config.revision)
    draft_source = Source(draft.name, config.draft_revision)
    are_compared = check_vocabularies(target_source, draft_source)
    # Sizes are compared if a model has no tokenizer.json.
    if not are_compared and target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"{draft.name} has a vocabulary of {draft.vocab_size}, {target.name} of "
            f"{target.vocab_size}; choose a draft model of the same family"
        )
