"""How the passes of a model are run: what every way must do, and the way that takes any model.

To add a way: a file with a class like these, and a line in `BACKENDS` (`probe.py`), which are tried in their
order. Each is compared with plain transformers at every start; where it gives other numbers, the next one serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.attention import AttentionMetadata
from engine.models.packing import pack, take_over
from engine.models.taps import storing


class Backend(Protocol):
    """Runs the passes of one model."""

    reads_pages: bool
    """Whether it attends itself, by `AttentionMetadata.pages`."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the K/V that it writes."""

    def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor) -> Tensor:
        """[N, V] logits at the wanted tokens of a flat pass, in the model's dtype.

        K/V goes where `metadata` says, and so do the hidden states of `metadata.storage.taps`.
        """

    def weight_used(self, weight: Tensor) -> Tensor:
        """The numbers that stand for a weight of the model, in the type of the arithmetic."""

    def prepare(self, works: Callable[[], bool]) -> int:
        """Give up the model's own weights where they are laid out anew; the memory that those take, in bytes.

        works: whether the model, changed so, still gives its numbers.
        """

    def tune(self, run: Callable[[int], object], most_cores: int) -> None:
        """Measure on how many cores passes are fastest; run: makes a pass of so many rows."""


class TransformersBackend:
    """A transformers model behind the attention hook, as it is."""

    reads_pages = False

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def kv_dtype(self) -> torch.dtype:
        """The model's."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor) -> Tensor:
        """[N, V] logits at the wanted tokens of a flat pass."""
        with storing(self._model, metadata):
            return self._logits(token_ids_T, positions_T, metadata, wanted_N)

    def _logits(
        self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor
    ) -> Tensor:
        output = self._model(
            input_ids=token_ids_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            past_key_values=None,
            use_cache=False,
            metadata=metadata,
            logits_to_keep=wanted_N,
        )
        logits_NV: Tensor = output.logits[0]
        return logits_NV

    def weight_used(self, weight: Tensor) -> Tensor:
        """The model's own."""
        return weight

    def prepare(self, works: Callable[[], bool]) -> int:
        """Pack the weights of its linear layers; some model's code may look at weights that a packed layer has not."""
        return pack(take_over(self._model), works)

    def tune(self, run: Callable[[int], object], most_cores: int) -> None:
        """Torch has threads of its own."""
