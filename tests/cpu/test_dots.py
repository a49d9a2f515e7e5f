"""Products by dot products: right numbers, alone and in company."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine.cpu.compiled.block_products import product
from engine.cpu.compiled.dot_products import HAS_DOTS, HAS_PAIRS
from engine.cpu.compiled.simd_vectors import BLOCK, FEATURES, GROUP, LANES
from engine.cpu.weights import Product, form_of_type, represented, rounded_rows
from engine.models.gguf.blocks import BLOCK_TYPES, BlockTensor
from tests.cpu.compiled_copies import copy_of_products
from tests.engine import tiny
from tests.grid import grid
from tests.models.gguf_models import stored_weight

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")

ROUNDED = ["int8", "int4", *(["pairs"] if HAS_PAIRS else [])]
"""Forms of weights that are rounded when they are laid out."""
STORED = [kind.name for kind in BLOCK_TYPES]
"""Types of blocks of GGUF files."""
IN_THE_GATE = {"int8"}
"""Each further type compiles a product for four seconds."""
RECORD = 256
# Whole groups, a part of one, and a part alone; blocks of files have whole records.
CASES = [
    *((form, depth) for form in ROUNDED for depth in (2 * GROUP, 3 * GROUP + 5, 7)),
    *((kind, depth) for kind in STORED for depth in (RECORD, 3 * RECORD)),
]
CASES_BY_GATE = grid(CASES, {case for case in CASES if case[0] in IN_THE_GATE})
NUM_COLUMNS = 4 * BLOCK + 3


def random_weight(kind: str, depth: int, num_columns: int = NUM_COLUMNS) -> Tensor:
    """A weight [N, K], in blocks if these are what `kind` names."""
    if kind not in STORED:
        return normal(num_columns, depth)
    raw = stored_weight(np.random.default_rng(0), (num_columns, depth), kind)
    return BlockTensor(torch.from_numpy(raw.reshape(num_columns, -1)), GGMLQuantizationType[kind])


def laid_out(weight: Tensor, form: str) -> Product:
    """The weight [N, K] as the decoder has it, with a bias."""
    bias = torch.linspace(-1, 1, len(weight))
    return Product.of([[weight]], [[bias]], partial(form_of, form=form))


def form_of(weight: Tensor, form: str) -> Any:
    return form_of_type(weight.type) if isinstance(weight, BlockTensor) else form


def products(rows: Tensor, of: Product, multiply: Any = product, blocks: slice = slice(None)) -> Tensor:
    """[T, N] the products of rows, in blocks of columns; other blocks are 0."""
    ((piece,),) = of.layers
    num_blocks = len(piece.words)
    first, last, _ = blocks.indices(num_blocks)
    found = np.zeros((len(rows), of.bias.shape[1]), np.float32)
    multiply(rows.numpy(), piece.words, piece.scales, of.bias[0], found, (first, last), (0, 1))
    return torch.from_numpy(found)


def expected(rows: Tensor, weight: Tensor, name: str) -> Tensor:
    """[T, N] what the products of rounded rows with the numbers of a form are."""
    bias, form = torch.linspace(-1, 1, len(weight)).double(), form_of(weight, name)
    found = rounded_rows(rows, form).double() @ represented(weight, form).double().T + bias
    return found.float()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether results differ by no more than float32 sums in another order."""
    return torch.allclose(found[:, : wanted.shape[1]], wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.sampled("depth")
@pytest.mark.parametrize(("form", "depth"), CASES_BY_GATE)
def test_products_are_those_of_the_numbers_that_bits_stand_for(form: str, depth: int) -> None:
    weight, rows = random_weight(form, depth), normal(19, depth, seed=1)
    assert agree(products(rows, laid_out(weight, form)), expected(rows, weight, form))


@pytest.mark.sampled
@pytest.mark.parametrize("form", grid(ROUNDED, {"int8"}))
def test_numbers_at_the_extremes_do_not_overflow(form: Any) -> None:
    """All weights and all numbers of a row are the largest, of either sign."""
    depth = 4 * GROUP
    signs = torch.tensor([[1.0], [-1.0]])
    weight, rows = signs.repeat(BLOCK, depth), signs.repeat(3, depth)
    assert agree(products(rows, laid_out(weight, form)), expected(rows, weight, form))


@pytest.mark.parametrize("form", grid(ROUNDED, {"int8"}))
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_results_that_are_not(wrong: float, form: Any) -> None:
    """And all other rows keep theirs."""
    weight, rows = normal(NUM_COLUMNS, 3 * GROUP), normal(5, 3 * GROUP, seed=1)
    of = laid_out(weight, form)
    right = products(rows, of)
    rows[2, 40] = wrong
    found = products(rows, of)
    assert not found[2, :NUM_COLUMNS].isfinite().any()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[others], right[others])


@pytest.mark.parametrize("form", grid(ROUNDED, {"int8"}))
@pytest.mark.parametrize("depth", [2 * GROUP, 3 * GROUP + 5, 7])
def test_rows_of_zeros_and_of_tiny_numbers_have_the_bias(depth: int, form: Any) -> None:
    weight = normal(NUM_COLUMNS, depth)
    rows = torch.stack([torch.zeros(depth), torch.full((depth,), 1e-38)])
    found = products(rows, laid_out(weight, form))
    assert agree(found, torch.linspace(-1, 1, NUM_COLUMNS).expand(2, -1))


@pytest.mark.sampled("depth")
@pytest.mark.parametrize(("form", "depth"), CASES_BY_GATE)
def test_a_row_keeps_its_numbers_in_company_and_on_any_cores(form: str, depth: int) -> None:
    """To the bit, with every number of rows, and for all parts of a weight."""
    weight, rows = random_weight(form, depth), normal(97, depth, seed=1) * torch.linspace(0.01, 100, 97).unsqueeze(1)
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
    for form in ROUNDED:
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


def with_blocks_of(copy: ModuleType, weight: Tensor, form: str, monkeypatch: pytest.MonkeyPatch) -> Product:
    """The weight in blocks of the width that a copy of the products has."""
    from engine.cpu import weights

    with monkeypatch.context() as patched:
        patched.setattr(weights, "BLOCK", copy.BLOCK)
        return laid_out(weight, form)


# test_processors.py has all formats with AVX2 and SSE.
COPIES = [
    (name, form)
    for name in PROCESSORS
    for form in ("int8", "int4", *STORED)
    if name not in ("AVX2", "SSE") or form == "int8"
]


@pytest.mark.slow  # compiles fifty copies
@pytest.mark.parametrize(("name", "form"), COPIES)
def test_every_processor_has_these_numbers(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the extremes, too, where instructions for fewer bits would overflow."""
    features = PROCESSORS[name]
    skip_without(features)
    changes = {"_IS_X86 = platform.machine() in": "_IS_X86 = () and"} if not features else {}
    copy = copy_of_products(
        monkeypatch, features, {**changes, "MOST_DOT_ROWS = 4 if LANES == 16 else 6": "MOST_DOT_ROWS = 3"}
    )
    for depth in (RECORD,) if form in STORED else (2 * GROUP, GROUP + 5):
        signs = normal(copy.BLOCK + 3, depth).sign()
        weight, extreme = random_weight(form, depth, copy.BLOCK + 3), signs if form not in STORED else None
        for numbers, rows in ((weight, normal(3, depth, seed=1)), (extreme, signs[:3].clone())):
            numbers = weight if numbers is None else numbers
            found = products(rows, with_blocks_of(copy, numbers, form, monkeypatch), copy.product)
            assert agree(found, expected(rows, numbers, form))


ZEROS = "[ir.Constant(VECTOR, [0.0] * LANES)] * self._num_blocks * VECTORS"
# Wrong variants: a form that shows it, and changes of the source.
WRONG: dict[str, tuple[str, dict[str, str]]] = {
    "the offset of bytes": ("int8", {"types.int8: 128": "types.int8: 127"}),
    "the offset of nibbles": ("int4", {"types.uint8: 8}": "types.uint8: 7}"}),
    "bytes of a row without their sign": ("int8", {"INTS, old, weights, row": "INTS, old, row, weights"}),
    "a scale of the first row for all": (
        "int8",
        {"(factors, group_stride, num_rows)": "(factors, long(0), num_rows)"},
    ),
    "corrections of the first row for all": (
        "int8",
        {"(corrections, correction_stride, num_rows)": "(corrections, long(0), num_rows)"},
    ),
    "no last part of a group": ("int8", {"tail[:rest] = rows[row, num_whole * GROUP :]": "tail[:rest] = 0"}),
    "halves of a byte in the other order": (
        "int4",
        {"2 * step, low": "2 * step, high", "2 * step + 1, high": "2 * step + 1, low"},
    ),
    "the scale of the first group": ("int8", {"address, group, 4 * BLOCK), 4 *": "address, long(0), 4 * BLOCK), 4 *"}),
    "numbers cut off rather than rounded": ("int8", {'f"llvm.lrint.': 'f"llvm.fptosi.sat.'}),
    "the largest number of a part of the group": ("int8", {'"umax", magnitudes)': '"umax", magnitudes[:1])'}),
    "no bias": ("int8", {"self.load_columns(self._bias, self._num_blocks)\n        body": f"{ZEROS}\n        body"}),
    "scales of one block of several": ("int8", {"(scale, scale_stride, num_blocks)": "(scale, long(0), num_blocks)"}),
    "no minima": ("Q4_1", {"self.multiply_add(one.minimum, share, new)": "new"}),
    "minima without the scale of the row": (
        "Q4_1",
        {"builder.fmul(factor, builder.sitofp(correction, FLOAT))": "factor"},
    ),
    "offsets of numbers with minima": ("Q4_1", {"0 if scales in MINIMA else ": ""}),
    "the scale of the first half of a group": ("Q6_K", {"2) * BLOCK + part * BLOCK": "2) * BLOCK"}),
    "corrections of the first half of a group": (
        "Q6_K",
        {"rounded[part * size : (part + 1) * size]": "rounded[:size]"},
    ),
    "the scale of the first group of a record": ("Q4_K", {"long(_GROUPS - 1)), self": "long(0)), self"}),
    "the first record": ("Q6_K", {"long(_GROUPS.bit_length() - 1)": "long(9)"}),
    "minima in the place of scales": ("Q4_K", {"first + _GROUPS * BLOCK, vector": "first, vector"}),
    "float16 scales as bfloat16": ("Q8_0", {"ints(0x7FFF)), ints(13))": "ints(0x7FFF)), ints(16))"}),
    "one block of several": ("int8", {"(weight, size, num_blocks)": "(weight, long(0), num_blocks)"}),
}


DOT_VARIANTS = {"bytes of a row without their sign", "scales of one block of several", "one block of several"}
"""Variants of AVX-512 VNNI and of blocks that are multiplied at once there."""


@pytest.mark.slow  # compiles twenty-three copies
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_wrong_variants_are_noticed(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is that of `test_products_are_those_of_the_numbers_that_bits_stand_for`."""
    if wrong in DOT_VARIANTS and not (HAS_DOTS and LANES == 16):
        pytest.skip("this processor has other instructions")
    form, changes = WRONG[wrong] if wrong else ("int8", {})
    if wrong == "float16 scales as bfloat16":
        changes = {**changes, "if _WIDENS_HALVES:": "if not FEATURES:"}
    copy = copy_of_products(
        monkeypatch, None, {**changes, "MOST_DOT_ROWS = 4 if LANES == 16 else 6": "MOST_DOT_ROWS = 3"}
    )
    depth = 2 * RECORD if form in STORED else 2 * GROUP + 5
    weight, rows = random_weight(form, depth), normal(5, depth, seed=1)
    rows[:, -5:] += 3
    found = products(rows, laid_out(weight, form), copy.product)
    assert agree(found, expected(rows, weight, form)) == (wrong is None)
