"""The CPU's decoder gives transformers' numbers, for every type of weights."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
import transformers
from numba.core.caching import NullCache
from torch import Tensor

from engine.attention.inputs import NO_NODES, SequenceInput, StepLayout
from engine.attention.tensors import NORMED
from engine.config import ModelConfig
from engine.cpu import weights
from engine.cpu.compiled import pass_table, shared_work
from engine.cpu.compiled.dot_products import HAS_PAIRS
from engine.cpu.compiled.shared_work import TEAM
from engine.cpu.compiled.simd_vectors import BLOCK
from engine.cpu.decoder import CpuDecoder
from engine.cpu.weights import Form, Forms, forms_of
from engine.errors import ConfigError
from engine.models import runner
from engine.models.backend import Backend, TransformersBackend
from engine.models.kinds import is_decoder, is_lean
from engine.models.runner import ModelRunner
from engine.start import probe
from engine.start.probe import choose_backend, find_kv_shape
from tests.attention.test_groups import passes
from tests.cpu.small_weights import rows_rounded
from tests.cuda.test_lean_decoder import LEAN, SIZES, randomised
from tests.engine import tiny
from tests.grid import grid
from tests.wrong import instead

pytestmark = pytest.mark.skipif(tiny.DEVICE.type != "cpu", reason="a decoder of CPUs")
PAGE = 4
Numbers = tuple[Tensor, Tensor, Tensor]

MODELS: dict[str, Any] = {
    **LEAN,
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=6),
    "qwen2, windows in some layers": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "llama, mlp biases": transformers.LlamaConfig(**SIZES, mlp_bias=True),
    "llama, odd sizes": transformers.LlamaConfig(
        **{**SIZES, "hidden_size": 36, "intermediate_size": 50, "vocab_size": 101}, head_dim=10
    ),
}
EVERY_STEP = list(range(len(passes()[1])))
STEPS = [[0, 1], [2, 8, 3], EVERY_STEP, *([number] for number in EVERY_STEP)]


def numbers(loaded: Any, backend: Backend, steps: list[list[int]] = STEPS, taps: tuple[int, ...] = ()) -> Numbers:
    """Return logits, keys and values of steps after prompts; with taps: hidden states."""
    shape = find_kv_shape(loaded)
    if taps:
        shape = replace(shape, hidden_dim=loaded.model.config.hidden_size, taps=taps)
    runs = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, backend)
    prompts, sequences = passes()
    for prompt in prompts:
        runs.forward([prompt])
    logits = [runs.forward([sequences[number] for number in step_numbers]) for step_numbers in steps]
    storage = runs.storage
    return torch.cat(logits), storage.keys, storage.values if storage.hidden is None else storage.hidden


def agree(found: Numbers, expected: Numbers, tolerance: float = 1e-4) -> bool:
    return all(
        torch.allclose(one.float(), other.float(), atol=tolerance, rtol=tolerance)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_numbers_of_transformers(name: str) -> None:
    """Prompts, single tokens, trees, one sequence and several."""
    loaded = randomised(MODELS[name], seed=5)
    assert is_decoder(loaded.model)
    assert agree(numbers(loaded, CpuDecoder(loaded.model)), numbers(loaded, TransformersBackend(loaded.model)))
    assert isinstance(choose_backend(loaded, find_kv_shape(loaded)).backend, CpuDecoder)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", grid([torch.bfloat16, torch.float16], [torch.bfloat16]))
@pytest.mark.parametrize("name", ["llama, tied, wide heads", "qwen2", "qwen3"])
def test_small_types_have_the_numbers_of_float32(name: str, dtype: torch.dtype) -> None:
    """Weights alone have the small type, if rows may not be rounded: all arithmetic is float32."""
    loaded = randomised(MODELS[name], seed=5)
    loaded.model.to(dtype)
    found = numbers(loaded, CpuDecoder(loaded.model, forms_of(dtype, may_round_rows=False)))
    loaded.model.to(torch.float32)
    assert agree(found, numbers(loaded, TransformersBackend(loaded.model)))


# Largest error of a weight as a share of the largest one: half a step in 8 bits; in 4 bits the
# largest is cut off.
SMALL: dict[Form, tuple[Forms, float]] = {
    "int8": (Forms("int8", "int8"), 1 / 253),
    "int4": (Forms("int4", "int8"), 1 / 5),
    "pairs": (Forms("pairs", "pairs"), 0),
}


ALL_FORMS = [*(forms for forms, _ in SMALL.values()), Forms("bfloat16", "bfloat16")]


@pytest.mark.sampled
@pytest.mark.parametrize("form", grid(SMALL, {"int8"}))
@pytest.mark.parametrize("name", grid(["llama", "llama, tied, wide heads", "qwen2", "llama, odd sizes"], ["qwen2"]))
def test_few_bits_have_the_numbers_that_they_stand_for(name: str, form: Form) -> None:
    """The numbers of a model whose layers round their rows."""
    if form == "pairs" and not HAS_PAIRS:
        pytest.skip("this processor has no dot products of bfloat16")
    forms, step = SMALL[form]
    loaded = randomised(MODELS[name], seed=5)
    if form == "pairs":
        loaded.model.bfloat16().float()
    decoder = CpuDecoder(loaded.model, forms)
    found = numbers(loaded, decoder)
    for module in loaded.model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            used = decoder.weight_used(module.weight)
            assert float((used - module.weight.data).abs().max()) <= float(module.weight.data.abs().max()) * step
            module.weight.data = used
    unrounded = numbers(loaded, TransformersBackend(loaded.model))
    with rows_rounded(loaded.model, form):
        rounded = numbers(loaded, TransformersBackend(loaded.model))
    # A number that is nearly between two is rounded to another one than in transformers, which
    # later layers amplify.
    distances = [float((found[0] - logits[0]).abs().max()) for logits in (rounded, unrounded)]
    assert distances[0] < 0.25 * distances[1]


@pytest.mark.slow
def test_k_and_v_in_bfloat16_are_the_rounded_ones() -> None:
    """The first layer's depend on no K/V; others differ by what the probe allows."""
    loaded = randomised(MODELS["llama"], seed=5)
    found = numbers(loaded, CpuDecoder(loaded.model, kv_dtype=torch.bfloat16))
    plain = numbers(loaded, CpuDecoder(loaded.model))
    for small, large in zip(found[1:], plain[1:], strict=True):
        assert small.dtype == torch.bfloat16
        # Two kernels, which may sum in another order and round differently then.
        assert torch.allclose(small[0].float(), large[0], rtol=2**-7, atol=1e-6)
    assert 0 < probe.distance(found[0], plain[0], plain[0], torch.bfloat16) < 1


@pytest.mark.parametrize("kv_dtype", grid([torch.float32, torch.bfloat16], [torch.float32]))
def test_hidden_states_are_stored_at_taps(kv_dtype: torch.dtype) -> None:
    loaded = randomised(MODELS["llama"], seed=5)
    taps = (2, NORMED, 0, 3)
    found = numbers(loaded, CpuDecoder(loaded.model, kv_dtype=kv_dtype), taps=taps)
    expected = numbers(loaded, TransformersBackend(loaded.model), taps=taps)
    written = expected[2].abs().sum(1) > 0
    assert torch.equal(found[2].abs().sum(1) > 0, written)
    assert probe.distance(found[2][written].float(), expected[2][written], expected[2][written], kv_dtype) < 1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", *(["pairs"] if HAS_PAIRS else [])])
def test_results_depend_on_nothing_else_in_a_pass(form: Form) -> None:
    """To the bit: alone or with others, on one core or on several."""
    # 13 blocks hold all tokens of `passes`, whatever a block's width.
    sizes = {**SIZES, "intermediate_size": 5 * BLOCK, "hidden_size": 3 * BLOCK, "vocab_size": 13 * BLOCK}
    loaded = randomised(transformers.LlamaConfig(**sizes, head_dim=8), seed=5)
    decoder = CpuDecoder(loaded.model, Forms(form, form))
    together = numbers(loaded, decoder, [EVERY_STEP])
    alone = numbers(loaded, decoder, [[number] for number in EVERY_STEP])
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    if TEAM.grow(2) < 2:
        pytest.skip("this system has no helpers")
    decoder.cores = 3, 3
    for _ in range(20):
        shared = numbers(loaded, decoder, [EVERY_STEP])
        assert all(torch.equal(one, other) for one, other in zip(together, shared, strict=True))


def _at_the_end_of_a_page(shift: int) -> Callable[..., Any]:
    """Align numbers `shift` numbers before memory that must not be read.

    As float32 and bfloat16 these bytes are NaN.
    """
    pieces = []

    def piece(shape: tuple[int, ...], numbers: Any) -> Any:
        size = math.prod(shape) * numbers.itemsize
        end = -(-(size + shift * numbers.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, end + mmap.PAGESIZE)
        pieces.append(memory)
        memory_bytes = np.frombuffer(memory, np.uint8)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory_bytes.ctypes.data + end), mmap.PAGESIZE, 0) == 0
        memory_bytes[:end] = 255
        start = end - size - shift * numbers.itemsize
        return memory_bytes[start : start + size].view(numbers).reshape(shape)

    return piece


@pytest.mark.skipif(sys.platform != "linux", reason="protects pages of memory")
@pytest.mark.sampled
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("name", grid(["llama", "qwen2", "llama, odd sizes"], ["llama, odd sizes"]))
@pytest.mark.parametrize("forms", grid([(forms,) for forms in [*ALL_FORMS, None]], [(None,)]))
def test_results_do_not_depend_on_memory(name: str, forms: Forms | None, shift: int) -> None:
    """Weights and memory at any alignment, filled with NaN before."""
    loaded = randomised(MODELS[name], seed=5)
    if forms and forms.layers == "pairs" and not HAS_PAIRS:
        pytest.skip("this processor has no dot products of bfloat16")
    expected = numbers(loaded, CpuDecoder(loaded.model, forms))
    piece = _at_the_end_of_a_page(shift)
    with instead(weights, "aligned", lambda _, *size, **named: piece(*size, **named)):
        found = numbers(loaded, CpuDecoder(loaded.model, forms))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("token", [-1, 101 + BLOCK])
def test_tokens_without_an_embedding_are_refused(token: int) -> None:
    loaded = randomised(MODELS["llama"], seed=5)
    runs = ModelRunner(loaded.model, find_kv_shape(loaded), 200, PAGE, loaded.vocab_size, CpuDecoder(loaded.model))
    with pytest.raises(IndexError, match="vocabulary"):
        runs.forward([SequenceInput([token], 0, [0], NO_NODES, slice(0, 1))])


def test_the_generator_of_parts_is_not_cached() -> None:
    """Code that is compiled in a later process could not use it."""
    assert isinstance(shared_work.claimed._cache, NullCache)


def test_helpers_take_part() -> None:
    """A pass of many rows gives them the time to wake up."""
    if TEAM.grow(1) < 1:
        pytest.skip("this system has no helpers")
    counts = np.zeros(1, dtype=np.int64)

    @numba.cfunc(numba.types.void(*[numba.types.int64] * 6))
    def waits_for_another(address, _1, _2, _3, _4, _5):  # type: ignore[no-untyped-def]
        shared_work._add(address, 1)
        looks = 0
        while shared_work._look(address) < 2 and looks < 10**9:
            looks = shared_work._wait(looks)

    for _ in range(3):
        counts[0] = 0
        shared_work.together(TEAM.shared, waits_for_another.address, counts.ctypes.data, 1)
        assert counts[0] == 2


def test_the_model_may_lose_its_own_weights() -> None:
    loaded = randomised(MODELS["llama"], seed=5)
    plain_bytes = loaded.weight_bytes
    decoder = CpuDecoder(loaded.model)
    before = numbers(loaded, decoder)
    mapped = [weight.data for weight in loaded.model.parameters()]
    # Blocks are padded, which matters where all is small.
    assert decoder.prepare() < 1.7 * plain_bytes
    assert loaded.weight_bytes < 0.1 * plain_bytes
    # One remaining view of a mapped file would keep the whole file in memory.
    for weight, mapped_weight in zip(loaded.model.parameters(), mapped, strict=True):
        assert not weight.numel() or weight.data_ptr() != mapped_weight.data_ptr()
    shape = find_kv_shape(randomised(MODELS["llama"], seed=5))
    runs = ModelRunner(loaded.model, shape, 200, PAGE, loaded.vocab_size, decoder)
    prompts, sequences = passes()
    for prompt in prompts:
        runs.forward([prompt])
    assert torch.equal(torch.cat([runs.forward([sequences[i] for i in step]) for step in STEPS]), before[0])


WRONG_PAGES: dict[str, Callable[[StepLayout], dict[str, Any]]] = {
    "a query sees the token behind it": lambda p: {"limits": np.minimum(p.limits + 1, p.num_keys.max())},
    "a query does not see itself": lambda p: {"limits": np.maximum(p.limits - 1, 1)},
    "keys are in the wrong pages": lambda p: {"pages": np.ascontiguousarray(np.roll(p.pages, 1, 1))},
    "nodes see each other": lambda p: {"words": p.words | (p.words << 1)},
    "the text ends a token early": lambda p: {"ends": p.ends - 1},
    "the first key is left out": lambda p: {"first_keys": p.first_keys + 1},
}


@pytest.mark.parametrize("wrong", WRONG_PAGES)
def test_wrong_keys_are_found_out(wrong: str) -> None:
    loaded = randomised(MODELS["llama"], seed=5)
    expected = numbers(loaded, TransformersBackend(loaded.model))

    def changed(build: Any, *operands: Any) -> StepLayout:
        pages = build(*operands)
        return replace(pages, **WRONG_PAGES[wrong](pages))

    with instead(runner, "build", changed):
        assert not agree(numbers(loaded, CpuDecoder(loaded.model)), expected)


WRONG_MODELS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "no bias of q, k and v": ("qwen2", lambda arrays: arrays[pass_table.QKV + 2].fill(0)),
    "no bias of the output": ("llama, biases", lambda arrays: arrays[pass_table.O_PROJ + 2].fill(0)),
    "no bias of gate and up": ("llama, mlp biases", lambda arrays: arrays[pass_table.GATE_UP + 2].fill(0)),
    "no bias of down": ("llama, mlp biases", lambda arrays: arrays[pass_table.DOWN + 2].fill(0)),
    "a window too wide": ("mistral, window", lambda arrays: arrays[pass_table.WINDOWS].__iadd__(1)),
    "no window": ("mistral, window", lambda arrays: arrays[pass_table.WINDOWS].fill(0)),
    "windows in all layers": ("qwen2, windows in some layers", lambda arrays: arrays[pass_table.WINDOWS].fill(5)),
    "norms of queries and keys exchanged": (
        "qwen3",
        lambda arrays: np.copyto(arrays[pass_table.HEAD_NORMS], arrays[pass_table.HEAD_NORMS][:, ::-1].copy()),
    ),
    "scores of another scale": ("llama", lambda arrays: arrays[pass_table.CONSTANTS].__imul__(1.1)),
    "the norms of another layer": (
        "llama",
        lambda arrays: np.copyto(arrays[pass_table.NORMS], np.roll(arrays[pass_table.NORMS], 1, 0)),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_MODELS)
def test_wrong_models_are_found_out(wrong: str) -> None:
    """The probe at start finds them, too."""
    name, spoil = WRONG_MODELS[wrong]
    loaded = randomised(MODELS[name], seed=5)
    decoder = CpuDecoder(loaded.model)
    spoil(decoder._arrays)
    assert not agree(numbers(loaded, decoder), numbers(loaded, TransformersBackend(loaded.model)))


def test_a_decoder_with_wrong_numbers_does_not_serve() -> None:
    """A checkpoint in bfloat16 then runs through torch in float32."""

    def wrong(made: Any, decoder: CpuDecoder, *operands: Any) -> None:
        made(decoder, *operands)
        decoder._arrays[pass_table.FREQUENCIES] *= 1.01

    loaded = randomised(MODELS["llama"], seed=5)
    loaded.model.to(torch.bfloat16)
    shape = find_kv_shape(loaded)
    assert isinstance(choose_backend(loaded, shape).backend, CpuDecoder)
    with instead(CpuDecoder, "__init__", wrong):
        backend = choose_backend(loaded, shape).backend
    assert not isinstance(backend, CpuDecoder)
    assert backend.kv_dtype == torch.float32


def test_the_type_of_kv_is_refused_for_other_models() -> None:
    loaded = randomised(transformers.Gemma2Config(**SIZES), seed=3)
    assert not is_decoder(loaded.model)
    assert not is_lean(loaded.model)
    with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16: it is for models of the Llama kind"):
        choose_backend(loaded, find_kv_shape(loaded), config=ModelConfig(target="t", kv_dtype="bfloat16"))


def test_cores_are_chosen_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest, if it is clearly faster than one."""
    loaded = randomised(MODELS["llama"], seed=5)
    decoder = CpuDecoder(loaded.model)
    clock = [0.0]
    seconds = {1: {1: 1.0, 16: 4.0}, 2: {1: 0.95, 16: 2.2}, 3: {1: 0.94, 16: 2.3}}

    def run(num_rows: int) -> None:
        clock[0] += seconds[decoder.cores[0]][num_rows]

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with instead(TEAM, "grow", lambda _, most: most):
        decoder.tune(run, 3)
    assert decoder.cores == (1, 2)
    num_runs = itertools.count()

    def run_disturbed(num_rows: int) -> None:
        run(num_rows)
        # Another process often has the core.
        clock[0] += 9.0 * (next(num_runs) % 3 > 0) * (decoder.cores[0] > 1)

    with instead(TEAM, "grow", lambda _, most: most):
        decoder.tune(run_disturbed, 3)
    assert decoder.cores == (1, 2)
    decoder.cores = 1, 1
    with instead(TEAM, "grow", lambda *_: 0):
        decoder.tune(run, 3)
    assert decoder.cores == (1, 1)
