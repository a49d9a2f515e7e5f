"""Products by the processor's dot products: right numbers, a row's numbers alone and in company, and wrong variants."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.models.cpu_weights import Form, Product, represented, rounded_rows
from engine.models.numba_dot import HAS_DOTS, HAS_PAIRS
from engine.models.numba_product import product
from engine.models.numba_vectors import BLOCK, FEATURES, GROUP, LANES
from tests.engine import tiny
from tests.models.compiled_copies import copy_of_products

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")

FORMS: list[Form] = ["int8", "int4", *(["pairs"] if HAS_PAIRS else [])]
# Whole groups, a part of one, and a part alone.
DEPTHS = [2 * GROUP, 3 * GROUP + 5, 7]
NUM_COLUMNS = 4 * BLOCK + 3


def laid_out(weight: Tensor, form: Form) -> Product:
    """The weight [N, K] as the decoder has it, with a bias."""
    bias = torch.linspace(-1, 1, len(weight))
    return Product.of([weight], bias, form)


def products(rows: Tensor, of: Product, multiply: Any = product, blocks: slice = slice(None)) -> Tensor:
    """[T, N] the products of rows, in blocks of columns; other blocks are 0."""
    num_blocks = of.weights.shape[1]
    first, last, _ = blocks.indices(num_blocks)
    found = np.zeros((len(rows), num_blocks * BLOCK), np.float32)
    multiply(rows.numpy(), of.weights[0], of.scales[0], of.bias[0], found, first, last)
    return torch.from_numpy(found)


def expected(rows: Tensor, weight: Tensor, form: Form) -> Tensor:
    """[T, N] what the products of rounded rows with the numbers of a form are."""
    bias = torch.linspace(-1, 1, len(weight)).double()
    found = rounded_rows(rows, form).double() @ represented(weight, form).double().T + bias
    return found.float()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether results differ by no more than float32 sums in another order."""
    return torch.allclose(found[:, : wanted.shape[1]], wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_products_are_those_of_the_numbers_that_bits_stand_for(depth: int, form: Form) -> None:
    weight, rows = normal(NUM_COLUMNS, depth), normal(19, depth, seed=1)
    assert agree(products(rows, laid_out(weight, form)), expected(rows, weight, form))


@pytest.mark.parametrize("form", FORMS)
def test_numbers_at_the_extremes_do_not_overflow(form: Form) -> None:
    """All weights and all numbers of a row are the largest, of either sign."""
    depth = 4 * GROUP
    signs = torch.tensor([[1.0], [-1.0]])
    weight, rows = signs.repeat(BLOCK, depth), signs.repeat(3, depth)
    assert agree(products(rows, laid_out(weight, form)), expected(rows, weight, form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_results_that_are_not(wrong: float, form: Form) -> None:
    """And all other rows keep theirs."""
    weight, rows = normal(NUM_COLUMNS, 3 * GROUP), normal(5, 3 * GROUP, seed=1)
    of = laid_out(weight, form)
    right = products(rows, of)
    rows[2, 40] = wrong
    found = products(rows, of)
    assert not found[2, :NUM_COLUMNS].isfinite().any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[others], right[others])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_rows_of_zeros_and_of_tiny_numbers_have_the_bias(depth: int, form: Form) -> None:
    weight = normal(NUM_COLUMNS, depth)
    rows = torch.stack([torch.zeros(depth), torch.full((depth,), 1e-38)])
    found = products(rows, laid_out(weight, form))
    assert agree(found, torch.linspace(-1, 1, NUM_COLUMNS).expand(2, -1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_row_keeps_its_numbers_in_company_and_on_any_cores(depth: int, form: Form) -> None:
    """To the bit: with every number of rows up to one more than are rounded together, and for all parts of a weight."""
    weight, rows = normal(NUM_COLUMNS, depth), normal(97, depth, seed=1) * torch.linspace(0.01, 100, 97).unsqueeze(1)
    of = laid_out(weight, form)
    alone = torch.cat([products(row.unsqueeze(0), of) for row in rows])
    for count in (*range(2, 26), 97):
        assert torch.equal(products(rows[:count], of), alone[:count])
        assert torch.equal(products(rows[-count:], of), alone[-count:])
    for first in range(5):
        for last in range(first + 1, 6):
            part = slice(first * BLOCK, last * BLOCK)
            found = products(rows[:13], of, blocks=slice(first, last))
            assert torch.equal(found[:, part], alone[:13, part])
            assert not found[:, : part.start].any()
            assert not found[:, part.stop :].any()


def test_weights_that_are_not_finite_do_not_become_zeros() -> None:
    weight = normal(BLOCK, 2 * GROUP)
    weight[3, 5], weight[4, 40] = torch.nan, torch.inf
    for form in FORMS:
        found = represented(weight, form)
        assert not found[3, :GROUP].isfinite().all()
        assert not found[4, GROUP:].isfinite().all()
        assert found[5:].isfinite().all()


# By what the processor has: the features for which LLVM writes dot products.
PROCESSORS = {
    "AVX-512 VNNI": "+avx512f,+avx512bw,+avx512vl,+avx512vnni",
    "AVX-512": "+avx512f,+avx512bw",
    "AVX-512 VNNI of 256 bits": "+avx2,+avx512vl,+avx512vnni",
    "AVX-VNNI": "+avx2,+avxvnni",
    "AVX2": "+avx2,+fma",
    "SSE": "+sse4.2",
    "another architecture": "",
}


def skip_without(features: str) -> None:
    missing = [name for name in features.split(",") if name and name not in FEATURES]
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")


def with_blocks_of(copy: ModuleType, weight: Tensor, form: Form, monkeypatch: pytest.MonkeyPatch) -> Product:
    """The weight in blocks of the width that a copy of the products has."""
    from engine.models import cpu_weights

    with monkeypatch.context() as patched:
        patched.setattr(cpu_weights, "BLOCK", copy.BLOCK)
        patched.setattr(cpu_weights, "_NO_SCALES", np.zeros((1, 1, 0, copy.BLOCK), np.float32))
        return laid_out(weight, form)


@pytest.mark.slow  # compiles twelve copies
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_has_these_numbers(name: str, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the extremes, too, where instructions for fewer bits would overflow."""
    features = PROCESSORS[name]
    skip_without(features)
    changes = {"_IS_X86 = platform.machine() in": "_IS_X86 = () and"} if not features else {}
    copy = copy_of_products(monkeypatch, features, {**changes, "MOST_DOT_ROWS = 6": "MOST_DOT_ROWS = 3"})
    for depth in (2 * GROUP, GROUP + 5):
        signs = normal(copy.BLOCK + 3, depth).sign()
        for weight, rows in ((normal(copy.BLOCK + 3, depth), normal(3, depth, seed=1)), (signs, signs[:3].clone())):
            of = with_blocks_of(copy, weight, form, monkeypatch)
            found = np.zeros((3, of.weights.shape[1] * copy.BLOCK), np.float32)
            copy.product(rows.numpy(), of.weights[0], of.scales[0], of.bias[0], found, 0, of.weights.shape[1])
            assert agree(torch.from_numpy(found), expected(rows, weight, form))


ROW_PLACES = "builder.mul(group_stride, long(number))) for number in numbers]"
ZEROS = "[ir.Constant(VECTOR, [0.0] * LANES)] * self._num_blocks * VECTORS"
# Wrong variants: a form that shows it, and changes of the source.
WRONG: dict[str, tuple[Form, dict[str, str]]] = {
    "the offset of bytes": ("int8", {"types.int8: 128": "types.int8: 127"}),
    "the offset of nibbles": ("int4", {"types.uint8: 8}": "types.uint8: 7}"}),
    "bytes of a row without their sign": ("int8", {"INTS, old, weights, row": "INTS, old, row, weights"}),
    "a scale of the first row for all": (
        "int8",
        {f"(scales, {ROW_PLACES}": "(scales, long(0)) for number in numbers]"},
    ),
    "starts of the first row for all": ("int8", {f"(starts, {ROW_PLACES}": "(starts, long(0)) for number in numbers]"}),
    "no last part of a group": ("int8", {"tail[:rest] = rows[row, num_whole * GROUP :]": "tail[:rest] = 0"}),
    "halves of a byte in the other order": (
        "int4",
        {"2 * step, low": "2 * step, high", "2 * step + 1, high": "2 * step + 1, low"},
    ),
    "the scale of the first group": ("int8", {"long(block)), group)": "long(block)), long(0))"}),
    "numbers cut off rather than rounded": ("int8", {'f"llvm.lrint.': 'f"llvm.fptosi.sat.'}),
    "the largest number of a part of the group": ("int8", {'"umax", magnitudes)': '"umax", magnitudes[:1])'}),
    "no bias": ("int8", {"self.load_columns(self._bias, self._num_blocks)\n        body": f"{ZEROS}\n        body"}),
    "one block of several": ("int8", {"builder.mul(size, long(block)))": "builder.mul(size, long(0)))"}),
}


OF_DOTS = {"bytes of a row without their sign", "one block of several"}
"""Variants of AVX-512 VNNI and of blocks that are multiplied at once there."""


@pytest.mark.slow  # compiles thirteen copies
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_wrong_variants_are_noticed(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is that of `test_products_are_those_of_the_numbers_that_bits_stand_for`."""
    if wrong in OF_DOTS and not (HAS_DOTS and LANES == 16):
        pytest.skip("this processor has other instructions")
    form, changes = WRONG[wrong] if wrong else ("int8", {})
    copy = copy_of_products(monkeypatch, None, {**changes, "MOST_DOT_ROWS = 6": "MOST_DOT_ROWS = 3"})
    depth = 2 * GROUP + 5
    weight, rows = normal(NUM_COLUMNS, depth), normal(5, depth, seed=1)
    rows[:, -5:] += 3
    found = products(rows, laid_out(weight, form), copy.product)
    assert agree(found, expected(rows, weight, form)) == (wrong is None)
