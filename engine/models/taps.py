"""Hidden states of a transformers model, stored by hooks on layers.

The storage says which taps there are (`engine.attention.tensors`). Not for: decoders that are not
transformers' own, which call `KVTensors.store` themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from engine.attention.attention import AttentionMetadata
from engine.attention.tensors import NORMED
from engine.errors import LoadError


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a model; raise LoadError if they cannot be found."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList)]
    fitting = [layers for layers in lists if len(layers) == count]
    if not fitting:
        raise LoadError(f"{model.config.model_type}: its layers are not found, so that no head can read their states")
    return fitting[0]


@contextlib.contextmanager
def storing(model: Any, metadata: AttentionMetadata) -> Iterator[None]:
    """Store the hidden states of a pass that runs meanwhile, at the taps of its storage."""
    taps = metadata.storage.taps
    if not taps:
        yield
        return

    def store(tap: int, state_BTD: Tensor) -> None:
        metadata.storage.store(tap, state_TD=state_BTD[0], slots=metadata.slots_T)

    with observing(model, taps, store):
        yield


@contextlib.contextmanager
def observing(model: Any, taps: Sequence[int], observe: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `observe(tap, state_BTD)` for each tap in every pass that runs meanwhile."""
    with contextlib.ExitStack() as hooks:
        for tap in taps:
            hooks.callback(_hook(model, tap, partial(observe, tap)).remove)
        yield


def _hook(model: Any, tap: int, observe: Callable[[Tensor], None]) -> Any:
    """Observe one tap's states in every pass until the hook is removed."""

    def entering(_module: Any, inputs: Any, named: Any) -> None:
        observe(inputs[0] if inputs else named["hidden_states"])

    def leaving(_module: Any, _inputs: Any, output: Any) -> None:
        observe(output if isinstance(output, Tensor) else output[0])

    if tap == NORMED:
        return model.base_model.register_forward_hook(leaving)
    layers = layers_of(model)
    if tap == len(layers):
        return layers[-1].register_forward_hook(leaving)
    return layers[tap].register_forward_pre_hook(entering, with_kwargs=True)
