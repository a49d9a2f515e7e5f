"""First weights of an EAGLE-3 head, in closed form.

The best linear prediction of the target's next state.

The target's state y at token t, after its last layer and normalised, is predicted from y at t - 1
and the embedding e of token t: y' = A y + B e + c, by least squares. One layer computes this if
each row attends to itself: its values are (A - I) y + B e, to which the residual stream adds y. The
MLP adds nothing at first. Steps of training start from there, so that a few thousand texts are
enough for a useful head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.heads.layers import Rotary, rotated
from research.distill.states import TextRows

_RIDGE = 1e-3
"""Share of the mean square that is added to every feature, for little text."""
_SELF_ATTENTION = 4.0
"""Difference between the score of a row itself and that of the row before it."""


class StateFit(NamedTuple):
    """Linear prediction of the next state, and the norm before the output head."""

    state_weight_DD: Tensor
    embedding_weight_DD: Tensor
    constant_D: Tensor
    norm_D: Tensor
    """Weight of the target's norm before its output head, times the scale of predicted states."""


def fit_states(rows: TextRows, embedding_VD: Tensor) -> StateFit:
    """Fit the prediction on texts.

    The last tap of the rows is the state that leaves the target's last layer.
    """
    width = embedding_VD.shape[1]
    is_token = torch.arange(rows.token_ids_RL.shape[1]) < rows.lengths_R[:, None]
    state_RLD = _normalised(rows.taps_RLX[..., -width:].float())
    after_RL = is_token[:, 1:]
    before_ND, next_ND = state_RLD[:, :-1][after_RL], state_RLD[:, 1:][after_RL]
    embedded_ND = _normalised(embedding_VD[rows.token_ids_RL[:, 1:][after_RL].long()].float())
    features_NX = torch.cat([before_ND, embedded_ND, torch.ones(len(before_ND), 1)], 1)
    squares_XX = features_NX.T @ features_NX
    squares_XX.diagonal().add_(_RIDGE * squares_XX.diagonal().mean())
    weight_XD = torch.linalg.solve(squares_XX.double(), (features_NX.T @ next_ND).double()).float()
    predicted_ND, last_ND = features_NX @ weight_XD, rows.last_RLD[:, 1:][after_RL].float()
    norm_D = (last_ND * next_ND).sum(0) / next_ND.square().sum(0).clamp(min=1e-6)
    scale = float(predicted_ND.square().mean().sqrt())
    return StateFit(
        state_weight_DD=weight_XD[:width].T,
        embedding_weight_DD=weight_XD[width : 2 * width].T,
        constant_D=weight_XD[-1],
        norm_D=norm_D * scale,
    )


def _normalised(state: Tensor) -> Tensor:
    return state / state.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


def first_eagle_layer(weights: dict[str, Tensor], fit: StateFit, layers: Any) -> dict[str, Tensor]:
    """Return the weights of a head of one layer that predicts by a fit.

    layers: transformers config of the head's.
    """
    attention, width = "layers.0.self_attn.", len(fit.constant_D)
    change_DX = torch.cat([fit.embedding_weight_DD, fit.state_weight_DD - torch.eye(width)], 1)
    left_DR, sizes_R, right_RX = torch.linalg.svd(change_DX, full_matrices=False)
    output, value = (torch.zeros_like(weights[f"{attention}{name}.weight"]) for name in ("o_proj", "v_proj"))
    rank = min(len(sizes_R), len(value))
    output[:, :rank] = left_DR[:, :rank] * sizes_R[:rank].sqrt()
    value[:rank] = sizes_R[:rank, None].sqrt() * right_RX[:rank]
    projection = torch.zeros_like(weights["fc.weight"])
    projection[:, -width:] = torch.eye(width)
    bias = _bias_of_itself(layers)
    queries = {
        f"{attention}{name}.bias": torch.full_like(weights[f"{attention}{name}.bias"], bias)
        for name in ("q_proj", "k_proj")
    }
    small = {
        name: weight * 0.1 if name.endswith(("q_proj.weight", "k_proj.weight")) else torch.zeros_like(weight)
        for name, weight in weights.items()
        if name.startswith("layers.") and name.endswith(("q_proj.weight", "k_proj.weight", "down_proj.weight"))
    }
    return (
        small
        | queries
        | {
            "fc.weight": projection,
            "norm.weight": fit.norm_D,
            f"{attention}o_proj.weight": output,
            f"{attention}o_proj.bias": fit.constant_D,
            f"{attention}v_proj.weight": value,
        }
    )


def _bias_of_itself(layers: Any) -> float:
    """Return the bias of all queries and keys by which a row attends to itself."""
    ones_THD = torch.ones(2, 1, layers.head_dim)
    turned_THD = rotated(ones_THD, Rotary(layers)(torch.arange(2), torch.float32))
    scores = (turned_THD[1] * turned_THD).sum(-1).flatten() * layers.head_dim**-0.5
    difference = float(scores[1] - scores[0])
    return float((_SELF_ATTENTION / difference) ** 0.5)
