"""Weights of the CPU's decoder: products in blocks, in several formats.

A product's weights are pieces with one layout each, so that a GGUF file may have several types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numba import from_dtype
from torch import Tensor
from torch.nn.functional import pad

from engine.cpu.compiled import pass_table, product_phase
from engine.cpu.compiled.block_products import WIDENS_HALVES
from engine.cpu.compiled.dot_products import HAS_PAIRS
from engine.cpu.compiled.row_rounding import best_scales
from engine.cpu.compiled.simd_vectors import BLOCK, GROUP, LINE
from engine.cpu.compiled.stored_words import offset_of
from engine.cpu.compiled.tile_products import HAS_TILES
from engine.cpu.tiles import Tiles, tiles_of_process
from engine.models.gguf.blocks import BLOCK_TYPES, FLOATS, BlockTensor, Form, StoredNumbers, unpacked

Array = npt.NDArray[Any]

_WORDS = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.int16,
    "pairs": np.uint32,
    **dict.fromkeys(("int8", "q8_0", "q5_1", "q5_k", "q6_k"), np.int8),
    **dict.fromkeys(("int4", "q4_0", "q4_1", "q4_k"), np.uint8),
}
_SCALES = {
    **dict.fromkeys(("q4_0", "q8_0"), np.int16),
    **dict.fromkeys(("q4_1", "q5_1"), np.uint16),
    **dict.fromkeys(("q4_k", "q5_k"), np.uint8),
    "q6_k": np.int8,
}
"""Types of scales; others are float32, and floating numbers have none."""
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "pairs": torch.bfloat16}
"""Types of the numbers of forms in 16 bits."""
_LARGEST = {"int8": 127, "int4": 7}


class Forms(NamedTuple):
    """Forms of a model's weights."""

    layers: Form
    vocabulary: Form
    """Form of embeddings and output head: 4 bits lose too much there, so they have 8."""


def forms_of(dtype: torch.dtype, weights: str = "auto", may_round_rows: bool = True) -> Forms:
    """Return the forms of a model's weights.

    weights: see `ModelConfig`; may_round_rows: in 16 bits.
    """
    if weights == "int8":
        return _alike("int8")
    if weights == "int4":
        return Forms("int4", "int8")
    if dtype == torch.bfloat16 and may_round_rows and HAS_PAIRS:
        return _alike("pairs")
    if dtype == torch.bfloat16:
        return _alike("bfloat16")
    return _alike("float16" if dtype == torch.float16 and WIDENS_HALVES else "float32")


def _alike(form: Form) -> Forms:
    return Forms(form, form)


def form_of_type(kind: GGMLQuantizationType) -> Form:
    """Return the form of weights of a type of GGUF files."""
    return forms_of(FLOATS[kind]).layers if kind in FLOATS else BLOCK_TYPES[kind].form


def bytes_of_number(kind: GGMLQuantizationType) -> float:
    """Return the memory of a number of a type of GGUF files, its share of the scales included."""
    numbers, size = GGML_QUANT_SIZES[kind]
    weight = BlockTensor(torch.zeros(BLOCK, size * max(1, GROUP // numbers), dtype=torch.uint8), kind)
    words, scales = _laid_out([weight], form_of_type(kind))
    return float(words.nbytes + scales.nbytes) / weight.numel()


def types_of(form: Form) -> tuple[Any, Any]:
    """Return the numpy types of a form's words and scales."""
    return _WORDS[form], _SCALES.get(form, np.float32)


def tiles() -> Tiles:
    """Return whether this process multiplies on tiles, and why it does not."""
    return tiles_of_process(HAS_TILES)


def is_on_tiles(form: Form) -> bool:
    """Whether rows are multiplied with weights of a form on tiles."""
    return form == "pairs" and tiles().are_used


def function_of(form: Form) -> Any:
    """Return the C function that multiplies rows with weights of a form."""
    return product_phase.piece_function(*types_of(form), is_on_tiles(form))


def rounds_rows(form: Form) -> bool:
    """Whether rows are rounded before they are multiplied with weights of a form."""
    return form not in ("float32", "bfloat16", "float16")


def remark_on(forms: Collection[Form]) -> str:
    """Return a start's remark on weights of these forms; "" if no rows are rounded."""
    if any(form.startswith("q") for form in forms):
        return "weights as in the file, rows of products are rounded to 8 bits"
    if "int4" in forms:
        return "4-bit weights (8 bits in the output head), rows of products are rounded to 8 bits"
    if "int8" in forms:
        return "8-bit weights, rows of products are rounded to 8 bits"
    if "pairs" in forms:
        return f"rows of products are rounded to bfloat16 and multiplied {tiles().remark}"
    return ""


class WeightPiece(NamedTuple):
    """Blocks of a layer's weight that have one form."""

    form: Form
    words: Array
    """[blocks, words, B]"""
    scales: Array
    """[blocks, rows, width], see `stored_words.py`"""
    first: int
    """The block of the result that the piece's first block has."""
    step: int
    """Blocks of the result from one block of the piece to the next."""


class Product:
    """Weights of one product in all L layers: pieces of blocks, and biases [L, N]."""

    def __init__(self, layers: Sequence[Sequence[WeightPiece]], biases: Array) -> None:
        self.layers = layers
        self.bias = biases

    @staticmethod
    def of(
        layers: Sequence[Sequence[Tensor]],
        biases: Sequence[Sequence[Tensor | None]],
        form_of: Callable[[Tensor], Form],
        alternate: bool = False,
    ) -> Product:
        """Lay out the weights [N, K] of every layer, one after the other in columns.

        biases: of these weights; form_of: returns the form of a weight; alternate: blocks of two
        weights alternate in the result.
        """
        lay_out = _alternating if alternate else _following
        pieces = [lay_out(parts, form_of) for parts in layers]
        block_counts = [sum(len(piece.words) for piece in layer_pieces) for layer_pieces in pieces]
        flat = np.zeros((len(layers), max(block_counts, default=0) * BLOCK), dtype=np.float32)
        for layer, (parts, layer_biases) in enumerate(zip(layers, biases, strict=True)):
            start = 0
            for number, (part, bias) in enumerate(zip(parts, layer_biases, strict=True)):
                if bias is not None and alternate:
                    padded = pad(bias.detach().float(), (0, -len(bias) % BLOCK)).view(-1, BLOCK)
                    flat[layer].reshape(-1, 2, BLOCK)[:, number] = padded.numpy()
                elif bias is not None:
                    flat[layer, start : start + len(bias)] = bias.detach().float().numpy()
                start += len(part)
        return Product(pieces, flat)

    def table(self) -> Array:
        """Return what the functions of products read of the pieces [L, pieces, `PIECE`]."""
        most_pieces = max(map(len, self.layers), default=0)
        pieces = np.zeros((len(self.layers), most_pieces, pass_table.PIECE), dtype=np.int64)
        for layer, layer_pieces in enumerate(self.layers):
            for number, piece in enumerate(layer_pieces):
                pieces[layer, number] = [
                    function_of(piece.form).address,
                    piece.words.ctypes.data,
                    piece.scales.ctypes.data,
                    self.bias[layer].ctypes.data,
                    *piece.words.shape[:2],
                    *piece.scales.shape[1:],
                    piece.first,
                    piece.step,
                ]
        return pieces

    @property
    def forms(self) -> frozenset[Form]:
        """Return the forms of all pieces."""
        return frozenset(piece.form for pieces in self.layers for piece in pieces)

    @property
    def nbytes(self) -> int:
        """Return the memory of the weights."""
        pieces = [piece for pieces in self.layers for piece in pieces]
        return int(sum(piece.words.nbytes + piece.scales.nbytes for piece in pieces) + self.bias.nbytes)


def _following(parts: Sequence[Tensor], form_of: Callable[[Tensor], Form]) -> list[WeightPiece]:
    """Return the pieces of consecutive weights; neighbours of one form are joined."""
    forms = [form_of(part) for part in parts]
    if len(set(forms)) > 1 and any(len(part) % BLOCK for part in parts[:-1]):
        # A piece begins with a block.
        parts = [represented(part, form) for part, form in zip(parts, forms, strict=True)]
        forms = ["float32"] * len(parts)
    pieces: list[WeightPiece] = []
    for form, group in groupby(zip(forms, parts, strict=True), key=itemgetter(0)):
        first = sum(len(piece.words) for piece in pieces)
        pieces.append(WeightPiece(form, *_laid_out([part for _, part in group], form), first, 1))
    return pieces


def _alternating(parts: Sequence[Tensor], form_of: Callable[[Tensor], Form]) -> list[WeightPiece]:
    """Return the pieces of two weights whose blocks alternate."""
    form, other_form = (form_of(part) for part in parts)
    first, second = _laid_out([parts[0]], form), _laid_out([parts[1]], other_form)
    if form != other_form:
        return [WeightPiece(form, *first, 0, 2), WeightPiece(other_form, *second, 1, 2)]
    words, scales = (_alternated(*arrays) for arrays in zip(first, second, strict=True))
    return [WeightPiece(form, words, scales, 0, 1)]


def _alternated(first: Array, second: Array) -> Array:
    alternated = aligned((2 * len(first), *first.shape[1:]), first.dtype)
    alternated[0::2] = first
    alternated[1::2] = second
    return alternated


def _laid_out(parts: Sequence[Tensor], form: Form) -> tuple[Array, Array]:
    """Return the words and scales of weights [N, K] of one form that follow each other."""
    stored = [_stored(part.detach(), form) for part in parts]
    numbers = _whole_blocks(torch.cat([one.numbers for one in stored]))
    words = _packed(numbers, form) if numbers.dtype == torch.uint8 else _bits(numbers, form)
    word_type, scale_type = types_of(form)
    laid_out = aligned(words.shape, np.dtype(word_type))
    laid_out[:] = words.view(word_type)
    columns = [torch.cat(tensors) for tensors in zip(*(one.scales for one in stored), strict=True)]
    if not columns:
        return laid_out, np.zeros((len(words), 0, BLOCK), dtype=scale_type)
    rows = [_whole_blocks(one).permute(0, 2, 3, 1).flatten(2).contiguous().numpy() for one in columns]
    joined = np.concatenate([one.view(np.uint8) for one in rows], -1).view(scale_type)
    scales = aligned(joined.shape, joined.dtype)
    scales[:] = joined
    return laid_out, scales


def _whole_blocks(columns: Tensor) -> Tensor:
    """Return [blocks, B, ...] columns [N, ...], filled up with zeros."""
    padding = columns.new_zeros((-len(columns) % BLOCK, *columns.shape[1:]))
    return torch.cat([columns, padding]).view(-1, BLOCK, *columns.shape[1:])


def _stored(weight: Tensor, form: Form) -> StoredNumbers:
    """Return the numbers of a weight [N, K] in the form's representation."""
    if isinstance(weight, BlockTensor):
        return unpacked(weight)
    if not rounds_rows(form):
        return StoredNumbers(weight, [])
    padded = pad(weight, (0, -weight.shape[1] % GROUP))
    if form not in _LARGEST:
        return StoredNumbers(padded, [])
    numbers, scales = quantised(padded, form)
    offset = offset_of(*(from_dtype(np.dtype(one)) for one in types_of(form)))
    return StoredNumbers((numbers + offset).to(torch.uint8), [scales.unsqueeze(-1)])


def _bits(blocks: Tensor, form: Form) -> Array:
    """Return [blocks, words, B] the words of blocks [blocks, B, K] in float32 or in 16 bits."""
    if form == "float32":
        numbers: Array = blocks.float().transpose(1, 2).numpy()
        return numbers
    bits: Array = blocks.to(_HALVES[form]).view(torch.int16).numpy()
    words: Array = bits.view(types_of(form)[0]).transpose(0, 2, 1)
    return words


def _packed(blocks: Tensor, form: Form) -> Array:
    """Return [blocks, words, B] words of blocks [blocks, B, K] of stored bytes."""
    num_blocks, width, depth = blocks.shape
    stored = blocks.view(num_blocks, width, -1, 4).transpose(1, 2).numpy()
    if types_of(form)[0] is np.uint8:
        pairs = stored.reshape(num_blocks, depth // 8, 2, width, 4)
        stored = pairs[:, :, 0] | pairs[:, :, 1] << 4
    packed: Array = np.ascontiguousarray(stored).reshape(num_blocks, -1, width)
    return packed


def quantised(weights: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return ([..., K] integers of 8 or 4 bits, scales) for weights [..., K].

    A scale is for `GROUP` numbers; in 4 bits it is the best of twenty (`best_scales`).
    """
    groups = weights.float().contiguous().view(*weights.shape[:-1], -1, GROUP)
    if form == "int4":
        scales = torch.from_numpy(best_scales(groups.view(-1, GROUP).numpy())).view(groups.shape[:-1])
    else:
        scales = groups.abs().amax(-1) / _LARGEST[form]
    tiny = torch.finfo(torch.float32).tiny
    divisors = torch.where(scales.abs() < tiny, tiny, scales)
    numbers = (groups / divisors.unsqueeze(-1)).round().clamp(-_LARGEST[form] - (form == "int4"), _LARGEST[form])
    return numbers.flatten(-2).to(torch.int16), scales


def represented(weight: Tensor, form: Form) -> Tensor:
    """Return the float32 numbers that a weight [..., K] represents in a form."""
    if isinstance(weight, BlockTensor):
        return weight.dequantize()
    if form in _HALVES:
        return weight.to(_HALVES[form]).float()
    if form == "float32":
        return weight.float()
    depth = weight.shape[-1]
    numbers, scales = quantised(pad(weight, (0, -depth % GROUP)), form)
    return (numbers.float() * scales.repeat_interleave(GROUP, -1))[..., :depth]


def rounded_rows(rows: Tensor, form: Form) -> Tensor:
    """Return the float32 numbers of rows [..., K] that are multiplied with weights of a form."""
    if form == "pairs":
        return rows.bfloat16().float()
    if not rounds_rows(form):
        return rows
    depth = rows.shape[-1]
    padded = pad(rows, (0, -depth % GROUP))
    groups = padded.view(*rows.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    shares = torch.where(most > 2.0**-100, 127 / most, 0.0)
    rounded = (groups * shares).round() * (most / 127)
    return rounded.flatten(-2)[..., :depth]


def aligned(shape: tuple[int, ...], numbers: np.dtype[Any]) -> Array:
    """Return memory that begins at a cache line, with a spare line at its end."""
    size = int(np.prod(shape)) * numbers.itemsize
    piece = np.zeros(size + 2 * LINE, dtype=np.uint8)
    start = -piece.ctypes.data % LINE
    memory: Array = piece[start : start + size].view(numbers).reshape(shape)
    return memory
