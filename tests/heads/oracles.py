"""Heads in the plainest way, computed from the beginning of the text at every node."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.attention import HOOK
from engine.start.loading import LoadedModel
from tests.engine import tiny
from tests.heads.folders import EPS, HEAD_DIM, HEADS, KV_HEADS, Written, final_norm

THETA = 500.0


def target_states(loaded: LoadedModel, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Return [T, taps * D] the target's states of a text, by transformers."""
    body = loaded.model.model
    before_norm: list[Tensor] = []
    hook = final_norm(body).register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
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


def rotate(heads: Tensor, first: int) -> Tensor:
    """[T, heads, head_dim] at positions from `first`: pairs (i, i + half) turned by an angle."""
    half = HEAD_DIM // 2
    positions = torch.arange(first, first + len(heads)).view(-1, 1, 1)
    angles = positions * THETA ** (-torch.arange(half) / half)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([turned.real, turned.imag], -1)


def heads_of(weights: dict[str, Tensor], name: str, which: str, states: Tensor) -> Tensor:
    """[T, heads, head_dim] one projection of states, normed if the layer has norms."""
    rows = states @ weights[f"{name}{which}_proj.weight"].T
    rows = rows + weights.get(f"{name}{which}_proj.bias", 0)
    heads = rows.view(len(rows), -1, HEAD_DIM)
    norm = weights.get(f"{name}{which}_norm.weight")
    return heads if norm is None else rms(heads, norm)


def attended(queries: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """[T, heads * head_dim] attention of queries to the keys that they see; sees: [T, keys]."""
    outputs = []
    for head in range(HEADS):
        of_key = head // (HEADS // KV_HEADS)
        scores = queries[:, head] @ keys[:, of_key].T * HEAD_DIM**-0.5
        outputs.append(scores.masked_fill(~sees, -torch.inf).softmax(1) @ values[:, of_key])
    return torch.cat(outputs, 1)


def gated(weights: dict[str, Tensor], name: str, states: Tensor) -> Tensor:
    gate, up = (states @ weights[f"{name}mlp.{one}_proj.weight"].T for one in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ weights[f"{name}mlp.down_proj.weight"].T


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
        projected = self._project(states[: len(text) - 1])
        self.cache = [(torch.zeros(0, KV_HEADS, HEAD_DIM),) * 2 for _ in range(self.num_layers)]
        output = self._rows(text[1:], projected, 1)[-1]
        for depth, token in enumerate(path):
            output = self._rows([token], output[None], len(text) + depth)[0]
        normed = output if self.flags.get("norm_output") else rms(output, self.weights["norm.weight"])
        result = torch.full((self.vocabulary,), -torch.inf)
        for number, logit in zip(self.target_ids, (self.head @ normed).tolist(), strict=True):
            result[number] = logit * self.flags.get("logit_scale", 1.0)
        return result

    def _project(self, taps: Tensor) -> Tensor:
        if self.flags.get("norm_before_fc"):
            taps = rms(taps, self.weights["input_norm.weight"])
        if self.flags.get("fc_norm"):
            chunks = taps.chunk(3, 1)
            taps = torch.cat([rms(chunk, self.weights[f"fc_norm.{i}.weight"]) for i, chunk in enumerate(chunks)], 1)
        return taps @ self.weights["fc.weight"].T

    def _rows(self, tokens: Sequence[int], state: Tensor, first: int) -> Tensor:
        """[T, D] states of the next tokens; first: position of the first token."""
        weights = self.weights
        for number in range(self.num_layers):
            name = f"layers.{number}."
            if number == 0:
                embedded = rms(self.embedding[list(tokens)], weights[f"{name}input_layernorm.weight"])
                normed = rms(state, weights[f"{name}hidden_norm.weight"])
                inputs = torch.cat([embedded, normed], 1)
                state = normed if self.flags.get("norm_before_residual") else state
            else:
                inputs = rms(state, weights[f"{name}input_layernorm.weight"])
            query, key, value = (heads_of(weights, f"{name}self_attn.", which, inputs) for which in "qkv")
            keys = torch.cat([self.cache[number][0], rotate(key, first)])
            values = torch.cat([self.cache[number][1], value])
            self.cache[number] = keys, values
            sees = torch.ones(len(query), len(keys), dtype=torch.bool).tril(len(keys) - len(query))
            attention = attended(rotate(query, first), keys, values, sees)
            attention = attention @ weights[f"{name}self_attn.o_proj.weight"].T
            state = state + attention + weights.get(f"{name}self_attn.o_proj.bias", 0)
            state = state + gated(weights, name, rms(state, weights[f"{name}post_attention_layernorm.weight"]))
        return rms(state, weights["norm.weight"]) if self.flags.get("norm_output") else state


class Block:
    """A head that drafts a block: each row from the target's states and the other rows."""

    def __init__(self, written: Written, of: LoadedModel) -> None:
        self.weights = {name: tensor for name, tensor in written.tensors.items() if tensor.is_floating_point()}
        self.given, self.flags, model = written.extra, written.flags, of.model
        self.vocabulary = of.vocab_size
        self.embedding = self.weights.get("embed_tokens.weight", model.get_input_embeddings().weight.detach().cpu())
        self.head = self.weights.get("lm_head.weight", model.get_output_embeddings().weight.detach().cpu())
        offsets = written.tensors.get("d2t")
        self.target_ids = [i + (int(offsets[i]) if offsets is not None else 0) for i in range(len(self.head))]
        self.from_anchor = self.flags.get("sample_from_anchor", self.given["kind"] == "dspark")

    def logits(self, text: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """[V] below a path."""
        anchor, size = len(text) - 1, self.given["block_size"]
        contexts = rms(states[:anchor] @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"])
        ids = [text[-1]] + [self.given["mask_token_id"]] * (size - 1)
        rows = self.embedding[ids] * self.given.get("input_embedding_scale", 1.0)
        for number in range(self.given["layers"]):
            rows = self._layer(number, rows, contexts)
        rows = rms(rows, self.weights["norm.weight"])
        slots = rows if self.from_anchor else rows[1:]
        own = self._own(slots, rows[0], [text[-1], *path])
        result = torch.full((self.vocabulary,), -torch.inf)
        for number, logit in own.items():
            result[self.target_ids[number]] = logit
        return result

    def _layer(self, number: int, rows: Tensor, contexts: Tensor) -> Tensor:
        weights, name = self.weights, f"layers.{number}."
        attn = f"{name}self_attn."
        normed, behind = self._convolved(f"{name}attention_conv", rms(rows, weights[f"{name}input_layernorm.weight"]))
        inputs = torch.cat([contexts, normed])
        anchor = len(contexts)
        sees = torch.tensor([[self._sees(number, anchor + i, k) for k in range(len(inputs))] for i in range(len(rows))])
        query = rotate(heads_of(weights, attn, "q", normed), anchor)
        key = rotate(heads_of(weights, attn, "k", inputs), 0)
        attention = attended(query, key, heads_of(weights, attn, "v", inputs), sees)
        rows = rows + behind(attention @ weights[f"{attn}o_proj.weight"].T)
        normed, behind = self._convolved(
            f"{name}mlp_conv", rms(rows, weights[f"{name}post_attention_layernorm.weight"])
        )
        return rows + behind(gated(weights, name, normed))

    def _sees(self, number: int, query: int, key: int) -> bool:
        slides = self.given.get("layer_types", ["full_attention"] * 9)[number] == "sliding_attention"
        if slides and query - key >= self.given["sliding_window"]:
            return False
        is_causal = slides and not self.flags.get("sliding_window_non_causal", self.given["kind"] == "dflash2")
        stated = self.flags.get("is_causal", self.given.get("causal"))
        return key <= query or not (is_causal if stated is None else stated)

    def _convolved(self, name: str, rows: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(rows convolved, what convolves the outputs of the part behind them)."""
        if f"{name}.base_kernel" not in self.weights:
            return rows, lambda outputs: outputs
        base, group = self.weights[f"{name}.base_kernel"], self.given["conv_group_size"]
        taps = base.shape[1]
        own = rows @ self.weights[f"{name}.kernel_projection.weight"].T
        kernels = base + own.view(len(rows), 2, taps, -1).repeat_interleave(group, -1)

        def side(which: int, inputs: Tensor) -> Tensor:
            result = torch.zeros_like(inputs)
            for i in range(len(inputs)):
                for tap in range(min(taps, i + 1)):
                    result[i] += kernels[i, which, tap] * inputs[i - tap]
            return result

        return side(0, rows), lambda outputs: side(1, outputs)

    def _own(self, slots: Tensor, first: Tensor, tokens: list[int]) -> dict[int, float]:
        """Logits in the head's own tokens; tokens: the text's last, and the path."""
        state, weights = slots[len(tokens) - 1], self.weights
        logits = self.head @ state * self.given.get("output_multiplier", 1.0)
        if cap := self.given.get("final_logit_softcapping"):
            logits = (logits / cap).tanh() * cap
        if "markov_head.markov_w1.weight" in weights:
            logits = logits + self._markov(slots, first, tokens)
        if "candidate_selector.predecessor_codebook" not in weights:
            return dict(enumerate(logits.tolist()))
        likeliest = logits.argsort(descending=True)[: self.given["selector_top_k"]].tolist()
        query = weights["candidate_selector.hidden_projection.weight"] @ state
        query = query * weights["candidate_selector.predecessor_codebook"][tokens[-1]]
        successors = weights["candidate_selector.successor_codebook"]
        return {one: float(logits[one] + query @ successors[one]) for one in likeliest}

    def _markov(self, slots: Tensor, first: Tensor, tokens: list[int]) -> Tensor:
        weights, kind = self.weights, self.flags.get("markov_head_type", "vanilla")
        w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        if kind == "vanilla":
            return w2 @ w1[tokens[-1]]
        name = f"markov_head.{'gate' if kind == 'gated' else 'joint'}_proj."
        projection, bias = weights[f"{name}weight"], weights[f"{name}bias"]
        if kind == "gated":
            before = w1[tokens[-1]]
            gate = (projection @ torch.cat([slots[len(tokens) - 1], before]) + bias).sigmoid()
            return w2 @ (gate * before)
        memory, term = torch.zeros(w1.shape[1]), torch.zeros(len(self.head))
        steps = list(zip(tokens, slots, strict=False))
        for token, state in steps if self.from_anchor else [(tokens[0], first), *steps]:
            parts = (projection @ torch.cat([memory, w1[token], state]) + bias).chunk(3)
            gate = parts[0].sigmoid()
            memory, term = gate * memory + (1 - gate) * parts[1].tanh(), w2 @ parts[2].tanh()
        return term


class Masked(Eagle):
    """A P-EAGLE head: a path's tokens count for nothing but its length."""

    def __init__(self, written: Written, of: LoadedModel) -> None:
        super().__init__(written, of)
        self.mask_token = written.extra["mask_token_id"]

    def logits(self, text: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """[V] below a path."""
        masks = [self.mask_token] * len(path)
        mask = self.weights["mask_hidden"].view(1, -1)
        return super().logits([*text, *masks], torch.cat([states[: len(text) - 1], *[mask] * len(path)]), ())


class Module:
    """An MTP module as transformers runs it, from the beginning of the text at every node."""

    def __init__(self, written: Written, of: LoadedModel) -> None:
        import transformers
        from transformers.modeling_layers import MtpModel

        folder = str(written.folder)
        main = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        # Its list names the layers of two published sizes.
        main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}\..*"]
        self.module: Any = MtpModel.from_pretrained(main).eval()
        assert of.vocab_size == main.config.vocab_size

    @torch.inference_mode()
    def logits(self, text: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """Return [V] logits below a path; states: [>= text - 1, D] the target's normed ones."""
        tokens, state_TD = list(text[1:]), states[: len(text) - 1]
        for token in [*path, None]:
            places = torch.arange(1, len(tokens) + 1)[None]
            output_TD = self.module.forward_layer(0, state_TD[None], places, None, torch.tensor([tokens]))[0]
            if token is not None:
                tokens, state_TD = [*tokens, token], torch.cat([state_TD, output_TD[-1:]])
        return self.module._project_to_logits(output_TD[-1])


class HybridModule:
    """An MTP module of a hybrid, from the beginning of the text at every node."""

    def __init__(self, written: Written, of: LoadedModel) -> None:
        config = copy.deepcopy(of.model.config)
        config._attn_implementation = config._experts_implementation = "eager"
        self.of, self.tensors, self.parts = of, written.tensors, written.extra["parts"]
        self.eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.blocks = []
        for number, kind in enumerate(self.parts.layers):
            place, begin = config.layer_types.index(kind), f"mtp.layers.{number}."
            block = type(of.model.model.layers[place])(config, place)
            named = {n.removeprefix(begin): t for n, t in written.tensors.items() if n.startswith(begin)}
            block.load_state_dict({name: named[name] for name in block.state_dict()})
            self.blocks.append(block)
        rotary = getattr(of.model.model, "rotary_emb", None)
        self.rotary = rotary and type(rotary)(config)

    def normed(self, rows_TD: Tensor, name: str) -> Tensor:
        scale_T1 = torch.rsqrt(rows_TD.pow(2).mean(-1, keepdim=True) + self.eps)
        return rows_TD * scale_T1 * (self.parts.added + self.tensors[f"mtp.{name}.weight"])

    @torch.inference_mode()
    def logits(self, text: Sequence[int], states: Tensor, path: Sequence[int]) -> Tensor:
        """Return [V] logits below a path; states: [>= text - 1, D] the target's normed ones."""
        tokens, state_TD = list(text[1:]), states[: len(text) - 1]
        for token in [*path, None]:
            embedded_TD = self.normed(self.of.model.get_input_embeddings()(torch.tensor(tokens)), self.parts.enorm)
            joined_TX = torch.cat([embedded_TD, self.normed(state_TD, self.parts.hnorm)], -1)
            hidden_1TD = (joined_TX @ self.tensors[f"mtp.{self.parts.eh_proj}.weight"].T)[None]
            places = torch.arange(1, len(tokens) + 1)[None]
            mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
            named = {} if self.rotary is None else {"position_embeddings": self.rotary(hidden_1TD, places)}
            for block in self.blocks:
                hidden_1TD = block(hidden_1TD, attention_mask=mask, **named)
            output_TD = self.normed(hidden_1TD[0], self.parts.norm)
            if token is not None:
                tokens, state_TD = [*tokens, token], torch.cat([state_TD, output_TD[-1:]])
        logits_V: Tensor = self.of.model.lm_head(output_TD[-1])
        return logits_V


def largest_error(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference of logits; infinite if only one token is possible."""
    worst = 0.0
    for found, expected in pairs:
        is_finite = expected.isfinite()
        if not bool((found.isfinite() == is_finite).all()):
            return float("inf")
        worst = max(worst, float((found[is_finite] - expected[is_finite]).abs().max()))
    return worst
