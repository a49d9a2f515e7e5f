"""Products of quantised weights in the lean decoder give torchao's numbers.

fp8 has the layout of a device, which a CPU computes by torch's own product; Triton's interpreter
rounds its rows. On a device the same tests use its own product and kernel.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.cuda import attention_kernel, layer_check, layer_products, lean_decoder
from engine.cuda.layer_products import Float8Product, ModuleProduct, PlainProduct
from engine.cuda.lean_decoder import LeanDecoder
from engine.errors import LoadError
from engine.models import quantising
from engine.models.backend import Backend, TransformersBackend
from engine.models.importing import import_torchao
from engine.models.runner import ModelRunner
from engine.start import loading
from engine.start.loading import LoadedModel, load
from engine.start.probe import BACKENDS, choose_backend, find_kv_shape, probe
from tests.attention.test_groups import passes
from tests.engine.tiny import DEVICE
from tests.grid import grid
from tests.models.test_quantised import layouts_of_a_device, stored_as_compressed_tensors, stored_by_torchao, written
from tests.wrong import instead

CPU = torch.device("cpu")
WIDE = {"initializer_range": 0.05}
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="a device has other sums for other shapes")
in_torch = pytest.mark.usefixtures("attention_in_torch")
by_triton = pytest.mark.skipif(not IS_INTERPRETED and DEVICE.type == "cpu", reason="Triton cannot run")

pytestmark = pytest.mark.filterwarnings("ignore")


@contextlib.contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Let Triton's interpreter convert float32 as a device does."""
    if not IS_INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    to = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}

    def convert(before: Any, numbers: Any, from_type: Any, to_type: Any, mode: Any) -> Any:
        if str(from_type) != "fp32" or str(to_type) not in to:
            return before(numbers, from_type, to_type, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(to[str(to_type)])
        return rounded.view(torch.uint8 if rounded.itemsize == 1 else torch.uint16).numpy()

    with instead(interpreter, "_convert_float", convert):
        yield


def in_fp8(folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> LoadedModel:
    """A model whose weights a device would have in fp8, with a scale for each row of a pass."""
    plain = written(folder, torch.bfloat16, **WIDE, **more)
    with monkeypatch.context() as once:
        if DEVICE.type == "cpu":
            layouts_of_a_device(once)
        return load(plain, None, "bfloat16", DEVICE, weights="fp8")


def in_int4(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model in the layout that a CPU has for int4."""
    return load(written(folder), None, "float32", CPU, weights="int4")


def in_int8(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A checkpoint of torchao."""
    import_torchao()
    from torchao.quantization import Int8WeightOnlyConfig

    plain = written(folder / "plain")
    return load(stored_by_torchao(folder / "int8", plain, torch.float32, Int8WeightOnlyConfig()), None, "auto", CPU)


def with_biases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model of fp8 with biases in attention, that are not 0."""
    loaded = in_fp8(folder, monkeypatch, attention_bias=True)
    for name, parameter in loaded.model.named_parameters():
        if "bias" in name:
            parameter.data += torch.linspace(-1, 1, len(parameter)).bfloat16().to(DEVICE)
    return loaded


def in_compressed_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A checkpoint of compressed-tensors in fp8, as a device has it."""
    pytest.importorskip("compressed_tensors")
    stored = stored_as_compressed_tensors(folder / "fp8", written(folder / "plain", torch.bfloat16, **WIDE))
    with monkeypatch.context() as once:
        layouts_of_a_device(once)
        once.setattr(loading, "multiplies_float8", lambda _: True)
        return load(stored, None, "bfloat16", CPU)


LAYOUTS = {
    "compressed-tensors": (in_compressed_tensors, Float8Product),
    "fp8": (in_fp8, Float8Product),
    "fp8, biases": (with_biases, Float8Product),
    "int4": (in_int4, ModuleProduct),
    "int8": (in_int8, ModuleProduct),
}


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_lean_decoder_gives_transformers_numbers(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kind = LAYOUTS[layout]
    loaded = make(tmp_path, monkeypatch)
    shape, before = find_kv_shape(loaded), loaded.weight_bytes
    of_transformers = probe(loaded, shape, TransformersBackend(loaded.model))
    decoder = choose_backend(loaded, shape, backends=BACKENDS[-2:]).backend
    assert isinstance(decoder, LeanDecoder)
    assert isinstance(decoder._layers[0].qkv, kind)
    assert probe(loaded, shape, decoder) < max(0.05, 1.5 * of_transformers)
    assert loaded.weight_bytes == before, "nothing is stored twice"


def joined_in_order(joined: Any, modules: Any, places: list[int]) -> Any:
    return joined([modules[place] for place in places] if len(modules) == len(places) else modules)


WRONG: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "up before gate": (layer_products, "_joined", partial(joined_in_order, places=[1, 0])),
    "k before q": (layer_products, "_joined", partial(joined_in_order, places=[1, 0, 2])),
    "no sum": (Float8Product, "add_to", lambda _, product, sums, rows: sums.copy_(product(rows))),
}


@pytest.mark.sampled
@in_torch
@pytest.mark.parametrize("wrong", grid(WRONG, WRONG.keys() - {"no sum"}))
def test_the_probe_finds_wrong_products(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model runs through transformers. Layers by kernels add in place, and others do not."""
    loaded = in_fp8(tmp_path, monkeypatch, num_key_value_heads=4)
    shape = find_kv_shape(loaded)
    by_kernels = wrong == "no sum"
    with instead(lean_decoder, "use_kernels", lambda *_: by_kernels), instead(*WRONG[wrong]):
        decoder = LeanDecoder(loaded.model)
        if not by_kernels:
            with pytest.raises(LoadError, match="differ from plain transformers"):
                probe(loaded, shape, decoder)
        else:
            assert not close(by_pass(loaded, decoder), by_pass(loaded, TransformersBackend(loaded.model)))


def by_pass(loaded: LoadedModel, backend: Backend) -> Tensor:
    """Logits of a step of a tree and a single token, after their prompts."""
    kernel = attention_kernel if getattr(backend, "use_kernels", False) else None
    runner = ModelRunner(loaded.model, find_kv_shape(loaded), 200, 4, loaded.vocab_size, backend, paged_kernel=kernel)
    prompts, steps = passes()
    with rounding_to_nearest():
        runner.forward([prompts[2], prompts[8]])
        return runner.forward([steps[2], steps[8]])


def close(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by rounding rows to fp8: 0.16 standard deviations."""
    return bool((found - expected).abs().max() < 0.3 * expected.std())


def by_kernels(loaded: LoadedModel) -> LeanDecoder:
    """The decoder as it is on a device."""
    with instead(lean_decoder, "use_kernels", lambda *_: True), instead(layer_products, "use_float8", lambda *_: True):
        return LeanDecoder(loaded.model)


@pytest.mark.slow
@in_torch
@by_triton
def test_layers_by_kernels_give_the_numbers_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = in_fp8(tmp_path, monkeypatch)
    expected = by_pass(loaded, TransformersBackend(loaded.model))
    assert close(by_pass(loaded, by_kernels(loaded)), expected)
    with instead(layer_kernels(), "round_rows", lambda round_rows, rows: round_rows(rows.roll(1, 1))):
        assert not close(by_pass(loaded, by_kernels(loaded)), expected)


def layer_kernels() -> Any:
    return pytest.importorskip("engine.cuda.layer_kernels")


@by_triton
@pytest.mark.parametrize("width", [64, 480, 12289])
def test_rows_are_rounded_as_by_torchao(width: int) -> None:
    """To the bit, however long they are; and each by itself."""
    import_torchao()
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, width, generator=generator) * torch.rand(6, width, generator=generator) ** 8
    rows_TK = rows.bfloat16().to(DEVICE)
    expected_T1 = _choose_scale_float8(rows_TK, [1, width])
    with rounding_to_nearest():
        rounded_TK, scales_T1 = layer_kernels().round_rows(rows_TK)
        alone_1K, _ = layer_kernels().round_rows(rows_TK[4:5])
    assert torch.equal(scales_T1, expected_T1)
    assert torch.equal(rounded_TK.float(), _quantize_affine_float8(rows_TK, expected_T1).float())
    assert torch.equal(rounded_TK[4:5].float(), alone_1K.float())


@by_triton
def test_rounding_keeps_zeros_and_nans() -> None:
    """torchao divides zeros by zero: rows of padding attend to nothing."""
    rows_TK = torch.linspace(-3, 3, 128, device=DEVICE).view(2, 64).bfloat16().repeat(2, 1)
    rows_TK[1] = 0
    rows_TK[2, 5], rows_TK[3, 7] = float("nan"), float("inf")
    with rounding_to_nearest():
        rounded_TK, scales_T1 = layer_kernels().round_rows(rows_TK)
    product_T = (rounded_TK.float() * scales_T1).sum(1)
    assert product_T[1] == 0
    assert product_T.isnan().tolist() == [False, False, True, True]


ROUNDED_WRONGLY = {
    "one scale": lambda round_rows, rows: (round_rows(rows)[0], round_rows(rows)[1].amax().expand(len(rows), 1)),
    "doubled": lambda round_rows, rows: (round_rows(rows)[0], 2 * round_rows(rows)[1]),
    "other rows": lambda round_rows, rows: (round_rows(rows)[0].flip(0), round_rows(rows)[1]),
}


@by_triton
@pytest.mark.parametrize("wrong", ROUNDED_WRONGLY)
def test_the_trial_at_start_finds_wrong_roundings(wrong: str) -> None:
    with rounding_to_nearest():
        assert layer_check.find_rounding_fault(DEVICE, torch.bfloat16) is None
        with instead(layer_kernels(), "round_rows", ROUNDED_WRONGLY[wrong]):
            assert layer_check.find_rounding_fault(DEVICE, torch.bfloat16) is not None


@interpreted
def test_a_product_is_that_of_torchao_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its rows rounded by our kernel; and unrounded, that of the weight's numbers."""
    loaded = with_biases(tmp_path, monkeypatch)
    attention = loaded.model.model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    rows_TK = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    expected = torch.cat([module(rows_TK) for module in modules], -1)
    with rounding_to_nearest(), instead(layer_products, "use_float8", lambda *_: True):
        product = layer_products.product(modules, use_kernels=True)
        assert torch.equal(product(rows_TK), expected)
        assert torch.equal(product(rows_TK)[2:3], product(rows_TK[2:3]))
    with quantising.rounding_off(loaded.model):
        exact = product(rows_TK)
    assert isinstance(product, Float8Product)
    assert torch.equal(exact, linear(rows_TK, product.weight_NK.dequantize(), product.bias_N))
    assert not torch.equal(exact, expected)


def test_a_stored_fp8_layer_gives_the_product_of_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors unpacks the same weights; adopted ones stay as stored."""
    adopted = in_compressed_tensors(tmp_path, monkeypatch)
    unpacked = load(str(tmp_path / "fp8"), None, "bfloat16", CPU)
    rows_TK = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    find_kv_shape(unpacked)  # the first pass unpacks
    found, expected = (one.model.model.layers[0].mlp.up_proj for one in (adopted, unpacked))
    assert quantising.is_quantised(found.weight)
    assert not quantising.is_quantised(expected.weight)
    assert torch.allclose(found.weight.dequantize().float(), expected.weight.float(), rtol=2**-7)
    exact = linear(rows_TK.float(), expected.weight.float())
    # Unpacked weights are in the type that this processor computes in.
    for layer, dtype in ((found, torch.bfloat16), (expected, unpacked.model.dtype)):
        assert (layer(rows_TK.to(dtype)).float() - exact).abs().max() < 0.05 * exact.abs().max()
    assert adopted.weight_bytes < 0.7 * unpacked.weight_bytes


def stored(folder: Path) -> LoadedModel:
    """A model in fp8 before its first pass, which unpacks it."""
    pytest.importorskip("compressed_tensors")
    plain = written(folder / "plain", torch.bfloat16, **WIDE)
    return load(stored_as_compressed_tensors(folder / "fp8", plain), None, "bfloat16", CPU)


@pytest.mark.parametrize("lacks", ["forward", "quantization_status", "weight_scale"])
def test_a_model_with_a_layer_of_another_release_is_left_as_it_is(lacks: str, tmp_path: Path) -> None:
    model = stored(tmp_path).model
    delattr(model.model.layers[1].mlp.up_proj, lacks)
    quantising.adopt_float8(model)
    assert not quantising.has_quantised(model)
    assert hasattr(model, "ct_decompress_hook")


def test_an_error_leaves_no_layer_converted(tmp_path: Path) -> None:
    import_torchao()
    loaded, seen = stored(tmp_path), []
    before = {name: weight.dtype for name, weight in loaded.model.named_parameters()}

    def failing(right: Any, *operands: Any, **named: Any) -> Any:
        seen.append(right)
        if len(seen) == 3:
            raise TypeError
        return right(*operands, **named)

    with instead("torchao.quantization", "Float8Tensor", failing), pytest.raises(TypeError):
        quantising.adopt_float8(loaded.model)
    assert len(seen) == 3
    assert {name: weight.dtype for name, weight in loaded.model.named_parameters()} == before
    find_kv_shape(loaded)
    up_proj = loaded.model.model.layers[0].mlp.up_proj
    assert up_proj.weight.dtype == loaded.model.dtype, "the first pass unpacks as before"


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_plain_product_is_added_with_its_bias(has_bias: bool) -> None:
    weight_NK, rows_TK, sums_TN = (torch.linspace(-2, 2, 6 * n).view(n, -1) for n in (3, 2, 1))
    sums_TN = sums_TN.view(2, 3)
    bias_N = torch.tensor([1.0, 2.0, 3.0]) if has_bias else None
    expected = sums_TN + linear(rows_TK, weight_NK.view(3, 6), bias_N)
    PlainProduct(weight_NK.view(3, 6), bias_N).add_to(sums_TN, rows_TK)
    assert torch.allclose(sums_TN, expected)


OTHER_ROWS = [
    {"float8_dtype": torch.float8_e5m2},
    {"granularity": "PerTensor"},
    {"hp_value_ub": 3.0},
]


@pytest.mark.parametrize("other", OTHER_ROWS, ids=str)
def test_rows_that_torchao_rounds_otherwise_are_left_to_it(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = in_fp8(tmp_path, monkeypatch).model.model.layers[0].mlp.up_proj.weight
    assert quantising.rounds_to_float8(weight)
    for name, value in other.items():
        setattr(weight.act_quant_kwargs, name, value)
    assert not quantising.rounds_to_float8(weight)
