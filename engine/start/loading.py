"""Loads transformers checkpoints that the attention hook serves correctly, and refuses the others.

Some architectures run through the hook without an exception but compute wrong logits (recurrent or hybrid layers,
encoders). So there is a list of supported families, a check of the configuration, and a probe (`probe.py`). Rotary
embeddings that depend on the longest request of a batch are fixed before a model is built (`rope.py`).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.attention.attention import HOOK, register
from engine.config import MODEL, MTP, ModelConfig
from engine.errors import ConfigError, LoadError, first_line
from engine.heads.config import HeadConfig, check_target
from engine.heads.head import Head
from engine.heads.loading import head_config, load_head, mtp_config
from engine.models.checkpoint import Source, check_vocabularies, context_length, length_remark, token_roles
from engine.models.files import check_source
from engine.models.gguf.blocks import BlockTensor
from engine.models.gguf.file import GgufFile
from engine.models.gguf.weights import check_types, file_behind, is_by_name, load_model
from engine.models.importing import import_transformers
from engine.models.kinds import may_decode
from engine.models.parallel import Ranks, check_split, start_ranks
from engine.models.quantising import (
    FORMATS,
    TORCHAO,
    adopt_float8,
    check_is_quantised,
    check_quantised,
    load_options,
    multiplies_float8,
    stored_method,
)
from engine.models.rope import depends_on_length, fix_rope, limit_reason, original_length
from engine.models.weight_files import check_unplaced, check_weight_files, missing_fault, wrapper_prefix

log = logging.getLogger("polydraft")

# Families whose logits through the hook equal plain transformers (tests/models/test_architectures.py
# covers the first line; the others passed the same comparison with random weights).
FITTING_MODEL_TYPES = frozenset(
    """
    llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 gpt_neox gpt2 opt olmo2
    afmoe apertus arcee bitnet cohere cohere2 cwm ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma4_text
    glm glm4 glm4_moe gpt_bigcode gpt_oss granite granitemoe helium hunyuan_v1_dense hunyuan_v1_moe internlm3
    jais2 jetmoe laguna llama4_text minimax_m2 ministral ministral3 mixtral modernbert-decoder nanochat olmo
    olmo3 olmoe persimmon phi phimoe qwen2_moe qwen3_moe seed_oss smollm3 starcoder2 vaultgemma
    """.split()
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Facts of a checkpoint's configuration, known before its weights are read."""

    name: str
    model_type: str
    vocab_size: int
    max_positions: int
    max_draft_length: int | None = None
    """Most tokens of a chain that it drafts; None is no limit."""
    short_context: int | None = None
    """Longest context that the short factors of a longrope model serve; None for other models."""
    limit_reason: str = ""
    """Reason for `max_positions`, for messages."""
    drafter: str = MODEL
    """Name of its facts as a drafter (`speculation.conditions`)."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel(Outline):
    """A model that attends through the hook, or a head of another model, and the facts of its checkpoint."""

    model: Any
    eos_token_ids: frozenset[int]
    is_share: bool = False
    """Whether this is one rank's share of a split model."""
    ranks: Ranks | None = None
    """On rank 0: the processes that hold the other shares."""
    remark: str = ""
    """Line for the log about a choice that was made while the model was loaded."""

    @property
    def weight_bytes(self) -> int:
        """Return the memory of the parameters and buffers; of a split model this process's share."""
        unique = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            for part in _stored(tensor):
                unique[part.data_ptr()] = part.nbytes
        return sum(unique.values())

    @property
    def weight_types(self) -> str:
        """Return the type of the weights, or the types of those in blocks, such as Q4_K+Q6_K, the largest share
        first.
        """
        sizes: Counter[str] = Counter()
        for weight in self.model.parameters():
            if isinstance(weight, BlockTensor):
                sizes[weight.type.name] += weight.numel()
        return "+".join(name for name, _ in sizes.most_common()) or str(self.model.dtype).removeprefix("torch.")


def _stored(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors of a weight: of a split one this process's share, of a quantised one its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [part for one in inner if isinstance(one, torch.Tensor) for part in _stored(one)]
    return [tensor]


def choose_device(wanted: str) -> torch.device:
    """Return the device to run on; raise ConfigError if CUDA is requested and missing."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no CUDA device; use --device cpu or auto")
    return torch.device("cuda")


def arithmetic_dtype(wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the type in which a transformers model computes; None is its checkpoint's.

    A CPU computes in float32, unless another type is requested and it has arithmetic of that type: without it, torch is
    ten times as slow.
    """
    if device.type != "cpu":
        return _DTYPES.get(wanted)
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if wanted == "bfloat16" and has_bfloat16 else torch.float32


def _load_dtype(wanted: str, config: Any, device: torch.device, split: bool, quantises: bool) -> torch.dtype | str:
    """Return the type for `from_pretrained`: our own decoder widens the weights of a CPU itself."""
    if stored_method(config) == TORCHAO:
        return "auto"
    if device.type == "cpu" and (split or quantises or not may_decode(config)):
        return arithmetic_dtype(wanted, device) or "auto"
    return torch.bfloat16 if quantises else _DTYPES.get(wanted, "auto")


def decoded_dtype(config: ModelConfig) -> torch.dtype | None:
    """Type of the weights that a CPU's decoder has for the target; None if it does not take such a model.

    Raises LoadError.
    """
    found = _read_config(config.target, config.revision)
    if choose_device(config.device).type != "cpu" or config.tensor_parallel_size > 1 or not may_decode(found):
        return None
    if by_torchao(config.weights, found, choose_device(config.device)):
        return None
    return _DTYPES.get(config.dtype) or getattr(found, "dtype", None)


def by_torchao(weights: str, config: Any, device: torch.device) -> bool:
    """Whether torchao quantises a checkpoint with this configuration, and not the CPU's decoder.

    weights: of `ModelConfig`.
    """
    is_decoded = device.type == "cpu" and may_decode(config) and find_spec("numba") is not None
    return weights in FORMATS and not (weights == "int4" and is_decoded)


def _dtype_of_file(file: GgufFile, wanted: str, device: torch.device) -> torch.dtype | None:
    """Return the type to which the weights of a GGUF file are dequantised; None leaves them in their blocks.

    wanted: of `ModelConfig`.
    """
    if device.type != "cpu":
        return _DTYPES.get(wanted, torch.bfloat16)
    if not is_by_name(file) or find_spec("numba") is None:
        return arithmetic_dtype(wanted, device)
    return _DTYPES.get(wanted)


def _torchao_format(name: str, revision: str | None, config: ModelConfig) -> str:
    """Return the format in which torchao quantises a checkpoint while it is loaded; auto if it does not."""
    stored = _read_config(name, revision)
    return config.weights if by_torchao(config.weights, stored, choose_device(config.device)) else "auto"


def load(
    name: str,
    revision: str | None,
    dtype: str,
    device: torch.device,
    split: bool = False,
    weights: str = "auto",
    context: int = 0,
) -> LoadedModel:
    """Load one checkpoint; raise ConfigError (it does not fit) or LoadError (it cannot be read).

    dtype, weights: of `ModelConfig`, but weights are those that torchao has; split: only this rank's share of it
    (`parallel.py`); context: tokens of the longest text that is served, 0 is the model's own limit.
    """
    transformers = import_transformers()
    register()
    config = _read_config(name, revision)
    check_config(name, config)
    remark = fix_rope(name, config, context or context_length(config))
    if (file := file_behind(name)) is not None:
        loaded = adopt(load_model(name, file, config, _dtype_of_file(file, dtype, device), device), name)
        return replace(loaded, remark=remark)
    renamed: dict[str, Any] = {}
    if Path(name).is_dir() and (prefix := wrapper_prefix(Path(name))):
        renamed = {"key_mapping": {f"^{re.escape(prefix)}": ""}}
    # On a device the weights are loaded one by one, and never pass through this process's memory as a whole.
    placed = {"tp_plan": "auto"} if split else {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        with warnings.catch_warnings():
            # Newer versions have another value of `tp_plan`, which the older ones do not know.
            warnings.simplefilter("ignore", FutureWarning)
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                revision=revision,
                dtype=_load_dtype(dtype, config, device, split, weights in FORMATS),
                attn_implementation=HOOK,
                output_loading_info=True,
                **load_options(weights, stored_method(config), device),
                **placed,
                **renamed,
            )
    except Exception as error:  # transformers and safetensors raise exceptions of many types
        raise LoadError(f"{name}: the weights cannot be loaded: {first_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            fault = missing_fault(report[kind], report.get("unexpected_keys", ()))
            raise LoadError(f"{name}: {fault}")
    unplaced = map(str, report.get("unexpected_keys", ()))
    check_unplaced(name, model, unplaced, is_quantised=stored_method(config) is not None)
    check_is_quantised(name, model, weights)
    if model.dtype == torch.bfloat16 and multiplies_float8(device):
        adopt_float8(model)
    return replace(adopt(model, name), is_share=split, remark=remark)


def adopt(model: Any, name: str) -> LoadedModel:
    """Wrap a transformers model that was built with `attn_implementation=HOOK`."""
    config = model.config
    check_config(name, config)
    assert not depends_on_length(config), "the rotary embedding is fixed before a model is built"
    model.eval().requires_grad_(False)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    return LoadedModel(model=model, eos_token_ids=eos_ids, **vars(_outline(name, config)))


def _outline(name: str, config: Any) -> Outline:
    return Outline(
        name=name,
        model_type=config.model_type,
        vocab_size=int(config.vocab_size),
        max_positions=context_length(config),
        short_context=original_length(config),
        limit_reason=limit_reason(config),
    )


def outline_pair(config: ModelConfig) -> list[Outline]:
    """Return the outlines of target and draft, checked by their configurations alone, before weights are read.

    Raise ConfigError or LoadError.
    """
    _check_formats(config)
    outlines = [_outlined(config.target, config.revision, config, config.tensor_parallel_size)]
    if config.draft is None:
        return outlines
    head = find_head(config)
    if head is not None:
        _check_format_of_head(config, head)
    else:
        outlines.append(_outlined_draft(config, config.draft))
        check_pair(outlines[0], outlines[1], config.revision, config.draft_revision)
        return outlines
    if Path(head.name).is_dir():
        check_weight_files(Path(head.name))
    check_target(head, _read_config(config.target, config.revision), config.target)
    if config.tensor_parallel_size > 1:
        raise ConfigError(f"{head.name}: heads are not served with --tensor-parallel-size; leave it out, or the head")
    return [*outlines, replace(outlines[0], **_facts_of(head))]


def _check_formats(config: ModelConfig) -> None:
    """Raise ConfigError for number formats that would change nothing."""
    if config.draft_weights != "auto" and config.draft is None:
        raise ConfigError(f"--draft-weights {config.draft_weights}: there is no draft model; leave the flag out")
    if config.activations == "auto":
        return
    if choose_device(config.device).type != "cpu":
        raise ConfigError("--activations is for a CPU; leave the flag out")
    rounding = {config.weights, config.draft_weights} & {"int8", "int4"}
    if rounding:
        raise ConfigError(
            f"--activations float32: rows are rounded to 8 bits for weights in {sorted(rounding)[0]}; leave one out"
        )


def _check_format_of_head(config: ModelConfig, head: HeadConfig) -> None:
    """Raise ConfigError for a number format that a head cannot have."""
    has_formats = choose_device(config.device).type == "cpu" and config.draft != MTP
    if config.draft_weights in ("int8", "int4") and has_formats:
        return
    if config.draft_weights != "auto":
        raise ConfigError(
            f"--draft-weights {config.draft_weights}: {head.name} is a head; only heads on a CPU that are no MTP "
            "module have other numbers, int8 or int4; leave the flag out"
        )


def find_head(config: ModelConfig) -> HeadConfig | None:
    """Return the configuration of a draft model that is a trained head; None if it is a language model."""
    if config.draft_source is None:
        return None
    check_source(*config.draft_source)
    return (mtp_config if config.draft == MTP else head_config)(*config.draft_source)


def _facts_of(head: HeadConfig) -> dict[str, Any]:
    """Return the fields of an `Outline` that differ between a head and its target."""
    return {
        "name": head.name,
        "model_type": head.kind,
        "max_draft_length": head.max_draft_length,
        "drafter": head.kind,
    }


def _outlined(name: str, revision: str | None, wanted: ModelConfig, num_ranks: int) -> Outline:
    device = choose_device(wanted.device)
    config = _read_config(name, revision)
    check_config(name, config)
    check_quantised(name, config, wanted, num_ranks, device, by_torchao(wanted.weights, config, device))
    if Path(name).is_dir():
        check_weight_files(Path(name))
    if (file := file_behind(name)) is not None:
        _check_file(name, file, wanted, num_ranks)
    return _outline(name, config)


def _outlined_draft(config: ModelConfig, name: str) -> Outline:
    try:
        return _outlined(name, config.draft_revision, draft_model_config(config), 1)
    except ConfigError as error:
        if config.draft_weights == "auto":
            raise
        raise ConfigError(str(error).replace("--weights", "--draft-weights")) from error


def draft_model_config(config: ModelConfig) -> ModelConfig:
    """Return a configuration with the number format of the draft model's weights: that of the target if the draft
    model's weights are not quantised already, and no other is asked for.
    """
    if config.draft_weights != "auto":
        return msgspec.structs.replace(config, weights=config.draft_weights)
    if config.weights == "auto" or config.draft is None:
        return config
    is_stored = _is_quantised_already(config.draft, config.draft_revision)
    return msgspec.structs.replace(config, weights="auto") if is_stored else config


def _is_quantised_already(name: str, revision: str | None) -> bool:
    if file_behind(name) is not None:
        return True
    try:
        return stored_method(_read_config(name, revision)) is not None
    except ConfigError:  # loading the model reports it
        return False


def _check_file(name: str, file: GgufFile, wanted: ModelConfig, num_ranks: int) -> None:
    """Raise LoadError for a GGUF file that cannot be served, ConfigError for formats that it cannot have."""
    check_types(file)
    if wanted.weights != "auto":
        raise ConfigError(
            f"--weights {wanted.weights}: the weights of {name} are quantised already, and nothing is quantised twice; "
            "leave the flag out, or choose another of the model's files"
        )
    if wanted.activations == "float32" and wanted.dtype == "auto":
        raise ConfigError(
            f"--activations float32: rows are rounded to 8 bits for the weights of {name}; leave the flag out, or "
            "dequantise the weights: --dtype float32"
        )
    if num_ranks > 1:
        raise ConfigError(f"{name}: GGUF files are not split; leave --tensor-parallel-size out")


def _read_config(name: str, revision: str | None) -> Any:
    check_source(name, revision)
    try:
        return import_transformers().AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"{name}: no readable transformers config: {first_line(error)}") from error


def check_config(name: str, config: Any) -> None:
    """Raise ConfigError for an architecture that would be served wrongly."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name}: an encoder-decoder model ({config.model_type}); only causal LMs are served")
    if config.model_type not in FITTING_MODEL_TYPES:
        raise ConfigError(
            f"{name}: architecture {config.model_type!r} is not known to give right logits here; "
            f"it must be one of: {', '.join(sorted(FITTING_MODEL_TYPES))}"
        )


def check_pair(target: Outline, draft: Outline, revision: str | None = None, draft_revision: str | None = None) -> None:
    """Raise ConfigError if the two models do not have the same tokens; revision: the target's."""
    are_compared = check_vocabularies(Source(target.name, revision), Source(draft.name, draft_revision))
    # Sizes are compared if a model has no tokenizer.json.
    if not are_compared and target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"{draft.name} has a vocabulary of {draft.vocab_size}, {target.name} of {target.vocab_size}; "
            "choose a draft model of the same family"
        )


def end_tokens(config: ModelConfig, progress: Progress) -> frozenset[int]:
    """Return the tokens that end an answer by all files of the target; report contradictions between these files."""
    target, tokenizer = Source(config.target, config.revision), Source(*config.tokenizer_source)
    stated = _read_config(*target)
    roles = token_roles(target, tokenizer, int(stated.vocab_size), getattr(stated, "eos_token_id", None))
    for fault in roles.faults:
        log.warning("%s", fault)
    for remark in filter(None, (*roles.remarks, length_remark(stated, tokenizer))):
        progress(remark)
    return roles.ends


def load_pair(config: ModelConfig, progress: Progress, context: int = 0) -> tuple[LoadedModel, LoadedModel | None]:
    """Load target and draft, which `outline_pair` has checked; context: tokens of the longest text that is served, 0 is
    each model's own limit.
    """
    device = choose_device(config.device)
    progress(f"loading target {config.target}")
    splits, ranks = config.tensor_parallel_size > 1, None
    if splits:
        check_split(config.target, _read_config(config.target, config.revision), config.tensor_parallel_size)
        ranks = start_ranks(config, device, context)
    weights = _torchao_format(config.target, config.revision, config)
    target = load(config.target, config.revision, config.dtype, device, splits, weights, context)
    target = replace(target, ranks=ranks)
    draft = None if config.draft is None else _load_draft(config, target, progress, context)
    for model in (target, draft):
        if model is not None and model.remark:
            progress(model.remark)
    return target, draft


def _load_draft(config: ModelConfig, target: LoadedModel, progress: Progress, context: int) -> LoadedModel:
    """Load a configured draft model or head."""
    assert config.draft is not None
    head = find_head(config)
    if head is not None:
        name, revision = config.draft_source or (config.draft, None)
        progress(f"loading the {head.kind} head of {name}")
        return adopt_head(load_head(head, revision, target.model), target)
    progress(f"loading draft {config.draft}")
    device = choose_device(config.device)
    weights = _torchao_format(config.draft, config.draft_revision, draft_model_config(config))
    return load(config.draft, config.draft_revision, config.dtype, device, weights=weights, context=context)


def adopt_head(head: Head, target: LoadedModel) -> LoadedModel:
    """Wrap a head that is attached to its target."""
    return replace(target, model=head, eos_token_ids=frozenset(), remark="", **_facts_of(head.config))
