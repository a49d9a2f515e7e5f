"""Weights of GGUF files in blocks of few bits, as the CPU's products store them.

Each type maps exactly: a product multiplies the numbers that the file's blocks stand for, and
nothing is quantised a second time. Layouts of blocks: ggml's `block_q4_0` and the like;
`gguf.quants` is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from engine.errors import LoadError

Form = Literal[
    "float32", "bfloat16", "float16", "pairs", "int8", "int4", "q4_0", "q4_1", "q8_0", "q5_1", "q4_k", "q5_k", "q6_k"
]
"""Forms in which the CPU's products store weights (`cpu/weights.py`)."""
_ROWS_AT_ONCE = 4096
"""Rows of a weight that a product of transformers dequantises at once."""


class StoredNumbers(NamedTuple):
    """Numbers of a weight [N, K] as a form of `weights.py` stores them."""

    numbers: Tensor
    """[N, K] numbers in float32 or 16 bits; or bytes, each a number plus an offset."""
    scales: Sequence[Tensor]
    """[N, rows, numbers] of the scales, which follow each other in a row (`stored_words.py`)."""


FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
"""Types of files without blocks."""


class BlockTensor(Tensor):
    """A weight [N, K] as a GGUF file has it. Operations on it compute with its float32 numbers."""

    raw: Tensor
    """[N, bytes of a row]"""
    type: Type

    @staticmethod
    def __new__(cls, raw: Tensor, kind: Type) -> BlockTensor:
        numbers, size = GGML_QUANT_SIZES[kind]
        shape = raw.shape[0], raw.shape[1] // size * numbers
        weight: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=raw.device)
        weight.raw = raw
        weight.type = kind
        return weight  # type: ignore[no-any-return]

    def __init__(self, raw: Tensor, kind: Type) -> None:  # noqa: ARG002
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockTensor({self.type.name}, {tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["raw"], self.type

    def dequantize(self) -> Tensor:
        """Return the float32 numbers [N, K]."""
        if self.type not in BLOCK_TYPES | FLOATS:  # a type that is never multiplied in its blocks
            return torch.from_numpy(dequantize(self.raw.numpy(), self.type))
        numbers, scales = unpacked(self)
        if not scales:
            return numbers.float()
        return _scaled(numbers, scales, BLOCK_TYPES[self.type].offset).view(self.shape)

    def rows(self, chosen: Any) -> BlockTensor:
        """Return some rows, by a slice or by indices."""
        return BlockTensor(self.raw[chosen], self.type)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Multiply, and read embeddings, without all numbers of a large weight at once."""
        if func is linear:
            return _multiplied(*args, **(kwargs or {}))
        if func is embedding and isinstance(args[1], BlockTensor):
            tokens, places = args[0].unique(return_inverse=True)
            return args[1].rows(tokens).dequantize()[places]
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return BlockTensor(args[0].raw, args[0].type)
        if func is torch.ops.aten.slice.Tensor and (len(args) < 2 or args[1] == 0):
            return args[0].rows(slice(*args[2:]))
        given = [one.dequantize() if isinstance(one, BlockTensor) else one for one in args]
        return func(*given, **(kwargs or {}))


_SHAPES_ALONE: ContextVar[bool] = ContextVar("shapes_alone", default=False)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Let products of weights in blocks have zeros instead of numbers."""
    token = _SHAPES_ALONE.set(True)
    try:
        yield
    finally:
        _SHAPES_ALONE.reset(token)


def has_blocks(model: nn.Module) -> bool:
    """Whether a model has weights as a GGUF file has them."""
    return any(isinstance(weight, BlockTensor) for weight in model.parameters())


def _multiplied(rows: Tensor, weight: BlockTensor, bias: Tensor | None = None) -> Tensor:
    if _SHAPES_ALONE.get():
        return rows.new_zeros(*rows.shape[:-1], len(weight))
    parts = range(0, len(weight), _ROWS_AT_ONCE)
    products = [rows @ weight.rows(slice(first, first + _ROWS_AT_ONCE)).dequantize().T for first in parts]
    product = torch.cat(products, -1)
    return product if bias is None else product + bias


class BlockType(NamedTuple):
    """A type of blocks that products multiply as it is."""

    form: Form
    unpack: Callable[[Tensor], StoredNumbers]
    """Unpacks blocks [N, blocks of a row, bytes]."""
    offset: int
    """Number that is added to stored numbers; 0 if they have minima."""


def unpacked(weight: BlockTensor) -> StoredNumbers:
    """Return a weight's stored numbers; raise LoadError for scales that are not finite."""
    if weight.type in FLOATS:
        return StoredNumbers(weight.raw.view(FLOATS[weight.type]), [])
    size = GGML_QUANT_SIZES[weight.type][1]
    numbers, scales = BLOCK_TYPES[weight.type].unpack(weight.raw.view(len(weight), -1, size))
    factors = [one.view(torch.float16) for one in scales if one.dtype == torch.int16]
    if not all(bool(one.isfinite().all()) for one in factors):
        raise LoadError(f"a tensor of type {weight.type.name} has scales that are not finite; choose another file")
    return StoredNumbers(numbers.flatten(1), scales)


def _scaled(numbers: Tensor, scales: Sequence[Tensor], offset: int) -> Tensor:
    """Return [N, groups, numbers] what stored numbers [N, K] stand for."""
    factors = scales[0].view(torch.float16).float()
    if len(scales) > 1:  # records: each factor has a byte for every group of the record
        bytes_of = scales[1:] if offset == 0 else [scales[1].view(torch.int8)]
        factors = torch.stack([(factors[..., place, None] * one).flatten(1) for place, one in enumerate(bytes_of)], -1)
    grouped = numbers.view(len(numbers), factors.shape[1], -1)
    if offset == 0:
        return grouped * factors[..., :1] + factors[..., 1:]
    return (grouped - float(offset)) * factors


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return [N, blocks, count] the bits of float16 numbers."""
    return blocks[..., start : start + 2 * count].contiguous().view(torch.int16)


def _nibbles(blocks: Tensor, start: int, size: int) -> Tensor:
    """Return [N, blocks, 2 * size] first the lower and then the upper halves of bytes."""
    both = blocks[..., start : start + size]
    return torch.cat([both & 15, both >> 4], -1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return [N, blocks, 32] bits of a word of 32, from the lowest on."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (blocks[..., start : start + 4].unsqueeze(-1) >> shifts & 1).flatten(-2)


def _q4_0(blocks: Tensor) -> StoredNumbers:
    return StoredNumbers(_nibbles(blocks, 2, 16), [_halves(blocks, 0)])


def _q4_1(blocks: Tensor) -> StoredNumbers:
    return StoredNumbers(_nibbles(blocks, 4, 16), [_halves(blocks, 0, 2)])


def _q5_0(blocks: Tensor) -> StoredNumbers:
    numbers = _nibbles(blocks, 6, 16) | _fifth_bits(blocks, 2) << 4
    return StoredNumbers(numbers + (128 - 16), [_halves(blocks, 0)])


def _q5_1(blocks: Tensor) -> StoredNumbers:
    return StoredNumbers(_nibbles(blocks, 8, 16) | _fifth_bits(blocks, 4) << 4, [_halves(blocks, 0, 2)])


def _q8_0(blocks: Tensor) -> StoredNumbers:
    return StoredNumbers(blocks[..., 2:] ^ 128, [_halves(blocks, 0)])


def _six_bits(blocks: Tensor) -> list[Tensor]:
    """Return a record's scales: factors' bits, and bytes of scales and minima."""
    packed = blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    factors = _halves(blocks, 0, 2).clone()
    factors[..., 1] ^= -0x8000  # minima are subtracted
    return [factors, scales, minima]


def _q4_k(blocks: Tensor) -> StoredNumbers:
    numbers = torch.cat([_nibbles(blocks, start, 32) for start in range(16, 144, 32)], -1)
    return StoredNumbers(numbers, _six_bits(blocks))


def _q5_k(blocks: Tensor) -> StoredNumbers:
    low = torch.cat([_nibbles(blocks, start, 32) for start in range(48, 176, 32)], -1)
    high = torch.cat([blocks[..., 16:48] >> bit & 1 for bit in range(8)], -1)
    return StoredNumbers(low | high << 4, _six_bits(blocks))


def _q6_k(blocks: Tensor) -> StoredNumbers:
    low = torch.cat([_nibbles(blocks, start, 64) for start in (0, 64)], -1)
    halves = (blocks[..., 128:160], blocks[..., 160:192])
    high = torch.cat([half >> place & 3 for half in halves for place in range(0, 8, 2)], -1)
    return StoredNumbers((low | high << 4) + (128 - 32), [_halves(blocks, 208), blocks[..., 192:208]])


BLOCK_TYPES: dict[Type, BlockType] = {
    Type.Q4_0: BlockType("q4_0", _q4_0, 8),
    Type.Q4_1: BlockType("q4_1", _q4_1, 0),
    Type.Q5_0: BlockType("q8_0", _q5_0, 128),
    Type.Q5_1: BlockType("q5_1", _q5_1, 0),
    Type.Q8_0: BlockType("q8_0", _q8_0, 128),
    Type.Q4_K: BlockType("q4_k", _q4_k, 0),
    Type.Q5_K: BlockType("q5_k", _q5_k, 0),
    Type.Q6_K: BlockType("q6_k", _q6_k, 128),
}
"""Types by their names in ggml."""
