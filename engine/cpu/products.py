"""Products of linear layers and experts on a CPU, for models that run in transformers' code.

Weights have the forms and layouts of the decoder's weights (`weights.py`), and the decoder's
compiled products multiply them, so a row's bits do not depend on other rows. The model's own code
computes all else, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.attention.attention import AttentionMetadata
from engine.attention.latent import has_latents
from engine.cpu.call import TableCall
from engine.cpu.compiled import pass_table, product_phase
from engine.cpu.weights import Product, form_of_type, forms_of, remark_on, represented, rounded_rows, rounds_rows
from engine.models.backend import ARE_ROWS_ROUNDED, TransformersBackend
from engine.models.gguf.blocks import BlockTensor, Form
from engine.models.quantising import has_scheme

_ARE_USED: ContextVar[bool] = ContextVar("are_used", default=False)
"""Whether compiled products compute the layers of a model, or torch's."""
_READ = frozenset({"dt_proj", "classifier"})
"""Names of layers whose weights are read by the code of Mamba 1 and LongCat."""
_FEW_COLUMNS = 8
"""Weights with fewer columns than their depth divided by this number keep the checkpoint's type.

They choose experts, or decays of states, and are a small part of a model.
"""


class BlockWeight:
    """A weight [N, K] in blocks, with its bias: `rows @ weight.T + bias`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, form: Form) -> None:
        self._shape = tuple(weight.shape)
        self._product = Product.of([[weight]], [[bias]], lambda _: form)
        self._call = TableCall(product_phase.work().address, pass_table.COUNTERS)
        self._call.put(pass_table.QKV, self._product.table())
        self._call.put(pass_table.QKV + 1, self._product.bias)
        self._sizes = np.zeros(4, dtype=np.int64)
        self._call.put(pass_table.SIZES, self._sizes)
        self.nbytes = self._product.nbytes

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the type of the rows."""
        width, depth = self._shape
        flat = rows.reshape(-1, depth).float().contiguous()
        result = torch.empty(len(flat), self._product.bias.shape[1])
        if len(flat):
            self._sizes[1] = torch.get_num_threads()
            self._call.put(pass_table.NORMED, flat.numpy())
            self._call.put(pass_table.JOINED, result.numpy())
            self._call.run()
        return result[:, :width].reshape(*rows.shape[:-1], width).to(rows.dtype)


class _Layer:
    """A module of a model whose weights products multiply."""

    def __init__(self, module: Any, form: Form) -> None:
        self.module = module
        self.form = form
        self.names = _names_of(module)
        module.forward = self.forward

    @property
    def nbytes(self) -> int:
        """Return the memory of the weights in blocks."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Any]:
        """Return the parameters of the model."""
        return [self.module._parameters[name] for name in self.names]

    def forward(self, *operands: Tensor) -> Tensor:
        """Compute the module: as torch does outside of `multiplying`, until weights are dropped."""
        if _ARE_USED.get() or not self.weights[0].numel():
            return self.multiply(*operands)
        return self.multiply_plainly(*operands)

    def multiply(self, *operands: Tensor) -> Tensor:
        """Compute the module by compiled products."""
        raise NotImplementedError

    def multiply_plainly(self, *operands: Tensor) -> Tensor:
        """Compute the module by torch's products."""
        raise NotImplementedError

    def represented(self, weight: Tensor) -> Tensor:
        """Return the float32 numbers that stand for a weight."""
        return represented(weight, self.form)

    def drop(self) -> None:
        """Drop the model's own weights."""
        for name in self.names:
            self.module._parameters[name] = nn.Parameter(torch.empty(0), requires_grad=False)


class BlockLinear(_Layer):
    """A linear layer."""

    def __init__(self, module: nn.Linear, form: Form) -> None:
        super().__init__(module, form)
        self._weight = BlockWeight(module.weight, module.bias, form)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def multiply(self, *operands: Tensor) -> Tensor:
        (rows,) = operands
        return self._weight(rows)

    def multiply_plainly(self, *operands: Tensor) -> Tensor:
        (rows,) = operands
        bias = None if self.module.bias is None else self.module.bias.to(rows.dtype)
        return linear(rows, self.module.weight.to(rows.dtype), bias)


class BlockExperts(_Layer):
    """Experts of a layer, with the interface of transformers' experts."""

    def __init__(self, module: Any, form: Form) -> None:
        super().__init__(module, form)
        self._blocks = {name: [BlockWeight(*one, form) for one in self._weights_of(name)] for name in self.names}

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for blocks in self._blocks.values() for one in blocks)

    def _weights_of(self, name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield each expert's weight [N, K], and its bias."""
        weights = getattr(self.module, name)
        biases = getattr(self.module, f"{name}_bias") if self.module.has_bias else [None] * len(weights)
        for weight, bias in zip(weights, biases, strict=True):
            yield weight.T.contiguous() if self.module.is_transposed else weight, bias

    def multiply(self, *operands: Tensor) -> Tensor:
        return self._sum(lambda name, expert, rows: self._blocks[name][expert](rows), *operands)

    def multiply_plainly(self, *operands: Tensor) -> Tensor:
        weights = {name: list(self._weights_of(name)) for name in self.names}

        def product(name: str, expert: int, rows: Tensor) -> Tensor:
            weight, bias = weights[name][expert]
            rows = rounded_rows(rows, self.form) if ARE_ROWS_ROUNDED.get() else rows
            return linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))

        return self._sum(product, *operands)

    def _sum(
        self,
        product: Callable[[str, int, Tensor], Tensor],
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Return [T, D] the sum of the chosen experts' outputs.

        product: multiplies rows by a weight's name and expert; hidden_states: [T, D]; top_k_index,
        top_k_weights: [T, experts of a token].
        """
        module = self.module
        up, down = self.names
        num_tokens, num_chosen = top_k_index.shape
        chosen = top_k_index.flatten()
        outputs = hidden_states.new_zeros(len(chosen), hidden_states.shape[-1])
        for expert in sorted(set(chosen.tolist())):
            places = (chosen == expert).nonzero().squeeze(-1)
            inner = product(up, expert, hidden_states[places // num_chosen])
            gated = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            outputs[places] = product(down, expert, gated)
        if module.has_post_expert_norm:
            outputs = module.post_expert_norm(outputs)
        weighted = outputs.view(num_tokens, num_chosen, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def represented(self, weight: Tensor) -> Tensor:
        if not self.module.is_transposed:
            return super().represented(weight)
        return super().represented(weight.transpose(1, 2)).transpose(1, 2)


class ProductsBackend(TransformersBackend):
    """transformers' code with compiled products."""

    def __init__(self, model: Any, weights: str = "auto", may_round_rows: bool = True) -> None:
        """weights, may_round_rows: see `weights.forms_of`."""
        super().__init__(model)
        self.kv_dtype = torch.float32
        _untie(model)
        head = model.get_output_embeddings()
        self._layers = [
            _layer(module, _form_of(weight, weights, may_round_rows, is_vocabulary=module is head))
            for module, weight in _multiplied(model)
        ]
        self._layer_of = {id(weight): layer for layer in self._layers for weight in layer.weights}
        """Layers by the identity of the model's parameters, until `prepare`."""
        forms_used = {layer.form for layer in self._layers}
        self.rounds_rows = any(map(rounds_rows, forms_used))
        self.remark = remark_on(forms_used)
        self._widen()

    def _widen(self) -> None:
        """Let the model compute in float32: convert all weights that no product has."""
        head = self._model.get_output_embeddings()
        in_blocks = {id(weight) for layer in self._layers if layer.module is not head for weight in layer.weights}
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is None or id(weight) in in_blocks or not weight.is_floating_point():
                    continue
                if not isinstance(weight, BlockTensor):
                    weight.data = weight.data.float()
                elif not isinstance(module, nn.Embedding) and module is not head:
                    module._parameters[name] = nn.Parameter(weight.dequantize(), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.float()

    def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor) -> Tensor:
        with multiplying():
            return super().logits(token_ids_T, positions_T, metadata, wanted_N)

    def weight_used(self, weight: Tensor) -> Tensor:
        """Return the float32 numbers that represent a weight of the model."""
        layer = self._layer_of.get(id(weight))
        return weight.float() if layer is None else layer.represented(weight)

    def rows_used(self, rows: Tensor, weight: Tensor) -> Tensor:
        layer = self._layer_of.get(id(weight))
        return rows if layer is None else rounded_rows(rows, layer.form)

    def prepare(self) -> int:
        """Drop the weights that products have."""
        self._layer_of.clear()
        for layer in self._layers:
            layer.drop()
        return sum(layer.nbytes for layer in self._layers)

    def withdraw(self) -> None:
        for layer in self._layers:
            layer.module.__dict__.pop("forward", None)


@contextmanager
def multiplying() -> Iterator[None]:
    """Let compiled products compute layers."""
    token = _ARE_USED.set(True)
    try:
        yield
    finally:
        _ARE_USED.reset(token)


def multiplies(model: Any) -> bool:
    """Whether products can replace the linear layers of a model, whose weights are plain.

    Subclasses of linear layers stay torch's.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return all(type(one.weight.data) in (Tensor, BlockTensor) and not has_scheme(one) for one in linears) and all(
        weight.element_size() > 1 for weight in model.parameters() if weight.is_floating_point()
    )


def lay_out(model: Any) -> int:
    """Let products compute the layers that have weights, and drop these; return their bytes."""
    num_bytes = 0
    for module, weight in _multiplied(model):
        if weight.numel():
            layer = _layer(module, forms_of(weight.dtype).layers)
            layer.drop()
            num_bytes += layer.nbytes
    return num_bytes


def multiplied_weights(model: Any) -> list[Tensor]:
    """Return the parameters of a model that products multiply; others are float32 when served."""
    return [getattr(module, name) for module, _ in _multiplied(model) for name in _names_of(module)]


def _multiplied(model: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield the linear layers and experts of a model, and their (first) weights."""
    read = {module.kv_b_proj for module in model.modules() if has_latents(module)}
    for name, module in model.named_modules():
        if _are_experts(module):
            yield module, module.down_proj
        elif type(module) is nn.Linear and module not in read and name.rpartition(".")[2] not in _READ:
            yield module, module.weight


def _are_experts(module: Any) -> bool:
    """Whether a module has the interface of transformers' experts."""
    return hasattr(module, "has_post_expert_norm") and not module._is_expert_parallel


def _names_of(module: Any) -> tuple[str, ...]:
    """Return the names of the weights of a linear layer, or of experts."""
    if not _are_experts(module):
        return ("weight",)
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def _layer(module: Any, form: Form) -> _Layer:
    return BlockExperts(module, form) if _are_experts(module) else BlockLinear(module, form)


def _form_of(weight: Tensor, weights: str, may_round_rows: bool, is_vocabulary: bool) -> Form:
    """Return the form of a layer's weight; see `weights.forms_of`."""
    if isinstance(weight, BlockTensor):
        return form_of_type(weight.type)
    forms = forms_of(weight.dtype, weights, may_round_rows)
    if is_vocabulary:
        return forms.vocabulary
    if weight.dim() == 2 and _FEW_COLUMNS * len(weight) < weight.shape[1]:
        return forms_of(weight.dtype, may_round_rows=False).layers
    return forms.layers


def _untie(model: Any) -> None:
    """Give the output head a separate parameter with the numbers of the embeddings."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach(), requires_grad=False)
