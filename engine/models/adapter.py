"""Low-rank adapters (LoRA, in the format of peft), merged into a model's weights after they are
loaded.

A layer's weight W becomes W + scale * B A, where A [r, in] and B [out, r] are the adapter's. The
merged model is served as any model: drafts are verified against its distribution. Not for: adapters
that are chosen per request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import ConfigError, LoadError, first_line
from engine.models.files import first_of, model_file, read_object

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix that peft gives the names of a model's modules."""
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "bias": (None, "none"),
}
"""Fields of the configuration that change more than low-rank parts of weights, with the values that
change nothing.
"""


class Adapter(NamedTuple):
    """Configuration of an adapter."""

    name: str
    """Folder, or name on the hub."""
    base: str
    """Model that it was trained on, as its configuration names it; may be empty."""
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    """Ranks and alphas of some modules, by patterns of their names."""
    is_stabilised: bool
    """Whether the scale is alpha / sqrt(rank), and not alpha / rank."""

    def scale(self, module: str) -> float:
        """Return the factor of a module's product B A."""
        rank = _by_pattern(self.rank_pattern, module, self.rank)
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_stabilised else rank)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's low-rank part."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_adapter(name: str) -> Adapter:
    """Return an adapter's configuration; raise ConfigError if it is no adapter that can be
    merged.
    """
    path = model_file(name, _CONFIG)
    if path is None:
        raise ConfigError(f"{name}: it has no {_CONFIG}; name a folder with an adapter in peft's format")
    if model_file(name, _WEIGHTS) is None:
        raise ConfigError(f"{name}: it has no {_WEIGHTS}; save the adapter as safetensors (peft: save_pretrained)")
    stored = read_object(path)
    if stored.get("peft_type") != "LORA":
        raise ConfigError(f"{name}: an adapter of the type {stored.get('peft_type')!r}; LORA alone is served")
    for field, neutral in _UNSERVED.items():
        if stored.get(field) not in neutral:
            raise ConfigError(f"{name}: adapters with {field} = {stored[field]!r} are not served; merge it with peft")
    rank, alpha = stored.get("r"), stored.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ConfigError(f"{name}: r = {rank!r} and lora_alpha = {alpha!r} must be numbers, r at least 1")
    return Adapter(
        name=name,
        base=str(stored.get("base_model_name_or_path") or ""),
        rank=rank,
        alpha=alpha,
        rank_pattern=stored.get("rank_pattern") or {},
        alpha_pattern=stored.get("alpha_pattern") or {},
        is_stabilised=bool(stored.get("use_rslora")),
    )


@torch.no_grad()
def merge(model: Any, adapter: Adapter) -> int:
    """Add an adapter to a model's weights, and return the number of changed weights.

    Raise LoadError if a tensor of the adapter has no place in the model, before any weight is
    changed.
    """
    parts = list(_parts(model, adapter))
    for linear, change, left, right in parts:
        delta = change * (left.to(linear.weight.device) @ right.to(linear.weight.device))
        linear.weight.data = (linear.weight.float() + delta).to(linear.weight.dtype)
    return len(parts)


def _parts(model: Any, adapter: Adapter) -> Iterator[tuple[nn.Linear, float, Tensor, Tensor]]:
    """Yield (layer, scale, B, A) of all changed layers; B and A are in float32."""
    tensors = _tensors(adapter)
    modules = dict(model.named_modules())
    pairs: dict[str, dict[str, Tensor]] = {}
    unplaced = []
    for key, tensor in tensors.items():
        module, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if module and part in ("A.weight", "B.weight"):
            pairs.setdefault(module, {})[part[0]] = tensor
        elif not _is_copy(modules, key, tensor):
            unplaced.append(key)
    unplaced += [module for module in pairs if type(modules.get(module)) is not nn.Linear]
    if unplaced or not pairs:
        shown = f"{len(unplaced)} tensors, such as {first_of(unplaced)}" if unplaced else "its weights"
        raise LoadError(f"{adapter.name}: {shown} change no plain linear layer of the model; is it for another model?")
    head = model.get_output_embeddings()
    for module, pair in sorted(pairs.items()):
        linear = modules[module]
        _check_pair(adapter, module, pair, linear.weight.shape)
        if linear is head and head.weight is model.get_input_embeddings().weight:
            raise LoadError(f"{adapter.name}: {module} is also the model's embedding; merge the adapter with peft")
        yield linear, adapter.scale(module), pair["B"].float(), pair["A"].float()


def _is_copy(modules: Mapping[str, Any], key: str, tensor: Tensor) -> bool:
    """Whether a tensor is the model's own weight, which peft stores with adapters of the output
    head.
    """
    name, _, rest = key.removeprefix(_PREFIX).partition(".base_layer")
    weight = getattr(modules.get(name), "weight", None)
    return rest == ".weight" and weight is not None and torch.equal(weight, tensor.to(weight))


def _check_pair(adapter: Adapter, module: str, pair: Mapping[str, Tensor], shape: torch.Size) -> None:
    """Raise LoadError if the parts of a module do not fit its weight, or its rank."""
    if len(pair) < 2:
        raise LoadError(f"{adapter.name}: {module} has one of its two parts; save the adapter again")
    num_out, num_in = shape
    rank = adapter.rank_of(module)
    wanted = {"A": (rank, num_in), "B": (num_out, rank)}
    for part, tensor in pair.items():
        if tuple(tensor.shape) != wanted[part]:
            raise LoadError(
                f"{adapter.name}: {module}.lora_{part} has the shape {tuple(tensor.shape)}, and {wanted[part]} fits "
                f"the model and the rank {rank}; is it for another model ({adapter.base or 'it names none'})?"
            )


def _tensors(adapter: Adapter) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = model_file(adapter.name, _WEIGHTS)
    assert path is not None, "read_adapter has found it"
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises exceptions of several types
        raise LoadError(f"{adapter.name}: {Path(path).name} cannot be read: {first_line(error)}") from error
