"""Products with a weight in the form that is fastest for the number of rows: plain, in oneDNN's layout, or in blocks.

oneDNN compiles a kernel of 0.5 MB and more for every number of rows on a weight's shape, in a millisecond, and keeps a
thousand. Products that it runs therefore take few numbers of rows: rows are filled up to the next one, so a server's
memory does not grow with the loads it has met. They are compiled at start, as far as some time for each shape goes: all
for small models; where it does not suffice, a product takes so long that a millisecond for the compiler is little.

Not for: choosing the form (`packing.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

# The numbers of rows of compiled products: nearly all where a row is a large share of the work, then an eighth apart.
# More rows than the last are taken in turns.
FEW = (1, 2, 4, 5, 6, 8)
SIZES = (
    *FEW,
    *range(9, 25),
    *range(28, 65, 4),
    *range(72, 129, 8),
    *range(144, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
)
SIZE_OF = [next(size for size in (0, *SIZES) if size >= num_rows) for num_rows in range(SIZES[-1] + 1)]
# The kernels of one shape are compiled at start for so long; those of more rows where they are met.
_COMPILE_BUDGET_S = 0.05

Array = npt.NDArray[Any]
"""Of float32 numbers, or the 16 bits of bfloat16 numbers."""


def array_of(numbers: Tensor) -> Array:
    """The array over a tensor's memory, as kernels that Numba compiles take it."""
    array: Array = (numbers.view(torch.uint16) if numbers.dtype == torch.bfloat16 else numbers).numpy()
    return array


class OneDnnForm:
    """A weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, size_of: Sequence[int] = SIZE_OF) -> None:
        """size_of: by number of rows, the number that they are padded to, up to the largest size."""
        self._packed, self._size_of = reorder(weight), size_of

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self._packed.nbytes

    def product(self, rows: Tensor, num_rows: int, bias: Tensor | None) -> Tensor:
        """`rows @ weight.T + bias`."""
        return in_sizes(onednn_linear, rows, num_rows, self._packed, bias, self._size_of)

    def to_weight(self) -> Tensor:
        """The plain weight."""
        return self._packed.to_dense()


class BlockForm:
    """A weight in the blocks of `numba_product.py`."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    @staticmethod
    def of(weights: Sequence[Tensor]) -> list[BlockForm]:
        """Weights of one shape in blocks, in one piece of memory."""
        from engine.execution import numba_product  # Numba is there where there are blocks

        return [BlockForm(blocks) for blocks in numba_product.in_blocks(weights)]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return int(self._blocks.nbytes)

    def product(self, rows: Tensor, num_rows: int, bias: Tensor | None) -> Tensor:
        """`rows @ weight.T + bias`."""
        found = torch.from_numpy(self.array_product(rows.reshape(num_rows, rows.shape[-1]).contiguous().numpy(), bias))
        return found if rows.dim() == 2 else found.view(*rows.shape[:-1], found.shape[1])

    def array_product(self, rows: Array, bias: Tensor | None) -> Array:
        """The same of arrays: rows [T, in] follow each other in memory."""
        from engine.execution import numba_product

        found: Array = numba_product.product(rows, self._blocks)
        if bias is not None:
            found += bias.detach().numpy()
        return found

    def to_weight(self) -> Tensor:
        """The plain weight."""
        from engine.execution import numba_product

        return numba_product.to_weight(self._blocks)


Form = OneDnnForm | BlockForm
"""A weight laid out anew."""


class PackedLinear:
    """`rows @ weight.T + bias`, by whichever form of the weight is faster for the number of rows."""

    __slots__ = ("_compiles", "_dtype", "_form", "_modules", "_packed_from", "_plain", "bias", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, modules: Sequence[nn.Linear] = ()) -> None:
        """modules: those whose weights are `weight`, and that nothing else runs."""
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._plain: Tensor | None = weight
        self._form: Form | None = None
        self._packed_from = 0
        self._modules = tuple(modules)
        self._dtype = weight.dtype
        # Where torch leaves even the plain product to oneDNN.
        self._compiles = weight.device.type == "cpu" and weight.dtype != torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        num_rows = rows.shape[:-1].numel()
        # Also of no rows, where there is no other form.
        if self._form is not None and (self._plain is None or num_rows >= self._packed_from):
            return self._form.product(rows, num_rows, self.bias)
        if self._compiles:
            return in_sizes(linear, rows, num_rows, self.weight, self.bias)
        return linear(rows, self.weight, self.bias)

    def of_few(self, rows_TK: Tensor, rows: Array) -> Array:
        """The product as an array, of rows that follow each other in memory; rows: the array over the same memory."""
        if isinstance(self._form, BlockForm) and len(rows) >= self._packed_from:
            return self._form.array_product(rows, self.bias)
        return array_of(self(rows_TK))

    def add_to(self, sums_TN: Tensor, rows_TM: Tensor) -> None:
        """Add the product of the rows to `sums_TN` in place: one operation, for a weight that is not packed."""
        sums_TN.addmm_(rows_TM, self.weight.t())
        if self.bias is not None:
            sums_TN += self.bias

    @property
    def weight(self) -> Tensor:
        """The plain weight; until it has been given up."""
        assert self._plain is not None, "the weight is packed"
        return self._plain

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed form."""
        return 0 if self._form is None else self._form.nbytes

    def pack(self, form: Form, packed_from: int) -> None:
        """Run by this form from so many rows on; from one row on, the plain weight is given up."""
        self._form, self._packed_from = form, packed_from
        if packed_from == 1:
            self._plain = None
            for module in self._modules:
                module.weight.data = module.weight.data.new_empty(0)

    def compile(self) -> None:
        """Run the product with each size of `SIZES`, from few rows to many, so that oneDNN compiles its kernels at
        start; stops after `_COMPILE_BUDGET_S`. Does nothing where oneDNN does not run the product."""
        if not isinstance(self._form, OneDnnForm) and not self._compiles:
            return
        began = time.perf_counter()
        for size in SIZES if self._compiles else SIZES[SIZES.index(SIZE_OF[self._packed_from]) :]:
            self(torch.zeros(size, self.shape[1], dtype=self._dtype))
            if time.perf_counter() - began > _COMPILE_BUDGET_S:
                return

    def unpack(self) -> None:
        """Run plain again: for a product of one module, whose weight is unpacked."""
        if self._plain is None and self._form is not None:
            self._plain = self._form.to_weight()
            for module in self._modules:
                module.weight.data = self._plain
        self._form = None


def is_plain(module: Any) -> bool:
    """Whether a module is a linear layer with a weight of its own numbers: not quantised, not one rank's share."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor


def take_over(model: Any) -> Iterator[PackedLinear]:
    """Make the linear layers of a transformers model products; quantised and other special ones stay as they are."""
    shared = {id(model.get_input_embeddings().weight)}
    for module in model.modules():
        if is_plain(module):
            own = () if id(module.weight) in shared else (module,)
            product = PackedLinear(module.weight.detach(), module.bias, own)
            module.forward = product
            yield product


def reorder(weight: Tensor) -> Tensor:
    """A weight in oneDNN's own layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
    return packed


def in_sizes(
    product: Callable[..., Tensor],
    rows: Tensor,
    num_rows: int,
    weight: Tensor | None,
    bias: Tensor | None,
    size_of: Sequence[int] = SIZE_OF,
) -> Tensor:
    """The product of [..., in], run with numbers of rows of `size_of` only."""
    if num_rows >= len(size_of):
        flat = rows.reshape(num_rows, -1)
        parts = [
            in_sizes(product, part, len(part), weight, bias, size_of) for part in torch.split(flat, len(size_of) - 1)
        ]
        return torch.cat(parts).view(*rows.shape[:-1], -1)
    missing = size_of[num_rows] - num_rows
    if not missing:
        return product(rows, weight, bias)
    if rows.dim() == 2:
        return product(pad(rows, (0, 0, 0, missing)), weight, bias).narrow(0, 0, num_rows)
    return in_sizes(product, rows.reshape(num_rows, -1), num_rows, weight, bias, size_of).view(*rows.shape[:-1], -1)


def onednn_linear(rows: Tensor, packed: Tensor | None, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result
