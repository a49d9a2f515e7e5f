"""Layers by kernels give the numbers of plain operations: in Triton's interpreter on a CPU, compiled on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import rms_norm, silu

triton_layer = pytest.importorskip("engine.execution.triton_layer")

from engine.execution import fused_layer, lean  # noqa: E402
from engine.execution.lean import LeanDecoder  # noqa: E402
from engine.execution.probe import find_kv_shape  # noqa: E402
from engine.execution.runner import ModelRunner  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.execution.test_groups import passes  # noqa: E402
from tests.execution.test_lean import LEAN, randomised  # noqa: E402

PAGE = 4
Numbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def numbers(loaded: Any, by_kernels: bool) -> Numbers:
    """Logits of a step of single tokens and trees behind prompts; all keys, all values."""
    with patch.object(lean, "use_kernels", lambda *_: by_kernels):
        decoder = LeanDecoder(loaded.model)
    runner = ModelRunner(loaded.model, find_kv_shape(loaded), 200, PAGE, loaded.vocab_size, decoder, paged=by_kernels)
    prompts, steps = passes()
    # Two trees and a short prompt: the interpreter takes its time.
    runner.forward([prompts[2], prompts[8], prompts[3]])
    return runner.forward([steps[2], steps[8], steps[3]]), runner.storage.keys, runner.storage.values


def agree(found: Numbers, expected: Numbers) -> bool:
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-4) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["llama, biases", "llama, tied, wide heads", "qwen3"])
def test_models_get_the_numbers_of_the_plain_operations(name: str) -> None:
    loaded = randomised(LEAN[name], seed=5)
    assert agree(numbers(loaded, True), numbers(loaded, False))


def swapped(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Cosines for sines."""
    return lambda joined, rotation, *rest: operation(joined, rotation[::-1], *rest)


def shifted(operation: Callable[..., Any]) -> Callable[..., Any]:
    """K/V one slot further on."""
    return lambda joined, rotation, norms, eps, slots, layer: operation(
        joined, rotation, norms, eps, (slots + 1) % len(layer[0]), layer
    )


def forgetful(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The norm of what was there before the sum."""
    return lambda hidden, added, weight, eps: (
        operation(hidden, added, weight, eps)[0],
        operation(hidden, None, weight, eps)[1],
    )


def without_norms(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Queries and keys as they come."""
    return lambda joined, rotation, _norms, *rest: operation(joined, rotation, None, *rest)


WRONG = {
    "swapped": ("rotate_and_write", swapped),
    "shifted": ("rotate_and_write", shifted),
    "without norms": ("rotate_and_write", without_norms),
    "forgetful": ("add_norm", forgetful),
    "up and gate": ("gate", lambda f: lambda joined: f(joined.roll(joined.shape[1] // 2, 1))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_kernels_are_found_out(wrong: str) -> None:
    """By the comparison, and by the trial at start, which would leave the plain operations in use."""
    name, spoil = WRONG[wrong]
    loaded = randomised(LEAN["qwen3"], seed=5)
    expected = numbers(loaded, False)
    assert fused_layer.find_fault(tiny.DEVICE, torch.float32) is None
    with patch.object(triton_layer, name, spoil(getattr(triton_layer, name))):
        assert not agree(numbers(loaded, True), expected)
        assert fused_layer.find_fault(tiny.DEVICE, torch.float32) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_types_are_rounded_as_sums_and_norms_are(dtype: torch.dtype) -> None:
    assert fused_layer.find_fault(tiny.DEVICE, dtype) is None
    generator = torch.Generator().manual_seed(4)
    hidden, added, weight = (
        torch.randn(shape, generator=generator).to(dtype).to(tiny.DEVICE) for shape in ((7, 96), (7, 96), (96,))
    )
    summed, normed = triton_layer.add_norm(hidden, added, weight, 1e-6)
    # The interpreter cuts bfloat16 off where a device rounds it.
    cut = dtype == torch.bfloat16 and tiny.DEVICE.type == "cpu"
    place = torch.finfo(dtype).eps
    assert torch.allclose(summed.float(), (hidden + added).float(), rtol=place if cut else 0, atol=0)
    expected = rms_norm(summed.float(), (96,), weight.float(), 1e-6).to(dtype)
    assert torch.allclose(normed.float(), expected.float(), rtol=place, atol=1e-6)
    gated = (silu(hidden[:, :48].float()) * hidden[:, 48:].float()).to(dtype)
    assert torch.allclose(triton_layer.gate(hidden).float(), gated.float(), rtol=place, atol=1e-6)


def test_without_a_device_plain_operations_serve() -> None:
    if tiny.DEVICE.type == "cpu":
        assert not fused_layer.use_kernels(tiny.DEVICE, torch.float32)
