"""Linear layers on a CPU in oneDNN's layout, for models without our decoder.

A plain product of several rows converts the weight's layout in every call. With a weight that is
converted once at start, up to eight rows cost little more than one, which is what verification
needs. Only the converted weights remain in memory.

oneDNN compiles a kernel of 0.5 MB and more for every number of rows on a weight's shape, in a
millisecond, and caches a thousand. So its products use few numbers of rows: rows are padded to the
next one, and a server's memory does not grow with the loads it has served. They are compiled at
start, up to a time limit for each shape. It suffices for small models; otherwise a product takes so
long that a millisecond for the compiler is little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from engine.attention.latent import has_latents
from engine.kernels.checks import synthetic_rows
from engine.models.quantising import has_scheme

# Numbers of rows of compiled products: nearly all if a row is a large share of the work, then an
# eighth apart. More rows than the last are computed in several turns.
SIZES = (
    *(1, 2, 4, 5, 6, 8),
    *range(9, 25),
    *range(28, 65, 4),
    *range(72, 129, 8),
    *range(144, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
)
SIZE_OF = [next(size for size in (0, *SIZES) if size >= num_rows) for num_rows in range(SIZES[-1] + 1)]
# Time limit for compiling the kernels of one shape at start; kernels of more rows are compiled at
# their first use.
_COMPILE_BUDGET_S = 0.05
# Largest allowed difference from the plain product, as a share of the largest number in it.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class PackedLinear:
    """`rows @ weight.T + bias`, with the weight in oneDNN's layout once it is packed."""

    __slots__ = ("_compiles", "_modules", "_packed", "_plain", "bias", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, modules: Sequence[nn.Linear] = ()) -> None:
        """modules: layers whose weights are `weight`, and that nothing else runs."""
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._plain: Tensor | None = weight
        self._packed: Tensor | None = None
        self._modules = tuple(modules)
        # Torch leaves even the plain product to oneDNN here.
        self._compiles = weight.device.type == "cpu" and weight.dtype != torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self._packed is not None:
            return _in_sizes(_onednn_linear, rows, self._packed, self.bias)
        if self._compiles:
            return _in_sizes(linear, rows, self.weight, self.bias)
        return linear(rows, self.weight, self.bias)

    @property
    def weight(self) -> Tensor:
        """Return the plain weight; AssertionError after packing."""
        assert self._plain is not None, "the weight is packed"
        return self._plain

    @property
    def packed_bytes(self) -> int:
        return 0 if self._packed is None else self._packed.nbytes

    def pack(self) -> None:
        """Replace the plain weight by the packed one."""
        self._packed = _reorder(self.weight)
        self._plain = None
        for module in self._modules:
            module.weight.data = module.weight.data.new_empty(0)

    def unpack(self) -> None:
        if self._packed is not None:
            self._plain, self._packed = self._packed.to_dense(), None
            for module in self._modules:
                module.weight.data = self._plain

    def compile(self) -> None:
        """Run the product with each size of `SIZES`, so that oneDNN compiles at start.

        Stops after `_COMPILE_BUDGET_S`. Does nothing if oneDNN does not run the product.
        """
        if self._packed is None and not self._compiles:
            return
        dtype = self.weight.dtype if self._packed is None else self._packed.dtype
        began = time.perf_counter()
        for size in SIZES:
            self(torch.zeros(size, self.shape[1], dtype=dtype))
            if time.perf_counter() - began > _COMPILE_BUDGET_S:
                return


def is_plain(module: Any) -> bool:
    """Return whether a module is linear with a whole plain weight."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor and not has_scheme(module)


def take_over(model: Any) -> Iterator[PackedLinear]:
    """Replace the plain linear layers of a model; others stay."""
    shared = {id(model.get_input_embeddings().weight)}
    # Attention over latents reads these weights.
    read = {module.kv_b_proj for module in model.modules() if has_latents(module)}
    for module in model.modules():
        if is_plain(module) and module not in read:
            emptied = () if id(module.weight) in shared else (module,)
            product = PackedLinear(module.weight.detach(), module.bias, emptied)
            module.forward = product
            yield product


@torch.inference_mode()
def pack(products: Iterable[PackedLinear], works: Callable[[], bool] = lambda: True) -> int:
    """Pack a model's products if that changes no numbers; return the memory of packed weights.

    works: whether the packed model runs; if not, all weights become plain again.
    """
    products = list(products)
    by_shape: dict[tuple[int, ...], list[PackedLinear]] = {}
    for product in products:
        by_shape.setdefault(product.shape, []).append(product)
    for alike in by_shape.values():
        if _can_pack(alike[0].weight):
            for product in alike:
                product.pack()
    if not works():
        for product in products:
            product.unpack()
    for product in {(product.shape, product.bias is None): product for product in products}.values():
        product.compile()
    return sum(product.packed_bytes for product in products)


def _can_pack(weight: Tensor) -> bool:
    """Whether a weight's packed product agrees with the plain one."""
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    rows = synthetic_rows(weight.device, weight.dtype, 9, weight.shape[1])
    try:
        packed = _onednn_linear(rows, _reorder(weight))
    except (AttributeError, RuntimeError):  # an operator that this torch or this processor lacks
        return False
    plain = linear(rows, weight)
    return bool((plain - packed).abs().max() <= _TOLERANCE[weight.dtype] * plain.abs().max())


def _reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
    return packed


def _onednn_linear(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


def _in_sizes(product: Callable[..., Tensor], rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of [..., in], run with numbers of rows of `SIZES` only."""
    flat = rows.reshape(-1, rows.shape[-1])
    parts = [_in_size(product, part, weight, bias) for part in torch.split(flat, SIZES[-1])]
    num_columns = parts[0].shape[1]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*rows.shape[:-1], num_columns)


def _in_size(product: Callable[..., Tensor], rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = SIZE_OF[len(rows)] - len(rows)
    if not missing:
        return product(rows, weight, bias)
    return product(pad(rows, (0, 0, 0, missing)), weight, bias).narrow(0, 0, len(rows))
