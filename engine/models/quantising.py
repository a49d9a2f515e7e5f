"""Weights of few bits, in torchao's layouts and in layouts of checkpoints; transformers loads both.

`--weights fp8` and `--weights int4` quantise the linear layers of a checkpoint, except its
head, while it is loaded. The served target is then the quantised model, and the probe compares
with the quantised model.

An activation that is quantised with one scale for the whole pass would make the answer to a request
depend on the other requests, and on drafted tokens. Every row has a scale here, and checkpoints
with one scale for all are refused.

Not for: `--weights int8` and `int4` on a CPU, whose layouts belong to
our CPU decoder (`cpu/weights.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import ModelConfig, Weights
from engine.errors import ConfigError
from engine.models.importing import import_torchao, import_transformers

FORMATS: tuple[Weights, ...] = ("fp8", "int4")
"""Formats in which torchao quantises weights while they are loaded."""
GROUP = 32
"""Numbers that share a scale in int4; a row shares one in fp8."""

TORCHAO = "torchao"
"""Method whose stored weights compute in the type that they had before: it cannot be changed."""
_LIBRARIES = {TORCHAO: "torchao", "compressed-tensors": "compressed_tensors"}
"""Modules that transformers imports for the methods of checkpoints."""
_LEAST_CAPABILITY = {"fp8": (8, 9), "int4": (8, 0)}


def stored_method(config: Any) -> str | None:
    """Return the method of a quantised checkpoint, or None."""
    stored = _stored(config)
    if "quant_method" not in stored:
        return None
    return str(stored["quant_method"])


def check_quantised(
    name: str, config: Any, wanted: ModelConfig, num_ranks: int, device: torch.device, by_torchao: bool
) -> None:
    """Raise ConfigError for quantised weights that cannot be served.

    config: the checkpoint's; by_torchao: whether torchao quantises the weights
    while they are loaded.
    """
    method, weights, dtype = stored_method(config), wanted.weights, wanted.dtype
    if method in _LIBRARIES and find_spec(_LIBRARIES[method]) is None:
        raise ConfigError(f"{name}: its weights are quantised by {method}, which is missing; {_install(method)}")
    if _shares_scale(_stored(config)):
        raise ConfigError(
            f"{name}: its activations are quantised with one scale for all tokens of a pass, so one request would "
            "change another's answer; serve a checkpoint with a scale for each token, or the one that is not quantised"
        )
    if method is not None and weights != "auto":
        raise ConfigError(f"--weights {weights}: {name} is already quantised, by {method}; leave --weights out")
    if method == TORCHAO and dtype not in ("auto", str(config.dtype).removeprefix("torch.")):
        raise ConfigError(f"--dtype {dtype}: the quantised weights of {name} are of {config.dtype}; leave --dtype out")
    if weights != "auto" and num_ranks > 1:
        raise ConfigError(f"--weights {weights}: a split target cannot be quantised; leave out --tensor-parallel-size")
    if not by_torchao:
        return
    if find_spec("torchao") is None:
        raise ConfigError(f"--weights {weights}: torchao is missing; {_install('torchao')}")
    if device.type == "cuda":
        _check_device(weights, dtype, torch.cuda.get_device_capability(device))


def _check_device(weights: str, dtype: str, capability: tuple[int, int]) -> None:
    if dtype not in ("auto", "bfloat16"):
        raise ConfigError(f"--weights {weights}: its products are of bfloat16; leave out --dtype {dtype}")
    least = _LEAST_CAPABILITY[weights]
    if capability < least:
        raise ConfigError(
            f"--weights {weights}: needs a device of compute capability {least[0]}.{least[1]}, this one has "
            f"{capability[0]}.{capability[1]}; leave the flag out"
        )


def load_options(weights: str, method: str | None, device: torch.device) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that quantise, if any.

    method: by which the checkpoint is quantised.
    """
    if weights in FORMATS or method == TORCHAO:
        import_torchao()
    if weights not in FORMATS:
        return {}
    torchao_config = _torchao_config(weights, on_cuda=device.type == "cuda")
    return {"quantization_config": import_transformers().TorchAoConfig(torchao_config)}


def _torchao_config(weights: str, on_cuda: bool) -> Any:
    """Return torchao's configuration; on a CPU it is no faster."""
    quantization = import_torchao().quantization
    by_row = quantization.PerRow()
    if weights == "fp8" and on_cuda:
        return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=by_row, set_inductor_config=False)
    if weights == "fp8":
        return quantization.Float8WeightOnlyConfig(granularity=by_row, set_inductor_config=False)
    if on_cuda:
        return quantization.Int4WeightOnlyConfig(
            group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
        )
    int4 = torch.int4  # type: ignore[attr-defined]
    by_group = quantization.PerGroup(GROUP)
    return quantization.IntxWeightOnlyConfig(weight_dtype=int4, granularity=by_group)


def multiplies_float8(device: torch.device) -> bool:
    """Whether torchao can multiply in fp8 on a device."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY["fp8"]
        and find_spec("torchao") is not None
    )


def adopt_float8(model: nn.Module) -> None:
    """Give fp8 layers of compressed-tensors, scaled by rows, torchao's layout.

    compressed-tensors unpacks weights, and rounds them once more in every pass. Call it before the
    first pass. Does nothing if some layers are quantised otherwise.
    """
    layers: list[Any] = [module for module in model.modules() if has_scheme(module)]
    unpacking = getattr(model, "ct_decompress_hook", None)
    if unpacking is None or not all(map(_is_float8_by_rows, layers)):
        return
    torchao = import_torchao()
    # An optional package. As an attribute, `quantize_` is a function.
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    quantization = torchao.quantization
    mm_config = torchao.float8.inference.Float8MMConfig(use_fast_accum=True)
    row_options = QuantizeTensorToFloat8Kwargs(granularity=quantization.PerRow(), mm_config=mm_config)
    weights = [
        quantization.Float8Tensor(
            layer.weight.data,
            layer.weight_scale.data.float().view(-1, 1),
            block_size=[1, layer.in_features],
            mm_config=mm_config,
            act_quant_kwargs=row_options,
            dtype=torch.bfloat16,
        )
        for layer in layers
    ]
    # All of them, or none if an error came before.
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight, requires_grad=False)
        del layer.weight_scale, layer.quantization_scheme, layer.quantization_status, layer.forward
    unpacking.remove()


def _is_float8_by_rows(layer: Any) -> bool:
    """Return whether a stored layer multiplies fp8 with scales of rows."""
    scheme = layer.quantization_scheme
    rows, scale = scheme.input_activations, getattr(layer, "weight_scale", None)
    return (
        type(layer) is nn.Linear
        and {"forward", "quantization_status"} <= vars(layer).keys()
        and layer.weight.dtype == torch.float8_e4m3fn
        and scale is not None
        and scale.numel() == layer.out_features
        and scheme.output_activations is None
        and rows is not None
        and (rows.type, rows.num_bits, rows.strategy, rows.dynamic) == ("float", 8, "token", True)
    )


def check_is_quantised(name: str, model: nn.Module, weights: str) -> None:
    """Raise ConfigError if a model has no layer that was quantised as asked."""
    if weights in FORMATS and not has_quantised(model):
        raise ConfigError(
            f"--weights {weights}: {name} has no linear layers that torchao quantises; leave the flag out"
        )


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight is stored in a layout of torchao."""
    return type(weight.data).__module__.startswith("torchao.")


def has_quantised(model: nn.Module) -> bool:
    """Whether any weight of a model is stored in a layout of torchao."""
    return any(map(is_quantised, model.parameters()))


def has_scheme(module: Any) -> bool:
    """Whether compressed-tensors computes a layer: its weight is plain, but its product is not."""
    return getattr(module, "quantization_scheme", None) is not None


def quantises_rows(model: nn.Module) -> bool:
    """Whether products of a model round their rows to few bits, too."""
    schemes: Iterator[Any] = (module.quantization_scheme for module in model.modules() if has_scheme(module))
    by_torchao = (getattr(weight, "act_quant_kwargs", None) is not None for weight in model.parameters())
    return any(by_torchao) or any(scheme.input_activations is not None for scheme in schemes)


def rounds_rows(module: nn.Module) -> bool:
    """Whether the product of a layer that rounds its rows is to round them now (`rounding_off`)."""
    return getattr(module, "quantization_enabled", True)


@contextmanager
def rounding_off(model: nn.Module) -> Iterator[None]:
    """Let quantised layers and joined products not round rows, temporarily."""
    changed: list[Any] = [module for module in model.modules() if has_scheme(module) or has_float8_rows(module)]
    before = [rounds_rows(module) for module in changed]
    try:
        for module in changed:
            module.quantization_enabled = False
        yield
    finally:
        for module, was in zip(changed, before, strict=True):
            module.quantization_enabled = was


def has_float8_rows(module: Any) -> bool:
    """Return whether a layer's torchao weight is fp8 with a scale for each row."""
    if type(module) is not nn.Linear or has_scheme(module) or not is_quantised(module.weight):
        return False
    weight: Any = module.weight.data
    return type(weight).__name__ == "Float8Tensor" and list(weight.block_size) == [1, weight.shape[1]]


def rounds_to_float8(weight: Any) -> bool:
    """Return whether a weight's rows are rounded as our kernel does it."""
    to = weight.data.act_quant_kwargs
    return (
        to is not None
        and weight.dtype == torch.bfloat16
        and {weight.data.qdata.dtype, to.float8_dtype} == {torch.float8_e4m3fn}
        and type(to.granularity).__name__ == "PerRow"
        and to.hp_value_lb is to.hp_value_ub is None
    )


def in_float32(weight: Tensor) -> Tensor:
    """Return a weight's numbers in float32; products with it do not round their rows."""
    return dequantised(weight).float()


def dequantised(weight: Tensor) -> Tensor:
    """Return a weight's numbers in the type of the arithmetic."""
    return weight.dequantize() if is_quantised(weight) else weight


def _stored(config: Any) -> dict[str, Any]:
    stored = getattr(config, "quantization_config", None)
    if stored is None or isinstance(stored, dict):
        return stored or {}
    fields: dict[str, Any] = stored.to_dict()
    return fields


def _install(package: str) -> str:
    return f"pip install 'polydraft[quantised]' has it, or pip install {package}"


def _shares_scale(stored: dict[str, Any]) -> bool:
    """Whether activations are quantised by one scale that follows from all rows of a pass."""
    for fields in _objects(stored):
        inputs = fields.get("input_activations")  # of compressed-tensors
        if isinstance(inputs, dict) and inputs.get("dynamic") is True and inputs.get("strategy") == "tensor":
            return True
        # Of torchao.
        if "DynamicActivation" in str(fields.get("_type")) and "PerTensor" in str(fields.get("_data")):
            return True
    return False


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects inside a JSON value."""
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        yield value
        items = value.values()
    elif isinstance(value, list):
        items = value
    for item in items:
        yield from _objects(item)


def is_plain(module: Any) -> bool:
    """Return whether a module is linear with a whole plain weight."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor and not has_scheme(module)
