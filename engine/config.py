"""Configuration of the engine: frozen, composed, sent to the engine process unchanged.

Facts found at start (vocabulary, number of blocks, ...) are a new value, `EngineFacts`; they do not
change this one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DRAFTERS = ("model", "prompt_lookup", "prediction", "earlier_answers")
MODEL, PROMPT_LOOKUP, PREDICTION, EARLIER_ANSWERS = DRAFTERS
"""Drafters: the draft model, the text itself, the answer that the request predicts, and earlier
answers to the same client.
"""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["auto", "int8", "fp8", "int4"]
KVDtype = Literal["auto", "float32", "bfloat16"]
Activations = Literal["auto", "float32"]
Probe = Literal["refuse", "warn"]


MTP = "mtp"
"""Name of the MTP module inside the target, as a draft model."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Models to load, and options for loading them."""

    target: str
    """Folder (or hub name) of the target model in transformers format."""
    draft: str | None = None
    """Folder (or hub name) of the draft model; `MTP` is the module inside the target; None serves
    without one.
    """
    tokenizer: str = ""
    """Folder (or hub name) of the tokenizer, for grammars; empty uses the target's."""
    revision: str | None = None
    """Hub revision of the target, and of its own tokenizer."""
    draft_revision: str | None = None
    dtype: Dtype = "auto"
    """Type of the weights; auto is the checkpoint's. A CPU computes in float32, whatever the
    weights' type.
    """
    device: Device = "auto"
    """Device of the models; auto is CUDA if there is a device."""
    num_threads: int = 0
    """Most CPU cores that the engine uses; 0 uses all."""
    tensor_parallel_size: int = 1
    """Processes over which the target is split; the draft model stays whole."""
    weights: Weights = "auto"
    """Number format of the weights: auto is the checkpoint's. A CPU's decoder has int8 and int4,
    with a scale for every 32 weights (`cpu/weights.py`); on other devices fp8 and int4 are
    quantised by torchao, except the output head (`models/quantising.py`).
    """
    draft_weights: Weights = "auto"
    """Number format of a draft model's weights; auto is that of `weights`, or the checkpoint's for
    a head.
    """
    activations: Activations = "auto"
    """Numbers that a CPU multiplies with weights: auto rounds them as its dot products need it,
    float32 never.
    """
    kv_dtype: KVDtype = "auto"
    """Type of the K/V cache; auto is float32 if a CPU decodes in float32, else the model's type."""
    enforce_eager: bool = False
    """Launch the operations of decode steps one by one on a CUDA device, and record no graphs of
    them.
    """
    adapter: str = ""
    """Folder (or hub name) of a LoRA adapter that is merged into the target's weights; empty for
    none.
    """
    probe: Probe = "refuse"
    """Treatment of models whose logits differ from plain transformers by more than rounding
    explains.
    """

    given_names: dict[str, str] = {}
    """Names in the command line of models whose folders are derived from GGUF files, by folder."""

    def shown(self, text: str) -> str:
        """Return a text for people, with given names in place of derived folders."""
        for folder, name in self.given_names.items():
            text = text.replace(folder, name)
        return text

    @property
    def draft_source(self) -> tuple[str, str | None] | None:
        """Return name and revision of the model that holds the draft model; None without a draft
        model.
        """
        if self.draft is None:
            return None
        if self.draft == MTP:
            return self.target, self.revision
        return self.draft, self.draft_revision

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """Return name and revision of the tokenizer."""
        name = self.tokenizer or self.target
        return name, self.revision if name == self.target else None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Paged K/V storage of target and draft."""

    block_size: int = 16
    """Tokens in a block."""
    num_blocks: int = 0
    """Blocks in the target's pool; 0 sizes it from `memory_bytes`."""
    device_share: float = 0.0
    """Share of a CUDA device's memory for weights, steps and K/V together; 0 is most of the free
    memory.
    """
    memory_bytes: int = 0
    """Memory for the K/V of target and draft together; 0 chooses by device."""
    prefix_caching: bool = True
    """Cache the K/V of ended requests, for later requests that begin with the same tokens."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and of the queue."""

    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one target pass, prompt chunks and drafted nodes together."""
    max_copied_tokens: int = 32
    """Most tokens of the text drafts of a request in a step, from a prediction and from texts; 0
    disables them.
    """
    max_prompt_tokens: int = 0
    """Prompt tokens of a step in which other requests decode; 0 is 512 on a CPU, and the rest of
    the step's budget elsewhere.
    """
    max_drafted_nodes: int = 0
    """Most nodes that decoding rows draft in a step, unless the controller chooses them: requests
    with fixed shapes take turns, and adaptive requests without measured step times draft smaller
    shapes. Rows that end their prompts draft in addition. 0 is 128 on a CPU, and no limit
    elsewhere.
    """
    max_model_len: int = 0
    """Longest prompt plus answer in tokens; 0 is the model's own limit, or less if the K/V pool is
    smaller.
    """


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Default speculation of requests, and the limits of what a request may ask for."""

    rule: str = "bv_race"
    """Verification rule: one of `engine.speculation.verification.RULES`, or `off`."""
    num_drafts: int = 4
    """Chains drafted per request (K)."""
    draft_length: int = 5
    """Tokens in a chain (L)."""
    draft_method: str = ""
    """Method of drawing the children of a node; empty is the rule's own method."""
    tree: tuple[int, ...] = ()
    """Children of every node by depth, instead of `num_drafts` and `draft_length`; empty is
    chains.
    """
    adaptive: bool = False
    """Choose the shape by load and acceptance, up to `num_drafts` and `draft_length`, for requests
    that set none.
    """
    seed_shape: tuple[int, int] | None = None
    """Number and length of chains for requests with a seed, whose shape must not depend on the
    load; None chooses by device.
    """
    draft_window: int = 0
    """Last tokens of the text that the draft model sees, stores and, of a long prompt, computes; 0
    is all.
    """
    drafters: tuple[str, ...] = (MODEL,)
    """Sources of drafts by default: `model`, `prompt_lookup`, `earlier_answers`."""
    max_over_acceptance: float = 0.0
    """Largest lossy over-acceptance that a request may ask for; 0 allows exact verification
    only.
    """
    observed_share: float = 0.01
    """Share of steps in which acceptance is compared with the optimum."""
    max_num_drafts: int = 16
    """Highest num_drafts a request may ask for."""
    max_draft_length: int = 16
    """Highest draft_length a request may ask for."""


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the process that computes a request's grammar masks. A grammar that exceeds them
    ends its request.
    """

    start_timeout_s: float = 5.0
    """CPU time to read the grammar and compute its first mask."""
    mask_timeout_s: float = 0.05
    """CPU time to compute the masks of a step. Other requests wait for it."""
    patience_s: float = 30.0
    """Wait for a process that gets no CPU time: it is not at fault, but the wait must end."""
    memory_bytes: int = 1 << 30
    """Memory in addition to the vocabulary, which all processes share."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Complete configuration of the engine process."""

    model: ModelConfig
    grammars: GrammarConfig = GrammarConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    calibrate: bool = True
    """Measure steps. Without it answers report no speedup, adaptive requests draft their maximum,
    and no time limits the prompts of a step in which other requests decode.
    """
    profile_cache: str = "off"
    """Folder for what is derived from GGUF files; `off` stores nothing."""
    self_check: bool = False
    """Check at start, on the loaded pair, that the configured rule preserves the target's
    distribution.
    """
    log_format: Literal["text", "json"] = "text"


class RuleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a rule on requests that use it."""

    max_drafts: int | None = None
    """Most children of a node that the rule can use; None is no limit."""
    draft_methods: tuple[str, ...] = ("iid",)
    """Draft methods for which the rule is exact; the first is the default."""
    needs: tuple[str, ...] = ()
    """Conditions that drafts must meet for the rule to be exact (`speculation/conditions.py`)."""
    max_vocabulary: int | None = None
    """Largest vocabulary that the rule can handle; None is no limit."""


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of drafts from one source, or of one shape, on which the exactness of rules
    depends.
    """

    title: str
    """Words for it in messages."""
    meets: tuple[str, ...] = ()
    """Conditions of rules that its chains meet (`speculation/conditions.py`)."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the engine has found while loading."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    """Type of the weights, or the types in a GGUF file, the largest share first."""
    architecture: str
    drafters: dict[str, DraftFacts]
    """Facts about the drafters (`DRAFTERS`) by name; `model` is missing without a draft model."""
    max_copied_tokens: int
    rules: dict[str, RuleFacts]
    """Facts about every verification rule, by name."""
    memory_plan: dict[str, int]
    """Bytes by purpose: weights, draft_weights, kv_cache, draft_kv_cache, workspace, graphs."""

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model."""
        return MODEL in self.drafters
