"""Layers by kernels give the numbers of plain operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

layer_kernels = pytest.importorskip("engine.cuda.layer_kernels")


from engine.attention.inputs import build  # noqa: E402
from engine.attention.tensors import NORMED  # noqa: E402
from engine.cuda import attention_kernel, layer_check, layer_products, lean_decoder  # noqa: E402
from engine.cuda.lean_decoder import LeanDecoder  # noqa: E402
from engine.models.runner import ModelRunner  # noqa: E402
from engine.start.probe import find_kv_shape  # noqa: E402
from tests.attention.test_groups import passes  # noqa: E402
from tests.cuda.test_lean_decoder import LEAN, randomised  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.grid import grid  # noqa: E402
from tests.wrong import instead  # noqa: E402

PAGE = 4
TAPS = (0, 2, 3, NORMED)
IN_TORCH = pytest.mark.usefixtures("attention_in_torch")
Numbers = tuple[torch.Tensor, ...]


def numbers(loaded: Any, by_kernels: bool, longest: int = 0) -> Numbers:
    """Logits, keys, values and hidden states of a step of a token and a tree."""
    with instead(lean_decoder, "use_kernels", lambda *_: by_kernels):
        decoder = LeanDecoder(loaded.model, longest)
    shape = replace(find_kv_shape(loaded), hidden_dim=loaded.model.config.hidden_size, taps=TAPS)
    kernel = attention_kernel if by_kernels else None
    runner = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, decoder, paged_kernel=kernel)
    prompts, steps = passes()
    # A tree and a short prompt: the interpreter takes its time.
    runner.forward([prompts[2], prompts[8]])
    logits_NV, storage = runner.forward([steps[2], steps[8]]), runner.storage
    assert storage.hidden is not None
    return logits_NV, storage.keys, storage.values, storage.hidden


def agree(found: Numbers, expected: Numbers) -> bool:
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-4) for one, other in zip(found, expected, strict=True))


@pytest.mark.sole("kernels of layers")
@pytest.mark.parametrize("name", grid(("llama, biases", "llama, tied, wide heads", "qwen3"), {"llama, biases"}))
def test_models_get_the_numbers_of_the_plain_operations(name: str) -> None:
    loaded = randomised(LEAN[name], seed=5)
    assert agree(numbers(loaded, True), numbers(loaded, False))


@pytest.mark.slow
@IN_TORCH
def test_angles_reach_as_far_as_the_served_texts() -> None:
    """Fewer positions than a pass has would be noticed."""
    loaded = randomised(LEAN["llama"], seed=5)
    expected = numbers(loaded, False)
    prompts, steps = passes()
    end = max(int(build(some, PAGE).positions_T.max()) + 1 for some in ([prompts[2], prompts[8]], [steps[2], steps[8]]))
    assert agree(numbers(loaded, True, end), expected)
    assert not agree(numbers(loaded, True, end - 2), expected)


def swapped(operation: Any, joined: Any, rotation: Any, *rest: Any) -> Any:
    """Cosines for sines."""
    return operation(joined, rotation[::-1], *rest)


def shifted(
    operation: Any, joined: Any, rotation: Any, positions: Any, norms: Any, eps: float, slots: Any, layer: Any
) -> Any:
    """K/V one slot further on."""
    return operation(joined, rotation, positions, norms, eps, (slots + 1) % len(layer[0]), layer)


def without_norms(operation: Any, joined: Any, rotation: Any, positions: Any, _norms: Any, *rest: Any) -> Any:
    """Queries and keys as they come."""
    return operation(joined, rotation, positions, None, *rest)


def at_the_next(operation: Any, joined: Any, rotation: Any, positions: Any, *rest: Any) -> Any:
    """Angles of the next positions."""
    return operation(joined, rotation, positions + 1, *rest)


WRONG = {
    "swapped": ("rotate_and_write", swapped),
    "the next position": ("rotate_and_write", at_the_next),
    "shifted": ("rotate_and_write", shifted),
    "without norms": ("rotate_and_write", without_norms),
    "norm of nothing": ("norm", lambda norm, hidden, weight, eps: norm(hidden, torch.ones_like(weight), eps)),
    "up and gate": ("gate", lambda gate, joined: gate(joined.roll(joined.shape[1] // 2, 1))),
}


@pytest.mark.slow
@IN_TORCH
@pytest.mark.parametrize("wrong", grid(WRONG, {"swapped"}))
def test_wrong_layer_kernels_are_rejected(wrong: str) -> None:
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False)
    assert layer_check.find_fault(tiny.DEVICE, torch.float32) is None
    with instead(layer_kernels, *WRONG[wrong]):
        assert not agree(numbers(loaded, True), expected)
        assert layer_check.find_fault(tiny.DEVICE, torch.float32) is not None


@pytest.mark.slow
@IN_TORCH
def test_omitted_sums_are_rejected() -> None:
    """A layer adds to what was there before it."""
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False)
    with instead(layer_products.PlainProduct, "add_to", lambda _, product, sums, rows: sums.copy_(product(rows))):
        assert not agree(numbers(loaded, True), expected)


@pytest.mark.slow
@IN_TORCH
def test_omitted_biases_are_rejected() -> None:
    loaded = randomised(LEAN["llama, biases"], seed=5)
    expected = numbers(loaded, False)
    with instead(layer_products.PlainProduct, "__call__", lambda _, product, rows: linear(rows, product.weight_NK)):
        assert not agree(numbers(loaded, True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_types_are_rounded_as_norms_and_gates_are(dtype: torch.dtype) -> None:
    assert layer_check.find_fault(tiny.DEVICE, dtype) is None
    generator = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype).to(tiny.DEVICE) for shape in ((7, 96), (96,)))
    normed = layer_kernels.norm(hidden, weight, 1e-6)
    place = torch.finfo(dtype).eps
    expected = rms_norm(hidden.float(), (96,), weight.float(), 1e-6).to(dtype)
    assert torch.allclose(normed.float(), expected.float(), rtol=place, atol=1e-6)
    gated = (silu(hidden[:, :48].float()) * hidden[:, 48:].float()).to(dtype)
    assert torch.allclose(layer_kernels.gate(hidden).float(), gated.float(), rtol=place, atol=1e-6)


def test_without_a_device_plain_operations_serve() -> None:
    if tiny.DEVICE.type == "cpu":
        assert not layer_check.use_kernels(tiny.DEVICE, torch.float32)
