"""Reads the part of a GGUF file before its weights: key-values, and the table of tensors.

The layout is llama.cpp's (ggml/include/gguf.h), little-endian:
    "GGUF", version u32, number of tensors u64, number of key-values u64,
    key-values: key, type u32, value; a list is: type of its items u32, number u64, items,
    tensors: name, number of dimensions u32, dimensions u64 (fastest first), type u32, offset u64.
A text is its length in bytes (u64) and its UTF-8. `gguf.GGUFReader` reads the same, but believes
every count: lists longer than their file make it loop without end, and each number of a list
becomes an object. Here nothing is read or reserved before the file is known to be long enough. Not
for: what keys mean (`folder.py`), tensors' data (`file.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGUF_VERSION, GGUFValueType

from engine.errors import LoadError

_VERSIONS = (2, GGUF_VERSION)
_LONGEST_HEADER = 1 << 27
"""Bytes of the longest part before the weights; the largest vocabularies in use need 16 MB."""
_MOST_ITEMS = 1 << 22
"""Largest number of items in all lists of a file."""
_MOST_ENTRIES = 1 << 17
"""Largest number of tensors, and of key-values."""
_MOST_DIMENSIONS = 4
_FORMATS: Mapping[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_DOWNLOAD = "download it again"


class TensorEntry(NamedTuple):
    """A line of the table of tensors, as it is in the file."""

    name: str
    dimensions: tuple[int, ...]
    """Fastest first: a row's length is the first."""
    type: int
    offset: int
    """Bytes from the beginning of the data."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything in a file but its weights."""

    metadata: dict[str, Any]
    entries: list[TensorEntry]
    alignment: int
    data_start: int
    """Byte at which the data of the tensors begins."""


def read_header(path: Path, content: np.ndarray) -> Header:
    """Read the header of a file; raise LoadError for a file that is cut off, damaged or not GGUF.

    content: the file's bytes, uint8, memory-mapped.
    """
    words = _Words(path, content)
    num_tensors, num_keys = _begin(words)
    words.section = "its key-values"
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = words.text()
        if key in metadata:
            raise words.fault(f"the key {key!r} is there twice")
        metadata[key] = words.value(key)
    words.section = "its table of tensors"
    entries = [_entry(words) for _ in range(num_tensors)]
    alignment = _alignment(words, metadata)
    start = -(-words.position // alignment) * alignment
    return Header(metadata=metadata, entries=entries, alignment=alignment, data_start=start)


def _begin(words: _Words) -> tuple[int, int]:
    """Return the numbers of tensors and key-values; raise LoadError if unreadable."""
    if words.take(4) != b"GGUF":
        raise words.fault("it does not begin as GGUF files do")
    version = words.number("I")
    if version & 0xFFFF == 0 and version:
        raise LoadError(
            f"{words.path}: a GGUF file for big-endian machines; download the little-endian one, or convert it with "
            "gguf-convert-endian FILE little"
        )
    if version not in _VERSIONS:
        raise LoadError(
            f"{words.path}: version {version} of GGUF; versions {_VERSIONS[0]} and {_VERSIONS[-1]} are served: "
            "download a newer file of the model, or convert the model again with llama.cpp"
        )
    counts = words.number("Q"), words.number("Q")
    if max(counts) > _MOST_ENTRIES:
        raise words.fault(f"it claims to have {counts[0]} tensors and {counts[1]} key-values")
    return counts


def _entry(words: _Words) -> TensorEntry:
    name = words.text()
    num_dimensions = words.number("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise words.fault(f"the tensor {name!r} has {num_dimensions} dimensions")
    dimensions = tuple(words.number("Q") for _ in range(num_dimensions))
    return TensorEntry(name, dimensions, words.number("I"), words.number("Q"))


def _alignment(words: _Words, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise words.fault(f"general.alignment is {alignment!r}, not a power of two")
    return alignment


class _Words:
    """Cursor over a file's bytes that never passes their end."""

    def __init__(self, path: Path, content: np.ndarray) -> None:
        self.path = path
        self.position = 0
        self.section = "its first bytes"
        self._content = content[:_LONGEST_HEADER].data
        self._is_whole = content.size <= _LONGEST_HEADER
        self._num_items = 0

    def fault(self, what: str) -> LoadError:
        """Return the error for a damaged file."""
        return LoadError(f"{self.path}: the file is damaged in {self.section}: {what}; {_DOWNLOAD}")

    def take(self, size: int) -> bytes:
        """Return the next bytes; raise LoadError if the file does not have them."""
        self._need(size)
        self.position += size
        return bytes(self._content[self.position - size : self.position])

    def number(self, code: str) -> int:
        """Return the next number; code: of the module `struct`."""
        stored = self.take(struct.calcsize(f"<{code}"))
        number: int = struct.unpack(f"<{code}", stored)[0]
        return number

    def text(self) -> str:
        """Return the next text."""
        text = self.take(self.number("Q"))
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self.fault(f"a text that is not UTF-8 ({text[:40]!r})") from error

    def value(self, key: str) -> Any:
        """Return the next value: a number, text, list of texts or array."""
        kind = self.number("I")
        if kind == GGUFValueType.ARRAY:
            return self._items(key)
        if kind == GGUFValueType.STRING:
            return self.text()
        return self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> Any:
        return self.number(self._code(key, kind))

    def _items(self, key: str) -> list[str] | np.ndarray:
        kind, count = self.number("I"), self.number("Q")
        is_text = kind == GGUFValueType.STRING
        code = "Q" if is_text else self._code(key, kind)  # a text is at least its length
        size = struct.calcsize(f"<{code}") * count
        self._need(size)
        self._num_items += count
        if self._num_items > _MOST_ITEMS:
            raise self.fault(f"more than {_MOST_ITEMS} items in lists")
        if is_text:
            return [self.text() for _ in range(count)]
        return np.frombuffer(self.take(size), dtype=np.dtype(code).newbyteorder("<"))

    def _code(self, key: str, kind: int) -> str:
        code = _FORMATS.get(kind)
        if code is None:
            raise self.fault(f"the key {key!r} has values of type {kind}, which is not served")
        return code

    def _need(self, size: int) -> None:
        if size <= len(self._content) - self.position:
            return
        if self._is_whole:
            raise LoadError(f"{self.path}: the file is cut off in {self.section}, or damaged; {_DOWNLOAD}")
        raise self.fault(f"it would be longer than {_LONGEST_HEADER >> 20} MiB")
