"""Recognise a head by its config.json, and read both published layouts.

The speculators layout names its type (`speculators_model_type`) and nests the layers'
sizes (`transformer_layer_config`). The layout of the heads' first authors is a flat
transformers config, recognised by its architecture. A *tap* k is the stream that enters
layer k of the target (`engine.attention.tensors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.attention.tensors import NORMED
from engine.errors import ConfigError, first_line
from engine.models.importing import import_transformers
from engine.models.rope import depends_on_length

Raw = Mapping[str, Any]

_LAYER_TYPES = ("llama", "qwen3")
"""qwen3 has norms of q and k."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Parameters of heads of the DFlash types, which draft a block in one pass."""

    size: int
    """Rows of a block: the anchor, which is the text's last token, and masks."""
    from_anchor: bool
    """Whether the anchor's row drafts the first token; else the first mask's does."""
    is_causal: tuple[bool, ...]
    """Whether rows of the block see only earlier rows, by layer."""
    embedding_scale: float = 1.0
    markov_rank: int = 0
    """Width of the term that depends on the last token; 0 for none."""
    markov_type: str = "vanilla"
    conv_taps: int = 0
    """Rows that the convolutions read; 0 for none."""
    conv_group: int = 1
    selector_rank: int = 0
    """Width of the selector that weighs pairs of candidates; 0 for none."""
    num_candidates: int = 0
    """Likeliest tokens from which the selector chooses."""

    @property
    def causalities(self) -> tuple[bool, ...]:
        return tuple(sorted(set(self.is_causal)))

    @property
    def max_draft_length(self) -> int:
        return self.size - (not self.from_anchor)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Configuration of a head, independent of its published layout."""

    name: str
    kind: str
    """One of `READERS`, or mtp."""
    layers: Any
    """transformers config of its decoder layers."""
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    """Taps of the target; None if they follow from its depth."""
    target_hidden_size: int | None = None
    """Width of the target's states; None is the width of the head."""
    target_layers: int | None = None
    """Layers of the target it was trained for, if known."""
    target_architectures: tuple[str, ...] = ()
    """Architectures of the target it was trained for, if known."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    """Smooth bound of logits."""
    mask_token_id: int | None = None
    """Token of rows whose tokens are unknown, for heads of one pass."""
    block: BlockConfig | None = None

    @property
    def max_draft_length(self) -> int | None:
        """Most tokens of a chain; None is no limit."""
        return None if self.block is None else self.block.max_draft_length

    @property
    def has_tables(self) -> bool:
        """Return whether logits are `samplers.Tables` after one pass."""
        return self.block is None or not self.block.markov_rank

    @property
    def hidden_size(self) -> int:
        return int(self.layers.hidden_size)

    @property
    def state_size(self) -> int:
        return self.target_hidden_size or self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "layers": self.layers.to_dict(), "block": self.block and vars(self.block)}

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the taps for a target with this number of layers."""
        if self.taps is not None:
            return self.taps
        return 2, num_layers // 2, num_layers - 3


def read_head(name: str, raw: Raw) -> HeadConfig | None:
    """Return the head's configuration in a config.json, or None for a language model.

    Raise ConfigError for unsupported heads.
    """
    kind = _kind(name, raw)
    if kind is None:
        return None
    return READERS[kind](name, kind, raw)


def _kind(name: str, raw: Raw) -> str | None:
    """Return the type of a head, None for a language model; raise ConfigError if not served."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        kind = _kind_of_architecture(raw)
    if kind is not None and kind not in READERS:
        raise ConfigError(f"{name}: heads of type {kind} are not served; choose one of type {', '.join(READERS)}")
    return kind


def _kind_of_architecture(raw: Raw) -> str | None:
    """Return the type of a head in its first authors' layout; None for a language model."""
    names = list(map(str, raw.get("architectures") or ()))
    is_small_layer = "draft_vocab_size" in raw and raw.get("num_hidden_layers") == 1
    if is_small_layer or any("eagle3" in name.lower() for name in names):
        return "eagle3"
    if "DFlash2DraftModel" in names:
        return "dflash2"
    if "DFlashDraftModel" in names:
        return "dflash"
    if any(word in name.lower() for name in names for word in ("eagle", "medusa", "dflash", "mtp")):
        return names[0]
    return None


def _eagle3(name: str, kind: str, raw: Raw) -> HeadConfig:
    nested = raw.get("transformer_layer_config")
    is_flat = nested is None
    inner = raw.get("eagle_config") or {}
    given = {**raw, **inner}
    if given.get("use_aux_hidden_state", True) is not True:
        raise ConfigError(f"{name}: EAGLE-3 without states of inner layers (use_aux_hidden_state) is not served")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    values: dict[str, Any] = {flag: _flag(name, given, flag) for flag in flags}
    if not is_flat and given.get("norm_before_residual") is None:
        values["norm_before_residual"] = True  # the default of this layout
    if values["norm_before_fc"] and values["fc_norm"]:
        raise ConfigError(f"{name}: norm_before_fc and fc_norm exclude each other; one must be false")
    layers = _layers(name, raw, {"num_hidden_layers": 1}) if is_flat else _layers(name, nested, {})
    taps = given.get("eagle_aux_hidden_state_layer_ids")
    count = given.get("num_aux_hidden_states") or given.get("num_aux_layers")
    if taps is not None and count is not None and len(taps) != count:
        raise ConfigError(f"{name}: names {len(taps)} layers to read (eagle_aux_hidden_state_layer_ids) of {count}")
    return HeadConfig(
        **_common(name, kind, raw, layers, taps),
        logit_scale=float(raw.get("logit_scale") or 1.0),
        **values,
        mask_token_id=_mask_token(name, given, layers) if kind == "peagle" else None,
    )


def _common(name: str, kind: str, raw: Raw, layers: Any, taps: Sequence[int] | None) -> dict[str, Any]:
    """Return the fields of a `HeadConfig` that every layout has."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return {
        "name": name,
        "kind": kind,
        "layers": layers,
        "vocab_size": int(layers.vocab_size),
        "draft_vocab_size": int(raw.get("draft_vocab_size") or layers.vocab_size),
        "taps": None if taps is None else tuple(map(int, taps)),
        "target_hidden_size": raw.get("target_hidden_size"),
        "target_architectures": tuple(map(str, verifier.get("architectures") or ())),
    }


def _mask_token(name: str, given: Raw, layers: Any) -> int:
    token = given.get("mask_token_id")
    if not isinstance(token, int) or not 0 <= token < layers.vocab_size:
        raise ConfigError(f"{name}: mask_token_id must be a token of the vocabulary, not {token!r}")
    return token


_NOT_SERVED = (("projector_type", "dflash"), ("shift_label", False), ("attention_sink_bias", False), ("use_swa", False))
"""Fields of block heads, with their supported values."""


def _dflash(name: str, kind: str, raw: Raw) -> HeadConfig:
    nested = raw.get("transformer_layer_config")
    given = {**raw, **(raw.get("dflash_config") or {})}
    for field, served in (*_NOT_SERVED, ("use_aux_hidden_state", True)):
        if given.get(field) not in (None, served):
            raise ConfigError(f"{name}: {field} {given[field]!r} is not served")
    layers = _layers(name, {"model_type": "qwen3", **(raw if nested is None else nested)}, {})
    taps = given.get("aux_hidden_state_layer_ids")
    if taps is None and given.get("target_layer_ids") is not None:
        # This layout counts the outputs of layers.
        taps = [tap + 1 for tap in given["target_layer_ids"]]
    if not taps:
        raise ConfigError(f"{name}: config.json names no layers to read (target_layer_ids)")
    size = given.get("block_size", 16 if nested is None else 8)
    if not isinstance(size, int) or size < 2:
        raise ConfigError(f"{name}: block_size must be at least 2, not {size!r}")
    return HeadConfig(
        **_common(name, kind, raw, layers, taps),
        target_layers=raw.get("num_target_layers"),
        logit_scale=float(given.get("output_multiplier") or 1.0),
        softcap=given.get("final_logit_softcapping"),
        mask_token_id=_mask_token(name, given, layers),
        block=_block(name, kind, given, layers, size),
    )


def _block(name: str, kind: str, given: Raw, layers: Any, size: int) -> BlockConfig:
    from_anchor = given.get("sample_from_anchor")
    markov = given.get("markov_head_type", "vanilla")
    if markov not in ("vanilla", "gated", "rnn"):
        raise ConfigError(f"{name}: markov_head_type {markov!r} is not served; only vanilla, gated and rnn")
    is_selected = kind == "dflash2"
    return BlockConfig(
        size=size,
        from_anchor=kind == "dspark" if from_anchor is None else bool(from_anchor),
        is_causal=_causality(name, kind, given, layers),
        embedding_scale=float(given.get("input_embedding_scale") or 1.0),
        markov_rank=int(given.get("markov_rank", 256)) if kind == "dspark" else 0,
        markov_type=markov,
        conv_taps=int(given.get("conv_kernel_size", 2)) if is_selected else 0,
        conv_group=int(given.get("conv_group_size", 16)),
        selector_rank=int(given.get("selector_rank", 256)) if is_selected else 0,
        num_candidates=min(int(given.get("selector_top_k", 16)), layers.vocab_size),
    )


def _causality(name: str, kind: str, given: Raw, layers: Any) -> tuple[bool, ...]:
    """Whether rows of a block see only earlier rows, by layer."""
    slides = [kind == "sliding_attention" for kind in layers.layer_types]
    if any(slides) and not layers.sliding_window:
        raise ConfigError(f"{name}: layers of sliding attention without a sliding_window")
    for field in ("is_causal", "causal"):
        if given.get(field) is not None:
            return (bool(given[field]),) * len(slides)
    if given.get("sliding_window_non_causal", kind == "dflash2"):
        return (False,) * len(slides)
    return tuple(slides)


READERS: dict[str, Callable[[str, str, Raw], HeadConfig]] = {
    "eagle3": _eagle3,
    "peagle": _eagle3,
    "dflash": _dflash,
    "dflash2": _dflash,
    "dspark": _dflash,
}


def _flag(name: str, given: Raw, flag: str) -> bool:
    value = given.get(flag)
    if value not in (None, True, False):
        raise ConfigError(f"{name}: {flag} must be true or false, not {value!r}")
    return bool(value)


def _layers(name: str, stored: Any, defaults: Raw) -> Any:
    """Return the transformers config of a head's decoder layers."""
    stored = {**defaults, **stored}
    kind = stored.get("model_type", "llama")
    if kind not in _LAYER_TYPES:
        raise ConfigError(f"{name}: layers of type {kind!r} are not served in heads; only {', '.join(_LAYER_TYPES)}")
    layers = layers_config(name, kind, stored)
    if layers.hidden_act != "silu" or getattr(layers, "mlp_bias", False):
        raise ConfigError(f"{name}: layers with {layers.hidden_act} or biases in the MLP are not served in heads")
    return layers


def layers_config(name: str, kind: str, stored: Raw) -> Any:
    """Return the transformers config of decoder layers of a type; raise ConfigError."""
    fields = {field: value for field, value in stored.items() if field != "model_type"}
    try:
        layers = import_transformers().AutoConfig.for_model(kind, **fields)
    except Exception as error:  # transformers raises exceptions of many types
        raise ConfigError(f"{name}: no readable config of its layers: {first_line(error)}") from error
    if depends_on_length(layers):
        rope = layers.rope_parameters["rope_type"]
        raise ConfigError(f"{name}: rotary embedding of type {rope!r} is not served in heads")
    return layers


def check_target(head: HeadConfig, target: Any, target_name: str) -> None:
    """Raise ConfigError for a head of another target; target: transformers config."""
    text = target.get_text_config()
    trained_for = set(head.target_architectures)
    if trained_for and trained_for.isdisjoint(target.architectures or trained_for):
        raise ConfigError(
            f"{head.name} was trained for {', '.join(sorted(trained_for))}, and {target_name} is "
            f"{', '.join(target.architectures)}; choose a head of this target"
        )
    for what, head_value, target_value in (
        ("layers", head.target_layers, text.num_hidden_layers),
        ("hidden size", head.state_size, text.hidden_size),
        ("vocabulary", head.vocab_size, text.vocab_size),
    ):
        if head_value is not None and head_value != target_value:
            raise ConfigError(
                f"{head.name} was trained for a target of {what} {head_value}, and {target_name} has {target_value}; "
                "choose a head of this target"
            )
    taps = set(head.taps_of(text.num_hidden_layers)) - {NORMED}
    if bad := [tap for tap in taps if not 0 <= tap <= text.num_hidden_layers]:
        raise ConfigError(
            f"{head.name} reads the state at layer {bad[0]}, and {target_name} has {text.num_hidden_layers} layers; "
            "choose a head of this target"
        )
