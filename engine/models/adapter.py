"""Low-rank adapters (LoRA, peft's format), merged into a model's weights.

A layer's weight W becomes W + scale * B A, where A [r, in] and B [out, r] are the adapter's. The
merged model is served as any model: drafts are verified against its distribution. Not for: adapters
that are chosen per request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from engine.errors import ConfigError, LoadError, first_line
from engine.models.files import model_file, read_object
from engine.models.wrappers import plain_module, plain_name, wrapper_of

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Prefix that peft gives the names of a model's modules."""
_READ = frozenset(
    "peft_type base_model_name_or_path r lora_alpha rank_pattern alpha_pattern use_rslora init_lora_weights".split()
)
_WITHOUT_EFFECT = frozenset(
    """
    task_type auto_mapping peft_version revision inference_mode target_modules exclude_modules layers_to_transform
    layers_pattern lora_dropout megatron_core qalora_group_size runtime_config ensure_weight_tying
    loftq_config eva_config corda_config lora_ga_config lora_dtype lorap_lr_ratio lorap_emb_lr
    """.split()
)
"""Fields about training, and about layers that the tensors name."""
_OFF: tuple[Any, ...] = (None, False, [], {}, "", "none")
"""Values with which any other field has no effect, whichever version of peft added it."""
INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Initialisations that leave the model's own weights as they are."""
_CHECKPOINT_KEY = re.compile(r"\.lora_[AB]\.[^.]+\.weight$")
_LONGEST_SHOWN = 80
_MERGE = "merge it with peft (merge_and_unload) and serve the result"


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
    """Return an adapter's configuration; raise ConfigError if it cannot be merged."""
    path = model_file(name, _CONFIG)
    if path is None:
        raise ConfigError(f"{name}: it has no {_CONFIG}; name a folder with an adapter in peft's format")
    if model_file(name, _WEIGHTS) is None:
        raise ConfigError(f"{name}: it has no {_WEIGHTS}; save the adapter as safetensors (peft: save_pretrained)")
    stored = read_object(path)
    if stored.get("peft_type") != "LORA":
        raise ConfigError(f"{name}: an adapter of the type {stored.get('peft_type')!r}; LORA alone is served")
    for field in sorted(stored.keys() - _READ - _WITHOUT_EFFECT):
        if stored[field] not in _OFF:
            shown = repr(stored[field])[:_LONGEST_SHOWN]
            raise ConfigError(f"{name}: adapters with {field} = {shown} are not served; {_MERGE}")
    start = stored.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in INITS:
        raise ConfigError(
            f"{name}: init_lora_weights = {start!r} has changed the model's own weights before the training; {_MERGE}, "
            "or save it as plain LoRA (peft: path_initial_model_for_weight_conversion)"
        )
    rank, alpha = stored.get("r"), stored.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not _is_number(alpha):
        raise ConfigError(f"{name}: r = {rank!r} and lora_alpha = {alpha!r} must be numbers, r at least 1")
    if not isinstance(stored.get("use_rslora"), bool | None):
        raise ConfigError(f"{name}: use_rslora = {stored['use_rslora']!r} must be true or false")
    return Adapter(
        name=name,
        base=str(stored.get("base_model_name_or_path") or ""),
        rank=rank,
        alpha=alpha,
        rank_pattern=_patterns(name, stored, "rank_pattern"),
        alpha_pattern=_patterns(name, stored, "alpha_pattern"),
        is_stabilised=bool(stored.get("use_rslora")),
    )


def _patterns(name: str, stored: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return numbers by patterns of modules' names. Raise ConfigError for anything else."""
    patterns = stored.get(field) or {}
    try:
        if all(_is_number(patterns[pattern]) and re.compile(pattern) for pattern in patterns):
            return dict(patterns)
    except (TypeError, re.error):
        pass
    shown = repr(patterns)[:_LONGEST_SHOWN]
    raise ConfigError(f"{name}: {field} = {shown} must have a number for each pattern of a module's name")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


@torch.no_grad()
def merge(model: Any, adapter: Adapter) -> int:
    """Add an adapter to a model's weights, and return the number of changed weights.

    Raise LoadError if a tensor of the adapter has no place in the model, before any weight is
    changed, and for merged weights beyond the range of their type.
    """
    parts = list(_parts(model, adapter))
    for linear, change, left, right in parts:
        delta = change * (left.to(linear.weight.device) @ right.to(linear.weight.device))
        merged = (linear.weight.float() + delta).to(linear.weight.dtype)
        if not merged.isfinite().all():
            raise LoadError(f"{adapter.name}: merged weights exceed {merged.dtype}; start with --dtype float32")
        linear.weight.data = merged
    return len(parts)


def _parts(model: Any, adapter: Adapter) -> Iterator[tuple[nn.Linear, float, Tensor, Tensor]]:
    """Yield (layer, scale, B, A) of all changed layers; B and A are in float32."""
    tensors = _tensors(adapter)
    if wrapper_of(model.config):
        adapter = _for_text_model(adapter)
        tensors = {_PREFIX + plain_name(key.removeprefix(_PREFIX)): tensor for key, tensor in tensors.items()}
    modules = dict(model.named_modules())
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise LoadError(f"{adapter.name}: {key} has numbers that are not finite; train or save the adapter again")
        module, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
        if module and part in ("A.weight", "B.weight"):
            _check_layer(adapter, modules, module)
            pairs.setdefault(module, {})[part[0]] = tensor
            continue
        own = _own_weight(modules, key)
        if own is None or not torch.equal(own, tensor.to(own)):
            raise LoadError(f"{adapter.name}: {_unplaced(key, own)}")
    if not pairs:
        raise LoadError(f"{adapter.name}: it has no low-rank part of a linear layer; save the adapter again")
    head = model.get_output_embeddings()
    for module, pair in sorted(pairs.items()):
        linear = modules[module]
        _check_pair(adapter, module, pair, linear.weight.shape)
        if linear is head and head.weight is model.get_input_embeddings().weight:
            raise LoadError(f"{adapter.name}: {module} is also the model's embedding; {_MERGE}")
        yield linear, adapter.scale(module), pair["B"].float(), pair["A"].float()


def _for_text_model(adapter: Adapter) -> Adapter:
    """Return an adapter whose patterns are names in the text model, not in its wrapper."""
    changed: dict[str, Any] = {}
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(adapter, field)
        changed[field] = {plain_module(adapter.name, field, name): value for name, value in patterns.items()}
    return adapter._replace(**changed)


def _check_layer(adapter: Adapter, modules: Mapping[str, Any], module: str) -> None:
    """Raise LoadError if an adapter changes a module that is no plain linear layer."""
    layer = modules.get(module)
    if layer is None:
        base = adapter.base or "it names none"
        raise LoadError(f"{adapter.name}: the model has no layer {module}; is it for another model ({base})?")
    if type(layer) is not nn.Linear:
        raise LoadError(f"{adapter.name}: {module} ({type(layer).__name__}) is no plain linear layer; {_MERGE}")


def _own_weight(modules: Mapping[str, Any], key: str) -> Tensor | None:
    """Return the model's weight in the place of a tensor, which peft stores with some adapters."""
    module, _, name = key.removeprefix(_PREFIX).replace(".base_layer.", ".").rpartition(".")
    weight = getattr(modules.get(module), name, None)
    return weight if isinstance(weight, Tensor) else None


def _unplaced(key: str, own: Tensor | None) -> str:
    """Return why a tensor is not served, and what to do. own: the model's weight in its place."""
    if _CHECKPOINT_KEY.search(key):
        return f"{key} has an adapter's name in it, as in a checkpoint of a training; save it with save_pretrained"
    if own is not None:
        return f"{key} is a whole weight that differs from the model's (trained, or of another size); {_MERGE}"
    return f"{key} is no part of a plain linear layer (another layer or method); {_MERGE}"


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
