"""Passes of the untouched transformers model, also with other attention or weights.

Not for: comparing them with a backend's passes (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.attention.attention import HOOK
from engine.models.backend import ARE_ROWS_ROUNDED
from engine.models.quantising import in_float32, rounding_off


def plain_forward(model: Any, texts: Sequence[Sequence[int]], cache: Any = None) -> Tensor:
    """Return logits [texts, T, V] of a pass; texts are padded at their ends.

    cache: of transformers, which is empty.
    """
    length = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts], device=model.device)
    positions = torch.arange(length, device=model.device).unsqueeze(0)
    logits: Tensor = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=False).logits.float()
    return logits


@contextmanager
def attention(model: Any, implementation: str) -> Iterator[None]:
    """Use another attention implementation than the hook, temporarily."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(HOOK)


@contextmanager
def rows_converted(model: Any, convert: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Let linear layers, and experts in blocks, multiply converted rows, temporarily.

    convert: takes rows and the layer's weight.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = []
    for module in linears:
        # Other hooks exchange the weight while the module runs.
        convert_first = partial(_first_converted, convert=convert, weight=module.weight)
        hooks.append(module.register_forward_pre_hook(lambda _, operands, hook=convert_first: hook(operands)))
    token = ARE_ROWS_ROUNDED.set(True)
    try:
        yield
    finally:
        ARE_ROWS_ROUNDED.reset(token)
        for hook in hooks:
            hook.remove()


def _first_converted(
    operands: tuple[Tensor, ...], convert: Callable[[Tensor, Tensor], Tensor], weight: Tensor
) -> tuple[Tensor, ...]:
    return convert(operands[0], weight), *operands[1:]


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """Let a model compute in float32, temporarily."""
    with rounding_off(model), converted(model, in_float32):
        yield


@contextmanager
def converted(model: Any, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a model compute with converted weights, temporarily.

    They are converted while their module runs, which takes memory for one module.
    """
    stored: dict[nn.Module, dict[str, Any]] = {}

    def replace(module: nn.Module, _: Any) -> None:
        stored[module] = dict(module._parameters)
        for name, weight in stored[module].items():
            if weight is None or not weight.is_floating_point():
                continue
            changed = convert(weight)
            if changed is not weight:
                module._parameters[name] = nn.Parameter(changed, requires_grad=False)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(stored.pop(module, {}))

    hooks = []
    for module in model.modules():
        if module._parameters:
            hooks.append(module.register_forward_pre_hook(replace))
            # Before the hooks of an outer conversion.
            hooks.append(module.register_forward_hook(restore, always_call=True, prepend=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
