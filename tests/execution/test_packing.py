"""Packed products: the plain ones' numbers, given up where they are not, and chosen by measured time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine.execution.products import BlockForm, OneDnnForm, PackedLinear, take_over

from engine.execution import packing, products
from engine.execution.lean import LeanDecoder
from engine.execution.packing import Choice, choose_from, choose_sizes, pack
from engine.execution.probe import find_kv_shape, probe, probe_ways
from engine.request import Speculation
from tests.engine import tiny
from tests.execution.test_architectures import CONFIGS
from tests.execution.test_lean import LEAN, randomised

CPU = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="weights are packed on a CPU only")
BLOCK = Speculation(rule="block", num_drafts=1, draft_length=3)


@CPU
@pytest.mark.parametrize("name", LEAN)
def test_a_lean_decoder_runs_packed(name: str) -> None:
    loaded = randomised(LEAN[name], seed=3)
    assert isinstance(probe_ways(loaded, find_kv_shape(loaded)).backend, LeanDecoder)
    plain_bytes = loaded.weight_bytes
    runs = [tiny.run(tiny.build(loaded, None), [tiny.request("a", range(5, 25))]).tokens]
    loaded = randomised(LEAN[name], seed=3)
    engine = tiny.build(loaded, None, prepack="always")
    runs.append(tiny.run(engine, [tiny.request("a", range(5, 25))]).tokens)
    assert runs[0] == runs[1]
    # Weights are there in one form only, but for a head that the embedding shares.
    assert loaded.weight_bytes < 0.5 * plain_bytes
    assert engine.facts.memory_plan["weights"] < 1.6 * plain_bytes


@CPU
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_layers_run_packed(name: str) -> None:
    """The hook path with packed layers against plain transformers, which is computed first."""
    loaded = randomised(CONFIGS[name](), seed=3)
    prompt = torch.arange(5, 25).unsqueeze(0)
    loaded.model.set_attn_implementation("eager")
    with torch.inference_mode():
        before = loaded.model(input_ids=prompt, use_cache=False).logits
        packed_bytes = pack(take_over(loaded.model), "always")
        after = loaded.model(input_ids=prompt, use_cache=False).logits
    assert packed_bytes > 0
    assert torch.allclose(before, after, atol=1e-4, rtol=1e-4)
    loaded.model.set_attn_implementation("polydraft_tree")
    assert probe(loaded, find_kv_shape(loaded)) < 0.5


@CPU
def test_speculation_gives_the_plain_answer_on_packed_weights() -> None:
    target = tiny.llama(1)
    engine = tiny.build(target, tiny.perturbed(target, 2, 0.05), prepack="always")
    requests = [tiny.request("plain", range(5, 25)), tiny.request("block", range(5, 25), BLOCK)]
    run = tiny.run(engine, requests)
    assert run.tokens["plain"] == run.tokens["block"]
    assert run.num_accepted > 0


@CPU
def test_wrong_packed_numbers_keep_a_model_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    right = products.onednn_linear
    monkeypatch.setattr(products, "onednn_linear", lambda rows, packed, bias=None: right(rows, packed, bias) * 1.01)
    product = PackedLinear(torch.randn(16, 8))
    assert pack([product], "always") == 0
    assert product.weight.shape == (16, 8)


def test_without_onednn_weights_lie_in_blocks_or_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fit blocks if the number of columns is a multiple of a block's, which depends on the processor."""

    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    numba_product = pytest.importorskip("engine.execution.numba_product")
    monkeypatch.setattr(packing, "reorder", missing)
    for num_columns, form in ((3 * numba_product.BLOCK, BlockForm), (numba_product.BLOCK + 1, type(None))):
        product = PackedLinear(torch.randn(num_columns, 8))
        expected = product(torch.ones(1, 3, 8))
        assert (pack([product], "always") > 0) == (form is BlockForm)
        assert type(product._form) is form
        assert torch.allclose(product(torch.ones(1, 3, 8)), expected, atol=1e-5)


@CPU
def test_a_product_runs_plain_below_its_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    product = PackedLinear(torch.randn(16, 8), torch.randn(16))
    expected = {n: product(torch.ones(1, n, 8)) for n in (3, 4)}
    product.pack(OneDnnForm(product.weight), 4)
    used = []
    right = products.onednn_linear
    monkeypatch.setattr(products, "onednn_linear", lambda rows, *rest: used.append(rows.shape) or right(rows, *rest))
    for n, plain in expected.items():
        assert torch.allclose(product(torch.ones(1, n, 8)), plain, atol=1e-5)
    assert used == [(1, 4, 8)]


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([0.5] * 8, 1),
        ([-0.5] * 8, 0),
        ([-0.8, 0.3, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1], 2),
        # Two forms of a weight must be worth their memory.
        ([-0.1, 0.3, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1], 1),
        ([0.01, -0.01] * 4, 0),
        ([-2, -2, -2, -2, -2, -2, 0.1, 0.1], 0),
    ],
)
def test_from_how_many_rows_on_it_is_packed(gains: list[float], expected: int) -> None:
    assert len(gains) == len(packing._NUM_ROWS)
    assert choose_from(gains)[0] == expected


@CPU
def test_measuring_chooses_something_that_agrees() -> None:
    alike = [PackedLinear(torch.randn(64, 32)) for _ in range(3)]
    plain = [product.weight.clone() for product in alike]
    pack(alike, "auto")
    rows = torch.randn(5, 32)
    for product, weight in zip(alike, plain, strict=True):
        assert torch.allclose(product(rows), rows @ weight.T, atol=1e-4)


@CPU
def test_a_model_that_looks_at_its_weights_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code multiplies by a layer's weight itself; packed, there is none."""
    config = CONFIGS["gemma2-softcap"]
    expected = tiny.run(tiny.build(randomised(config(), seed=3), None), [tiny.request("a", range(5, 25))]).tokens
    loaded = randomised(config(), seed=3)
    mlp = loaded.model.model.layers[0].mlp
    forward = type(mlp).forward

    def looking(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        assert torch.nn.functional.linear(hidden, self.up_proj.weight).shape[-1] == 48
        return forward(self, hidden)

    monkeypatch.setattr(type(mlp), "forward", looking)
    engine = tiny.build(loaded, None, prepack="always")
    assert mlp.up_proj.weight.shape == (48, 32)
    assert tiny.run(engine, [tiny.request("a", range(5, 25))]).tokens == expected


def test_few_numbers_of_rows_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one is filled up or taken in turns, and gives the same numbers."""
    met = set()

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        met.add(len(rows))
        return torch.nn.functional.linear(rows, weight, bias)

    rows, weight, bias = torch.randn(1300, 6), torch.randn(5, 6), torch.randn(5)
    expected = torch.nn.functional.linear(rows, weight, bias)
    for num_rows in (0, *range(1, 300), *range(300, 1300, 29), 1024, 1025, 1300):
        result = products.in_sizes(product, rows[:num_rows], num_rows, weight, bias)
        assert torch.allclose(result, expected[:num_rows], atol=1e-6)
    nested = products.in_sizes(product, rows[:34].view(2, 17, 6), 34, weight, bias)
    assert torch.allclose(nested, expected[:34].view(2, 17, 5), atol=1e-6)
    assert met - {0} <= set(products.SIZES)
    assert all(size <= 1.125 * num_rows for num_rows, size in enumerate(products.SIZE_OF) if num_rows > 8)


@pytest.mark.parametrize(
    ("micros", "filling", "expected"),
    [
        # All alike: to the next number that there is, no further.
        ([10, 10, 10, 10, 10, 10], 1, [0, 1, 2, 4, 4, 5, 6, 8, 8]),
        # Five rows are the fastest.
        ([72, 84, 55, 53, 57, 69], 1, [0, 5, 5, 4, 4, 5, 6, 8, 8]),
        # So they are by the products, but filling up takes more than is gained.
        ([72, 84, 55, 53, 57, 69], 40, [0, 1, 2, 4, 4, 5, 6, 8, 8]),
        ([72, 84, 80, 80, 30, 20], 1, [0, 8, 8, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_few_rows_are_filled_up_where_that_is_faster(micros: list[int], filling: int, expected: list[int]) -> None:
    size_of = choose_sizes(dict(zip(products.FEW, micros, strict=True)), filling)
    assert size_of[:9] == expected
    assert size_of[9:] == products.SIZE_OF[9:]


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filled_up_rows_have_the_plain_numbers(dtype: torch.dtype) -> None:
    product = PackedLinear(torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype))
    if "onednn" not in packing._kinds_for(product.weight):
        pytest.skip(f"this processor does not pack {dtype}")
    rows = torch.randn(2, 4, 32).to(dtype)
    expected = product(rows)
    size_of = choose_sizes(dict(zip(products.FEW, [9, 9, 9, 9, 1, 9], strict=True)), 0)
    product.pack(OneDnnForm(product.weight, size_of), 1)
    for num_rows in (1, 2, 3, 4):
        result = product(rows[:, :num_rows])
        assert result.shape == (2, num_rows, 48)
        assert torch.allclose(result, expected[:, :num_rows], atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@CPU
def test_memory_does_not_grow_with_the_numbers_of_rows_met() -> None:
    """Kernels for each of 500 numbers would take 250 MB."""
    product = PackedLinear(torch.randn(1024, 64))
    pack([product], "always")
    rows = torch.ones(520, 64)
    product(rows)
    before = resident_bytes()
    for num_rows in range(1, 520):
        product(rows[:num_rows])
    assert resident_bytes() - before < 50 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_an_earlier_start_s_choices_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they make sense; what is new is measured and kept beside them."""
    measured: list[tuple[int, ...]] = []

    def fastest(alike: Sequence[PackedLinear]) -> Choice:
        measured.append(alike[0].shape)
        return Choice("onednn", 4, choose_sizes(dict.fromkeys((1, 2, 4, 5, 6, 8), 1.0), 0.0)[:9])

    monkeypatch.setattr(packing, "_fastest", fastest)
    small, large = [PackedLinear(torch.ones(3, 2))], [PackedLinear(torch.ones(4, 2))]

    def choose(*all_alike: Sequence[PackedLinear]) -> list[Choice]:
        choices = packing.Choices(str(tmp_path), pytest.fail)
        found = [choices.of(alike) for alike in all_alike]
        choices.keep()
        return found

    first = choose(small)
    assert choose(small, large) == first * 2
    assert measured == [(3, 2), (4, 2)]
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace('"onednn", 4,', '"onednn", 3,'))
    assert choose(small) == first
    assert measured[2:] == [(3, 2)]
    monkeypatch.setattr(packing, "_fastest", lambda _: Choice())
    tall = [PackedLinear(torch.ones(5, 2))]
    assert choose(tall) == [Choice()]
    # That plain weights are the fastest is known, too.
    monkeypatch.setattr(packing, "_fastest", pytest.fail)
    assert choose(tall)[0].packed_from == 0
    monkeypatch.setattr(packing, "_fastest", fastest)
    file.write_text("not JSON")
    assert choose(small) == first
