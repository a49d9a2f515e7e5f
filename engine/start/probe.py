"""Compares backends with plain transformers, and chooses the fastest correct one.

Backends are tried in the order of `BACKENDS`: on a device with an attention kernel first all with
the kernel, then all without. The first backend that passes the probe serves the model.

The probe of a backend:
1. A short prompt in two chunks, a small tree, an acceptance with compaction and one more token run
   through the paged path (`_paged_logits`).
2. Every path from root to leaf runs through the untouched model with its own eager attention
   (`plain_passes.py`).
3. The logits are compared (`distance`). In 16 bits both passes are compared with a pass of the same
   weights in float32: a backend may lie twice as far from that pass as the untouched model does. A
   larger difference means that the model would be served wrongly.
4. If products also round their rows to few bits, this bound is wide, so both passes are compared
   once more without rounding. The CPU's decoder cannot run without it: it is compared with a model
   whose rows are rounded alike.
5. With an attention kernel of a device and a long context, a longer prompt is probed, too, which
   needs the largest tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.attention import HOOK, PagedKernel
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.attention.latent import has_latents
from engine.attention.masks import mask_of, record_mask, register_masks
from engine.attention.recurrent import ShapeCalls, computing
from engine.attention.tensors import KVShape, LayerShape
from engine.config import ModelConfig
from engine.cuda.lean_decoder import LeanDecoder
from engine.errors import ConfigError, LoadError
from engine.kernels.checks import raise_if_lost
from engine.models.backend import Backend, TransformersBackend
from engine.models.gguf.blocks import has_blocks, shapes_alone
from engine.models.gguf.weights import dequantise
from engine.models.importing import import_transformers
from engine.models.kinds import is_decoder, is_lean
from engine.models.quantising import dequantised, has_quantised, quantises_rows, rounding_off
from engine.models.runner import ModelRunner
from engine.plan import StatePlaces
from engine.speculation.topology import merge_chains
from engine.start.choosing import choose
from engine.start.loading import LoadedModel
from engine.start.number_formats import arithmetic_dtype
from engine.start.plain_passes import attention, converted, plain_forward, rows_converted, widened

log = logging.getLogger("polydraft")

# Largest allowed difference of a logit row, as a share of the row's standard deviation.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# Alternatively, in units in the last place of the largest logit.
_LAST_PLACES = 1.5
# Alternatively, in distances of plain transformers from float32: a deep model adds the rounding of
# all its layers.
_PLAIN_DISTANCES = 2.0
_BLOCK_SIZE = 16
_PROMPT_LENGTH = 20
_LONG_PROMPT = 140
"""Tokens of a second probe, which needs the attention kernel's largest tiles."""


_OF_DECODER = "it is for models of the Llama kind on a CPU (docs/models.md); leave it out for this one"


class BackendChoice(NamedTuple):
    """Chosen backend of a model."""

    backend: Backend
    paged_kernel: PagedKernel | None
    """None if the plain path attends."""


class BackendOption(NamedTuple):
    """A backend, and the models it supports."""

    name: str
    takes: Callable[[Any], bool]
    make: Callable[[Any, ModelConfig, int], Backend]
    """Return the backend of a model.

    Further arguments: the requested formats, and the tokens of the longest text (0
    is the model's limit).
    """


def _is_cpu_decoder(model: Any) -> bool:
    return torch.device(model.device).type == "cpu" and is_decoder(model) and find_spec("numba") is not None


def _cpu_decoder(model: Any, config: ModelConfig, longest: int) -> Backend:  # noqa: ARG001
    # Numba is an optional package; it is installed if this backend takes a model.
    from engine.cpu.decoder import CpuDecoder
    from engine.cpu.weights import forms_of

    may_round_rows = config.activations == "auto"
    forms = forms_of(model.lm_head.weight.dtype, config.weights, may_round_rows)
    kv_dtype = torch.bfloat16 if config.kv_dtype == "bfloat16" else torch.float32
    return CpuDecoder(model, forms, kv_dtype)


def _lean_decoder(model: Any, _: ModelConfig, longest: int) -> Backend:
    # The probe reads its own texts.
    return LeanDecoder(model, longest and max(longest, 2 * _LONG_PROMPT))


def _is_multiplied(model: Any) -> bool:
    if torch.device(model.device).type != "cpu" or find_spec("numba") is None:
        return False
    from engine.cpu.products import multiplies  # Numba is an optional package

    return multiplies(model)


def _products(model: Any, config: ModelConfig, longest: int) -> Backend:  # noqa: ARG001
    from engine.cpu.products import ProductsBackend  # Numba is an optional package

    if config.kv_dtype not in ("auto", "float32"):
        raise ConfigError(f"--kv-cache-dtype {config.kv_dtype}: {_OF_DECODER}")
    return ProductsBackend(model, config.weights, config.activations == "auto")


BACKENDS = (
    BackendOption("CPU decoder", _is_cpu_decoder, _cpu_decoder),
    BackendOption("compiled products", _is_multiplied, _products),
    BackendOption("lean decoder", is_lean, _lean_decoder),
    BackendOption("transformers", lambda _: True, lambda model, *_: TransformersBackend(model)),
)
"""Fastest first; the last one supports any model."""


def find_kv_shape(loaded: LoadedModel) -> KVShape:
    """Return the shapes of K and V that the hook gets, and record masks, in two calls."""
    layers: dict[int, LayerShape] = {}
    shared: dict[int, int] = {}
    seen: list[tuple[Tensor, Tensor, int]] = []
    has_options: list[bool] = []

    def unattended(module: Any, query: Tensor, value: Tensor) -> tuple[Tensor, None]:
        width = module.v_head_dim if has_latents(module) else value.shape[-1]
        return query.new_zeros(1, query.shape[2], query.shape[1], width), None

    def shapes(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        has_options.append(softcap is not None or s_aux is not None)
        if module.layer_idx < 0:  # blocks that share weights; they share no K and V
            module.layer_idx = len(layers)
        sources = [layer for other_key, other_value, layer in seen if other_key is key and other_value is value]
        if sources:
            shared[module.layer_idx] = sources[0]
        else:
            layers[module.layer_idx] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], has_latents(module))
            seen.append((key, value, module.layer_idx))
        return unattended(module, query, value)

    def masks(
        module: Any, query: Tensor, _key: Tensor, value: Tensor, attention_mask: object = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        record_mask(module, attention_mask)
        has_options.append(mask_of(module, None).chunk is not None)
        return unattended(module, query, value)

    transformers = import_transformers()
    register_masks(f"{HOOK}_masks")
    # A cache returns other tensors for the K and V of layers that share. Without one, masks would
    # also part texts that are packed into one row; of two tokens, Gemma 4 would cut them.
    empty = transformers.DynamicCache(config=loaded.model.config)
    inputs = ShapeCalls()
    passes = (("shapes", shapes, [1, 2], None, inputs), ("masks", masks, [1], empty, None))
    for name, record, text, cache, calls in passes:
        if cache is not None and not layers:
            break  # no layer attends, and no mask is built
        transformers.AttentionInterface.register(f"{HOOK}_{name}", record)
        with attention(loaded.model, f"{HOOK}_{name}"), torch.inference_mode(), computing(calls), shapes_alone():
            plain_forward(loaded.model, [text], cache)
    if not layers and not inputs.shapes:
        raise LoadError(f"{loaded.name}: none of its layers attends through the hook; not supported")
    return KVShape(layers, shared, calls=tuple(inputs.shapes), are_scores_plain=not any(has_options))


def choose_backend(
    loaded: LoadedModel,
    shape: KVShape,
    block_size: int = _BLOCK_SIZE,
    config: ModelConfig | None = None,
    longest: int = 0,
    backends: Sequence[BackendOption] | None = None,
) -> BackendChoice:
    """Return the fastest backend that reproduces the model; raise LoadError if none does.

    block_size: tokens of a block while serving, for which kernels are compiled; config: requested
    number formats; longest: tokens of the longest served text, 0 is the model's limit; backends:
    options, fastest first; all if None.
    """
    config = config or ModelConfig(target=loaded.name)
    device = torch.device(loaded.model.device)
    only_warns = config.probe == "warn"
    kernel = attention_kernel(device, shape)
    attempts = _attempts(loaded.model, kernel, backends or BACKENDS)
    last: tuple[BackendOption, Backend] | None = None
    for option, paged_kernel in attempts:
        try:
            if last is None or last[0] is not option:
                if last is not None:
                    last[1].withdraw()
                if option.make not in (_cpu_decoder, _products):
                    _compute_as(loaded, config, device)
                # Once: it may convert the model's weights.
                last = option, option.make(loaded.model, config, longest)
            backend = last[1]
            choice = BackendChoice(backend, None if backend.reads_pages else paged_kernel)
            probe(loaded, shape, *choice, block_size=block_size, only_warns=only_warns)
            if choice.paged_kernel is not None and device.type != "cpu" and loaded.max_positions > 2 * _LONG_PROMPT:
                # Tiles of the largest size: a device may lack the memory for them.
                probe(loaded, shape, *choice, _LONG_PROMPT, block_size, only_warns)
            return choice
        except ConfigError:
            raise
        # Wrong numbers, weights of other shapes, a kernel that cannot be compiled.
        except Exception as error:
            raise_if_lost(device, error)
            # Memory may end on one rank only, which must not try another backend while other ranks
            # wait for its share.
            is_alone = loaded.is_share and isinstance(error, torch.cuda.OutOfMemoryError)
            if is_alone or (option, paged_kernel) == attempts[-1]:
                raise
            without = option.name if paged_kernel is None else "attention kernel"
            log.warning("%s: runs without the %s: %s", loaded.name, without, error)
    raise AssertionError("the last attempt works or raises")


def _attempts(
    model: Any, kernel: PagedKernel | None, backends: Sequence[BackendOption]
) -> list[tuple[BackendOption, PagedKernel | None]]:
    """Return the backends that take the model, with the attention kernel first.

    On a CPU a backend without the kernel comes before the next backend, which has other weights.
    """
    kernels = (None,) if kernel is None else (kernel, None)
    options = [option for option in backends if option.takes(model)]
    if torch.device(model.device).type == "cpu":
        return [(option, paged_kernel) for option in options for paged_kernel in kernels]
    return [(option, paged_kernel) for paged_kernel in kernels for option in options]


def _compute_as(loaded: LoadedModel, config: ModelConfig, device: torch.device) -> None:
    """Let the model itself compute in the type of the device's arithmetic.

    Raise ConfigError if `config` asks for a format that only the CPU decoder has.
    """
    is_int4_decoded = config.weights == "int4" and not has_quantised(loaded.model)
    if config.weights == "int8" or is_int4_decoded:
        raise ConfigError(
            f"{loaded.name}: --weights {config.weights} is for models with plain linear layers on a CPU "
            "(docs/models.md); leave it out for this one"
        )
    if config.kv_dtype not in ("auto", str(loaded.model.dtype).removeprefix("torch.")):
        raise ConfigError(f"--kv-cache-dtype {config.kv_dtype}: {_OF_DECODER}")
    dtype = arithmetic_dtype(config.dtype, device)
    if has_blocks(loaded.model):
        log.warning("%s: the weights of the GGUF file are dequantised to float32, four bytes each", loaded.name)
        dequantise(loaded.model, torch.float32)
    is_narrow = loaded.model.dtype in (torch.bfloat16, torch.float16) and not has_quantised(loaded.model)
    if device.type == "cpu" and dtype is not None and is_narrow:
        loaded.model.to(dtype)


def attention_kernel(device: torch.device, shape: KVShape) -> PagedKernel | None:
    """Return the kernel that attends over pages on a device; None if there is none."""
    if device.type == "cpu":
        if not (shape.layers and shape.are_scores_plain) or find_spec("numba") is None:
            return None
        from engine.cpu.attention import CpuAttention  # Numba is an optional package

        return CpuAttention()
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from engine.cuda import attention_kernel  # Triton is an optional package

    return attention_kernel


def is_replayed(loaded: LoadedModel, choice: BackendChoice) -> bool:
    """Whether steps of a model are recorded and replayed as CUDA graphs.

    Steps of a split model are not: the exchange between ranks is not recorded. All ranks must
    decide alike, because they make the same passes together.
    """
    return choice.paged_kernel is not None and loaded.model.device.type == "cuda" and not loaded.is_share


def probe(
    loaded: LoadedModel,
    shape: KVShape,
    backend: Backend | None = None,
    paged_kernel: PagedKernel | None = None,
    prompt_length: int = _PROMPT_LENGTH,
    block_size: int = _BLOCK_SIZE,
    only_warns: bool = False,
) -> float:
    """Return the largest logit difference in float32, as a share of the tolerance.

    Raise LoadError if it is larger than the tolerance (`distance`); only_warns: log a warning
    instead, if it is finite.
    """
    num_blocks = prompt_length // block_size + 6
    sizes = num_blocks, block_size, loaded.vocab_size
    kernels = choose(torch.device(loaded.model.device))
    runner = ModelRunner(loaded.model, shape, *sizes, backend, paged_kernel=paged_kernel, kernels=kernels)
    dtype = runner.backend.weight_used(loaded.model.get_output_embeddings().weight[:1]).dtype
    difference = _difference(loaded, runner, prompt_length, dtype)
    if quantises_rows(loaded.model):
        with rounding_off(loaded.model), converted(loaded.model, dequantised):
            unrounded = _difference(loaded, runner, prompt_length, dtype)
        difference = float(np.max([difference, unrounded]))  # NaN if either is
    if difference <= 1:
        return difference
    fault = (
        f"{loaded.name}: logits through the paged path differ from plain transformers by {difference:.2g} times of "
        f"what rounding of {dtype} explains"
    )
    if not only_warns or not isfinite(difference):
        raise LoadError(f"{fault}; this architecture cannot be served exactly")
    log.warning("%s; served all the same, as --probe warn asks", fault)
    return difference


def _difference(loaded: LoadedModel, runner: ModelRunner, prompt_length: int, dtype: torch.dtype) -> float:
    """Return the distance between a runner's logits and the logits of plain transformers."""
    generator = np.random.default_rng(7)
    tokens = [int(token) for token in generator.integers(3, loaded.vocab_size, prompt_length + 6)]
    prompt, rest = tokens[:prompt_length], tokens[prompt_length:]
    chains = [rest[:3], [rest[0], rest[3], rest[4]]]
    results = _paged_logits(runner, prompt, chains, rest[5])
    paths = [path for path, _ in results]
    logits_NV = torch.cat([path_logits_NV for _, path_logits_NV in results])

    def plain() -> Tensor:
        """Return the untouched model's logits at the same tokens [N, V]."""
        plain_logits = plain_forward(loaded.model, paths)
        parts = []
        for number, (path, path_logits_NV) in enumerate(results):
            places = slice(len(path) - len(path_logits_NV), len(path))
            parts.append(plain_logits[number, places, : loaded.vocab_size])
        return torch.cat(parts)

    with (
        attention(loaded.model, "eager"),
        converted(loaded.model, runner.backend.weight_used),
        torch.inference_mode(),
    ):
        if runner.backend.rounds_rows:
            with rows_converted(loaded.model, runner.backend.rows_used):
                plain_NV = plain()
            difference = distance(logits_NV, plain_NV, plain_NV, dtype)
            if difference <= 1:
                return difference
            # A deep model amplifies the rounding of single numbers up to the effect of all
            # rounding.
            return distance(logits_NV, plain_NV, plain(), dtype)
        plain_NV = plain()
        exact_NV = plain_NV
        if dtype != torch.float32 or quantises_rows(loaded.model):
            try:
                with widened(loaded.model):
                    exact_NV = plain()
            # A model that computes in its own type, or memory: the bound is smaller then.
            except Exception as error:
                log.warning("%s: probed without float32: %s", loaded.name, error)
    return distance(logits_NV, plain_NV, exact_NV, dtype)


def distance(logits_NV: Tensor, plain_NV: Tensor, exact_NV: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of some logits from exact ones, as a share of the tolerance.

    plain_NV: logits of plain transformers; exact_NV: the same in float32. NaN if a number is.

    The tolerance is the largest of three: a share of the rows' standard deviation; some units in
    the last place of the largest logit, because the last product alone rounds to the model's dtype;
    a multiple of the difference of plain transformers from the exact logits.
    """
    plain_difference = float((plain_NV - exact_NV).abs().max())
    by_deviation = _TOLERANCE[dtype] * float(exact_NV.std(-1).min().clamp(min=1e-6))
    by_last_places = _LAST_PLACES * torch.finfo(dtype).eps * float(exact_NV.abs().max())
    by_plain = 0.0
    if isfinite(plain_difference):
        by_plain = _PLAIN_DISTANCES * plain_difference
    tolerance = max(by_deviation, by_last_places, by_plain)
    return float((exact_NV - logits_NV).abs().max()) / tolerance


def _paged_logits(
    runner: ModelRunner, prompt: list[int], chains: list[list[int]], last: int
) -> list[tuple[list[int], Tensor]]:
    """Return (path, logits of its last tokens) for prompt, tree and the token after them."""
    block_size = runner.block_size
    num_blocks = len(prompt) // block_size + 6
    # Blocks out of order, including the last one of the pool.
    blocks = [num_blocks - 1, 0, *range(1, num_blocks - 1)]
    cut = len(prompt) // 2
    runner.forward([SequenceInput(prompt[:cut], 0, blocks, NO_NODES, slice(0, 0))])
    tree = merge_chains(chains)
    nodes = NodeInput(tree.tokens, tree.depths, (), tree.ancestry())
    num_rest = len(prompt) - cut
    logits_NV = runner.forward(
        [SequenceInput(prompt[cut:], cut, blocks, nodes, slice(num_rest - 1, num_rest + tree.num_nodes))]
    )
    results = [
        (prompt + chain, logits_NV[torch.tensor(path, device=logits_NV.device)])
        for chain, path in zip(chains, tree.paths, strict=True)
    ]
    # Accept the second chain: its nodes move to the end of the prompt, then one more token is run.
    slots = [block * block_size + place for block in blocks for place in range(block_size)]
    nodes_from_to = [(node - 1, depth) for depth, node in enumerate(tree.paths[1][1:])]
    moves = [(slots[len(prompt) + node], slots[len(prompt) + depth]) for node, depth in nodes_from_to]
    runner.keep([moves], [(0, node, depth) for node, depth in nodes_from_to])
    text = prompt + chains[1]
    state = StatePlaces(seat=0, source=0, covered=len(prompt))
    after_NV = runner.forward([SequenceInput([last], len(text), blocks, NO_NODES, slice(0, 1), state=state)])
    return [*results, ([*text, last], after_NV)]
