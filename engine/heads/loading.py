"""Load the checkpoint of a head, and rename the tensors of every layout to the modules here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.errors import LoadError, first_line
from engine.heads.config import HeadConfig, read_head
from engine.heads.dflash import DFlash
from engine.heads.eagle import Eagle3, PEagle
from engine.heads.head import Head, TargetWeights
from engine.heads.mtp import Mtp, mtp_tensors, prefix_of, read_mtp
from engine.models.files import model_file, read_object
from engine.models.wrappers import plain_name, text_object, wrapped_names

_FILES = ("model.safetensors", "pytorch_model.bin")
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq")
"""Tensors of training only, or computed."""
_UNUSED_PARTS = ("confidence_head.",)
_IN_FLOAT32 = "e_score_correction_bias"
"""Tensors that choose experts, which small differences change."""
_HEADS: dict[str, type[Eagle3 | PEagle | DFlash | Mtp]] = {"eagle3": Eagle3, "peagle": PEagle, "mtp": Mtp}
"""Module of each type of head; DFlash for other types."""


def head_config(name: str, revision: str | None) -> HeadConfig | None:
    """Return the config of a head, or None if the name is that of a language model."""
    path = model_file(name, "config.json", revision)
    if path is None:
        return None
    return read_head(name, read_object(path))


def mtp_config(name: str, revision: str | None) -> HeadConfig:
    """Return the config of a target's MTP module; raise ConfigError if it is not served."""
    path = model_file(name, "config.json", revision)
    return read_mtp(name, {} if path is None else text_object(read_object(path)))


def load_head(config: HeadConfig, revision: str | None, target: Any) -> Head:
    """Load a head for its target, which is not packed yet; raise LoadError."""
    if config.kind == "mtp":
        stored = _read(config.name, revision, tuple(wrapped_names(prefix_of(config))))
        tensors = mtp_tensors(config, {plain_name(name): tensor for name, tensor in stored.items()})
    else:
        tensors = {_renamed(name): tensor for name, tensor in _read(config.name, revision).items()}
    tensors = {
        name: tensor for name, tensor in tensors.items() if name not in _UNUSED and not name.startswith(_UNUSED_PARTS)
    }
    # A CPU computes in float32.
    dtype = torch.float32 if target.device.type == "cpu" else target.dtype
    for name, tensor in tensors.items():
        tensor_dtype = tensor.dtype
        if tensor.is_floating_point():
            tensor_dtype = torch.float32 if name.endswith(_IN_FLOAT32) else dtype
        tensors[name] = tensor.to(target.device, tensor_dtype)
    num_taps = len(config.taps_of(target.config.get_text_config().num_hidden_layers))
    head = build_head(config, num_taps, tensors)
    head.attach(TargetWeights.of(target, dtype))
    return head


def build_head(config: HeadConfig, num_taps: int, tensors: dict[str, Tensor]) -> Head:
    """Return a head that takes over the weights of a checkpoint."""
    head = _empty(config, num_taps, frozenset(tensors))
    wrong = {name: head.state_dict()[name].shape for name in tensors.keys() & head.state_dict().keys()}
    if bad := [name for name, shape in wrong.items() if tensors[name].shape != shape]:
        name = sorted(bad)[0]
        raise LoadError(
            f"{config.name}: {name} is {list(tensors[name].shape)}, and by config.json it would be {list(wrong[name])}"
        )
    missing, unexpected = head.load_state_dict(tensors, strict=False, assign=True)
    for fault, names in (("lacks", missing), ("has unknown", unexpected)):
        if names:
            shown = ", ".join(sorted(names)[:3])
            raise LoadError(f"{config.name}: the checkpoint {fault} tensors ({shown}); is this a head of another type?")
    return head.to(head.device).eval().requires_grad_(False)


def shapes_of(config: HeadConfig, num_taps: int) -> dict[str, torch.Size]:
    """Return the weights' shapes of a head that shares the target's embeddings and output."""
    return {name: weight.shape for name, weight in _empty(config, num_taps, frozenset()).state_dict().items()}


def _empty(config: HeadConfig, num_taps: int, names: frozenset[str]) -> Eagle3 | PEagle | DFlash | Mtp:
    """Return a head without memory for its weights; names: of the checkpoint's tensors."""
    with torch.device("meta"):
        return _HEADS.get(config.kind, DFlash)(config, num_taps, names)


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("candidate_selector."):
        return name.replace("codebook.weight", "codebook")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def _read(name: str, revision: str | None, begin: str | tuple[str, ...] = "") -> dict[str, Tensor]:
    """Read the tensors of a checkpoint whose names begin with a text of `begin`, on the CPU."""
    for file in _FILES:
        tensors: dict[str, Tensor] = {}
        for path in _paths(name, revision, file, begin):
            tensors |= _tensors(path, begin)
        if tensors:
            return tensors
    wanted = f"{begin[0]}* in " if begin else ""
    raise LoadError(f"{name}: no weights of the head ({wanted}{', '.join(_FILES)}); download it again")


def _paths(name: str, revision: str | None, file: str, begin: str | tuple[str, ...]) -> list[Path]:
    """Return a file, or its shards with tensors whose names begin with `begin`."""
    path = model_file(name, file, revision)
    if path is not None:
        return [path]
    index = model_file(name, f"{file}.index.json", revision)
    if index is None:
        return []
    places = read_object(index).get("weight_map", {})
    shards = sorted({shard for key, shard in places.items() if key.startswith(begin)})
    return [path for shard in shards if (path := model_file(name, shard, revision)) is not None]


def _tensors(path: Path, begin: str | tuple[str, ...]) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys() if key.startswith(begin)}  # noqa: SIM118
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return {key: tensor for key, tensor in stored.items() if key.startswith(begin)}
    except Exception as error:  # both libraries raise exceptions of many types
        raise LoadError(f"{path}: cannot be read ({first_line(error)}); download the head again") from error
