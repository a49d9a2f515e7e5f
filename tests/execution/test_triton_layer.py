"""Layers by kernels give the numbers of plain operations: in Triton's interpreter on a CPU, compiled on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch.nn.functional import rms_norm, silu

triton_layer = pytest.importorskip("engine.execution.triton_layer")
triton_product = pytest.importorskip("engine.execution.triton_product")

from engine.cache.tensors import NORMED  # noqa: E402
from engine.execution import fused_layer, lean, probe  # noqa: E402
from engine.execution.lean import LeanDecoder  # noqa: E402
from engine.execution.packing import Choices  # noqa: E402
from engine.execution.probe import find_kv_shape  # noqa: E402
from engine.execution.products import PackedLinear  # noqa: E402
from engine.execution.runner import ModelRunner  # noqa: E402
from engine.kept import NOWHERE  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.execution.test_groups import passes  # noqa: E402
from tests.execution.test_lean import LEAN, SIZES, randomised  # noqa: E402
from tests.grid import grid  # noqa: E402

PAGE = 4
TAPS = (0, 2, 3, NORMED)
Numbers = tuple[torch.Tensor, ...]


def tiles_from(tile: int) -> fused_layer.Tiles:
    """This tile, or the first larger one that kernels of so many rows may have; 0 is none."""
    return {(gated, rows): max(tile, rows // 2) for gated in (False, True) for rows in (1, 16, 32, 64)} if tile else {}


def numbers(loaded: Any, by_kernels: bool, tile: int = 0) -> Numbers:
    """Logits of a step of single tokens and trees behind prompts; all keys, values and hidden states."""
    with patch.object(lean, "use_kernels", lambda *_: by_kernels):
        decoder = LeanDecoder(loaded.model)
    decoder.tiles = tiles_from(tile)
    shape = replace(find_kv_shape(loaded), hidden_dim=loaded.model.config.hidden_size, taps=TAPS)
    runner = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, decoder, paged=by_kernels)
    prompts, steps = passes()
    # Two trees and a short prompt: the interpreter takes its time.
    runner.forward([prompts[2], prompts[8], prompts[3]])
    logits_NV, storage = runner.forward([steps[2], steps[8], steps[3]]), runner.storage
    assert storage.hidden is not None
    return logits_NV, storage.keys, storage.values, storage.hidden


def agree(found: Numbers, expected: Numbers) -> bool:
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-4) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "tile"),
    grid(
        [(name, tile) for name in ("llama, biases", "llama, tied, wide heads", "qwen3") for tile in (0, 16, 32)],
        {("llama, biases", 16), ("qwen3", 0)},
    ),
)
def test_models_get_the_numbers_of_the_plain_operations(name: str, tile: int) -> None:
    """With norms and gate apart from their products, and in one kernel with them."""
    loaded = randomised(LEAN[name], seed=5)
    assert agree(numbers(loaded, True, tile), numbers(loaded, False))


def swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Cosines for sines."""
    return lambda joined, rotation, *rest: operation(joined, rotation[::-1], *rest)


def shifted(operation: Callable[..., Any]) -> Callable[..., Any]:
    """K/V one slot further on."""
    return lambda joined, rotation, norms, eps, slots, layer: operation(
        joined, rotation, norms, eps, (slots + 1) % len(layer[0]), layer
    )


def without_norms(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Queries and keys as they come."""
    return lambda joined, rotation, _norms, *rest: operation(joined, rotation, None, *rest)


WRONG = {
    "swapped": ("rotate_and_write", swapped),
    "shifted": ("rotate_and_write", shifted),
    "without norms": ("rotate_and_write", without_norms),
    "norm of nothing": ("norm", lambda f: lambda hidden, weight, eps: f(hidden, torch.ones_like(weight), eps)),
    "up and gate": ("gate", lambda f: lambda joined: f(joined.roll(joined.shape[1] // 2, 1))),
}


@pytest.mark.parametrize("wrong", grid(WRONG, {"swapped"}))
def test_wrong_kernels_are_found_out(wrong: str) -> None:
    """By the comparison, and by the trial at start, which would leave the plain operations in use."""
    name, spoil = WRONG[wrong]
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False)
    assert fused_layer.find_fault(tiny.DEVICE, torch.float32) is None
    with patch.object(triton_layer, name, spoil(getattr(triton_layer, name))):
        assert not agree(numbers(loaded, True), expected)
        assert fused_layer.find_fault(tiny.DEVICE, torch.float32) is not None


def changed(**operands: Callable[[Any], Any]) -> Callable[..., Any]:
    """A product of other operands."""
    names = ("hidden_TD", "norm_D", "eps", "weight_ND", "bias_N", "gated", "tile")

    def spoil(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            return operation(*(operands.get(name, lambda same: same)(one) for name, one in zip(names, given)))  # noqa: B905

        return run

    return spoil


WRONG_PRODUCTS = {
    "norm of nothing": changed(norm_D=torch.ones_like),
    "another mean": changed(eps=lambda eps: eps + 0.5),
    "up and gate": changed(weight_ND=lambda weight: weight.roll(len(weight) // 2, 0)),
    "rows as they come": lambda f: lambda hidden, *rest: f(hidden.flip(0), *rest),
}


@pytest.mark.parametrize("wrong", grid(WRONG_PRODUCTS, {"another mean"}))
def test_wrong_products_are_found_out(wrong: str) -> None:
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False)
    with patch.object(triton_product, "norm_product", WRONG_PRODUCTS[wrong](triton_product.norm_product)):
        assert not agree(numbers(loaded, True, 16), expected)
        assert fused_layer.find_product_fault(tiny.DEVICE, torch.float32) == "products differ"


@pytest.mark.slow
def test_sums_that_are_left_out_are_found_out() -> None:
    """A layer adds to what was there before it."""
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False)
    with patch.object(PackedLinear, "add_to", lambda self, sums, rows: sums.copy_(self(rows))):
        assert not agree(numbers(loaded, True), expected)


@pytest.mark.slow
def test_biases_that_are_left_out_are_found_out() -> None:
    loaded = randomised(LEAN["llama, biases"], seed=5)
    expected = numbers(loaded, False)
    without = changed(bias_N=lambda _: None)(triton_product.norm_product)
    with patch.object(triton_product, "norm_product", without):
        assert not agree(numbers(loaded, True, 16), expected)
        assert fused_layer.find_product_fault(tiny.DEVICE, torch.float32) == "products differ"


def products(decoder: LeanDecoder) -> list[fused_layer.NormedProduct]:
    return [product for layer in decoder._layers for product in (layer.normed_qkv, layer.normed_gate_up)]


def test_tiles_are_those_that_are_measured_to_be_fastest() -> None:
    """Of many rows none, and none that gain nothing."""
    decoder = LeanDecoder(randomised(LEAN["llama"], seed=5).model)
    width = decoder._layers[0].qkv.shape[1]
    seen: list[tuple[bool, int, int]] = []

    def timer_of(work: Any) -> fused_layer.Timer:
        tried, hidden_TD, _, tile = work.args
        assert hidden_TD.shape[1] == width
        seen.append((tried[0].gated, len(hidden_TD), tile))
        taken_s = {0: 1.0, 16: 0.99, 32: 1.5, 64: 0.5 if tried[0].gated and len(hidden_TD) == 32 else 1.01}[tile]
        times = iter([10 * taken_s, taken_s, taken_s / 10, taken_s, taken_s])
        return lambda: next(times)

    tiles = fused_layer.fastest_tiles(products(decoder), 1e-5, timer_of)
    assert tiles == {(True, 32): 64}
    assert (True, 64, 16) not in seen
    assert len(seen) == len(set(seen)) == 2 * (4 + 4 + 4 + 3)
    found = [fused_layer.tile_of(tiles, gated, rows) for gated in (True, False) for rows in (1, 16, 17, 32, 33, 65)]
    assert found == [0, 0, 64, 64, 0, 0] + [0] * 6
    half = [product._replace(weight_ND=product.weight_ND.half()) for product in products(decoder)]
    assert fused_layer.fastest_tiles(half, 1e-5, timer_of) == {}


@pytest.mark.parametrize("rows", grid([5, 21, 40], {21}))
def test_kernels_of_any_number_of_rows_are_tried(rows: int) -> None:
    """The wrong variant: a kernel that is wrong for the rows of one size alone."""
    right = triton_product.norm_product

    def wrong(hidden_TD: Any, *rest: Any) -> Any:
        result = right(hidden_TD, *rest)
        return result + 1 if triton_product.rows_of(len(hidden_TD)) == triton_product.rows_of(rows) else result

    with patch.object(triton_product, "norm_product", wrong):
        assert fused_layer.find_product_fault(tiny.DEVICE, torch.float32) == "products differ"


def test_models_are_tried_with_rows_of_every_kernel() -> None:
    """What `pack` is given to try a model with makes passes of every size, where kernels attend."""
    loaded = randomised(LEAN["llama"], seed=5)
    way = probe.BackendChoice(LeanDecoder(loaded.model), paged=True)
    seen = []
    run = LeanDecoder.logits

    def noted(self: LeanDecoder, token_ids_T: Any, *rest: Any) -> Any:
        seen.append(triton_product.rows_of(len(token_ids_T)))
        return run(self, token_ids_T, *rest)

    with patch.object(LeanDecoder, "logits", noted):
        assert probe.runs(loaded, find_kv_shape(loaded), way)
    assert {16, 32, 64} <= set(seen)


@pytest.mark.skipif(tiny.DEVICE.type != "cuda", reason="records passes")
def test_recorded_passes_give_the_same_numbers_with_any_tile() -> None:
    """In bfloat16, of a width that takes several turns of a program's loop."""
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 512, "intermediate_size": 640})
    loaded = tiny.load_model(config, 5)
    loaded.model.to(torch.bfloat16)
    shape = find_kv_shape(loaded)
    found = []
    for tile in (0, 16, 32, 64):
        decoder = LeanDecoder(loaded.model)
        decoder.tiles = tiles_from(tile)
        runner = ModelRunner(
            loaded.model, shape, 200, PAGE, loaded.vocab_size, decoder, paged=True, replayed=True, most_blocks=40
        )
        runner.record(4, print)
        prompts, steps = passes()
        runner.forward(prompts[:4])
        found.append(torch.cat([runner.forward(steps[:count]) for count in (1, 2, 4)]))
    for other in found[1:]:
        assert probe.distance(other, found[0], torch.bfloat16) < 1


@pytest.mark.skipif(tiny.DEVICE.type != "cuda", reason="times recorded graphs")
def test_a_device_measures_its_tiles() -> None:
    decoder = LeanDecoder(randomised(LEAN["llama"], seed=5).model)
    assert set(fused_layer.fastest_tiles(products(decoder), 1e-5).values()) <= {16, 32, 64}


@pytest.mark.parametrize("holds", [True, False])
def test_tiles_that_change_the_logits_are_not_used(holds: bool, caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(lean, "use_kernels", lambda *_: True):
        decoder = LeanDecoder(randomised(LEAN["llama"], seed=5).model)
    with patch.object(lean, "fastest_tiles", lambda *_: {(True, 16): 32}):
        decoder.pack("auto", Choices(NOWHERE, print), lambda: holds and decoder.tiles == {(True, 16): 32})
    assert decoder.tiles == ({(True, 16): 32} if holds else {})
    assert bool(caplog.records) is not holds


@pytest.mark.parametrize("dtype", grid([torch.float32, torch.bfloat16], {torch.bfloat16}))
def test_products_are_tried_before_they_are_used(dtype: torch.dtype) -> None:
    assert fused_layer.find_product_fault(tiny.DEVICE, dtype) is None
    decoder = LeanDecoder(randomised(LEAN["llama"], seed=5).model)
    spoilt = WRONG_PRODUCTS["rows as they come"](triton_product.norm_product)
    with (
        patch.object(triton_product, "norm_product", spoilt),
        pytest.raises(RuntimeError, match="products differ"),
    ):
        fused_layer.fastest_tiles(products(decoder), 1e-5, lambda _: lambda: 1.0)


def test_a_device_that_records_nothing_computes_them_apart(caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(lean, "use_kernels", lambda *_: True):
        decoder = LeanDecoder(randomised(LEAN["llama"], seed=5).model)
    with patch.object(torch.cuda, "current_stream", side_effect=RuntimeError("no recording")):
        decoder.pack("auto", Choices(NOWHERE, print), lambda: True)
    assert decoder.tiles == {}
    assert "no recording" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_types_are_rounded_as_norms_and_gates_are(dtype: torch.dtype) -> None:
    assert fused_layer.find_fault(tiny.DEVICE, dtype) is None
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype).to(tiny.DEVICE) for shape in ((7, 96), (96,)))
    normed = triton_layer.norm(hidden, weight, 1e-6)
    place = torch.finfo(dtype).eps
    expected = rms_norm(hidden.float(), (96,), weight.float(), 1e-6).to(dtype)
    assert torch.allclose(normed.float(), expected.float(), rtol=place, atol=1e-6)
    gated = (silu(hidden[:, :48].float()) * hidden[:, 48:].float()).to(dtype)
    assert torch.allclose(triton_layer.gate(hidden).float(), gated.float(), rtol=place, atol=1e-6)


def test_without_a_device_plain_operations_serve() -> None:
    if tiny.DEVICE.type == "cpu":
        assert not fused_layer.use_kernels(tiny.DEVICE, torch.float32)
