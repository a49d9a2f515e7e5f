"""A decoder like Llama on a CPU: its weights in blocks, and a pass as one call (`model_pass.py`).

Weights are stored in the checkpoint's type and widened when they are read, or in a form for
which rows are rounded (`weights.py`). A model is accepted by its modules. Every start
compares the decoder with transformers (`probe.py`), and a model that the decoder does not
reproduce runs through transformers.
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
from engine.cpu.compiled import model_pass, pass_table
from engine.cpu.compiled.shared_work import PHASE_SIZE, TEAM
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.weights import Array, Forms, Product, forms_of, represented, types_of
from engine.models.backend import Backend
from engine.models.gguf.blocks import BlockTensor, Form
from engine.models.kinds import window_of

_ROWS_TOGETHER = 16
_PROMPT_ROWS_TOGETHER = 64
"""Most rows of a sequence that share tiles of keys, on one core."""
_PARTS_PER_CORE = 4
"""Least parts of attention per core; with fewer, fewer rows attend together."""
_MANY_ROWS = 16
"""Rows from which on a pass has much work, or fewer with K/V as large as weights."""
_TUNING_S = 0.15
"""Least duration of the measurements for a number of rows."""
_RUNS_OF_TURN = 3
_CORE_COST = 0.1
NO_STATES = np.zeros((0, 0), dtype=np.float32)


class CpuDecoder(Backend):
    """Runs the passes of one model."""

    reads_pages = True
    target_ids: Array | None = None
    """[tokens with logits] Target's ids of a head's fewer tokens; None if equal."""
    embedded_term: Array | None = None
    """[V, r] Embeddings of a head's product `TERM`, or None."""
    has_plain_logits = True
    """Whether logits are the output head's, without further operations."""

    def __init__(
        self,
        model: Any,
        forms: Forms | None = None,
        kv_dtype: torch.dtype = torch.float32,
        shared: Mapping[int, Product] | None = None,
    ) -> None:
        """Lay out the weights of a model that `kinds.is_decoder` accepts, until `prepare`.

        forms: forms of the weights; None keeps the model's type. shared: products of another
        decoder, by field, that replace the model's products. The first layer of an EAGLE head
        (`head_decoder.py`) has a `hidden_norm`: it reads hidden states in addition to embeddings.
        """
        self.kv_dtype = kv_dtype
        self.forms = forms or forms_of(model.lm_head.weight.dtype)
        self._model = model
        config = model.config
        layers = model.model.layers
        attention = layers[0].self_attn
        self._num_layers = len(layers)
        self._num_entries = int(hasattr(layers[0], "hidden_norm"))
        """1 for an EAGLE head, whose first layer reads states, else 0."""
        self._hidden_dim = int(config.hidden_size)
        self._inner_dim = _whole_blocks(int(config.intermediate_size))
        self._num_kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(attention.head_dim)
        self._query_dim = int(config.num_attention_heads) * self._head_dim
        self._joined_dim = self._query_dim + 2 * self._num_kv_heads * self._head_dim
        self.vocab_size = int(model.lm_head.weight.shape[0])
        self._table = np.zeros((pass_table.NUM_FIELDS, pass_table.COLUMNS), dtype=np.int64)
        self._arrays: dict[int, Array] = {}
        self._put_weights(model, shared or {})
        forms_used = {form for product in self.products.values() for form in product.forms}
        self.rounds_rows = any(map(weights.rounds_rows, forms_used))
        self.remark = weights.remark_on(forms_used)
        self._put_constants(model)
        self._put_functions()
        self._function = model_pass.work().address
        self._capacity = 0
        self._storage: KVTensors | None = None
        self._sizes = 0, 0, 0, 0
        self.cores = 1, 1
        """Cores for passes of little and of much work (`_cores_for`)."""

    def _put_functions(self) -> None:
        """Point the table to the functions for the types of the embeddings and of K/V."""
        kv_type = np.uint16 if self.kv_dtype == torch.bfloat16 else np.float32
        (embedding,) = self.products[pass_table.EMBEDDING].layers[0]
        self._put(pass_table.FUNCTIONS, model_pass.functions_for(types_of(embedding.form), kv_type))

    def _put_weights(self, model: Any, shared: Mapping[int, Product]) -> None:
        layers = model.model.layers
        entries = layers[: self._num_entries]
        embedding, output = model.model.embed_tokens, model.lm_head
        self._vocabulary = embedding.weight, output.weight
        self.products = {
            pass_table.ENTRY: self._product([_inputs(layer) for layer in entries]),
            pass_table.QKV: self._product([_inputs(layer) for layer in layers[self._num_entries :]]),
            pass_table.O_PROJ: self._product([[layer.self_attn.o_proj] for layer in layers]),
            pass_table.GATE_UP: self._product([[layer.mlp.gate_proj, layer.mlp.up_proj] for layer in layers], True),
            pass_table.DOWN: self._product([[layer.mlp.down_proj] for layer in layers]),
            **shared,
        }
        """Products by field; output head and embeddings may share one."""
        if pass_table.LM_HEAD not in shared:
            self.products[pass_table.LM_HEAD] = self._product([[output]])
        if pass_table.EMBEDDING not in shared and output.weight is embedding.weight:
            self.products[pass_table.EMBEDDING] = self.products[pass_table.LM_HEAD]
        elif pass_table.EMBEDDING not in shared:
            self.products[pass_table.EMBEDDING] = self._product([[embedding]])
        for field, product in self.products.items():
            self._put_product(field, product)
        unshared = {product for product in self.products.values() if product not in shared.values()}
        self.weight_bytes = sum(product.nbytes for product in unshared)
        """Memory of the weights that only this decoder has."""

    def _product(self, layers: Sequence[Sequence[Any]], alternate: bool = False) -> Product:
        """Lay out the weights of modules that follow each other in the product of a layer."""
        layer_weights = [[module.weight for module in modules] for modules in layers]
        biases = [[getattr(module, "bias", None) for module in modules] for modules in layers]
        return Product.of(layer_weights, biases, self._form_of, alternate)

    def _form_of(self, weight: Tensor) -> Form:
        """Return the form in which a weight of the model is stored."""
        if isinstance(weight, BlockTensor):
            return weights.form_of_type(weight.type)
        if any(weight.data_ptr() == one.data_ptr() for one in self._vocabulary):
            return self.forms.vocabulary
        return self.forms.layers

    def _put_product(self, field: int, product: Product) -> None:
        """Point the table to the pieces of a product, and to its biases."""
        self._put(field, product.table(), product.bias)

    def _put_constants(self, model: Any) -> None:
        config = model.config
        body = model.model
        norms = [norm for layer in body.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        norms.append(body.norm)
        if self._num_entries:
            norms.append(body.layers[0].hidden_norm)
        attentions = [layer.self_attn for layer in body.layers]
        head_norms = [
            _floats(torch.stack([attention.q_norm.weight, attention.k_norm.weight]))
            for attention in attentions
            if hasattr(getattr(attention, "q_norm", None), "weight")
        ]
        no_head_norms = np.zeros((0, 2, self._head_dim), np.float32)
        windows = [window_of(attention) or 0 for attention in attentions]
        rotary = body.rotary_emb
        constants = [config.rms_norm_eps, body.layers[0].self_attn.scaling, rotary.attention_scaling, 1]
        self._put(pass_table.NORMS, np.stack([_floats(norm.weight) for norm in norms]))
        self._put(pass_table.HEAD_NORMS, np.stack(head_norms) if head_norms else no_head_norms)
        self._put(pass_table.FREQUENCIES, _floats(rotary.inv_freq))
        self._put(pass_table.CONSTANTS, np.array(constants, dtype=np.float32))
        self._put(pass_table.WINDOWS, np.array(windows, dtype=np.int64))
        self._put(pass_table.VISIBLE_FIELDS, np.full(self._num_layers, pass_table.VISIBLE_BITS, dtype=np.int64))
        num_phases = self._num_layers * model_pass.LAYER_PHASES + model_pass.OTHER_PHASES
        self._put(pass_table.COUNTERS, np.zeros((num_phases, PHASE_SIZE), dtype=np.int64))

    def _put(self, field: int, *arrays: Array) -> None:
        """Point the table's fields from `field` on to arrays, which are held."""
        for place, array in enumerate(arrays, field):
            assert array.flags.c_contiguous
            self._arrays[place] = array
            self._table[place] = 0
            self._table[place, : 1 + array.ndim] = [array.ctypes.data, *array.shape]

    def prepare(self) -> int:
        """Drop weights of linear layers and embeddings; copy others out of the file."""
        for module in self._model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        for weight in self._model.parameters():
            weight.data = weight.data.clone()
        return self.weight_bytes

    def weight_used(self, weight: Tensor) -> Tensor:
        """Return the float32 numbers that represent a weight of the model."""
        if weight.dim() != 2:
            return weight.float()
        return represented(weight, self._form_of(weight))

    def rows_used(self, rows: Tensor, weight: Tensor) -> Tensor:
        return weights.rounded_rows(rows, self._form_of(weight))

    def tune(self, run: Callable[[int], object], most_cores: int) -> None:
        """Measure on how many cores passes are fastest, and use them.

        run: runs a pass with a number of rows.
        """
        counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < most_cores] + [most_cores]
        # Cores that a system without helpers cannot provide are not counted.
        counts = counts[: TEAM.grow(most_cores - 1) + 1]
        if len(counts) < 2:
            return
        fastest = [self._fastest(run, num_rows, counts) for num_rows in (1, _MANY_ROWS)]
        self.cores = fastest[0], fastest[1]

    def _fastest(self, run: Callable[[int], object], num_rows: int, counts: Sequence[int]) -> int:
        """Return the fastest number of cores, among `counts`, for passes of these rows."""
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
        cost_s = {}
        for count, runs_s in taken_s.items():
            # The first quartile: another process may have occupied a core for most of this short
            # time.
            usual_s = statistics.quantiles(runs_s)[0]
            # More cores are taken from other processes, so they must be worth it.
            cost_s[count] = usual_s * (1 + _CORE_COST * (count > 1))
        return min(counts, key=cost_s.__getitem__)

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= self._capacity:
            return
        self._capacity = rows = max(64, 1 << (num_rows - 1).bit_length())
        widths = {
            pass_table.HIDDEN: self._hidden_dim,
            pass_table.NORMED: self._hidden_dim,
            pass_table.JOINED: _whole_blocks(self._joined_dim),
            pass_table.ATTENDED: self._query_dim,
            pass_table.SUMMAND: self._arrays[pass_table.O_PROJ + 1].shape[1],
            pass_table.INNER: 2 * self._inner_dim,
            pass_table.GATED: self._inner_dim,
            pass_table.CHOSEN: self._hidden_dim,
            pass_table.ENTERING: 2 * self._hidden_dim * self._num_entries,
        }
        for field, width in widths.items():
            self._put(field, weights.aligned((rows, width), np.dtype(np.float32)))
        self._put(pass_table.NORMED_ALL, self._arrays[pass_table.NORMED])
        self._put(pass_table.ROTATION, weights.aligned((2, rows, self._head_dim // 2), np.dtype(np.float32)))

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
        """Run a flat pass; return wanted tokens' ([N, D] states if read, [N, V] logits).

        state_TX, are_target_states: see `states_of`.
        """
        layout = metadata.layout
        assert layout is not None, "the layout of a pass"
        assert isinstance(metadata.slots_T, Tensor)
        num_rows = len(token_ids_T)
        logits = self.room_for_logits(len(wanted_N))
        states = self.states_of(state_TX, len(wanted_N), are_target_states)
        ready = self.ready(metadata.storage, metadata.page_size, num_rows, int(layout.num_keys.sum()))
        tokens = np.ascontiguousarray(token_ids_T.numpy())
        slots = metadata.slots_T.numpy()
        wanted = wanted_N.numpy()
        parts = parts_of(layout.starts, layout.counts, self._rows_together(num_rows))
        model_pass.run(*ready, 0, tokens, slots, wanted, parts, layout.seen, positions_T.numpy(), states, logits)
        return torch.from_numpy(states[2]), torch.from_numpy(logits)[:, : self.vocab_size].contiguous()

    def states_of(
        self, state_TX: Tensor | None, num_leaving: int, are_target_states: bool
    ) -> tuple[Array, Array, Array]:
        """Return the states of a pass as three arrays, of width 0 if the pass reads no states.

        The arrays are the target's states [T, X] that rows read, the states [T, D] that rows read
        (or memory for the projection of the target's states), and memory for the states that leave
        the pass. state_TX: states that rows read; are_target_states: whether `state_TX` has the
        target's states. The pass projects them and may overwrite them.
        """
        assert state_TX is None
        assert not are_target_states
        return NO_STATES, NO_STATES, np.empty((num_leaving, 0), dtype=np.float32)

    def ready(self, storage: KVTensors, page_size: int, num_rows: int, num_keys: int) -> tuple[Array, int, Array]:
        """Reserve buffers for passes; return (helpers' state, function, table).

        num_keys: keys of the sequences of a pass.
        """
        self._reserve(num_rows)
        if self._storage is not storage:
            assert storage.keys.dtype == self.kv_dtype, "K/V of the type that the function was compiled for"
            self._storage = storage
            self._put(pass_table.KEYS, array_of(storage.keys))
            self._put(pass_table.VALUES, array_of(storage.values))
            self._put(pass_table.TAPS, np.array([self._place_of(tap) for tap in range(self._num_layers + 2)]))
            nothing = np.zeros((0, 0), dtype=self._arrays[pass_table.KEYS].dtype)
            self._put(pass_table.TAPPED, nothing if storage.hidden is None else array_of(storage.hidden))
        num_heads = self._query_dim // self._head_dim
        sizes = page_size, self._cores_for(num_rows, num_keys), num_heads, num_heads // self._num_kv_heads
        if self._sizes != sizes:
            self._sizes = sizes
            self._put(pass_table.SIZES, np.array(sizes, dtype=np.int64))
        return TEAM.shared, self._function, self._table

    def _cores_for(self, num_rows: int, num_keys: int) -> int:
        """Return the cores of a pass; one row has much work if its K/V is large."""
        keys = self._arrays[pass_table.KEYS]
        kv_bytes = 2 * num_keys * keys.nbytes // keys.shape[1]
        has_much_work = num_rows >= _MANY_ROWS or kv_bytes >= self.weight_bytes
        return self.cores[has_much_work]

    def _rows_together(self, num_rows: int) -> int:
        """Return the most rows that attend together; results do not depend on it."""
        num_parts = num_rows // _PROMPT_ROWS_TOGETHER * self._num_kv_heads
        if num_parts >= _PARTS_PER_CORE * self.cores[1]:
            return _PROMPT_ROWS_TOGETHER
        return _ROWS_TOGETHER

    def room_for_logits(self, num_rows: int) -> Array:
        """Return [N, at least V] the buffer to which `run` writes logits."""
        return np.empty((num_rows, self._arrays[pass_table.LM_HEAD + 1].shape[1]), dtype=np.float32)

    def _place_of(self, number: int) -> int:
        """Return the place of the state that enters layer `number` among the taps, or -1.

        The number after the last layer is the state that leaves it. The next number is that state
        after the final norm.
        """
        assert self._storage is not None
        taps = self._storage.taps
        tap = NORMED if number == self._num_layers + 1 else number
        return taps.index(tap) if tap in taps else -1


def parts_of(starts: Array, counts: Array, most_rows: int = _ROWS_TOGETHER) -> Array:
    """Return [P, 3] (sequence, first row, end) of at most `most_rows` rows that attend together."""
    parts = []
    for sequence, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        end = start + count
        for first in range(start, end, most_rows):
            parts.append((sequence, first, min(first + most_rows, end)))
    return np.array(parts, dtype=np.int64).reshape(-1, 3)


def _whole_blocks(num_columns: int) -> int:
    return -(-num_columns // BLOCK) * BLOCK


def array_of(numbers: Tensor) -> Array:
    """Return a tensor as an array; bfloat16 as its 16 bits."""
    if numbers.dtype == torch.bfloat16:
        numbers = numbers.view(torch.uint16)
    array: Array = numbers.numpy()
    return array


def _floats(numbers: Tensor) -> Array:
    array: Array = numbers.detach().float().contiguous().numpy()
    return array


def _inputs(layer: Any) -> list[Any]:
    """Return the modules of q, k and v of a layer."""
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]
