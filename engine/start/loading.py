"""Loads transformers checkpoints with the attention hook, and heads that are attached to them.

Rotary embeddings that depend on the longest request of a batch are fixed before a model is built
(`rope.py`). Not for: what can be refused before weights are read (`outlines.py`).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.attention.attention import HOOK, register
from engine.attention.latent import METHOD, store_latents
from engine.attention.recurrent import replace_recurrences
from engine.config import ModelConfig
from engine.errors import LoadError, first_line
from engine.heads.head import Head
from engine.heads.loading import load_head
from engine.models.adapter import merge, read_adapter
from engine.models.checkpoint import Source, context_length, length_remark, token_roles
from engine.models.gguf.blocks import BlockTensor
from engine.models.gguf.weights import file_behind, load_model
from engine.models.importing import import_transformers
from engine.models.parallel import Ranks, check_split, start_ranks
from engine.models.quantising import (
    FORMATS,
    adopt_float8,
    check_is_quantised,
    is_plain,
    load_options,
    multiplies_float8,
    stored_method,
)
from engine.models.rope import depends_on_length, fix_rope
from engine.models.weight_files import check_unplaced, missing_fault, wrapper_prefix
from engine.models.wrappers import KEY_MAPPING, wrapper_of
from engine.start.architectures import check_config, read_config
from engine.start.number_formats import (
    choose_device,
    draft_model_config,
    file_dtype,
    load_dtype,
    torchao_format,
)
from engine.start.outlines import Outline, find_head, head_facts, outline_of

log = logging.getLogger("polydraft")

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LoadedModel(Outline):
    """A model that attends through the hook, or a head, and its checkpoint's facts."""

    model: Any
    eos_token_ids: frozenset[int]
    is_share: bool = False
    """Whether it is one rank's share of a split model."""
    ranks: Ranks | None = None
    """On rank 0: the processes of the other shares."""
    remark: str = ""
    """For the log, about a choice while loading."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of this rank's parameters and buffers."""
        unique = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            for part in _stored(tensor):
                unique[part.data_ptr()] = part.nbytes
        return sum(unique.values())

    @property
    def weight_types(self) -> str:
        """Return the type of the weights, such as bfloat16.

        For weights in blocks: their types, such as Q4_K+Q6_K, the largest share first.
        """
        sizes: Counter[str] = Counter()
        for weight in self.model.parameters():
            if isinstance(weight, BlockTensor):
                sizes[weight.type.name] += weight.numel()
        if not sizes:
            return str(self.model.dtype).removeprefix("torch.")
        return "+".join(name for name, _ in sizes.most_common())


def _stored(weight: Any) -> list[torch.Tensor]:
    """Return a weight's tensors: this rank's share, or parts of a quantised one."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    parts = [getattr(weight, name) for name in names]
    return [inner for part in parts if isinstance(part, torch.Tensor) for inner in _stored(part)]


def load_pair(config: ModelConfig, progress: Progress, context: int = 0) -> tuple[LoadedModel, LoadedModel | None]:
    """Load target and draft, which `outline_pair` has checked.

    context: tokens of the longest text that is served, 0 is each model's own limit.
    """
    progress(f"loading target {config.target}")
    target = _load_target(config, context)
    draft = None
    if config.draft is not None:
        draft = _load_draft(config, config.draft, target, progress, context)
    for model in (target, draft):
        if model is not None and model.remark:
            progress(model.remark)
    return target, draft


def _load_target(config: ModelConfig, context: int) -> LoadedModel:
    """Load the target; if it is split, start the other ranks first, which load their shares."""
    device = choose_device(config.device)
    if config.tensor_parallel_size == 1:
        weights = torchao_format(config.target, config.revision, config)
        target = load(config.target, config.revision, config.dtype, device, weights, context)
        return _with_adapter(target, config.adapter)
    stored = read_config(config.target, config.revision)
    check_split(config.target, stored, config.tensor_parallel_size)
    ranks = start_ranks(config, device, context)
    return replace(load_share(config, device, context), ranks=ranks)


def _with_adapter(target: LoadedModel, adapter: str) -> LoadedModel:
    """Return the target with an adapter in its weights, if one is named."""
    if not adapter:
        return target
    num_changed = merge(target.model, read_adapter(adapter))
    remarks = [target.remark, f"merged the adapter {adapter} into {num_changed} weights"]
    return replace(target, remark="; ".join(filter(None, remarks)))


def _load_draft(config: ModelConfig, name: str, target: LoadedModel, progress: Progress, context: int) -> LoadedModel:
    """Load the configured draft model, or the head that the name stands for."""
    head = find_head(config)
    if head is not None:
        folder, revision = config.draft_source or (name, None)
        progress(f"loading the {head.kind} head of {folder}")
        return adopt_head(load_head(head, revision, target.model), target)
    progress(f"loading draft {name}")
    device = choose_device(config.device)
    weights = torchao_format(name, config.draft_revision, draft_model_config(config))
    return load(name, config.draft_revision, config.dtype, device, weights, context)


def load(
    name: str,
    revision: str | None,
    dtype: str,
    device: torch.device,
    weights: str = "auto",
    context: int = 0,
) -> LoadedModel:
    """Load a checkpoint; raise ConfigError (it does not fit) or LoadError (unreadable).

    dtype: of `ModelConfig`; weights: format in which torchao quantises them, or auto; context:
    tokens of the longest served text, 0 is the model's limit.
    """
    config, remark = _servable_config(name, revision, context)
    file = file_behind(name)
    if file is not None:
        model = load_model(name, file, config, file_dtype(file, dtype, device), device)
        return replace(adopt(model, name), remark=remark)
    stored_dtype = load_dtype(dtype, config, device, split=False, quantises=weights in FORMATS)
    options: dict[str, Any] = {"revision": revision, "dtype": stored_dtype}
    if device.type != "cpu":
        # Weights are loaded one by one, and never pass through this process's memory as a whole.
        options["device_map"] = {"": device}
    model = _from_pretrained(name, config, device, weights, options)
    check_is_quantised(name, model, weights)
    return replace(_adopt_loaded(model, name, device), remark=remark)


def load_share(config: ModelConfig, device: torch.device, context: int = 0) -> LoadedModel:
    """Load this rank's share of a split target (`parallel.py`); raise as `load` does."""
    name = config.target
    stored, remark = _servable_config(name, config.revision, context)
    stored_dtype = load_dtype(config.dtype, stored, device, split=True, quantises=False)
    options = {"revision": config.revision, "dtype": stored_dtype, "tp_plan": "auto"}
    model = _from_pretrained(name, stored, device, "auto", options)
    return replace(_adopt_loaded(model, name, device), is_share=True, remark=remark)


def _servable_config(name: str, revision: str | None, context: int) -> tuple[Any, str]:
    """Return (a model's configuration with its rotary embedding fixed, a remark for the log)."""
    import_transformers()
    register()
    config = read_config(name, revision)
    check_config(name, config)
    return config, fix_rope(name, config, context or context_length(config))


def _from_pretrained(name: str, config: Any, device: torch.device, weights: str, options: dict[str, Any]) -> Any:
    """Return transformers' model of a checkpoint; raise LoadError if weights do not fit it.

    weights: of `load`; options: further arguments of `from_pretrained`.
    """
    models = import_transformers().AutoModelForCausalLM
    options |= _renaming(name, config)
    try:
        with warnings.catch_warnings(), _without_report():
            # Newer versions have another value of `tp_plan`, which the older ones do not know.
            warnings.simplefilter("ignore", FutureWarning)
            model, report = models.from_pretrained(
                name,
                config=config,
                attn_implementation=HOOK,
                output_loading_info=True,
                **load_options(weights, stored_method(config), device),
                **options,
            )
    except Exception as error:  # transformers and safetensors raise exceptions of many types
        raise LoadError(f"{name}: the weights cannot be loaded: {first_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            fault = missing_fault(report[kind], report.get("unexpected_keys", ()))
            raise LoadError(f"{name}: {fault}")
    unplaced = map(str, report.get("unexpected_keys", ()))
    check_unplaced(name, model, unplaced, stored_method(config) is not None, wrapper_of(config))
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Keep transformers' table of unused tensors out of the log, which `check_unplaced` sums up."""
    reporter = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    reporter.addFilter(is_other)
    try:
        yield
    finally:
        reporter.removeFilter(is_other)


def _renaming(name: str, config: Any) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that remove a wrapped model's prefix."""
    if wrapper_of(config):
        return {"key_mapping": dict(KEY_MAPPING)}
    prefix = wrapper_prefix(Path(name)) if Path(name).is_dir() else ""
    if not prefix:
        return {}
    return {"key_mapping": {f"^{re.escape(prefix)}": ""}}


def _adopt_loaded(model: Any, name: str, device: torch.device) -> LoadedModel:
    if model.dtype == torch.bfloat16 and multiplies_float8(device):
        adopt_float8(model)
    return adopt(model, name)


def adopt(model: Any, name: str) -> LoadedModel:
    """Wrap a transformers model that was built with `attn_implementation=HOOK`."""
    config = model.config
    check_config(name, config)
    assert not depends_on_length(config), "the rotary embedding is fixed before a model is built"
    model.eval().requires_grad_(False)
    latent = [module for module in model.modules() if hasattr(type(module), METHOD) and is_plain(module.kv_b_proj)]
    store_latents(latent, HOOK)
    replace_recurrences(model.modules())
    eos = model.generation_config.eos_token_id if model.generation_config else None
    if eos is None:
        eos = config.eos_token_id
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    return LoadedModel(model=model, eos_token_ids=eos_ids, **vars(outline_of(name, config)))


def adopt_head(head: Head, target: LoadedModel) -> LoadedModel:
    """Wrap a head that is attached to its target."""
    facts = head_facts(head.config)
    return replace(target, model=head, eos_token_ids=frozenset(), remark="", **facts)


def end_tokens(config: ModelConfig, progress: Progress) -> frozenset[int]:
    """Return the tokens that end an answer by all files of the target; report contradictions."""
    target = Source(config.target, config.revision)
    tokenizer = Source(*config.tokenizer_source)
    stored = read_config(*target)
    default_ends = getattr(stored, "eos_token_id", None)
    roles = token_roles(target, tokenizer, int(stored.vocab_size), default_ends)
    for fault in roles.faults:
        log.warning("%s", fault)
    for remark in filter(None, (*roles.remarks, length_remark(stored, tokenizer))):
        progress(remark)
    return roles.ends
