"""Configuration of the engine: frozen, composed, sent to its process unchanged.

Facts found at start (vocabulary, number of blocks, ...) are another value, `EngineFacts`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DRAFTERS = ("model", "prompt_lookup", "prediction", "earlier_answers")
MODEL, PROMPT_LOOKUP, PREDICTION, EARLIER_ANSWERS = DRAFTERS
"""Drafters: a draft model, the text, the request's prediction, the client's earlier answers."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["auto", "int8", "fp8", "int4"]
KVDtype = Literal["auto", "float32", "bfloat16"]
Activations = Literal["auto", "float32"]
Probe = Literal["refuse", "warn"]


MTP = "mtp"
"""Draft model's name of the MTP module inside the target."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Models to load, and options for loading them."""

    target: str
    """Folder or hub name, in transformers' format."""
    draft: str | None = None
    """Folder or hub name; `MTP` is the module inside the target; None serves without one."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer, for grammars; empty uses the target's."""
    revision: str | None = None
    """Hub revision of the target, and of its own tokenizer."""
    draft_revision: str | None = None
    dtype: Dtype = "auto"
    """Type of the weights; auto is the checkpoint's. A CPU computes in float32 from any."""
    device: Device = "auto"
    """auto is CUDA if there is a device."""
    num_threads: int = 0
    """Most CPU cores that the engine uses; 0 uses all."""
    tensor_parallel_size: int = 1
    """Processes over which the target is split; the draft model stays whole."""
    weights: Weights = "auto"
    """Number format of the weights; auto is the checkpoint's.

    A CPU has int8 and int4 with a scale for every 32 weights (`cpu/weights.py`). Elsewhere torchao
    quantises fp8 and int4, but the output head (`models/quantising.py`).
    """
    draft_weights: Weights = "auto"
    """Format of a draft model's weights; auto is that of `weights`, or of a head's checkpoint."""
    activations: Activations = "auto"
    """Numbers that a CPU multiplies; auto rounds them for dot products, float32 never."""
    kv_dtype: KVDtype = "auto"
    """Type of the K/V cache; auto is float32 if a CPU decodes in it, else the model's."""
    enforce_eager: bool = False
    """Launch operations of decode steps one by one on CUDA, and record no graphs."""
    adapter: str = ""
    """Folder or hub name of a LoRA adapter that is merged into the target; empty for none."""
    probe: Probe = "refuse"
    """Treatment of models whose logits differ from transformers' beyond rounding."""

    given_names: dict[str, str] = {}
    """Names in the command line of models derived from GGUF files, by folder."""

    def shown(self, text: str) -> str:
        """Return a text for people, with given names in place of derived folders."""
        for folder, name in self.given_names.items():
            text = text.replace(folder, name)
        return text

    @property
    def draft_source(self) -> tuple[str, str | None] | None:
        """Return (name, revision) of the draft model's files; None without one."""
        if self.draft is None:
            return None
        if self.draft == MTP:
            return self.target, self.revision
        return self.draft, self.draft_revision

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        name = self.tokenizer or self.target
        return name, self.revision if name == self.target else None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Paged K/V storage of target and draft."""

    block_size: int = 16
    num_blocks: int = 0
    """Blocks in the target's pool; 0 sizes it from `memory_bytes`."""
    device_share: float = 0.0
    """Share of a CUDA device's memory for weights, steps and K/V; 0 is most of the free memory."""
    memory_bytes: int = 0
    """Memory for the K/V of target and draft; 0 chooses by device."""
    prefix_caching: bool = True
    """Cache the K/V of ended requests."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and of the queue."""

    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one target pass, with prompt chunks and drafted nodes."""
    max_copied_tokens: int = 32
    """Most tokens of text drafts of a request in a step; 0 disables them."""
    max_prompt_tokens: int = 0
    """Prompt tokens of a step with decoding requests; 0 is 512 on a CPU, else the rest."""
    max_drafted_nodes: int = 0
    """Most nodes that decoding rows draft in a step without the controller.

    Requests with fixed shapes take turns; adaptive ones without step times draft smaller shapes.
    Rows that end their prompts draft in addition. 0 is 128 on a CPU, and no limit elsewhere.
    """
    max_model_len: int = 0
    """Most tokens of prompt and answer; 0 is the model's limit, or less if the pool is smaller."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Default speculation of requests, and the limits of what a request may ask for."""

    rule: str = "bv_race"
    """One of `engine.speculation.verification.RULES`, or `off`."""
    num_drafts: int = 4
    """Chains drafted per request (K)."""
    draft_length: int = 5
    """Tokens in a chain (L)."""
    draft_method: str = ""
    """Method of drawing a node's children; empty is the rule's own."""
    tree: tuple[int, ...] = ()
    """Children by depth, in place of `num_drafts` and `draft_length`; empty is chains."""
    adaptive: bool = False
    """Choose the shape by load and acceptance, within `num_drafts` and `draft_length`."""
    seed_shape: tuple[int, int] | None = None
    """(number, length) of chains for requests with a seed; None chooses by device.

    The shape must not depend on the load.
    """
    draft_window: int = 0
    """Last tokens that the draft model sees, stores and computes; 0 is all."""
    drafters: tuple[str, ...] = (MODEL,)
    """Sources of drafts by default: `model`, `prompt_lookup`, `earlier_answers`."""
    max_over_acceptance: float = 0.0
    """Largest lossy over-acceptance of a request; 0 allows exact verification only."""
    observed_share: float = 0.01
    """Share of steps in which acceptance is compared with the optimum."""
    max_num_drafts: int = 16
    max_draft_length: int = 16


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a process that computes a grammar's masks; beyond them its request ends."""

    start_timeout_s: float = 5.0
    """CPU time to read the grammar and compute its first mask."""
    mask_timeout_s: float = 0.05
    """CPU time for the masks of a step, for which other requests wait."""
    patience_s: float = 30.0
    """Longest wait for a process that gets no CPU time."""
    memory_bytes: int = 1 << 30
    """Memory in addition to the vocabulary, which processes share."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Complete configuration of the engine process."""

    model: ModelConfig
    grammars: GrammarConfig = GrammarConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    calibrate: bool = True
    """Measure steps. Without it there are no speedups, drafts are maximal, prompts unlimited."""
    profile_cache: str = "off"
    """Folder for what is derived from GGUF files; `off` stores nothing."""
    self_check: bool = False
    """Check at start that the rule preserves the target's distribution on this pair."""
    log_format: Literal["text", "json"] = "text"


class RuleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements of a rule on requests that use it."""

    max_drafts: int | None = None
    """Most children of a node; None is no limit."""
    draft_methods: tuple[str, ...] = ("iid",)
    """Methods for which the rule is exact; the first is the default."""
    needs: tuple[str, ...] = ()
    """Conditions of exactness (`speculation/conditions.py`)."""
    max_vocabulary: int | None = None
    """None is no limit."""


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of drafts of one source or shape, on which the exactness of rules depends."""

    title: str
    """Words for it in messages."""
    meets: tuple[str, ...] = ()
    """Conditions that its chains meet (`speculation/conditions.py`)."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that the engine has found while loading."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    """Types of the weights, the largest share first."""
    architecture: str
    drafters: dict[str, DraftFacts]
    """Drafters by name (`DRAFTERS`); `model` is missing without a draft model."""
    max_copied_tokens: int
    rules: dict[str, RuleFacts]
    placeholder_ids: list[int] = []
    """Tokens of images, videos and audio, which no prompt may have and no answer has."""
    memory_plan: dict[str, int]
    """Bytes by purpose.

    weights, draft_weights, kv_cache, draft_kv_cache, workspace, graphs, states.
    """
    num_states: int = 0
    """Places for states of recurrent layers, of target and draft model."""

    @property
    def has_draft(self) -> bool:
        return MODEL in self.drafters
