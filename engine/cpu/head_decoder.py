"""EAGLE and DFlash heads on a CPU, by the decoder of language models.

The head's modules (`heads/eagle.py`, `heads/dflash.py`) are the oracle: every start compares passes
of a text with them, and a head whose numbers differ runs through its modules.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput, StepLayout
from engine.attention.tensors import KVShape
from engine.config import ModelConfig
from engine.cpu.compiled import head_phases, model_pass, pass_table
from engine.cpu.compiled.shared_work import TEAM
from engine.cpu.decoder import NO_STATES, CpuDecoder, parts_of
from engine.cpu.products import BlockWeight, lay_out
from engine.cpu.weights import Array, Product, aligned, forms_of, rounds_rows
from engine.heads.config import BlockConfig
from engine.heads.dflash import DFlash
from engine.heads.eagle import Eagle3
from engine.heads.head import Head, TargetWeights
from engine.heads.runner import HeadBackend, HeadRunner, Reading, TorchHead, mask_nodes
from engine.models.backend import Backend
from engine.models.gguf.blocks import Form
from engine.models.kinds import may_decode
from engine.models.runner import Pass

log = logging.getLogger("polydraft")

_TOLERANCE = 1e-3
"""Largest difference of a number, as a share of the largest one."""
_ROUNDED_TOLERANCES: dict[Form, float] = {"pairs": 0.03, "int4": 0.3}
_ROUNDED_TOLERANCE = 0.1
"""The same for forms that round; no answer's distribution depends on it."""


class HeadDecoder(CpuDecoder, HeadBackend):
    """Runs the passes of one head."""

    def __init__(self, head: Any, target: Backend, dtype: torch.dtype, wanted: ModelConfig | None = None) -> None:
        """Lay out a head's weights.

        target: the target's backend; it has the embeddings and the output head that the head lacks.
        dtype: of the target's weights. The head's weights are stored in bfloat16 or this type,
        whichever has all their numbers, otherwise in float32. wanted: requested formats.
        """
        self._head = head
        wanted = wanted or ModelConfig(target="")
        shared = _shared(head, target)
        stored = _narrowest(_decoded_weights(head, shared), (torch.bfloat16, dtype))
        forms = forms_of(stored, wanted.draft_weights, wanted.activations == "auto")
        super().__init__(_as_model(head), forms, shared=shared)
        config = head.config
        block = config.block
        leaves_normed = config.norm_output or block is not None
        self._put(pass_table.NORM_FLAGS, np.array([config.norm_before_residual, leaves_normed], dtype=np.int64))
        self._add_product(pass_table.PROJECTION, [head.fc])
        self._put(pass_table.TARGET_NORMS, _target_norms(head))
        if block is not None:
            self._put_block(head)
        self._put_functions()
        if head.target_ids is not None:
            self.target_ids = head.target_ids.numpy()
        self.has_plain_logits = config.logit_scale == 1 and not config.softcap

    def _add_product(self, field: int, modules: Sequence[nn.Module]) -> None:
        """Lay out the weights of modules, one for each layer, that language models do not have."""
        self.products[field] = self._product([[module] for module in modules])
        self._put_product(field, self.products[field])
        self.weight_bytes += self.products[field].nbytes

    def _put_block(self, head: Any) -> None:
        """Put the arrays and products that only heads of the DFlash types have."""
        block: BlockConfig = head.block_config
        norms = self._arrays[pass_table.NORMS]
        constants = self._arrays[pass_table.CONSTANTS]
        self._put(pass_table.NORMS, np.concatenate([norms, [head.hidden_norm.weight.numpy()]]))
        constants[3] = block.embedding_scale
        fields = pass_table.VISIBLE_BITS, pass_table.OTHER_VISIBLE_BITS
        visible_fields = [fields[block.causalities.index(is_causal)] for is_causal in block.is_causal]
        self._put(pass_table.VISIBLE_FIELDS, np.array(visible_fields, dtype=np.int64))
        if _has_term(head):
            self.embedded_term = head.markov_head.markov_w1.weight.float().numpy()
            self._add_product(pass_table.TERM, [head.markov_head.markov_w2])
        if not block.conv_taps:
            return
        convolutions = [conv for layer in head.layers for conv in (layer.attention_conv, layer.mlp_conv)]
        self._add_product(pass_table.KERNELS, [conv.kernel_projection for conv in convolutions])
        self._put(pass_table.CONVOLUTIONS, np.stack([conv.base_kernel.numpy() for conv in convolutions]))
        self._put(pass_table.BLOCK_SIZES, np.array([block.size, block.conv_group], dtype=np.int64))

    def _reserve(self, num_rows: int) -> None:
        before = self._capacity
        super()._reserve(num_rows)
        if pass_table.KERNELS in self.products and self._capacity != before:
            width = self._arrays[pass_table.KERNELS + 1].shape[1]
            self._put(pass_table.ROW_KERNELS, aligned((self._capacity, width), np.dtype(np.float32)))

    def states_of(
        self, state_TX: Tensor | None, num_leaving: int, are_target_states: bool
    ) -> tuple[Array, Array, Array]:
        leaving = np.empty((num_leaving, self._hidden_dim), dtype=np.float32)
        if state_TX is None:
            return NO_STATES, NO_STATES, leaving
        states = np.ascontiguousarray(state_TX.float().numpy())
        if not are_target_states:
            return NO_STATES, states, leaving
        return (
            states,
            np.empty((len(states), self._arrays[pass_table.PROJECTION + 1].shape[1]), dtype=np.float32),
            leaving,
        )

    def block(self, reading: Reading | None, blocks: Sequence[Pass], rows_N: Tensor) -> tuple[Tensor, Tensor]:
        """Read texts and compute whole blocks after them, in one call."""
        first_pass = blocks[0] if blocks else reading.one  # type: ignore[union-attr]
        layout = _layout_of(first_pass)
        parts = parts_of(layout.starts, layout.counts)
        num_rows = len(layout.token_ids_T)
        if not blocks:  # there are only rows that are read
            parts = parts[:0]
            num_rows = 0
        tokens = layout.token_ids_T[:num_rows]
        slots = layout.slots_T[:num_rows]
        positions = layout.positions_T[:num_rows]
        taps_TX = None
        if reading is not None:
            read = _layout_of(reading.one)
            slots = np.concatenate([slots, read.slots_T])
            positions = np.concatenate([positions, read.positions_T])
            taps_TX = reading.taps_TX
        if len(blocks) > 1:
            self._put(pass_table.OTHER_VISIBLE_BITS, _layout_of(blocks[1]).words)
        logits = self.room_for_logits(len(rows_N))
        states = self.states_of(taps_TX, len(rows_N), taps_TX is not None)
        metadata = first_pass.metadata
        ready = self.ready(metadata.storage, metadata.page_size, len(slots), int(layout.num_keys.sum()))
        model_pass.run(*ready, 0, tokens, slots, rows_N.numpy(), parts, layout.seen, positions, states, logits)
        return torch.from_numpy(states[2]), torch.from_numpy(logits)[:, : self.vocab_size]

    def term(self, memory_NR: Tensor) -> Tensor:
        """Return [N, draft vocabulary] the product with `markov_w2`, after a pass."""
        terms = self.room_for_logits(len(memory_NR))
        memory = memory_NR.contiguous().numpy()
        head_phases.run_term(TEAM.shared, head_phases.term().address, self._table, memory, terms)
        return torch.from_numpy(terms)[:, : self.vocab_size]

    def prepare(self) -> int:
        """Drop weights that the decoder has, and lay out those used outside of passes."""
        head = self._head
        for module in _decoded_modules(head):
            module.weight.data = module.weight.data.new_empty(0)
        head.shared = TargetWeights(torch.empty(0), torch.empty(0))
        num_bytes = self.weight_bytes + lay_out(head)
        if _has_term(head):
            head.markov_head.markov_w2.forward = self.term
        return num_bytes


class ProductsHead(TorchHead):
    """A head's own modules with compiled products."""

    def prepare(self) -> int:
        head = self._model
        num_bytes = lay_out(head)
        if head.lm_head is None:
            head.shared_output = output = BlockWeight(head.shared.head_VD, None, "float32")
            num_bytes += output.nbytes
        head.shared = TargetWeights(head.shared.embedding_VD, torch.empty(0))
        return num_bytes


def backend_of(
    head: Any,
    shape: KVShape,
    target: Backend,
    dtype: torch.dtype,
    block_size: int,
    wanted: ModelConfig | None = None,
) -> HeadBackend:
    """Return the backend of a head on a CPU. target, dtype, wanted: see `HeadDecoder`."""
    plain = ProductsHead(head)
    if not isinstance(head, Eagle3 | DFlash) or not may_decode(head.config.layers):
        return plain
    try:
        decoder = HeadDecoder(head, target, dtype, wanted)
        difference = _difference(head, shape, (plain, decoder), block_size)
    except Exception as error:  # weights of other shapes, a kernel that cannot be compiled
        log.warning("%s: runs without the CPU decoder: %s", head.config.name, error)
        return plain
    # A product that is shared with the target has the target's form.
    forms_used = {form for product in decoder.products.values() for form in product.forms}
    tolerance = max(map(_tolerance_of, {decoder.forms.layers, *forms_used}))
    if not difference <= tolerance:
        log.warning("%s: runs without the CPU decoder, whose numbers differ by %.2g", head.config.name, difference)
        return plain
    return decoder


def _tolerance_of(form: Form) -> float:
    if not rounds_rows(form):
        return _TOLERANCE
    return _ROUNDED_TOLERANCES.get(form, _ROUNDED_TOLERANCE)


def _difference(head: Head, shape: KVShape, backends: Sequence[HeadBackend], block_size: int) -> float:
    """Return the largest difference of states and products, as a share."""
    compute = _block if isinstance(head, DFlash) else _tree
    plain, decoded = (compute(head, shape, backend, block_size) for backend in backends)
    shares = []
    for expected, numbers in zip(plain, decoded, strict=True):
        shares.append((expected - numbers).abs().max() / expected.abs().max().clamp(min=1e-6))
    return float(torch.stack(shares).max())  # NaN if any share is NaN


def _layout_of(step_pass: Pass) -> StepLayout:
    """Return the layout of a pass that the decoder reads."""
    assert step_pass.metadata.layout is not None
    return step_pass.metadata.layout


_NUM_READ = 20
"""Rows of the text that a comparison reads."""


def _tree(head: Any, shape: KVShape, backend: HeadBackend, block_size: int) -> list[Tensor]:
    """Return the numbers of a head that drafts by depth, for a text and a tree."""
    nodes = NodeInput(_text(head)[1:4], (1, 1, 2), (), np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=np.bool_))
    runner = _runner(head, shape, backend, block_size, len(nodes.depths))
    text = _text(head)
    blocks = range(-(-(_NUM_READ + len(nodes.depths)) // block_size) + 1)
    whole = SequenceInput(text, 1, blocks, NO_NODES, slice(_NUM_READ - 2, None), 1)
    tree = SequenceInput((), 1 + _NUM_READ, blocks, nodes, slice(None), 1)
    first, second = runner.prepare([[whole], [tree]])
    read = runner.read(first, _numbers(_NUM_READ, head.fc.in_features))
    return [*read, *runner.states(second, _numbers(len(nodes.depths), head.config.hidden_size))]


def _block(head: Any, shape: KVShape, backend: HeadBackend, block_size: int) -> list[Tensor]:
    """Return a head's numbers for two blocks, of which one follows a text."""
    block: BlockConfig = head.block_config
    runner = _runner(head, shape, backend, block_size, block.size)
    blocks = range(-(-(_NUM_READ + block.size) // block_size) + 1)
    half = _NUM_READ // 2
    mask = head.config.mask_token_id
    assert mask is not None
    numbers: list[Tensor] = []
    for first in (0, half):
        read = SequenceInput(_text(head)[first : first + half], 1 + first, blocks, NO_NODES, slice(0, 0), 1)
        end = 1 + first + half
        masks = (_text(head)[1], *(mask,) * (block.size - 1))
        after = [
            SequenceInput((), end, blocks, mask_nodes(masks, is_causal), slice(None), 1)
            for is_causal in block.causalities
        ]
        reading_pass, *passes = runner.prepare([[read], *([part] for part in after)])
        reading = Reading(reading_pass, _numbers(half, head.fc.in_features))
        numbers += runner.block(reading, passes, torch.arange(block.size))
    if _has_term(head):
        numbers.append(backend.term(_numbers(3, block.markov_rank)))
    return numbers


def _runner(head: Any, shape: KVShape, backend: HeadBackend, block_size: int, num_nodes: int) -> HeadRunner:
    num_blocks = -(-(_NUM_READ + num_nodes) // block_size) + 1
    return HeadRunner(head, shape, num_blocks, block_size, head.config.vocab_size, backend)


def _text(head: Any) -> list[int]:
    return [7919 * row % head.config.vocab_size for row in range(_NUM_READ)]


def _numbers(num_rows: int, width: int) -> Tensor:
    """Return [T, X] states to compare with."""
    return (torch.arange(num_rows * width) * 0.7).sin().view(num_rows, width)


def _target_norms(head: Any) -> Array:
    """Return [parts, X / parts] norm weights of the target's states."""
    if isinstance(head, DFlash):
        return NO_STATES
    norms = [head.input_norm] if head.config.norm_before_fc else list(head.fc_norm)
    if not norms:
        return NO_STATES
    return np.stack([norm.weight.float().numpy() for norm in norms])


def _as_model(head: Any) -> Any:
    """Return a head's modules by the names that they have in a language model."""
    output = head.lm_head
    if output is None:
        output = SimpleNamespace(weight=head.shared.head_VD, bias=None)
    body = SimpleNamespace(
        layers=head.layers,
        embed_tokens=head.get_input_embeddings(),
        norm=head.norm,
        rotary_emb=head.rotary.embedding,
    )
    return SimpleNamespace(config=head.config.layers, model=body, lm_head=output)


def _shared(head: Any, target: Backend) -> dict[int, Product]:
    """Return the products of the target's decoder that a head can use as they are."""
    if not isinstance(target, CpuDecoder):
        return {}
    modules = {pass_table.EMBEDDING: head.embed_tokens, pass_table.LM_HEAD: head.lm_head}
    shared = {field: target.products[field] for field, module in modules.items() if module is None}
    if pass_table.LM_HEAD in shared and shared[pass_table.LM_HEAD].bias.any():
        del shared[pass_table.LM_HEAD]
    return shared


def _has_term(head: Any) -> bool:
    """Whether the decoder computes the product with `markov_w2`."""
    block: BlockConfig | None = head.config.block
    return block is not None and block.markov_rank > 0 and block.markov_type == "vanilla"


def _decoded_modules(head: Any) -> list[Any]:
    """Return the modules whose weights the decoder has."""
    parts = [head.layers, head.fc, *(part for part in (head.embed_tokens, head.lm_head) if part is not None)]
    if _has_term(head):
        parts.append(head.markov_head.markov_w2)
    return [module for part in parts for module in part.modules() if isinstance(module, nn.Linear | nn.Embedding)]


def _decoded_weights(head: Any, shared: Collection[int]) -> list[Tensor]:
    """Return the weights that a decoder lays out; shared: the target's products."""
    weights_by_field = {
        pass_table.EMBEDDING: (head.embed_tokens, head.shared.embedding_VD),
        pass_table.LM_HEAD: (head.lm_head, head.shared.head_VD),
    }
    laid_out = [
        weight for field, (module, weight) in weights_by_field.items() if module is None and field not in shared
    ]
    return [*laid_out, *(module.weight for module in _decoded_modules(head))]


def _narrowest(weights: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the first of these types that has all numbers, else float32."""
    for dtype in dtypes:
        if all(torch.equal(weight.to(dtype).float(), weight) for weight in weights):
            return dtype
    return torch.float32
