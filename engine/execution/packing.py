"""Linear layers with weights packed for oneDNN, where that is faster than the plain product.

A plain product of several rows lays the weight out anew in every call. Packed once at start, a weight costs up to
eight rows little more than one, which is what verification needs. From how many rows on weights of a shape are run
packed is measured at start; where that is always, they are kept in this form only. CPU only. The operators are torch's
private ones: without them, and where packed numbers are not the plain ones, everything stays plain.

oneDNN compiles a kernel of 0.5 MB and more for every number of rows on a weight's shape, in a millisecond, and keeps a
thousand. Products that it runs therefore take few numbers of rows: rows are filled up to the next one, so a server's
memory does not grow with the loads it has met. They are compiled at start, as far as some time for each shape goes: all
for small models; where it does not suffice, a product takes so long that a millisecond for the compiler is little.

Its kernels for five or six rows read a weight faster than those for one or two (20 GB/s against 13 to 15 on a core that
reads 27), so few rows are filled up further where a measurement at start shows a gain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from engine.config import Prepack
from engine.kept import NOWHERE, keep, kept_file, read_kept

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_POINT_BUDGET_S = 0.015
_MIN_REPEATS, _MAX_REPEATS = 3, 25
# The numbers of rows of compiled products: nearly all where a row is a large share of the work, then an eighth apart.
# More rows than the last are taken in turns.
_FEW = (1, 2, 4, 5, 6, 8)
_SIZES = (
    *_FEW,
    *range(9, 25),
    *range(28, 65, 4),
    *range(72, 129, 8),
    *range(144, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
)
_SIZE_OF = [next(size for size in (0, *_SIZES) if size >= num_rows) for num_rows in range(_SIZES[-1] + 1)]
# The kernels of one shape are compiled at start for so long; those of more rows where they are met.
_COMPILE_BUDGET_S = 0.05
# Weights of one shape that a measurement goes through: enough not to stay in the processor's cache.
_MEASURED_BYTES = 128 << 20
# A weight kept in one form only is worth so much of a product's time.
_ONE_FORM = 1.05
# And so much more filling few rows up further than to the next number.
_FURTHER = 1.08
_FORMAT = 1
"""Of what is kept of a measurement."""
# Largest allowed difference from the plain product, as a share of the largest number in it.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class PackedLinear:
    """`rows @ weight.T + bias`, by whichever form of the weight is faster for the number of rows."""

    __slots__ = ("_compiles", "_dtype", "_modules", "_packed", "_packed_from", "_plain", "_size_of", "bias", "shape")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, modules: Sequence[nn.Linear] = ()) -> None:
        """modules: those whose weights are `weight`, and that nothing else runs."""
        self.shape = tuple(weight.shape)
        self.bias = bias
        self._plain: Tensor | None = weight
        self._packed: Tensor | None = None
        self._packed_from = 0
        self._size_of: Sequence[int] = _SIZE_OF
        self._modules = tuple(modules)
        self._dtype = weight.dtype
        # Where torch leaves even the plain product to oneDNN.
        self._compiles = weight.device.type == "cpu" and weight.dtype != torch.float32

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        num_rows = rows.shape[:-1].numel()
        if self._plain is None or (self._packed is not None and num_rows >= self._packed_from):
            return _in_sizes(_packed_linear, rows, num_rows, self._packed, self.bias, self._size_of)
        if self._compiles:
            return _in_sizes(linear, rows, num_rows, self._plain, self.bias)
        return linear(rows, self._plain, self.bias)

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
        return 0 if self._packed is None else self._packed.nbytes

    def pack(self, packed_from: int, size_of: Sequence[int] = _SIZE_OF) -> None:
        """Run packed from so many rows on; from one row on, the plain form is given up.

        size_of: by number of rows, the number that they are padded to, up to the largest size.
        """
        self._packed, self._packed_from, self._size_of = reorder(self.weight), packed_from, size_of
        if packed_from == 1:
            self._plain = None
            for module in self._modules:
                module.weight.data = module.weight.data.new_empty(0)

    def compile(self) -> None:
        """Run the product with each size of `_SIZES`, from few rows to many, so that oneDNN compiles its kernels at
        start; stops after `_COMPILE_BUDGET_S`. Does nothing where oneDNN does not run the product."""
        if self._packed is None and not self._compiles:
            return
        began = time.perf_counter()
        for size in _SIZES if self._compiles else _SIZES[_SIZES.index(_SIZE_OF[self._packed_from]) :]:
            self(torch.zeros(size, self.shape[1], dtype=self._dtype))
            if time.perf_counter() - began > _COMPILE_BUDGET_S:
                return

    def unpack(self) -> None:
        """Run plain again: for a product of one module, whose weight is unpacked."""
        if self._plain is None and self._packed is not None:
            self._plain = self._packed.to_dense()
            for module in self._modules:
                module.weight.data = self._plain
        self._packed = None


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


class Choices:
    """How weights of a shape are run fastest, as measured in this start or an earlier one."""

    def __init__(self, folder: str, progress: Callable[[str], None]) -> None:
        """folder: where measurements are kept (`engine.kept`)."""
        described = ["packed products", _FORMAT, torch.__version__, torch.get_num_threads()]
        self._file = kept_file(folder, described, progress)
        self._progress = progress
        known = read_kept(self._file)
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}
        self._is_new = False

    def of(self, alike: Sequence[PackedLinear]) -> tuple[int, Sequence[int]]:
        """(fewest rows that run packed, 0: never; by number of rows, the number they are padded to) for one shape."""
        name = f"{alike[0].shape} {alike[0].weight.dtype} {len(alike)}"
        try:
            packed_from, few = self._known[name]
            if packed_from not in (0, *_NUM_ROWS) or len(few) != _FEW[-1] + 1 or not set(few) <= {0, *_FEW}:
                raise ValueError(name)
        except (KeyError, TypeError, ValueError):
            packed_from, size_of = _fastest(alike)
            few = list(size_of[: _FEW[-1] + 1])
            self._known[name] = packed_from, few
            self._is_new = True
        return packed_from, [*few, *_SIZE_OF[len(few) :]]

    def keep(self) -> None:
        """Write down what has been measured."""
        if self._is_new:
            keep(self._file, self._known, self._progress)


def pack(
    products: Iterable[PackedLinear],
    wanted: Prepack,
    works: Callable[[], bool] = lambda: True,
    choices: Choices | None = None,
) -> int:
    """Pack a model's products: `always` all of them, `auto` what is faster so; the memory that packed weights take.

    works: tells of the packed model whether it runs; if not, all weights become plain again.
    """
    products = list(products)
    choices = choices or Choices(NOWHERE, lambda _: None)
    if wanted != "off" and products and _is_supported(products[0].weight):
        _pack(products, wanted, works, choices)
        choices.keep()
    _compile(products)
    return sum(product.packed_bytes for product in products)


def _pack(products: Sequence[PackedLinear], wanted: Prepack, works: Callable[[], bool], choices: Choices) -> None:
    by_shape: dict[tuple[int, ...], list[PackedLinear]] = {}
    for product in products:
        by_shape.setdefault(product.shape, []).append(product)
    for alike in by_shape.values():
        packed_from, size_of = (1, _SIZE_OF) if wanted == "always" else choices.of(alike)
        if packed_from and _agrees(alike[0].weight):
            for product in alike:
                product.pack(packed_from, size_of)
    if not works():
        for product in products:
            product.unpack()


@torch.inference_mode()
def _compile(products: Iterable[PackedLinear]) -> None:
    for product in {(product.shape, product.bias is None): product for product in products}.values():
        product.compile()


def reorder(weight: Tensor) -> Tensor:
    """A weight in oneDNN's own layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
    return packed


def _in_sizes(
    product: Callable[..., Tensor],
    rows: Tensor,
    num_rows: int,
    weight: Tensor | None,
    bias: Tensor | None,
    size_of: Sequence[int] = _SIZE_OF,
) -> Tensor:
    """The product of [..., in], run with numbers of rows of `size_of` only."""
    if num_rows >= len(size_of):
        flat = rows.reshape(num_rows, -1)
        parts = [
            _in_sizes(product, part, len(part), weight, bias, size_of) for part in torch.split(flat, len(size_of) - 1)
        ]
        return torch.cat(parts).view(*rows.shape[:-1], -1)
    missing = size_of[num_rows] - num_rows
    if not missing:
        return product(rows, weight, bias)
    if rows.dim() == 2:
        return product(pad(rows, (0, 0, 0, missing)), weight, bias).narrow(0, 0, num_rows)
    return _in_sizes(product, rows.reshape(num_rows, -1), num_rows, weight, bias, size_of).view(*rows.shape[:-1], -1)


def _packed_linear(rows: Tensor, packed: Tensor | None, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


def _is_supported(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        reorder(weight[:1])
    except (AttributeError, RuntimeError):  # an operator that this torch or this processor lacks
        return False
    return True


def _agrees(weight: Tensor) -> bool:
    rows = _made_up(9, weight)
    plain, packed = linear(rows, weight), _packed_linear(rows, reorder(weight))
    return bool((plain - packed).abs().max() <= _TOLERANCE[weight.dtype] * plain.abs().max())


def _made_up(num_rows: int, weight: Tensor) -> Tensor:
    """Rows to try a weight on: no two alike, the same every time, drawn from no generator."""
    width = weight.shape[1]
    return torch.arange(1, num_rows * width + 1).sqrt().sin().view(num_rows, width).to(weight.dtype)


@torch.inference_mode()
def _fastest(alike: Sequence[PackedLinear]) -> tuple[int, Sequence[int]]:
    """(fewest rows that run packed, 0: never; by number of rows, the number they are padded to) for one shape."""
    count = max(1, min(len(alike), _MEASURED_BYTES // alike[0].weight.nbytes))
    plain = [product.weight for product in alike[:count]]
    packed = [reorder(weight) for weight in plain]
    rows = {size: _made_up(size, plain[0]) for size in sorted({*_NUM_ROWS, *_FEW})}
    packed_s = _middle_s(_packed_linear, rows, packed)
    plain_s = _middle_s(linear, {size: rows[size] for size in _NUM_ROWS}, plain)
    filling_s = _middle_s(lambda rows, _: _in_sizes(_nothing, rows, 1, None, None, (0, 8)), {1: rows[1]}, plain)[1]
    size_of = choose_sizes(packed_s, filling_s)
    filled_s = {n: packed_s[size_of[n]] + (filling_s if size_of[n] != n else 0) for n in _NUM_ROWS}
    return choose_from([math.log(plain_s[n] / filled_s[n]) for n in _NUM_ROWS]), size_of


def _nothing(rows: Tensor, *_: Tensor | None) -> Tensor:
    """In place of a product, to time what is around it."""
    return rows


def choose_sizes(packed_s: Mapping[int, float], filling_s: float) -> Sequence[int]:
    """With how many rows so many are run, given the seconds for each of `_FEW` and those of filling up."""
    size_of = list(_SIZE_OF)
    for num_rows in range(1, _FEW[-1] + 1):
        cost_s = {_SIZE_OF[num_rows]: packed_s[_SIZE_OF[num_rows]]}
        cost_s |= {size: (packed_s[size] + filling_s) * _FURTHER for size in _FEW if size > _SIZE_OF[num_rows]}
        size_of[num_rows] = min(cost_s, key=cost_s.__getitem__)
    return size_of


def choose_from(gains: Sequence[float]) -> int:
    """From how many rows on to run packed, given log(plain / packed seconds) at `_NUM_ROWS`; 0 for never."""
    total = {0: 0.0} | {num_rows: sum(gains[index:]) for index, num_rows in enumerate(_NUM_ROWS)}
    total[0] += len(gains) * math.log(_ONE_FORM)
    total[1] += len(gains) * math.log(_ONE_FORM)
    return max(total, key=total.__getitem__)


def _middle_s(
    product: Callable[[Tensor, Tensor], Tensor], rows: Mapping[int, Tensor], weights: Sequence[Tensor]
) -> dict[int, float]:
    """Time of the products of all weights with so many rows: the middle one of several, taken in turns."""
    runs_s: dict[int, list[float]] = {num_rows: [] for num_rows in rows}
    for repeat in range(_MAX_REPEATS):
        for num_rows, some in rows.items():
            if repeat >= _MIN_REPEATS and sum(runs_s[num_rows]) > _POINT_BUDGET_S:
                continue
            began = time.perf_counter()
            for weight in weights:
                product(some, weight)
            runs_s[num_rows].append(time.perf_counter() - began)
    return {num_rows: sorted(runs)[len(runs) // 2] for num_rows, runs in runs_s.items()}
