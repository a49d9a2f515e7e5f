"""Chooses the models' device, and formats in which weights are loaded and multiplied."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.models.gguf.file import GgufFile
from engine.models.gguf.weights import IN_BLOCKS, check_types, file_behind, has_served_types
from engine.models.quantising import FORMATS, TORCHAO, stored_method
from engine.start.architectures import read_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> torch.device:
    """Return the device to run on; raise ConfigError if CUDA is requested and missing."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no CUDA device; use --device cpu or auto")
    return torch.device("cuda")


def arithmetic_dtype(wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the type in which a transformers model computes; None is its checkpoint's.

    A CPU computes in float32, unless another type is requested and the CPU has arithmetic of that
    type: without it, torch is ten times as slow.
    """
    if device.type != "cpu":
        return _DTYPES.get(wanted)
    if wanted == "bfloat16" and _has_bfloat16():
        return torch.bfloat16
    return torch.float32


def _has_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def load_dtype(wanted: str, config: Any, device: torch.device, split: bool, quantises: bool) -> torch.dtype | str:
    """Return the type for `from_pretrained`: compiled products read weights of a checkpoint's type.

    wanted: of `ModelConfig`; config: transformers' of the model; split: whether a rank loads its
    share; quantises: whether torchao quantises the weights.
    """
    if stored_method(config) == TORCHAO:
        return "auto"
    is_multiplied = is_compiled(config, device) and not split and not quantises
    if device.type == "cpu" and not is_multiplied:
        return arithmetic_dtype(wanted, device) or "auto"
    if quantises:
        return torch.bfloat16
    return _DTYPES.get(wanted, "auto")


def is_compiled(config: Any, device: torch.device) -> bool:
    """Whether compiled products of a CPU multiply the weights of a checkpoint."""
    return device.type == "cpu" and stored_method(config) is None and find_spec("numba") is not None


def file_dtype(file: GgufFile, wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the type to which the weights of a GGUF file are dequantised; None leaves the blocks.

    wanted: of `ModelConfig`. Raise LoadError for types of weights that are not served.
    """
    dtype: torch.dtype | None
    if device.type != "cpu":
        dtype = _DTYPES.get(wanted, torch.bfloat16)
    elif find_spec("numba") is None or (file.architecture not in IN_BLOCKS and not has_served_types(file)):
        dtype = arithmetic_dtype(wanted, device)
    else:
        dtype = _DTYPES.get(wanted)
    check_types(file, dtype)
    return dtype


def multiplied_dtype(config: ModelConfig) -> torch.dtype | None:
    """Return the type of the target weights that compiled products multiply; None for others.

    Raise ConfigError or LoadError for a target that cannot be read.
    """
    stored = read_config(config.target, config.revision)
    device = choose_device(config.device)
    if config.tensor_parallel_size > 1 or not is_compiled(stored, device):
        return None
    if by_torchao(config.weights, stored, device):
        return None
    return _DTYPES.get(config.dtype) or getattr(stored, "dtype", None)


def by_torchao(weights: str, config: Any, device: torch.device) -> bool:
    """Whether torchao quantises a checkpoint with this configuration.

    weights: of `ModelConfig`.
    """
    return weights in FORMATS and not (weights == "int4" and is_compiled(config, device))


def torchao_format(name: str, revision: str | None, config: ModelConfig) -> str:
    """Return the format in which torchao quantises a checkpoint at loading; auto if it does not."""
    stored = read_config(name, revision)
    if by_torchao(config.weights, stored, choose_device(config.device)):
        return config.weights
    return "auto"


def draft_model_config(config: ModelConfig) -> ModelConfig:
    """Return a configuration with the number format of the draft model's weights.

    That is the target's format if no other is asked for, and the weights are not stored quantised.
    """
    if config.draft_weights != "auto":
        return msgspec.structs.replace(config, weights=config.draft_weights)
    if config.weights == "auto" or config.draft is None:
        return config
    if _is_quantised_already(config.draft, config.draft_revision):
        return msgspec.structs.replace(config, weights="auto")
    return config


def _is_quantised_already(name: str, revision: str | None) -> bool:
    if file_behind(name) is not None:
        return True
    try:
        return stored_method(read_config(name, revision)) is not None
    except ConfigError:  # loading the model reports it
        return False
