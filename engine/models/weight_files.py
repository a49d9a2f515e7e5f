"""Checks of the weights of a checkpoint.

Files are checked by their names, sizes and headers before anything reads them: one that is missing,
truncated, or another file under its name would otherwise be detected after minutes, with a
library's error that does not state the reason.

Tensors that the model has no place for are ignored with a warning, or the sign of a wrong model: a
tensor inside a module that exists (a scale, a bias, a norm of queries) would change the module's
results. Separate parts (a vision tower, layers for multi-token prediction) would not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import nn

from engine.errors import LoadError, first_line
from engine.models.files import file_fault, first_of, read_object
from engine.models.gguf.file import open_file
from engine.models.gguf.folder import file_of

log = logging.getLogger("polydraft")

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WHOLE)
_COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)$")
"""Buffers that the model computes itself, and that older checkpoints contain."""
_WRAPPERS = re.compile(r"(_orig_mod\.|module\.)+")
"""Prefixes of tensors wrapped by torch.compile or DistributedDataParallel."""


def check_weight_files(folder: Path) -> None:
    """Raise LoadError for missing weights, ConfigError for an unreadable index."""
    if (file := file_of(folder)) is not None:
        open_file(file)
        return
    path = next((folder / name for name in (*_WHOLE, *_INDEXES) if _is_there(folder / name)), None)
    if path is None:
        raise LoadError(f"{folder}: {_without_weights(folder)}")
    for file in _shards(path) if path.name in _INDEXES else [path]:
        if fault := file_fault(file) or _header_fault(file):
            raise LoadError(f"{file}: {fault}")


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names; raise LoadError if files are missing."""
    shards = read_object(index).get("weight_map")
    names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
    if not names:
        raise LoadError(f"{index}: the file has no weight_map; download it again")
    missing = [name for name in names if not _is_there(index.parent / name)]
    if missing:
        raise LoadError(
            f"{index.parent}: {len(missing)} of the {len(names)} files that {index.name} names are missing "
            f"({first_of(missing)}); download the model again"
        )
    return [index.parent / name for name in names]


def _is_there(path: Path) -> bool:
    """Return whether a folder has the name, also as a broken link."""
    return path.is_file() or path.is_symlink()


def _without_weights(folder: Path) -> str:
    others = sorted(path.name for kind in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(kind))
    if not others:
        return f"this folder has no weights ({', '.join(_WHOLE)}); download the model again"
    if all(name.endswith(".gguf") for name in others):
        return f"this folder's weights are in GGUF files; serve one by naming it: polydraft serve {folder / others[0]}"
    return (
        f"this folder has no weights that transformers finds ({', '.join((*_WHOLE, *_INDEXES))}), only "
        f"{first_of(others)}; download the model again"
    )


def wrapper_prefix(folder: Path) -> str:
    """Return the prefix that torch.compile or DDP put before all tensors."""
    names: list[str] = []
    for file in folder.glob("model*.safetensors"):
        if _header_fault(file):
            return ""
        with safe_open(file, framework="pt") as tensors:
            names += tensors.keys()
    prefix = _WRAPPERS.match(names[0]) if names else None
    if prefix and all(name.startswith(prefix[0]) for name in names):
        return prefix[0]
    return ""


def missing_fault(missing: Iterable[object], unplaced: Iterable[object]) -> str:
    """Return why weights are missing, and a way out; unplaced: other tensors."""
    lacking = sorted(map(str, missing))
    others = sorted(map(str, unplaced))
    fault = f"the checkpoint lacks {len(lacking)} of the model's weights ({first_of(lacking)})"
    if not others:
        return f"{fault}; download it again, or point to the folder that holds them"
    return (
        f"{fault}, and has {len(others)} tensors with other names ({first_of(others)}); rename them as transformers "
        "does (save_pretrained of the unwrapped model), or correct the architecture in config.json"
    )


def _header_fault(file: Path) -> str:
    """Return why a safetensors file is incomplete; "" if its header describes all of it."""
    if file.suffix != ".safetensors":
        return ""
    try:
        with safe_open(file, framework="pt"):
            return ""
    except Exception as error:  # of the library, or of the system
        return f"the file is cut off, or no safetensors file ({first_line(error)}); download it again"


def check_unplaced(name: str, model: nn.Module, keys: Iterable[str], is_quantised: bool, wrapper: str = "") -> None:
    """Raise LoadError for tensors that would change results; warn of others.

    keys: names of the ignored tensors. is_quantised: whether the configuration says how weights are
    quantised; scales of K/V are then ignored by design. wrapper: type of a multimodal checkpoint,
    whose other parts are left out, or "".
    """
    left_out = sorted(key for key in keys if not _COMPUTED.search(key))
    if not left_out:
        return
    modules = dict(model.named_modules())
    inside = [key for key in left_out if _is_inside(key, model, modules)]
    if inside and not is_quantised:
        raise LoadError(
            f"{name}: {len(inside)} tensors of the checkpoint have no place in the model and would change its numbers "
            f"({first_of(inside)}); its config.json may lack a quantization_config, or name another architecture"
        )
    if wrapper:
        num_left_out = len(left_out)
        log.info("%s: serving the text part of %s; its %d other tensors are not loaded", name, wrapper, num_left_out)
        return
    log.warning("%s: %d tensors of the checkpoint are not used (%s)", name, len(left_out), first_of(left_out))


def _is_inside(key: str, model: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Whether a tensor belongs to a module that the model has, not to a part that it lacks."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    for path in (key, f"{prefix}.{key}"):
        parent = path.rpartition(".")[0]
        if parent in modules:
            return parent not in ("", prefix) and not isinstance(modules[parent], nn.ModuleList)
    return False
