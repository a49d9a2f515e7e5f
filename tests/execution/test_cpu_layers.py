"""Layers by Numba's kernels give the numbers of plain operations, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

numba_layer = pytest.importorskip("engine.execution.numba_layer")
numba_product = pytest.importorskip("engine.execution.numba_product")

from engine import kernels, numba_numbers  # noqa: E402
from engine.execution import cpu_layers, fused_layer, lean, probe  # noqa: E402
from engine.execution.lean import LeanDecoder  # noqa: E402
from engine.execution.packing import Choice  # noqa: E402
from engine.execution.probe import find_kv_shape  # noqa: E402
from engine.execution.products import PackedLinear, array_of  # noqa: E402
from engine.execution.runner import ModelRunner  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.execution.test_groups import passes  # noqa: E402
from tests.execution.test_lean import LEAN, randomised  # noqa: E402

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="kernels of a CPU")
PAGE = 4
Numbers = tuple[Tensor, Tensor, Tensor]


def numbers(loaded: Any, by_kernels: bool, numbers_of_steps: list[list[int]]) -> Numbers:
    """Logits of steps of single tokens and trees behind prompts; all keys, all values."""
    with patch.object(lean, "use_cpu_kernels", lambda *_: by_kernels):
        decoder = LeanDecoder(loaded.model)
    runner = ModelRunner(loaded.model, find_kv_shape(loaded), 200, PAGE, loaded.vocab_size, decoder)
    prompts, steps = passes()
    for prompt in prompts:
        runner.forward([prompt])
    logits = [runner.forward([steps[number] for number in of_step]) for of_step in numbers_of_steps]
    return torch.cat(logits), runner.storage.keys, runner.storage.values


def agree(found: Numbers, expected: Numbers, tolerance: float = 1e-4) -> bool:
    return all(
        torch.allclose(one.float(), other.float(), atol=tolerance, rtol=tolerance)
        for one, other in zip(found, expected, strict=True)
    )


ALONE = [[number] for number in range(len(passes()[1]))]
SOME_TOGETHER = [[0, 1], [2, 8, 3], list(range(len(passes()[1])))]


@pytest.mark.parametrize("steps", [ALONE, SOME_TOGETHER], ids=["alone", "together"])
@pytest.mark.parametrize("name", LEAN)
def test_models_get_the_numbers_of_the_plain_operations(name: str, steps: list[list[int]]) -> None:
    """Sequences alone, whose attention is two products, and several, which attend in groups."""
    loaded = randomised(LEAN[name], seed=5)
    with patch.object(cpu_layers.CpuLayers, "hidden", autospec=True, side_effect=cpu_layers.CpuLayers.hidden) as used:
        found = numbers(loaded, True, steps)
    assert used.call_count > len(steps)
    assert agree(found, numbers(loaded, False, steps))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_they_are_as_near_to_the_truth(name: str) -> None:
    """The truth: the same weights in float32."""
    loaded = randomised(LEAN[name], seed=5)
    loaded.model.to(torch.bfloat16)
    found, plain = (numbers(loaded, by_kernels, SOME_TOGETHER) for by_kernels in (True, False))
    loaded.model.to(torch.float32)
    truth = numbers(loaded, False, SOME_TOGETHER)
    for one, other, right in zip(found, plain, truth, strict=True):
        error, usual = ((numbers_of.float() - right).square().mean().sqrt() for numbers_of in (one, other))
        assert error <= 1.1 * usual
    assert probe.probe(loaded, find_kv_shape(loaded), LeanDecoder(loaded.model)) < 1


def swapped(kernel: Callable[..., None]) -> Callable[..., None]:
    """Cosines for sines."""
    return lambda joined, cosines, sines, *rest: kernel(joined, sines, cosines, *rest)


def shifted(kernel: Callable[..., None]) -> Callable[..., None]:
    """K/V one slot further on."""

    def wrong(*operands: Any) -> None:
        *before, slots, keys, values, query = operands
        kernel(*before, (slots + 1) % len(keys), keys, values, query)

    return wrong


def without_norms(kernel: Callable[..., None]) -> Callable[..., None]:
    """Queries and keys as they come."""
    return lambda joined, cosines, sines, _has, *rest: kernel(joined, cosines, sines, False, *rest)


def seeing_all(kernel: Callable[..., None]) -> Callable[..., None]:
    """Without the mask."""
    return lambda scores, scale, _is_masked, visible: kernel(scores, scale, False, visible)


def unscaled(kernel: Callable[..., None]) -> Callable[..., None]:
    """Scores as they come."""
    return lambda scores, _scale, *rest: kernel(scores, 1.0, *rest)


def elsewhere(kernel: Callable[..., None]) -> Callable[..., None]:
    """One row too early."""
    return lambda attended, first, result: kernel(attended, max(0, first - 1), result)


def without_product(kernel: Callable[..., None]) -> Callable[..., None]:
    """The residual sum forgotten."""
    return lambda hidden, product, _has, *rest: kernel(hidden, product, False, *rest)


def turned(kernel: Callable[..., None]) -> Callable[..., None]:
    """The halves of gate and up exchanged."""
    return lambda joined, result: kernel(np.roll(joined, joined.shape[1] // 2, 1), result)


def elsewhere_in_the_text(kernel: Callable[..., None]) -> Callable[..., None]:
    """One position too far."""
    return lambda token_ids, positions, *rest: kernel(token_ids, positions + 1, *rest)


WRONG = {
    "elsewhere in the text": ("embed", elsewhere_in_the_text),
    "swapped": ("rotate_and_write", swapped),
    "shifted": ("rotate_and_write", shifted),
    "without norms": ("rotate_and_write", without_norms),
    "seeing all": ("softmax", seeing_all),
    "unscaled": ("softmax", unscaled),
    "elsewhere": ("merge", elsewhere),
    "without product": ("add_and_norm", without_product),
    "turned": ("gate", turned),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison above, and by the one at every start, after which plain operations serve."""
    kernel, wrong = WRONG[name]
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False, [*ALONE, *SOME_TOGETHER])
    monkeypatch.setattr(numba_layer, kernel, wrong(getattr(numba_layer, kernel)))
    assert not agree(numbers(loaded, True, [*ALONE, *SOME_TOGETHER]), expected)
    assert cpu_layers.find_fault(torch.device("cpu"), torch.float32) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_have_no_fault(dtype: torch.dtype) -> None:
    assert cpu_layers.find_fault(torch.device("cpu"), dtype) is None
    assert fused_layer.use_cpu_kernels(torch.device("cpu"), dtype)
    assert not fused_layer.use_cpu_kernels(torch.device("cpu"), torch.float16)


def test_without_numba_the_plain_operations_serve(caplog: pytest.LogCaptureFixture) -> None:
    def find_fault(_: torch.device) -> str | None:
        raise ModuleNotFoundError("No module named 'numba'")

    assert not kernels.usable.__wrapped__("layers are computed", find_fault, torch.device("cpu"), compiler="Numba")
    assert "layers are computed without Numba kernels: No module named 'numba'" in caplog.text


def test_exponentials_are_right_to_the_last_places() -> None:
    values = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    gates = np.stack([-values, np.ones_like(values)], 1).reshape(-1, 2)
    found = np.empty((len(values), 1), np.float32)
    numba_layer.gate(gates, found)
    # silu(-x) = -x / (1 + e^x)
    expected = -values.astype(np.float64) / (1 + np.exp(values.astype(np.float64)))
    assert np.abs(found[:, 0] / np.where(expected == 0, 1, expected) - (expected != 0)).max() < 1e-6


def test_what_is_no_number_stays_none() -> None:
    """So that a request with such numbers is found and ended; the other rows keep theirs."""
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    hidden = np.ones((3, 8), np.float32)
    hidden[1, 3], hidden[2, 3] = nan, inf
    normed = np.empty_like(hidden)
    numba_layer.add_and_norm(hidden, hidden, False, np.ones(8, np.float32), 1e-5, normed)
    assert np.isfinite(normed[0]).all()
    assert np.isnan(normed[1]).all()
    assert np.isnan(normed[2, 3])
    gated = np.empty((3, 4), np.float32)
    numba_layer.gate(hidden, gated)
    assert np.isfinite(gated[0]).all()
    assert not np.isfinite(gated[1:, 3]).any()
    scores = np.zeros((1, 3, 5), np.float32)
    scores[0, 1, 2], scores[0, 2, 4] = nan, nan
    visible = np.ones((3, 5), np.bool_)
    visible[2, 4] = False
    numba_layer.softmax(scores, 1.0, True, visible)
    assert np.allclose(scores[0, 0], 0.2)
    assert np.isnan(scores[0, 1]).all()
    # A key that is not seen does not matter, whatever is written there.
    assert np.allclose(scores[0, 2], [0.25, 0.25, 0.25, 0.25, 0])


def test_softmax_of_large_and_masked_scores() -> None:
    scores = torch.tensor([[[3e4, 3e4 - 2, -3e4], [-3e4, -3e4 - 1, -3e4 - 90]]])
    expected = (scores * 0.5).softmax(-1)
    numba_layer.softmax(scores.numpy(), 0.5, False, np.ones((1, 1), np.bool_))
    assert torch.allclose(scores, expected, atol=1e-6)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    """Every upper half of a float32 number with lower halves around the middle, NaN and infinities too."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = torch.from_numpy(bits.view(np.float32).copy())
    found = np.array([numba_numbers.to_bfloat16(value) for value in values.numpy()])
    is_number = ~np.isnan(values.numpy())
    assert (found[is_number] == array_of(values.to(torch.bfloat16))[is_number]).all()
    assert (found[~is_number] == 0x7FC0).all()


@pytest.mark.parametrize("num_rows", [*range(1, 30), 64, 100])
def test_products_of_blocks_are_the_plain_ones(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weights = [torch.randn(5 * numba_product.BLOCK, 37, generator=generator) for _ in range(3)]
    bias = torch.nn.Parameter(torch.randn(5 * numba_product.BLOCK, generator=generator))  # as a model has it
    rows = torch.randn(num_rows, 37, generator=generator)
    for weight, form in zip(weights, Choice("blocks", 1).forms(weights), strict=True):
        assert torch.equal(form.to_weight(), weight)
        expected = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
        product = PackedLinear(weight, bias)
        product.pack(form, 1)
        for found in (product(rows), product(rows.view(1, num_rows, 37))[0], product(rows.repeat(1, 2)[:, :37])):
            assert torch.allclose(found.double(), expected, atol=2e-5)
        assert np.array_equal(product.of_few(rows, rows.numpy()), product(rows).numpy())
        assert product(rows[:0]).shape == (0, 5 * numba_product.BLOCK)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Sums of a row are added up in the same order, however many rows there are."""
    weight, rows = torch.randn(2 * numba_product.BLOCK, 300), torch.randn(30, 300)
    (blocks,) = numba_product.in_blocks([weight])
    whole = numba_product.product(rows.numpy(), blocks)
    for count in (1, 5, 13):
        assert np.array_equal(numba_product.product(rows.numpy()[:count], blocks), whole[:count])


@pytest.mark.parametrize("num_columns", [numba_product.BLOCK - 1, 7])
def test_other_widths_have_no_blocks(num_columns: int) -> None:
    assert not numba_product.takes(torch.ones(num_columns, 4))
    assert not numba_product.takes(torch.ones(numba_product.BLOCK, 4, dtype=torch.bfloat16))
    assert numba_product.takes(torch.ones(numba_product.BLOCK, 4))


def test_passes_of_many_rows_run_by_plain_operations() -> None:
    loaded = randomised(LEAN["llama"], seed=5)
    decoder = LeanDecoder(loaded.model)
    assert decoder.cpu_layers is not None
    metadata = partial(cpu_layers.AttentionMetadata, None, slice(0, 1))
    assert decoder.cpu_layers.takes(cpu_layers.MOST_ROWS, metadata())
    assert not decoder.cpu_layers.takes(cpu_layers.MOST_ROWS + 1, metadata())
    assert not decoder.cpu_layers.takes(1, metadata(paged=object()))
