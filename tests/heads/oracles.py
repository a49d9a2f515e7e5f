"""Heads in the plainest way, row by row and token by token: what served logits are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.execution.attention import HOOK
from engine.execution.loading import LoadedModel
from tests.engine import tiny
from tests.heads.folders import EPS, HEAD_DIM, HEADS, KV_HEADS, Written

THETA = 500.0


def target_states(loaded: LoadedModel, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """[T, taps * D] the target's states of a text, by transformers' own attention and its list of hidden states."""
    body = loaded.model.model
    before_norm: list[Tensor] = []
    hook = body.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=tiny.DEVICE)
        states = body(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    loaded.model.set_attn_implementation(HOOK)
    by_tap = [before_norm[0] if tap == len(body.layers) else states[tap] for tap in taps]
    return torch.cat([state[0] for state in by_tap], 1).cpu()


def rms(state: Tensor, weight: Tensor) -> Tensor:
    return state / (state.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(heads: Tensor, position: int) -> Tensor:
    """[heads, head_dim]: each pair (i, i + half) turned by an angle."""
    half = HEAD_DIM // 2
    angles = position * THETA ** (-torch.arange(half) / half)
    turned = torch.complex(heads[:, :half], heads[:, half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag], 1)


def heads_of(weights: dict[str, Tensor], name: str, which: str, state: Tensor) -> Tensor:
    """[heads, head_dim] one projection of a state, normed if the layer has norms."""
    rows = weights[f"{name}{which}_proj.weight"] @ state
    rows = rows + weights.get(f"{name}{which}_proj.bias", 0)
    heads = rows.view(-1, HEAD_DIM)
    norm = weights.get(f"{name}{which}_norm.weight")
    return heads if norm is None else rms(heads, norm)


def attended(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """[heads * head_dim] attention of one query to all keys given."""
    outputs = []
    for head in range(HEADS):
        of_key = head // (HEADS // KV_HEADS)
        scores = torch.stack([query[head] @ key[of_key] for key in keys]) * HEAD_DIM**-0.5
        outputs.append(sum(w * value[of_key] for w, value in zip(scores.softmax(0), values, strict=True)))
    return torch.cat(outputs)  # type: ignore[arg-type]


def gated(weights: dict[str, Tensor], name: str, state: Tensor) -> Tensor:
    gate, up = (weights[f"{name}mlp.{one}_proj.weight"] @ state for one in ("gate", "up"))
    return weights[f"{name}mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)


class Eagle:
    """An EAGLE-3 head over a text and a path of drafted tokens below it."""

    def __init__(self, written: Written, of: LoadedModel) -> None:
        self.weights = {name: tensor for name, tensor in written.tensors.items() if tensor.is_floating_point()}
        self.flags = written.flags
        model, self.vocabulary = of.model, of.vocab_size
        self.embedding = self.weights.get("embed_tokens.weight", model.get_input_embeddings().weight.detach().cpu())
        self.head = self.weights.get("lm_head.weight", model.get_output_embeddings().weight.detach().cpu())
        offsets = written.tensors.get("d2t")
        size = len(self.head)
        self.target_ids = [i + (int(offsets[i]) if offsets is not None else 0) for i in range(size)]
        self.num_layers = sum(name.endswith("input_layernorm.weight") for name in self.weights)

    def logits(self, text: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """[V] below a path; states: [>= text - 1, taps * D] the target's at the text's tokens."""
        self.cache: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(self.num_layers)]
        for position in range(1, len(text)):
            output = self._row(text[position], self._project(states[position - 1]), position)
        for depth, token in enumerate(path):
            output = self._row(token, output, len(text) + depth)
        normed = output if self.flags.get("norm_output") else rms(output, self.weights["norm.weight"])
        result = torch.full((self.vocabulary,), -torch.inf)
        for number, logit in zip(self.target_ids, (self.head @ normed).tolist(), strict=True):
            result[number] = logit * self.flags.get("logit_scale", 1.0)
        return result

    def _project(self, taps: Tensor) -> Tensor:
        if self.flags.get("norm_before_fc"):
            taps = rms(taps, self.weights["input_norm.weight"])
        if self.flags.get("fc_norm"):
            chunks = taps.chunk(3)
            taps = torch.cat([rms(chunk, self.weights[f"fc_norm.{i}.weight"]) for i, chunk in enumerate(chunks)])
        return self.weights["fc.weight"] @ taps

    def _row(self, token: int, state: Tensor, position: int) -> Tensor:
        weights = self.weights
        for number in range(self.num_layers):
            name = f"layers.{number}."
            if number == 0:
                embedded = rms(self.embedding[token], weights[f"{name}input_layernorm.weight"])
                normed = rms(state, weights[f"{name}hidden_norm.weight"])
                inputs = torch.cat([embedded, normed])
                state = normed if self.flags.get("norm_before_residual") else state
            else:
                inputs = rms(state, weights[f"{name}input_layernorm.weight"])
            keys, values = self.cache[number]
            query = rotate(heads_of(weights, f"{name}self_attn.", "q", inputs), position)
            keys.append(rotate(heads_of(weights, f"{name}self_attn.", "k", inputs), position))
            values.append(heads_of(weights, f"{name}self_attn.", "v", inputs))
            attention = weights[f"{name}self_attn.o_proj.weight"] @ attended(query, keys, values)
            state = state + attention + weights.get(f"{name}self_attn.o_proj.bias", 0)
            state = state + gated(weights, name, rms(state, weights[f"{name}post_attention_layernorm.weight"]))
        return rms(state, weights["norm.weight"]) if self.flags.get("norm_output") else state


def all_close(found: Tensor, expected: Tensor, tolerance: float = 1e-3) -> bool:
    """Equal, minus infinity included."""
    is_finite = expected.isfinite()
    return bool((found.isfinite() == is_finite).all()) and bool(
        (found[is_finite] - expected[is_finite]).abs().max() < tolerance
    )


def largest_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Of all logits; infinite if tokens are possible in one of two only."""
    worst = 0.0
    for found, expected in pairs:
        is_finite = expected.isfinite()
        if not bool((found.isfinite() == is_finite).all()):
            return float("inf")
        worst = max(worst, float((found[is_finite] - expected[is_finite]).abs().max()))
    return worst
