"""Load the checkpoint of a head, and rename the tensors of every layout to the modules here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import LoadError, first_line
from engine.models.files import model_file, read_object
from engine.models.heads.config import HeadConfig, read_head
from engine.models.heads.dflash import DFlash
from engine.models.heads.eagle import Eagle3, PEagle
from engine.models.heads.head import Head, TargetWeights

_FILES = ("model.safetensors", "pytorch_model.bin")
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors that are used in training only, or computed."""
_UNUSED_PARTS = ("confidence_head.",)
_HEADS: dict[str, type[Eagle3 | PEagle | DFlash]] = {"eagle3": Eagle3, "peagle": PEagle}
"""Module of each type of head; DFlash for all others."""


def head_config(name: str, revision: str | None) -> HeadConfig | None:
    """Return the config of a head, or None if the name is that of a language model."""
    path = model_file(name, "config.json", revision)
    return None if path is None else read_head(name, read_object(path))


def load_head(config: HeadConfig, revision: str | None, target: Any) -> Head:
    """Load a head for its target, a transformers model that has not been packed; raise LoadError."""
    tensors = {_renamed(name): tensor for name, tensor in _read(config.name, revision).items()}
    tensors = {
        name: tensor for name, tensor in tensors.items() if name not in _UNUSED and not name.startswith(_UNUSED_PARTS)
    }
    # A CPU computes in float32.
    dtype = torch.float32 if target.device.type == "cpu" else target.dtype
    tensors = {
        name: tensor.to(target.device, dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    num_taps = len(config.taps_of(target.config.get_text_config().num_hidden_layers))
    head = build_head(config, num_taps, tensors)
    head.attach(TargetWeights.of(target, dtype))
    return head


def build_head(config: HeadConfig, num_taps: int, tensors: dict[str, Tensor]) -> Head:
    """Return a head that takes over these weights."""
    head = _empty(config, num_taps, frozenset(tensors))
    wrong = {name: head.state_dict()[name].shape for name in tensors.keys() & head.state_dict().keys()}
    if bad := [name for name, shape in wrong.items() if tensors[name].shape != shape]:
        name = sorted(bad)[0]
        raise LoadError(
            f"{config.name}: {name} is {list(tensors[name].shape)}, and by config.json it would be {list(wrong[name])}"
        )
    missing, unexpected = head.load_state_dict(tensors, strict=False, assign=True)
    for what, names in (("lacks", missing), ("has unknown", unexpected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise LoadError(f"{config.name}: the checkpoint {what} tensors ({some}); is this a head of another type?")
    return head.to(head.device).eval().requires_grad_(False)


def shapes_of(config: HeadConfig, num_taps: int) -> dict[str, torch.Size]:
    """Shapes of the weights of a head that shares the target's embeddings and output head."""
    return {name: weight.shape for name, weight in _empty(config, num_taps, frozenset()).state_dict().items()}


def _empty(config: HeadConfig, num_taps: int, names: frozenset[str]) -> Eagle3 | PEagle | DFlash:
    """A head without memory for its weights; names: of the checkpoint's tensors."""
    with torch.device("meta"):
        return _HEADS.get(config.kind, DFlash)(config, num_taps, names)


def _renamed(name: str) -> str:
    """Return a tensor's name here."""
    name = name.removeprefix("model.")
    if name.startswith("candidate_selector."):
        return name.replace("codebook.weight", "codebook")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _read(name: str, revision: str | None) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, on the CPU."""
    for file in _FILES:
        path = model_file(name, file, revision)
        paths = [] if path is None else [path]
        if not paths and (index := model_file(name, f"{file}.index.json", revision)) is not None:
            shards = sorted(set(read_object(index).get("weight_map", {}).values()))
            paths = [found for one in shards if (found := model_file(name, one, revision)) is not None]
        if paths:
            return {key: tensor for path in paths for key, tensor in _tensors(path).items()}
    raise LoadError(f"{name}: no weights of the head ({', '.join(_FILES)}); download it again")


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # both libraries raise exceptions of many types
        raise LoadError(f"{path}: cannot be read ({first_line(error)}); download the head again") from error
