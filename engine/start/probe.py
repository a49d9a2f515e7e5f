"""Compares backends with a plain transformers forward before a model is served, and chooses the fastest correct one.

The probe runs a short prompt in two chunks, a small tree, an acceptance with compaction and one
more token through the paged path, and every root-to-leaf path through the untouched model with
its own eager attention. In 16 bits both are compared with a pass of the same weights in float32: a backend may lie
twice as far from it as the untouched model does. A larger difference means that the model would be served wrongly.
If products also round their rows to few bits, this bound is wide, so both are compared once more without that; the
CPU's decoder, which cannot leave it out, may instead have the numbers of a model whose layers' rows are rounded alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.attention.attention import HOOK, PagedKernel
from engine.attention.inputs import NO_NODES, NodeInput, SequenceInput
from engine.attention.tensors import KVShape
from engine.config import ModelConfig
from engine.cuda.lean_decoder import LeanDecoder
from engine.errors import ConfigError, LoadError
from engine.kernels.checks import raise_if_lost
from engine.models.backend import Backend, TransformersBackend
from engine.models.gguf.blocks import has_blocks
from engine.models.gguf.weights import dequantise
from engine.models.kinds import is_decoder, is_lean
from engine.models.quantising import dequantised, has_quantised, in_float32, quantises_rows, rounding_off
from engine.models.runner import ModelRunner
from engine.speculation.topology import merge_chains
from engine.start.loading import LoadedModel
from engine.start.number_formats import arithmetic_dtype

log = logging.getLogger("polydraft")

# Largest allowed difference of a logit row, as a share of the row's standard deviation.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# Alternatively, in units in the last place of the largest logit.
_LAST_PLACES = 1.5
# Alternatively, in distances of plain transformers from float32: a deep model adds the rounding of all its layers.
_PLAIN_DISTANCES = 2.0
_BLOCK_SIZE = 16
_PROMPT_LENGTH = 20
_LONG_PROMPT = 140
"""Tokens of a second probe, whose passes need the attention kernel's largest tiles."""


class BackendChoice(NamedTuple):
    """Chosen backend of a model."""

    backend: Backend
    paged_kernel: PagedKernel | None
    """Kernel that attends over pages; None if the plain path attends."""


class BackendOption(NamedTuple):
    """A backend, and the models it supports."""

    name: str
    takes: Callable[[Any], bool]
    make: Callable[[Any, ModelConfig, int], Backend]
    """Makes one for a model, its requested formats, and the tokens of the longest text; 0 is the model's own limit."""


def _is_cpu_decoder(model: Any) -> bool:
    return torch.device(model.device).type == "cpu" and is_decoder(model) and find_spec("numba") is not None


def _cpu_decoder(model: Any, config: ModelConfig, longest: int) -> Backend:  # noqa: ARG001
    from engine.cpu.decoder import CpuDecoder  # Numba is installed
    from engine.cpu.weights import forms_of

    kv_dtype = torch.bfloat16 if config.kv_dtype == "bfloat16" else torch.float32
    return CpuDecoder(
        model, forms_of(model.lm_head.weight.dtype, config.weights, config.activations == "auto"), kv_dtype
    )


def _lean_decoder(model: Any, _: ModelConfig, longest: int) -> Backend:
    # The probe reads its own texts.
    return LeanDecoder(model, longest and max(longest, 2 * _LONG_PROMPT))


BACKENDS = (
    BackendOption("CPU decoder", _is_cpu_decoder, _cpu_decoder),
    BackendOption("lean decoder", is_lean, _lean_decoder),
    BackendOption("transformers", lambda _: True, lambda model, *_: TransformersBackend(model)),
)
"""Fastest first; the last one supports any model."""


def find_kv_shape(loaded: LoadedModel) -> KVShape:
    """Return the shape of the K and V that the model passes to the hook, found by calling it once.

    Weights of a GGUF file would be dequantised for it, so their models' shape is that of the configuration.
    """
    if has_blocks(loaded.model):
        config = loaded.model.config
        return KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.head_dim)
    seen: dict[int, tuple[int, int, int]] = {}

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        seen[module.layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    from transformers import AttentionInterface

    AttentionInterface.register(f"{HOOK}_shape", record)
    with _attention(loaded.model, f"{HOOK}_shape"), torch.inference_mode():
        _plain_forward(loaded.model, [[1, 2]])
    shapes = set(seen.values())
    if len(shapes) != 1 or sorted(seen) != list(range(len(seen))):
        raise LoadError(
            f"{loaded.name}: its layers do not all keep K and V of one shape ({sorted(shapes)}); not supported"
        )
    heads, key_dim, value_dim = shapes.pop()
    return KVShape(len(seen), heads, key_dim, value_dim)


def choose_backend(
    loaded: LoadedModel,
    shape: KVShape,
    block_size: int = _BLOCK_SIZE,
    config: ModelConfig | None = None,
    longest: int = 0,
    backends: Sequence[BackendOption] | None = None,
) -> BackendChoice:
    """Return the fastest backend that reproduces the model's numbers; raise LoadError if there is none.

    block_size: tokens of a block while serving, for which kernels are compiled; config: requested number formats;
    longest: tokens of the longest text that is served, 0 is the model's own limit; backends: those that are tried,
    fastest first; all if None.
    """
    config = config or ModelConfig(target=loaded.name)
    device = torch.device(loaded.model.device)
    kinds = [kind for kind in backends or BACKENDS if kind.takes(loaded.model)]
    kernel = attention_kernel(device)
    kernels = (None,) if kernel is None else (kernel, None)
    choices = [(kind, paged_kernel) for paged_kernel in kernels for kind in kinds]
    for kind, paged_kernel in choices:
        try:
            if kind.make is not _cpu_decoder:
                _compute_as(loaded, config, device)
            choice = BackendChoice(kind.make(loaded.model, config, longest), paged_kernel)
            only_warns = config.probe == "warn"
            probe(loaded, shape, choice.backend, paged_kernel, block_size=block_size, only_warns=only_warns)
            if paged_kernel is not None and loaded.max_positions > 2 * _LONG_PROMPT:
                # Tiles of the largest size: a device may lack the memory for them.
                probe(loaded, shape, choice.backend, paged_kernel, _LONG_PROMPT, block_size, only_warns)
            return choice
        except Exception as error:  # wrong numbers, weights of other shapes, a kernel that cannot be compiled
            raise_if_lost(device, error)
            # Memory may end on one rank only, which must not try another backend while the others wait for its share.
            is_last = (kind, paged_kernel) == choices[-1]
            if is_last or (loaded.is_share and isinstance(error, torch.cuda.OutOfMemoryError)):
                raise
            without = "attention kernel" if paged_kernel is not None else kind.name
            log.warning("%s: runs without the %s: %s", loaded.name, without, error)
    raise AssertionError("the last choice works or raises")


def _compute_as(loaded: LoadedModel, config: ModelConfig, device: torch.device) -> None:
    """Let the model itself compute in the type of the device's arithmetic; raise ConfigError if `config` asks for a
    format of weights or K/V that only the CPU decoder has.
    """
    is_decoded = config.weights == "int8" or (config.weights == "int4" and not has_quantised(loaded.model))
    if is_decoded or config.kv_dtype not in ("auto", str(loaded.model.dtype).removeprefix("torch.")):
        raise ConfigError(
            f"{loaded.name}: --weights {config.weights} and --kv-cache-dtype are for models of the Llama kind on a CPU "
            "(docs/models.md); leave them out for this one"
        )
    dtype = arithmetic_dtype(config.dtype, device)
    if has_blocks(loaded.model):
        log.warning("%s: the weights of the GGUF file are dequantised to float32, four bytes each", loaded.name)
        dequantise(loaded.model, torch.float32)
    is_narrow = loaded.model.dtype in (torch.bfloat16, torch.float16) and not has_quantised(loaded.model)
    if device.type == "cpu" and dtype is not None and is_narrow:
        loaded.model.to(dtype)


def runs(loaded: LoadedModel, shape: KVShape, choice: BackendChoice, block_size: int = _BLOCK_SIZE) -> bool:
    """Whether a changed model still runs, and agrees with the model through its own attention."""
    try:
        probe(loaded, shape, choice.backend, choice.paged_kernel, block_size=block_size)
    except Exception:  # the model's own code may raise any exception
        return False
    return True


def attention_kernel(device: torch.device) -> PagedKernel | None:
    """Return the kernel that attends over pages on a device; None if there is none."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from engine.cuda import attention_kernel

    return attention_kernel


def is_replayed(loaded: LoadedModel, choice: BackendChoice) -> bool:
    """Whether steps of a model are recorded and replayed as CUDA graphs.

    A share of a split model is not: the exchange between ranks is not recorded. All ranks must decide alike, because
    they make the same passes together.
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
    """Return the largest logit difference between a backend and the model in float32, as a share of the tolerance of
    its dtype (`distance`).

    Raise LoadError if it is larger than that; only_warns: log a warning instead, if it is finite.
    """
    num_blocks = prompt_length // block_size + 6
    sizes = num_blocks, block_size, loaded.vocab_size
    runner = ModelRunner(loaded.model, shape, *sizes, backend, paged_kernel=paged_kernel)
    dtype = runner.backend.weight_used(loaded.model.get_output_embeddings().weight[:1]).dtype
    found = _difference(loaded, runner, prompt_length, dtype)
    if quantises_rows(loaded.model):
        with rounding_off(loaded.model), _converted(loaded.model, dequantised):
            found = float(np.max([found, _difference(loaded, runner, prompt_length, dtype)]))
    if found <= 1:
        return found
    said = (
        f"{loaded.name}: logits through the paged path differ from plain transformers by {found:.2g} times of what "
        f"rounding of {dtype} explains"
    )
    if not only_warns or not isfinite(found):
        raise LoadError(f"{said}; this architecture cannot be served exactly")
    log.warning("%s; served all the same, as --probe warn asks", said)
    return found


def _difference(loaded: LoadedModel, runner: ModelRunner, prompt_length: int, dtype: torch.dtype) -> float:
    """Return the distance between a runner's logits and those of plain transformers."""
    tokens = [int(t) for t in np.random.default_rng(7).integers(3, loaded.vocab_size, prompt_length + 6)]
    prompt, rest = tokens[:prompt_length], tokens[prompt_length:]
    chains = [rest[:3], [rest[0], rest[3], rest[4]]]
    paths, of_paths = zip(*_paged_logits(runner, prompt, chains, rest[5]), strict=True)

    def plain() -> Tensor:
        """Return the untouched model's logits at the same tokens [N, V]."""
        logits = _plain_forward(loaded.model, paths)
        parts = [
            logits[number, len(path) - len(logits_NV) : len(path), : loaded.vocab_size]
            for number, (path, logits_NV) in enumerate(zip(paths, of_paths, strict=True))
        ]
        return torch.cat(parts)

    with (
        _attention(loaded.model, "eager"),
        _converted(loaded.model, runner.backend.weight_used),
        torch.inference_mode(),
    ):
        if runner.backend.rounds_rows:
            with rows_converted(loaded.model, runner.backend.rows_used):
                plain_NV = plain()
            found = distance(torch.cat(of_paths), plain_NV, plain_NV, dtype)
            # A deep model amplifies differences by the rounding of single numbers up to those by all rounding.
            return found if found <= 1 else distance(torch.cat(of_paths), plain_NV, plain(), dtype)
        plain_NV = exact_NV = plain()
        if dtype != torch.float32 or quantises_rows(loaded.model):
            try:
                with _in_float32(loaded.model):
                    exact_NV = plain()
            except Exception as error:  # a model that computes in its own type, or memory: the bound is smaller then
                log.warning("%s: probed without float32: %s", loaded.name, error)
    return distance(torch.cat(of_paths), plain_NV, exact_NV, dtype)


def distance(logits_NV: Tensor, plain_NV: Tensor, exact_NV: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of some logits from exact ones, as a share of the tolerance.

    plain_NV: those of plain transformers; exact_NV: the same in float32. The tolerance is a share of the rows' standard
    deviation, or some units in the last place of the largest logit, because the last product alone rounds to the
    model's dtype, or a multiple of the difference of plain transformers from the exact logits. NaN if a number is.
    """
    of_plain = float((plain_NV - exact_NV).abs().max())
    allowed = max(
        _TOLERANCE[dtype] * float(exact_NV.std(-1).min().clamp(min=1e-6)),
        _LAST_PLACES * torch.finfo(dtype).eps * float(exact_NV.abs().max()),
        _PLAIN_DISTANCES * of_plain if isfinite(of_plain) else 0.0,
    )
    return float((exact_NV - logits_NV).abs().max()) / allowed


def _paged_logits(
    runner: ModelRunner, prompt: list[int], chains: list[list[int]], last: int
) -> list[tuple[list[int], Tensor]]:
    """Return (path, logits of the path's last tokens) for prompt, tree and the token after an acceptance."""
    size = runner.block_size
    num_blocks = len(prompt) // size + 6
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
    slot = [block * size + place for block in blocks for place in range(size)]
    runner.keep(
        [[(slot[len(prompt) + node - 1], slot[len(prompt) + depth]) for depth, node in enumerate(tree.paths[1][1:])]]
    )
    text = prompt + chains[1]
    after_NV = runner.forward([SequenceInput([last], len(text), blocks, NO_NODES, slice(0, 1))])
    return [*results, ([*text, last], after_NV)]


def _plain_forward(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return logits [texts, T, V] of one pass; shorter texts are filled up at their ends, which no other token sees."""
    length = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts], device=model.device)
    positions = torch.arange(length, device=model.device).unsqueeze(0)
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    return logits


@contextmanager
def _attention(model: Any, implementation: str) -> Iterator[None]:
    """Use another attention implementation than the hook, temporarily."""
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(HOOK)


@contextmanager
def rows_converted(model: Any, convert: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Let a model's linear layers multiply converted rows, temporarily; convert: takes rows and the layer's weight."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = []
    for module in linears:
        # Other hooks exchange the weight while the module runs.
        converted = partial(_first_converted, convert=convert, weight=module.weight)
        hooks.append(module.register_forward_pre_hook(lambda _, operands, converted=converted: converted(operands)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_converted(
    operands: tuple[Tensor, ...], convert: Callable[[Tensor, Tensor], Tensor], weight: Tensor
) -> tuple[Tensor, ...]:
    return convert(operands[0], weight), *operands[1:]


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Let a model compute in float32, temporarily."""
    with rounding_off(model), _converted(model, in_float32):
        yield


@contextmanager
def _converted(model: Any, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a model compute with converted weights, temporarily. Each module's weights are converted while it runs, so
    that memory is needed for those of one layer's part.
    """
    kept: dict[nn.Module, dict[str, Any]] = {}

    def widen(module: nn.Module, _: Any) -> None:
        kept[module] = dict(module._parameters)
        for name, weight in kept[module].items():
            if weight is not None and weight.is_floating_point() and (used := convert(weight)) is not weight:
                module._parameters[name] = nn.Parameter(used, requires_grad=False)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(kept.pop(module, {}))

    hooks = []
    for module in model.modules():
        if module._parameters:
            hooks.append(module.register_forward_pre_hook(widen))
            # Before the hooks of an outer conversion.
            hooks.append(module.register_forward_hook(restore, always_call=True, prepend=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
