"""Tensors of a checkpoint that the model has no place for: ignored with a warning, or the sign of a wrong model.

A tensor inside a module that exists (a scale, a bias, a norm of queries) would change the module's results. Separate
parts (a vision tower, layers for multi-token prediction) would not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from torch import nn

from engine.errors import LoadError

log = logging.getLogger("polydraft")

_COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|attn\.bias|attention\.bias|position_ids)$")
"""Buffers that the model computes itself, and that older checkpoints contain."""
_SHOWN = 3


def check_unplaced(name: str, model: nn.Module, keys: Iterable[str], is_quantised: bool) -> None:
    """Raise LoadError for tensors that would change the model's results; warn of all others, except buffers.

    keys: names of the ignored tensors. is_quantised: whether the configuration says how weights are quantised; scales
    of K/V are then ignored by design.
    """
    left_out = sorted(key for key in keys if not _COMPUTED.search(key))
    if not left_out:
        return
    modules = dict(model.named_modules())
    inside = [] if is_quantised else [key for key in left_out if _is_inside(key, model, modules)]
    if inside:
        raise LoadError(
            f"{name}: {len(inside)} tensors of the checkpoint have no place in the model and would change its numbers "
            f"({_some(inside)}); its config.json may lack a quantization_config, or name another architecture"
        )
    log.warning("%s: %d tensors of the checkpoint are not used (%s)", name, len(left_out), _some(left_out))


def _is_inside(key: str, model: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Whether a tensor belongs to a module that the model has, not to a part that it lacks."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    for path in (key, f"{prefix}.{key}"):
        parent = path.rpartition(".")[0]
        if parent in modules:
            return parent not in ("", prefix) and not isinstance(modules[parent], nn.ModuleList)
    return False


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
