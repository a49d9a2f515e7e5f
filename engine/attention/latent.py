"""Latent attention (MLA): the K and V of all heads are products of one short row a token.

The stored row is the latent and the rotated key that all heads share; K is this row, and V is its
beginning. A head's query is multiplied by the head's key weights once, so that it is compared with
latents, and its result by the value weights. So a model with latents attends as one with a single
K/V head, whose width is that of the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

METHOD = "expand_kv"
"""Method of transformers' MLA classes that computes K and V of all heads from latents."""


def store_latents(modules: Iterable[Any], hook: str) -> None:
    """Let MLA modules pass latents to attention implementations whose name begins with `hook`."""

    def latents(module: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        if not str(module.config._attn_implementation).startswith(hook):
            expanded: tuple[Tensor, Tensor] = getattr(type(module), METHOD)(module, latent, rotated)
            return expanded
        return torch.cat((latent, rotated), dim=-1), latent

    for module in modules:
        setattr(module, METHOD, MethodType(latents, module))


def has_latents(module: Any) -> bool:
    """Return whether an attention module passes latents to the hook."""
    return METHOD in vars(module)


def absorbed(module: Any, query: Tensor) -> Tensor:
    """Return queries [1, H, T, row] that are compared with stored rows."""
    num_plain = module.qk_nope_head_dim
    key_HDL, _ = head_weights(module)
    return torch.cat((query[..., :num_plain] @ key_HDL, query[..., num_plain:]), dim=-1)


def expanded(module: Any, output: Tensor) -> Tensor:
    """Return the heads' results [1, T, H, D_v] from sums of weighted latents [1, T, H, L]."""
    _, value_HDL = head_weights(module)
    result_HTD = output[0].transpose(0, 1) @ value_HDL.transpose(1, 2)
    return result_HTD.transpose(0, 1).unsqueeze(0)


def head_weights(module: Any) -> tuple[Tensor, Tensor]:
    """Return the weights of keys without rotation [H, D_k, L], and of values [H, D_v, L]."""
    weight: Tensor = module.kv_b_proj.weight
    weight_HDL = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[-1])
    return weight_HDL[:, : module.qk_nope_head_dim], weight_HDL[:, module.qk_nope_head_dim :]
