"""Key-values of an architecture, with types; unread keys are refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.errors import LoadError
from engine.models.gguf.file import GgufFile

OTHER_FORMAT = "serve the same model in transformers format"
CONVERT_AGAIN = "choose another file of the model, or convert the model again"
"""Ways out. A file that can be read is not improved by a second download."""
_HARMLESS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""Keys that change nothing."""


class Keys:
    """The key-values `ARCHITECTURE.*` of a file."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        prefix = f"{file.architecture}."
        self._left = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        for key in _HARMLESS:
            self._left.pop(key, None)

    def fault(self, key: str, what: str) -> LoadError:
        """Return the error for a value that cannot be used."""
        return LoadError(f"{self._file.path}: {self._file.architecture}.{key} {what}")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a number of things. A list, of a value for each layer, must have equal values."""
        value = self._scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise self.fault(key, f"is {value!r}, not a number from {least}; {CONVERT_AGAIN}")
        return value

    def counts(self, key: str, num_layers: int) -> list[int]:
        """Return a number of things for each layer; it may be 0."""
        values = self._left.pop(key, None)
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if not isinstance(values, list) or len(values) != num_layers:
            raise self.fault(key, f"has no number for each of {num_layers} layers; {CONVERT_AGAIN}")
        if not all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
            raise self.fault(key, f"is {values!r}, not numbers from 0; {CONVERT_AGAIN}")
        return values

    def number(self, key: str, default: float | None = None, zero: float | None = None) -> float:
        """Return a finite number above 0; zero: the meaning of 0, if it has one."""
        value = self._scalar(key, default)
        if zero is not None and value == 0:
            return zero
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fault(key, f"is {value!r}, not a number above 0; {CONVERT_AGAIN}")
        # The file has float32: 9.999999747378752e-06 was written as 1e-05.
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._scalar(key, default)
        if not isinstance(value, str):
            raise self.fault(key, f"is {value!r}, not a text; {CONVERT_AGAIN}")
        return value

    def expect(self, key: str, values: Iterable[object], served: str) -> None:
        """Raise LoadError for a value that is none of `values`; served: for the message."""
        value = self._scalar(key, None, is_needed=False)
        if value is not None and value not in values:
            raise self.fault(key, f"is {value!r}, which is not served; {served}")

    def end(self) -> None:
        """Raise LoadError for keys that nobody has read."""
        if self._left:
            shown = ", ".join(f"{self._file.architecture}.{key}" for key in sorted(self._left)[:3])
            raise LoadError(
                f"{self._file.path}: {len(self._left)} keys of this file are not known here and may change what the "
                f"model computes ({shown}); {OTHER_FORMAT}"
            )

    def has(self, key: str) -> bool:
        """Whether the file has a key that has not been read."""
        return key in self._left

    def _scalar(self, key: str, default: Any, is_needed: bool = True) -> Any:
        value = self._left.pop(key, default)
        if value is None and is_needed:
            raise self.fault(key, f"is missing; {CONVERT_AGAIN}")
        if not isinstance(value, np.ndarray | list):
            return value
        several = set(value.tolist() if isinstance(value, np.ndarray) else value)
        if len(several) != 1:
            raise self.fault(key, "differs between layers, which is not served; choose another model")
        return several.pop()
