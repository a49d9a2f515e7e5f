"""Models in transformers that stand for a decoder's weights in few bits and its rounded rows."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from engine.cpu.decoder import CpuDecoder
from engine.cpu.weights import Form, Forms, rounded_rows
from engine.start.loading import LoadedModel
from engine.start.plain_passes import rows_converted


def rows_rounded(model: Any, form: Form) -> AbstractContextManager[None]:
    """Let the linear layers of a model round their rows as products with weights of a form do."""
    return rows_converted(model, lambda rows, _: rounded_rows(rows, form))


def represented_by(loaded: LoadedModel, forms: Forms) -> LoadedModel:
    """A copy of a model in float32 with the numbers that weights of these forms stand for."""
    decoder = CpuDecoder(loaded.model, forms)
    model = copy.deepcopy(loaded.model)
    used = {name: decoder.weight_used(weight) for name, weight in loaded.model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.data = used[name]
    return replace(loaded, model=model)
