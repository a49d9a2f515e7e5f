"""Checks the weight files of a model folder by their names, sizes and headers, before anything reads them.

A file that is missing, truncated, or another file under its name would otherwise be detected after minutes, with a
library's error that does not state the reason.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from engine.errors import LoadError
from engine.models.files import NO_GGUF, file_fault, read_object

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WHOLE)


def check_weight_files(folder: Path) -> None:
    """Raise LoadError for weights that are missing or incomplete, ConfigError for an index that cannot be read."""
    found = next((folder / name for name in (*_WHOLE, *_INDEXES) if _is_there(folder / name)), None)
    if found is None:
        raise LoadError(f"{folder}: {_without_weights(folder)}")
    files = [found]
    if found.name in _INDEXES:
        shards = read_object(found).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        if not names:
            raise LoadError(f"{found}: the file has no weight_map; download it again")
        missing = [name for name in names if not _is_there(folder / name)]
        if missing:
            raise LoadError(
                f"{folder}: {len(missing)} of the {len(names)} files that {found.name} names are missing "
                f"({', '.join(missing[:3])}{', ...' * (len(missing) > 3)}); download the model again"
            )
        files = [folder / name for name in names]
    for file in files:
        if fault := file_fault(file) or _size_fault(file):
            raise LoadError(f"{file}: {fault}")


def _is_there(path: Path) -> bool:
    """Whether a folder has the name; a link to a missing file counts, so that its fault can be reported."""
    return path.is_file() or path.is_symlink()


def _without_weights(folder: Path) -> str:
    others = sorted(path.name for kind in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(kind))
    if not others:
        return f"this folder has no weights ({', '.join(_WHOLE)}); download the model again"
    some = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)}"
    if all(name.endswith(".gguf") for name in others):
        return f"this folder's weights are {some}; {NO_GGUF}"
    return (
        f"this folder has no weights that transformers finds ({', '.join((*_WHOLE, *_INDEXES))}), only {some}; "
        "download the model again"
    )


def _size_fault(file: Path) -> str:
    """Return why a safetensors file is incomplete; "" if its size is the one in its header."""
    if file.suffix != ".safetensors":
        return ""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))[0]
        if 8 + length > size:
            return "the file is cut off, or no safetensors file; download it again"
        try:
            header = msgspec.json.decode(opened.read(length), type=dict[str, dict[str, object]])
        except (ValueError, RecursionError):
            return "the file has no header of a safetensors file; download it again"
    ends = [end for name, one in header.items() if name != "__metadata__" for end in _ends(one)]
    promised = 8 + length + max(ends, default=0)
    return "" if size >= promised else f"the file is cut off: {size} of {promised} bytes; download it again"


def _ends(tensor: dict[str, object]) -> list[int]:
    offsets = tensor.get("data_offsets")
    return [one for one in offsets if isinstance(one, int)] if isinstance(offsets, list) else []
