"""Opens GGUF files: their metadata, and views of their tensors' blocks in the memory-mapped file.

A model may be split into parts, `NAME-00001-of-00003.gguf`, which are opened as one. Everything
that a file claims is compared with its size first, so a damaged or hostile file costs no memory.
Not for: what keys and tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import LoadError
from engine.models.files import begins_as_gguf, file_fault, first_of
from engine.models.gguf.header import Header, TensorEntry, read_header
from engine.models.gguf.parts import parts_of

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_ARCHITECTURE = "general.architecture"
_LARGEST = 2**63 - 1
_DOWNLOAD = "download it again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor as the file has it."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Shape in torch's order: a linear layer's weight is (outputs N, inputs K)."""
    data: np.ndarray
    """uint8 view of the mapped file: [N, bytes of a row], or [bytes]."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A model's GGUF file, or all of its parts."""

    path: Path
    """The file, or the first part."""
    paths: tuple[Path, ...]
    """All parts in their order."""
    metadata: dict[str, Any]
    """Key-values: numbers, texts, lists of texts, and numpy arrays of numbers."""
    architecture: str
    tensors: dict[str, StoredTensor]


def open_file(path: Path) -> GgufFile:
    """Open all parts of a file; raise LoadError for missing or damaged ones."""
    paths = parts_of(path)
    missing = [part.name for part in paths if not (part.is_file() or part.is_symlink())]
    if missing:
        shown = first_of(missing)
        raise LoadError(
            f"{path}: {len(missing)} of the {len(paths)} parts of this model are missing from {path.parent} ({shown}); "
            "download them into this folder, without other names"
        )
    contents = list(map(_mapped, paths))
    headers = [read_header(part, content) for part, content in zip(paths, contents, strict=True)]
    _check_parts(paths, headers)
    tensors: dict[str, StoredTensor] = {}
    for part, content, header in zip(paths, contents, headers, strict=True):
        for tensor in _tensors(part, content, header):
            if tensor.name in tensors:
                raise LoadError(f"{part}: the tensor {tensor.name!r} is there twice, {_advice(len(paths))}")
            tensors[tensor.name] = tensor
    metadata = headers[0].metadata
    architecture = metadata.get(_ARCHITECTURE)
    if not isinstance(architecture, str):
        raise LoadError(
            f"{paths[0]}: the file has no {_ARCHITECTURE}, so it is not a model's; name a model's GGUF file"
        )
    return GgufFile(path=paths[0], paths=paths, metadata=metadata, architecture=architecture, tensors=tensors)


def _advice(count: int) -> str:
    """Return why a tensor may be there twice in files of this number of parts, and what to do."""
    if count == 1:
        return f"so the file is damaged; {_DOWNLOAD}"
    return "so its parts are of different models, or one has another's name; download all parts again"


def _mapped(path: Path) -> np.ndarray:
    """Return the bytes of a file that can be one, memory-mapped for reading."""
    if not begins_as_gguf(path) and (fault := file_fault(path)):
        raise LoadError(f"{path}: {fault}")
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: cannot be mapped into memory ({error}); copy it to a local file system") from error


def _check_parts(paths: tuple[Path, ...], headers: list[Header]) -> None:
    """Raise LoadError for files that are not the parts of one model."""
    first = headers[0].metadata
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        _check_part(path, header.metadata, number, len(paths))
        for key in (_ARCHITECTURE, _TENSORS):
            value = header.metadata.get(key, first.get(key))
            if value != first.get(key):
                raise LoadError(
                    f"{path}: {key} is {value!r} here and {first.get(key)!r} in {paths[0].name}, so the parts are of "
                    "different models; download all parts again"
                )
    count = sum(len(header.entries) for header in headers)
    if len(paths) > 1 and count != first.get(_TENSORS, count):
        raise LoadError(
            f"{paths[0]}: the parts have {count} tensors of {first[_TENSORS]}, so they are of different models; "
            "download all parts again"
        )


def _check_part(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    """Raise LoadError if a file is not the part that its name says."""
    stated = metadata.get(_NUMBER, 0), metadata.get(_COUNT, 1) or 1
    if stated == (number, count):
        return
    if count == 1:
        raise LoadError(
            f"{path}: part {stated[0] + 1} of the {stated[1]} parts of a model, under another name; put all parts into "
            f"one folder as NAME-{stated[0] + 1:05}-of-{stated[1]:05}.gguf and so on"
        )
    raise LoadError(
        f"{path}: its name says part {number + 1} of {count}, its content part {stated[0] + 1} of {stated[1]}; "
        "download this part again"
    )


def _tensors(path: Path, content: np.ndarray, header: Header) -> Iterator[StoredTensor]:
    """Return views of a file's tensors; raise LoadError for one that the file cannot hold."""
    end = 0
    for entry in sorted(header.entries, key=lambda entry: entry.offset):
        if entry.offset < end:
            raise _damaged(path, entry, "begins inside another tensor")
        row, count = _row_bytes(path, entry), math.prod(entry.dimensions[1:])
        if entry.offset % header.alignment:
            raise _damaged(path, entry, f"begins at byte {entry.offset}, which is not aligned to {header.alignment}")
        end = entry.offset + row * count
        start, stop = header.data_start + entry.offset, header.data_start + end
        if stop > content.size:
            raise LoadError(
                f"{path}: the file is cut off, or damaged: {entry.name!r} ends at byte {stop}, the file at "
                f"{content.size}; {_DOWNLOAD}"
            )
        shape = entry.dimensions[::-1]
        data = content[start:stop].reshape(*shape[:-1], row)
        yield StoredTensor(name=entry.name, type=GGMLQuantizationType(entry.type), shape=shape, data=data)


def _row_bytes(path: Path, entry: TensorEntry) -> int:
    """Return the bytes of a tensor's row."""
    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}.get(entry.type)
    if sizes is None:
        raise LoadError(
            f"{path}: {entry.name!r} has the tensor type {entry.type}, which is unknown here: withdrawn by llama.cpp, "
            "or newer than this version; choose a file of another type, Q4_K_M or Q8_0"
        )
    if not all(1 <= size <= _LARGEST for size in entry.dimensions):
        raise _damaged(path, entry, f"has dimensions {entry.dimensions}")
    block, size = sizes
    length = entry.dimensions[0]
    if length % block:
        kind = GGMLQuantizationType(entry.type).name
        raise _damaged(path, entry, f"has rows of {length} numbers, which are not whole blocks of {kind} ({block})")
    num_bytes: int = length // block * size
    return num_bytes


def _damaged(path: Path, entry: TensorEntry, what: str) -> LoadError:
    return LoadError(f"{path}: the file is damaged: {entry.name!r} {what}; {_DOWNLOAD}")
