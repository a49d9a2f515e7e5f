"""Chooses, for the weights of every shape, the form in which products are fastest (`products.py`). CPU only.

A plain product of several rows lays the weight out anew in every call. Laid out once at start, a weight costs up to
eight rows little more than one, which is what verification needs. Two forms are tried: oneDNN's own, and on one core
the blocks of `numba_product.py`. Which of them is used, and from how many rows on, is measured at start; where that is
always, weights are kept in this form only. Without what a form needs, and where its numbers are not the plain ones,
it is left out.

oneDNN's kernels for five or six rows read a weight faster than those for one or two (20 GB/s against 13 to 15 on a core
that reads 27), so few rows are filled up further where a measurement at start shows a gain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.config import Prepack
from engine.execution.fused_layer import made_up_rows
from engine.execution.products import (
    FEW,
    SIZE_OF,
    BlockForm,
    Form,
    OneDnnForm,
    PackedLinear,
    in_sizes,
    onednn_linear,
    reorder,
)
from engine.kept import NOWHERE, keep, kept_file, read_kept
from engine.kernels import usable

_NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_POINT_BUDGET_S = 0.015
_MIN_REPEATS, _MAX_REPEATS = 3, 25
# Weights of one shape that a measurement goes through: enough not to stay in the processor's cache.
_MEASURED_BYTES = 128 << 20
# Weights that are laid out at once; large pieces of memory get large pages.
_PIECE_BYTES = 64 << 20
# Keeping one form of a weight saves memory: it is chosen even where it is up to 5 % slower than keeping both.
_ONE_FORM = 1.05
# Filling few rows up to a later number than the next one must gain at least 8 %.
_FURTHER = 1.08
_FORMAT = 2
"""Of what is kept of a measurement."""
# Largest allowed difference from the plain product, as a share of the largest number in it.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Choice(NamedTuple):
    """How weights of a shape are run."""

    kind: str = ""
    """Of the form: `onednn` or `blocks`."""
    packed_from: int = 0
    """Fewest rows that run by this form; 0: none do."""
    few: Sequence[int] = SIZE_OF[: FEW[-1] + 1]
    """By number of rows, the number that oneDNN's form pads them to; more rows are padded as in `SIZE_OF`."""

    @property
    def is_known(self) -> bool:
        """Whether there is such a choice: it may come from a file."""
        rows = self.packed_from in (0, *_NUM_ROWS) and len(self.few) == FEW[-1] + 1 and set(self.few) <= {0, *FEW}
        return rows and (self.kind in _KINDS if self.packed_from else not self.kind)

    def forms(self, weights: Sequence[Tensor]) -> Iterator[Form]:
        """Weights of one shape in this form."""
        if self.kind == "blocks":
            yield from BlockForm.of(weights)
        else:
            yield from (OneDnnForm(weight, [*self.few, *SIZE_OF[len(self.few) :]]) for weight in weights)


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

    def of(self, alike: Sequence[PackedLinear]) -> Choice:
        """For products of one shape."""
        name = f"{alike[0].shape} {alike[0].weight.dtype} {len(alike)}"
        try:
            choice = Choice(*self._known[name])
            if not choice.is_known:
                raise ValueError(name)
        except (KeyError, TypeError, ValueError):
            choice = _fastest(alike)
            self._known[name] = choice
            self._is_new = True
        return choice

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
    if wanted != "off" and products and _kinds_for(products[0].weight):
        _pack(products, wanted, works, choices)
        choices.keep()
    _compile(products)
    return sum(product.packed_bytes for product in products)


def _pack(products: Sequence[PackedLinear], wanted: Prepack, works: Callable[[], bool], choices: Choices) -> None:
    by_shape: dict[tuple[int, ...], list[PackedLinear]] = {}
    for product in products:
        by_shape.setdefault(product.shape, []).append(product)
    for alike in by_shape.values():
        weight = alike[0].weight
        choice = choices.of(alike) if wanted == "auto" else Choice(next(iter(_kinds_for(weight)), ""), 1)
        if choice.packed_from and choice.kind in _kinds_for(weight) and _agrees(weight, choice.kind):
            # Not all at once: there must be room for both forms.
            count = max(1, _PIECE_BYTES // weight.nbytes)
            for some in (alike[start : start + count] for start in range(0, len(alike), count)):
                forms = choice.forms([product.weight for product in some])
                for product, form in zip(some, forms, strict=True):
                    product.pack(form, choice.packed_from)
    if not works():
        for product in products:
            product.unpack()


@torch.inference_mode()
def _compile(products: Iterable[PackedLinear]) -> None:
    for product in {(product.shape, product.bias is None): product for product in products}.values():
        product.compile()


def _kinds_for(weight: Tensor) -> list[str]:
    """The forms that a weight can have."""
    if weight.device.type != "cpu" or weight.dtype not in _TOLERANCE:
        return []
    return [kind for kind, can_have in _KINDS.items() if can_have(weight)]


def _has_onednn(weight: Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        reorder(weight[:1])
    except (AttributeError, RuntimeError):  # an operator that this torch or this processor lacks
        return False
    return True


def _has_blocks(weight: Tensor) -> bool:
    if not usable("products are computed", _find_block_fault, weight.device, compiler="Numba"):
        return False
    from engine.execution import numba_product

    return numba_product.takes(weight)


def _find_block_fault(device: torch.device) -> str | None:
    from engine.execution import numba_product

    weight = made_up_rows(device, torch.float32, 3 * numba_product.BLOCK, 40)
    (blocks,) = numba_product.in_blocks([weight])
    for num_rows in range(1, 2 * numba_product.MOST_ROWS + 2):
        rows = made_up_rows(device, torch.float32, num_rows, 40)
        found = torch.from_numpy(numba_product.product(rows.numpy(), blocks))
        if not torch.allclose(found, linear(rows, weight), atol=1e-4):
            return f"products of {num_rows} rows differ"
    return None


_KINDS = {"onednn": _has_onednn, "blocks": _has_blocks}
"""Of forms, and which weights can have them."""


def _agrees(weight: Tensor, kind: str) -> bool:
    """Whether a form gives a weight's numbers; lays out the whole weight."""
    rows = made_up_rows(weight.device, weight.dtype, 9, weight.shape[1])
    plain = linear(rows, weight)
    (form,) = Choice(kind, 1).forms([weight])
    packed = form.product(rows, len(rows), None)
    return bool((plain - packed).abs().max() <= _TOLERANCE[weight.dtype] * plain.abs().max())


@torch.inference_mode()
def _fastest(alike: Sequence[PackedLinear]) -> Choice:
    """How weights of one shape are run fastest."""
    plain = [product.weight for product in alike[: max(1, _MEASURED_BYTES // alike[0].weight.nbytes)]]
    made_up = partial(made_up_rows, plain[0].device, plain[0].dtype)
    rows = {size: made_up(size, plain[0].shape[1]) for size in sorted({*_NUM_ROWS, *FEW})}
    few_rows = {size: rows[size] for size in _NUM_ROWS}
    plain_s = _middle_s(linear, few_rows, plain)
    choice, most = Choice(), 0.0
    for kind in _kinds_for(plain[0]):
        few = Choice().few
        if kind == "onednn":
            packed_s = _middle_s(onednn_linear, rows, [reorder(weight) for weight in plain])
            filling_s = _middle_s(lambda r, _: in_sizes(_nothing, r, 1, None, None, (0, 8)), {1: rows[1]}, plain)[1]
            size_of = choose_sizes(packed_s, filling_s)
            few = list(size_of[: len(few)])
            packed_s = {n: packed_s[size_of[n]] + (filling_s if size_of[n] != n else 0) for n in _NUM_ROWS}
        else:
            packed_s = _middle_s(
                lambda r, form: form.product(r, len(r), None), few_rows, list(Choice(kind, 1).forms(plain))
            )
        packed_from, gain = choose_from([math.log(plain_s[n] / packed_s[n]) for n in _NUM_ROWS])
        if packed_from and gain > most:
            choice, most = Choice(kind, packed_from, few), gain
    return choice


def _nothing(rows: Tensor, *_: Tensor | None) -> Tensor:
    """In place of a product, to time what is around it."""
    return rows


def choose_sizes(packed_s: Mapping[int, float], filling_s: float) -> Sequence[int]:
    """With how many rows so many are run, given the seconds for each of `FEW` and those of filling up."""
    size_of = list(SIZE_OF)
    for num_rows in range(1, FEW[-1] + 1):
        cost_s = {SIZE_OF[num_rows]: packed_s[SIZE_OF[num_rows]]}
        cost_s |= {size: (packed_s[size] + filling_s) * _FURTHER for size in FEW if size > SIZE_OF[num_rows]}
        size_of[num_rows] = min(cost_s, key=cost_s.__getitem__)
    return size_of


def choose_from(gains: Sequence[float]) -> tuple[int, float]:
    """(from how many rows on to run packed, 0 for never; what that gains).

    gains: log(plain / packed seconds) at `_NUM_ROWS`.
    """
    total = {0: 0.0} | {num_rows: sum(gains[index:]) for index, num_rows in enumerate(_NUM_ROWS)}
    total[0] += len(gains) * math.log(_ONE_FORM)
    total[1] += len(gains) * math.log(_ONE_FORM)
    best = max(total, key=total.__getitem__)
    return best, total[best]


def _middle_s(
    product: Callable[[Tensor, Any], Tensor], rows: Mapping[int, Tensor], weights: Sequence[Any]
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
