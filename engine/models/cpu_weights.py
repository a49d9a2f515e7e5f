"""Weights of the CPU's decoder: products in blocks, in the checkpoint's type, in pairs of bfloat16, or in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import from_dtype
from torch import Tensor
from torch.nn.functional import pad

from engine.models.numba_dot import HAS_PAIRS
from engine.models.numba_product import WIDENS_HALVES
from engine.models.numba_rounding import best_scales
from engine.models.numba_vectors import BLOCK, GROUP, LINE
from engine.models.numba_words import OFFSETS

Array = npt.NDArray[Any]
Form = Literal["float32", "bfloat16", "float16", "pairs", "int8", "int4"]
"""Stored form of weights: numbers that are widened, pairs of bfloat16, or 8 or 4 bits. Rows are rounded for the last
three (`numba_rounding.py`)."""

_NO_SCALES = np.zeros((1, 1, 0, BLOCK), dtype=np.float32)
_WORDS = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.int16,
    "pairs": np.uint32,
    "int8": np.int8,
    "int4": np.uint8,
}
_NUMBERS_OF_WORD = {"pairs": 2, "int4": 2}
"""Numbers of a column that a word has, if it has several."""
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "pairs": torch.bfloat16}
"""Types of the numbers of forms in 16 bits."""
_LARGEST = {"int8": 127, "int4": 7}


class Forms(NamedTuple):
    """Forms of a model's weights."""

    layers: Form
    vocabulary: Form
    """Form of embeddings and output head: 4 bits lose too much there, so they have 8."""


def forms_of(dtype: torch.dtype, weights: str = "auto", may_round_rows: bool = True) -> Forms:
    """Return the forms of weights of a type; weights: of `ModelConfig`; may_round_rows: for weights in 16 bits."""
    if weights == "int8":
        return _alike("int8")
    if weights == "int4":
        return Forms("int4", "int8")
    if dtype == torch.bfloat16:
        return _alike("pairs" if may_round_rows and HAS_PAIRS else "bfloat16")
    return _alike("float16" if dtype == torch.float16 and WIDENS_HALVES else "float32")


def _alike(form: Form) -> Forms:
    return Forms(form, form)


def word_of(form: Form) -> Any:
    """Return the numpy type of the words of a form: what the functions of a pass are compiled for."""
    return _WORDS[form]


def rounds_rows(form: Form) -> bool:
    """Whether rows are rounded before they are multiplied with weights of a form."""
    return form in ("pairs", "int8", "int4")


REMARKS: dict[Form, str] = {
    "pairs": "rows of products are rounded to bfloat16",
    "int8": "8-bit weights, rows of products are rounded to 8 bits",
    "int4": "4-bit weights (8 bits in embeddings and output head), rows of products are rounded to 8 bits",
}
"""Remarks of a start on forms that round rows."""


class Product:
    """The weights of one product in all L layers, in blocks [L, N / B, words, B] of one piece of memory."""

    def __init__(self, num_layers: int, num_columns: int, depth: int, form: Form) -> None:
        self.form = form
        num_blocks = -(-num_columns // BLOCK)
        if rounds_rows(form):
            depth = -(-depth // GROUP) * GROUP
        self._depth = depth
        size = num_layers, num_blocks, depth // _NUMBERS_OF_WORD.get(form, 1), BLOCK
        self.weights = aligned(size, np.dtype(word_of(form)))
        self.bias = np.zeros((num_layers, num_blocks * BLOCK), dtype=np.float32)
        self.scales = _NO_SCALES.repeat(num_layers, 0)
        if form in _LARGEST:
            self.scales = aligned((num_layers, num_blocks, depth // GROUP, BLOCK), np.dtype(np.float32))

    @staticmethod
    def of(weights: Sequence[Tensor], bias: Tensor | None, form: Form) -> Product:
        """Lay out weights [N, K], one for each layer."""
        num_columns, depth = weights[0].shape
        product = Product(len(weights), num_columns, depth, form)
        for layer, weight in enumerate(weights):
            product.put(layer, weight, bias)
        return product

    def put(self, layer: int, weight: Tensor, bias: Tensor | None, first: int = 0, step: int = 1) -> None:
        """Store the weight [N, K] of a layer in every `step`-th block from `first` on."""
        num_columns, depth = weight.shape
        num_blocks = -(-num_columns // BLOCK)
        padded = torch.zeros((num_blocks * BLOCK, self._depth), dtype=weight.dtype)
        padded[:num_columns, :depth] = weight.detach()
        places = slice(first, first + step * num_blocks, step)
        blocks = padded.view(num_blocks, BLOCK, -1)
        if self.form in _LARGEST:
            numbers, scales = quantised(blocks, self.form)
            self.scales[layer, places] = scales.transpose(1, 2).numpy()
            self.weights[layer, places] = _packed(numbers, self.form).view(self.weights.dtype)
        else:
            self.weights[layer, places] = _bits(blocks, self.form)
        if bias is not None:
            of_blocks = self.bias[layer].reshape(-1, BLOCK)[places]
            flat = np.zeros(of_blocks.size, dtype=np.float32)
            flat[:num_columns] = bias.float().numpy()
            self.bias[layer].reshape(-1, BLOCK)[places] = flat.reshape(of_blocks.shape)

    @property
    def nbytes(self) -> int:
        """Return the memory of the weights."""
        return int(self.weights.nbytes + self.scales.nbytes + self.bias.nbytes)


def _bits(blocks: Tensor, form: Form) -> Array:
    """Return [blocks, words, B] the words of blocks [blocks, B, K] in float32 or in 16 bits."""
    if form == "float32":
        numbers: Array = blocks.float().transpose(1, 2).numpy()
        return numbers
    bits: Array = blocks.to(_HALVES[form]).view(torch.int16).numpy()
    words: Array = bits.view(word_of(form)).transpose(0, 2, 1)
    return words


def _packed(numbers: Tensor, form: Form) -> Array:
    """Return [blocks, words, B] the words of blocks [blocks, B, K] of integers, as `numba_words.py` says."""
    num_blocks, width, depth = numbers.shape
    offset = OFFSETS[word_type(form)]
    stored = (numbers + offset).to(torch.uint8).view(num_blocks, width, -1, 4).transpose(1, 2).numpy()
    if form == "int4":
        pairs = stored.reshape(num_blocks, depth // 8, 2, width, 4)
        stored = pairs[:, :, 0] | pairs[:, :, 1] << 4
    packed: Array = np.ascontiguousarray(stored).reshape(num_blocks, -1, width)
    return packed


def word_type(form: Form) -> Any:
    """Return Numba's type of the words of a form."""
    return from_dtype(np.dtype(word_of(form)))


def quantised(weights: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return ([..., K] integers of 8 or 4 bits, [..., K / `GROUP`] their scales) for weights [..., K].

    In 4 bits the scale of a group is that of the least squared error among some (`best_scales`).
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
    """Return the float32 numbers that a weight [N, K] represents in a form."""
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
    found: Array = piece[start : start + size].view(numbers).reshape(shape)
    return found
