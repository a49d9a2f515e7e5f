"""Interface of backends, which run the passes of a model, and the backend that supports any model.

To add a backend, add a file with a class like these, and an entry in `BACKENDS` (`start/probe.py`).
Backends are tried in order. Each is compared with plain transformers at every start; if its numbers
differ, the next backend is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from engine.attention.attention import AttentionMetadata, running
from engine.models.taps import storing

ARE_ROWS_ROUNDED: ContextVar[bool] = ContextVar("are_rows_rounded", default=False)
"""Whether torch's products of experts round their rows, as a backend's do."""


class Backend:
    """Runs the passes of one model, with the model's own weights if methods are not overridden."""

    reads_pages = False
    """Whether it computes attention itself, from `AttentionMetadata.layout`."""
    kv_dtype: torch.dtype
    """Type of the K/V that it writes."""
    remark = ""
    """Text for the log of a start, on rounded numbers."""
    rounds_rows = False
    """Whether products round their rows, by `rows_used`."""

    def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor) -> Tensor:
        """Return [N, V] logits at the wanted tokens of a flat pass, in the model's dtype.

        `metadata` determines where K/V is stored, and `metadata.storage.taps`
        the stored hidden states.
        """
        raise NotImplementedError

    def weight_used(self, weight: Tensor) -> Tensor:
        """Return the numbers that represent a parameter, in the arithmetic's type."""
        return weight

    def rows_used(self, rows: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        """Return the numbers that a product multiplies for rows [..., K]."""
        return rows

    def prepare(self) -> int:
        """Drop weights stored in another layout; return this backend's further bytes."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Give the model's modules back, because another backend runs them."""

    def tune(self, run: Callable[[int], object], most_cores: int) -> None:
        """Measure on how many cores passes are fastest; run: runs a pass of some rows."""


class TransformersBackend(Backend):
    """An unchanged transformers model with the attention hook."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kv_dtype = model.dtype

    def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor) -> Tensor:
        with storing(self._model, metadata), running(metadata, positions_T):
            output = self._model(
                input_ids=token_ids_T.unsqueeze(0),
                position_ids=positions_T.unsqueeze(0),
                past_key_values=None,
                use_cache=False,
                logits_to_keep=wanted_N,
            )
        logits_NV: Tensor = output.logits[0]
        return logits_NV

    def prepare(self) -> int:
        return 0
