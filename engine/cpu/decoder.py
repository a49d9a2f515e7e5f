"""A decoder like Llama on a CPU: its weights in blocks, and a pass as one call (`model_pass.py`).

Weights are stored in the checkpoint's type and widened when they are read, or in a form for which rows are rounded
(`weights.py`). A model is accepted by its modules; every start compares the decoder with transformers
(`probe.py`), and a model that it does not reproduce runs through transformers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.attention.attention import AttentionMetadata
from engine.attention.tensors import NORMED, KVTensors
from engine.cpu import weights
from engine.cpu.compiled import model_pass as nd
from engine.cpu.compiled import pass_table as nt
from engine.cpu.compiled import product_phase as nm
from engine.cpu.compiled.shared_work import ROW, TEAM
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.weights import (
    Array,
    Forms,
    Product,
    form_of_type,
    forms_of,
    remark_on,
    represented,
    rounded_rows,
    rounds_rows,
    types_of,
)
from engine.models.backend import Backend
from engine.models.gguf.blocks import BlockTensor, Form
from engine.models.kinds import window_of

_ROWS_TOGETHER, _PROMPT_ROWS_TOGETHER = 16, 64
"""Most rows of a sequence that attend together: they share tiles of keys, and are one core's work."""
_PARTS_PER_CORE = 4
"""Least number of parts of attention per core; with fewer parts, fewer rows attend together."""
_MANY_ROWS = 16
"""Rows from which on a pass uses the second of `cores`; smaller passes do if their K/V is as large as the weights."""
_TUNING_S = 0.15
"""Least duration of the measurements for a number of rows; a turn of a large model takes longer."""
_RUNS_OF_TURN = 3
_CORE_COST = 0.1
NO_STATES = np.zeros((0, 0), dtype=np.float32)


class CpuDecoder(Backend):
    """Runs the passes of one model."""

    reads_pages = True
    target_ids: Array | None = None
    """[tokens with logits] the target's id of each token of a head that has fewer tokens; None if ids are equal."""
    embedded_term: Array | None = None
    """[V, r] the embeddings of the product `TERM` of a head; None if it has none."""
    has_plain_logits = True
    """Whether the model's logits are those of its output head, without further operations."""

    def __init__(
        self,
        model: Any,
        forms: Forms | None = None,
        kv_dtype: torch.dtype = torch.float32,
        shared: Mapping[int, Product] | None = None,
    ) -> None:
        """Lay out the weights of a model that `kinds.is_decoder` accepts; the model keeps its own until `prepare`.

        forms: of the weights; None is the type of the model's. shared: products of another decoder by their field, in
        place of the model's. A first layer with a `hidden_norm` is that of an EAGLE
        head (`head_decoder.py`): it reads hidden states in addition to embeddings.
        """
        self.kv_dtype = kv_dtype
        self.forms = forms = forms or forms_of(model.lm_head.weight.dtype)
        self._model = model
        config, layers = model.config, model.model.layers
        attention = layers[0].self_attn
        self._num_layers, self._num_entries = len(layers), int(hasattr(layers[0], "hidden_norm"))
        """Layers, and those of them that read states: the first one or none."""
        self._hidden_dim, self._inner_dim = int(config.hidden_size), -(-int(config.intermediate_size) // BLOCK) * BLOCK
        self._num_kv_heads, self._head_dim = int(config.num_key_value_heads), int(attention.head_dim)
        self._query_dim = int(config.num_attention_heads) * self._head_dim
        self._joined_dim = self._query_dim + 2 * self._num_kv_heads * self._head_dim
        """Columns of q, k and v together."""
        self.vocab_size = int(model.lm_head.weight.shape[0])
        """V, the number of tokens with logits."""
        self._table = np.zeros((nt.NUM_FIELDS, nt.COLUMNS), dtype=np.int64)
        self._arrays: dict[int, Array] = {}
        """Arrays of the table, by field."""
        self._put_weights(model, shared or {})
        used = frozenset[Form]().union(*(product.forms for product in self.products.values()))
        self.rounds_rows, self.remark = any(map(rounds_rows, used)), remark_on(used)
        self._put_constants(model)
        self._put_functions()
        self._function = nd.work().address
        self._capacity = 0
        self._storage: KVTensors | None = None
        self._sizes = 0, 0
        self.cores = 1, 1
        """Cores of passes of little work, and of more: see `_cores_for`."""

    def _put_functions(self) -> None:
        """Point the table to the functions for the types of the embeddings and of K/V."""
        kv = np.uint16 if self.kv_dtype == torch.bfloat16 else np.float32
        (embedding,) = self.products[nt.EMBEDDING].layers[0]
        self._put(nt.FUNCTIONS, nd.functions_for(types_of(embedding.form), kv))

    def _put_weights(self, model: Any, shared: Mapping[int, Product]) -> None:
        layers, entries = model.model.layers[self._num_entries :], model.model.layers[: self._num_entries]
        embedding, output = model.model.embed_tokens, model.lm_head
        self._vocabulary = embedding.weight, output.weight
        self.products = {
            nt.ENTRY: self._product([_inputs(layer) for layer in entries]),
            nt.QKV: self._product([_inputs(layer) for layer in layers]),
            nt.O_PROJ: self._product([[layer.self_attn.o_proj] for layer in model.model.layers]),
            nt.GATE_UP: self._product([[one.mlp.gate_proj, one.mlp.up_proj] for one in model.model.layers], True),
            nt.DOWN: self._product([[layer.mlp.down_proj] for layer in model.model.layers]),
            **shared,
        }
        """Products by their field; those of the output head and the embeddings may be the same."""
        if nt.LM_HEAD not in shared:
            self.products[nt.LM_HEAD] = self._product([[output]])
        if nt.EMBEDDING not in shared and output.weight is embedding.weight:
            self.products[nt.EMBEDDING] = self.products[nt.LM_HEAD]
        elif nt.EMBEDDING not in shared:
            self.products[nt.EMBEDDING] = self._product([[embedding]])
        for field, product in self.products.items():
            self._put_product(field, product)
        own = {id(product): product.nbytes for product in self.products.values() if product not in shared.values()}
        self.weight_bytes = sum(own.values())
        """Memory of the weights that only this decoder has."""

    def _product(self, layers: Sequence[Sequence[Any]], alternate: bool = False) -> Product:
        """Lay out the weights of modules, which follow each other in the product of a layer."""
        weights = [[module.weight for module in modules] for modules in layers]
        biases = [[getattr(module, "bias", None) for module in modules] for modules in layers]
        return Product.of(weights, biases, self._form_of, alternate)

    def _form_of(self, weight: Tensor) -> Form:
        """Return the form in which a weight of the model is stored."""
        if isinstance(weight, BlockTensor):
            return form_of_type(weight.type)
        is_of_vocabulary = any(weight.data_ptr() == one.data_ptr() for one in self._vocabulary)
        return self.forms.vocabulary if is_of_vocabulary else self.forms.layers

    def _put_product(self, field: int, product: Product) -> None:
        """Point the table to the pieces of a product, and to its biases."""
        pieces = np.zeros((len(product.layers), max(map(len, product.layers), default=0), nt.PIECE), dtype=np.int64)
        for layer, layer_pieces in enumerate(product.layers):
            for number, piece in enumerate(layer_pieces):
                pieces[layer, number] = [
                    nm.multiplication(*types_of(piece.form)).address,
                    piece.words.ctypes.data,
                    piece.scales.ctypes.data,
                    product.bias[layer].ctypes.data,
                    *piece.words.shape[:2],
                    *piece.scales.shape[1:],
                    piece.first,
                    piece.step,
                ]
        self._put(field, pieces, product.bias)

    def _put_constants(self, model: Any) -> None:
        config, body = model.config, model.model
        norms = [norm for layer in body.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        norms += [body.norm, *([body.layers[0].hidden_norm] if self._num_entries else ())]
        of_heads = [
            _floats(torch.stack([attention.q_norm.weight, attention.k_norm.weight]))
            for attention in (layer.self_attn for layer in body.layers)
            if hasattr(getattr(attention, "q_norm", None), "weight")
        ]
        rotary = body.rotary_emb
        constants = [config.rms_norm_eps, body.layers[0].self_attn.scaling, rotary.attention_scaling, 1]
        self._put(nt.NORMS, np.stack([_floats(norm.weight) for norm in norms]))
        self._put(nt.HEAD_NORMS, np.stack(of_heads) if of_heads else np.zeros((0, 2, self._head_dim), np.float32))
        self._put(nt.FREQUENCIES, _floats(rotary.inv_freq))
        self._put(nt.CONSTANTS, np.array(constants, dtype=np.float32))
        self._put(nt.WINDOWS, np.array([window_of(layer.self_attn) or 0 for layer in body.layers], dtype=np.int64))
        self._put(nt.WORDS_OF, np.full(self._num_layers, nt.WORDS, dtype=np.int64))
        num_phases = self._num_layers * nd.LAYER_PHASES + nd.OTHER_PHASES
        self._put(nt.COUNTERS, np.zeros((num_phases, ROW), dtype=np.int64))

    def _put(self, field: int, *arrays: Array) -> None:
        """Point the table's fields from this one on to arrays, and hold references to them."""
        for place, array in enumerate(arrays, field):
            assert array.flags.c_contiguous
            self._arrays[place] = array
            self._table[place] = [array.ctypes.data, *array.shape, *[0] * (nt.COLUMNS - 1 - array.ndim)]

    def prepare(self, works: Callable[[], bool]) -> int:  # noqa: ARG002
        """Drop the weights of linear layers and embeddings, and copy the other parameters out of the mapped file."""
        for module in self._model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        for weight in self._model.parameters():
            weight.data = weight.data.clone()
        return self.weight_bytes

    def weight_used(self, weight: Tensor) -> Tensor:
        """Return the float32 numbers that represent a weight of the model."""
        return represented(weight, self._form_of(weight)) if weight.dim() == 2 else weight.float()

    def rows_used(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rounded_rows(rows, self._form_of(weight))

    def tune(self, run: Callable[[int], object], most_cores: int) -> None:
        """Measure on how many cores passes of few and of more rows are fastest, and use that many.

        run: runs a pass of this many rows.
        """
        counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < most_cores] + [most_cores]
        # Cores that a system without helpers cannot provide are not counted.
        counts = counts[: TEAM.grow(most_cores - 1) + 1]
        if len(counts) < 2:
            return
        fastest = []
        for num_rows in (1, _MANY_ROWS):
            taken_s: dict[int, list[float]] = {count: [] for count in counts}
            started = time.perf_counter()
            while not taken_s[counts[-1]] or time.perf_counter() - started < _TUNING_S:
                for count, runs_s in taken_s.items():
                    self.cores = count, count
                    run(num_rows)  # this wakes sleeping helpers
                    for _ in range(_RUNS_OF_TURN):
                        began = time.perf_counter()
                        run(num_rows)
                        runs_s.append(time.perf_counter() - began)
            # The first quartile: another process may have occupied a core for most of this short time.
            usual_s = {count: statistics.quantiles(runs_s)[0] for count, runs_s in taken_s.items()}
            # More cores are taken from other processes, so they must be worth it.
            fastest.append(min(counts, key=lambda count: usual_s[count] * (1 + _CORE_COST * (count > 1))))
        self.cores = fastest[0], fastest[1]

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = rows = max(64, 1 << (num_rows - 1).bit_length())
        widths = {
            nt.HIDDEN: self._hidden_dim,
            nt.NORMED: self._hidden_dim,
            nt.JOINED: -(-self._joined_dim // BLOCK) * BLOCK,
            nt.ATTENDED: self._query_dim,
            nt.SUMMAND: self._arrays[nt.O_PROJ + 1].shape[1],
            nt.INNER: 2 * self._inner_dim,
            nt.GATED: self._inner_dim,
            nt.CHOSEN: self._hidden_dim,
            nt.ENTERING: 2 * self._hidden_dim * self._num_entries,
        }
        for field, width in widths.items():
            self._put(field, weights.aligned((rows, width), np.dtype(np.float32)))
        self._put(nt.NORMED_ALL, self._arrays[nt.NORMED])
        self._put(nt.ROTATION, weights.aligned((2, rows, self._head_dim // 2), np.dtype(np.float32)))

    def logits(self, token_ids_T: Tensor, positions_T: Tensor, metadata: AttentionMetadata, wanted_N: Tensor) -> Tensor:
        return self.passed(token_ids_T, positions_T, metadata, wanted_N)[1]

    def passed(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        metadata: AttentionMetadata,
        wanted_N: Tensor,
        state_TX: Tensor | None = None,
        are_target_states: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run a flat pass; return the wanted tokens' ([N, D] states if the model reads states, [N, V] logits).

        state_TX, are_target_states: see `states_of`.
        """
        layout = metadata.layout
        assert layout is not None, "the layout of a pass"
        assert isinstance(metadata.slots_T, Tensor)
        num_rows, found = len(token_ids_T), self.room_for_logits(len(wanted_N))
        states = self.states_of(state_TX, len(wanted_N), are_target_states)
        ready = self.ready(metadata.storage, metadata.page_size, num_rows, int(layout.num_keys.sum()))
        tokens, slots, wanted = np.ascontiguousarray(token_ids_T.numpy()), metadata.slots_T.numpy(), wanted_N.numpy()
        parts = parts_of(layout.starts, layout.counts, self._rows_together(num_rows))
        nd.run(*ready, 0, tokens, slots, wanted, parts, layout.seen, positions_T.numpy(), states, found)
        logits_NV, state_ND = torch.from_numpy(found), torch.from_numpy(states[2])
        return state_ND, logits_NV[:, : self.vocab_size].contiguous()

    def states_of(
        self, state_TX: Tensor | None, num_leaving: int, are_target_states: bool
    ) -> tuple[Array, Array, Array]:
        """Return the states of a pass as three arrays, of width 0 if the pass reads no states.

        The arrays are the target's states [T, X] that rows read, the states [T, D] that rows read (or memory for the
        projection of the target's states), and memory for the states that leave the pass.
        state_TX: states that rows read; are_target_states: whether `state_TX` has the target's states. The pass
        projects them and may overwrite them.
        """
        assert state_TX is None
        assert not are_target_states
        return NO_STATES, NO_STATES, np.empty((num_leaving, 0), dtype=np.float32)

    def ready(self, storage: KVTensors, page_size: int, num_rows: int, num_keys: int) -> tuple[Array, int, Array]:
        """Reserve buffers for passes of at most this many rows on this K/V; return (words of the helpers, function,
        table).

        num_keys: keys of the sequences of a pass.
        """
        self._reserve(num_rows)
        if self._storage is not storage:
            assert storage.keys.dtype == self.kv_dtype, "K/V of the type that the function was compiled for"
            self._storage = storage
            self._put(nt.KEYS, _array_of(storage.keys))
            self._put(nt.VALUES, _array_of(storage.values))
            self._put(nt.TAPS, np.array([self._place_of(tap) for tap in range(self._num_layers + 2)]))
            nothing = np.zeros((0, 0), dtype=self._arrays[nt.KEYS].dtype)
            self._put(nt.TAPPED, nothing if storage.hidden is None else _array_of(storage.hidden))
        sizes = page_size, self._cores_for(num_rows, num_keys)
        if self._sizes != sizes:
            self._sizes = sizes
            self._put(nt.SIZES, np.array(sizes, dtype=np.int64))
        return TEAM.shared, self._function, self._table

    def _cores_for(self, num_rows: int, num_keys: int) -> int:
        """Return the cores of a pass: a single row has as much work as many if its text's K/V is large."""
        keys = self._arrays[nt.KEYS]
        kv_bytes = 2 * num_keys * keys.nbytes // keys.shape[1]
        return self.cores[num_rows >= _MANY_ROWS or kv_bytes >= self.weight_bytes]

    def _rows_together(self, num_rows: int) -> int:
        """Return how many rows of a sequence attend together in a pass; results do not depend on it."""
        num_parts = num_rows // _PROMPT_ROWS_TOGETHER * self._num_kv_heads
        is_enough = num_parts >= _PARTS_PER_CORE * self.cores[1]
        return _PROMPT_ROWS_TOGETHER if is_enough else _ROWS_TOGETHER

    def room_for_logits(self, num_rows: int) -> Array:
        """Return [N, at least V] the buffer to which `run` writes logits."""
        return np.empty((num_rows, self._arrays[nt.LM_HEAD + 1].shape[1]), dtype=np.float32)

    def _place_of(self, number: int) -> int:
        """Return the place, among the stored taps, of the state that enters layer `number`; -1 if it is not stored.

        The number after the last layer is the state that leaves it, and the next one that state after the final norm.
        """
        assert self._storage is not None
        tap = NORMED if number == self._num_layers + 1 else number
        return self._storage.taps.index(tap) if tap in self._storage.taps else -1


def parts_of(starts: Array, counts: Array, most_rows: int = _ROWS_TOGETHER) -> Array:
    """Return [P, 3] (sequence, first row, end) of at most this many rows that attend together."""
    found = []
    for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        for first in range(start, start + count, most_rows):
            found.append((number, first, min(first + most_rows, start + count)))
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _array_of(numbers: Tensor) -> Array:
    array: Array = (numbers.view(torch.uint16) if numbers.dtype == torch.bfloat16 else numbers).numpy()
    return array


def _floats(numbers: Tensor) -> Array:
    array: Array = numbers.detach().float().contiguous().numpy()
    return array


def _inputs(layer: Any) -> list[Any]:
    """Return the modules of q, k and v of a layer."""
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]
