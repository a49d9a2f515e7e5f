"""Packed linear layers: the plain ones' numbers, and plain where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import packing
from engine.models.backend import TransformersBackend
from engine.models.packing import PackedLinear, pack, take_over
from engine.start.probe import find_kv_shape, probe
from tests.cuda.test_lean_decoder import randomised
from tests.engine import tiny
from tests.models.test_architectures import CONFIGS
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="weights are packed on a CPU only")


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_layers_run_packed(name: str) -> None:
    """The hook path with packed layers against plain transformers, which is computed first."""
    loaded = randomised(CONFIGS[name](), seed=3)
    prompt = torch.arange(5, 25).unsqueeze(0)
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        before = loaded.model(input_ids=prompt, use_cache=False).logits
        packed_bytes = TransformersBackend(loaded.model).prepare(lambda: True)
        after = loaded.model(input_ids=prompt, use_cache=False).logits
    assert packed_bytes > 0
    assert torch.allclose(before, after, atol=1e-4, rtol=1e-4)
    loaded.model.set_attn_implementation("polydraft_tree")
    assert probe(loaded, find_kv_shape(loaded)) < 0.5


def test_packing_gives_the_plain_weights_up() -> None:
    loaded = tiny.llama(1)
    plain_bytes = loaded.weight_bytes
    packed_bytes = pack(take_over(loaded.model))
    # Weights are there in one form only, but for a head that the embedding shares.
    assert loaded.weight_bytes < 0.5 * plain_bytes
    assert loaded.weight_bytes + packed_bytes < 1.6 * plain_bytes


def test_wrong_packed_numbers_keep_a_weight_plain() -> None:
    product = PackedLinear(torch.randn(16, 8))
    with instead(packing, "_onednn_linear", lambda linear, *operands: linear(*operands) * 1.01):
        assert pack([product]) == 0
    assert product.weight.shape == (16, 8)


def test_without_the_operator_a_weight_stays_plain() -> None:
    def missing(*_: Any) -> None:
        raise AttributeError("no such operator")

    product = PackedLinear(torch.randn(16, 8))
    expected = product(torch.ones(1, 3, 8))
    with instead(packing, "_reorder", missing):
        assert pack([product]) == 0
        assert torch.equal(product(torch.ones(1, 3, 8)), expected)


def test_a_model_that_does_not_run_packed_becomes_plain_again() -> None:
    loaded = tiny.llama(1)
    products = list(take_over(loaded.model))
    before = [product.weight.clone() for product in products]
    assert pack(products, works=lambda: False) == 0
    for product, weight in zip(products, before, strict=True):
        assert torch.equal(product.weight, weight)
        assert all(module.weight.shape == weight.shape for module in product._modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_have_the_plain_numbers(dtype: torch.dtype) -> None:
    product = PackedLinear(torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype))
    if not packing._can_pack(product.weight):
        pytest.skip(f"this processor does not pack {dtype}")
    rows = torch.randn(2, 600, 32).to(dtype)
    expected = product(rows)
    pack([product])
    for num_rows in (1, 2, 3, 4, 13, 600):
        result = product(rows[:, :num_rows])
        assert result.shape == (2, num_rows, 48)
        assert torch.allclose(result, expected[:, :num_rows], atol=2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert product(rows[:, :0]).shape == (2, 0, 48)


def test_memory_does_not_grow_with_the_numbers_of_rows_met() -> None:
    """Kernels for each of 500 numbers would take 250 MB."""
    product = PackedLinear(torch.randn(1024, 64))
    pack([product])
    rows = torch.ones(520, 64)
    product(rows)
    before = resident_bytes()
    for num_rows in range(1, 520):
        product(rows[:num_rows])
    assert resident_bytes() - before < 50 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
