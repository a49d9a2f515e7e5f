"""The engine's configuration: frozen, composed, sent to the engine process as it is.

What is found out at start (vocabulary, number of blocks, ...) is a new value, `EngineFacts`,
not an edit of this one.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MODEL, PROMPT_LOOKUP, PREDICTION = DRAFTERS = ("model", "prompt_lookup", "prediction")
"""Drafters: the draft model, the text itself, and what a request says its answer will probably be."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Weights = Literal["auto", "int8"]
KVDtype = Literal["auto", "float32", "bfloat16"]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which models to load, and how."""

    target: str
    """Folder (or hub name) of the target model in transformers format."""
    draft: str | None = None
    """Folder (or hub name) of the draft model; None serves without a draft model."""
    tokenizer: str = ""
    """Folder (or hub name) of the tokenizer, for grammars; empty is the target's."""
    revision: str | None = None
    """Hub revision of the target, and of its own tokenizer."""
    draft_revision: str | None = None
    dtype: Dtype = "auto"
    """Type of the weights; auto is the checkpoint's. A CPU computes in float32, whatever the weights' type."""
    device: Device = "auto"
    """Where the models run; auto is CUDA when there is a device."""
    num_threads: int = 0
    """Most CPU cores of the engine; 0 is all."""
    tensor_parallel_size: int = 1
    """Processes over which the target is split; the draft model stays whole."""
    weights: Weights = "auto"
    """Numbers of the weights on a CPU: the checkpoint's, or 8 bits with a scale for every 32 of them."""
    kv_dtype: KVDtype = "auto"
    """Type of the K/V cache; auto is float32 where a CPU decodes in float32, else the model's."""

    @property
    def tokenizer_source(self) -> tuple[str, str | None]:
        """Name and revision of the tokenizer."""
        name = self.tokenizer or self.target
        return name, self.revision if name == self.target else None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Paged K/V storage, shared by target and draft through one block accounting."""

    block_size: int = 16
    """Tokens in a block."""
    num_blocks: int = 0
    """Blocks in the pool; 0 sizes it from `memory_bytes`."""
    device_share: float = 0.0
    """Of a CUDA device's memory, how much weights, steps and K/V may take together; 0 is most of what is free."""
    memory_bytes: int = 0
    """Memory for the K/V of target and draft together; 0 chooses by device."""
    prefix_caching: bool = True
    """Keep the K/V of ended requests, for others that begin with the same tokens."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step and of the queue."""

    max_num_seqs: int = 64
    """Requests that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one target pass, prompt chunks and drafted nodes together."""
    max_copied_tokens: int = 32
    """Longest chain copied from a prediction or from the text; 0 copies nothing."""
    max_prompt_tokens: int = 0
    """Prompt tokens of a step in which others decode; 0 is 512 on a CPU, and elsewhere what the step has room for."""
    max_model_len: int = 0
    """Longest prompt plus answer in tokens; 0 takes the model's own limit, or what the K/V pool holds of it."""


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation a request gets when it names none, and the most it may ask for."""

    rule: str = "bv_race"
    """Verification rule: one of `engine.speculation.verification.RULES`, or `off`."""
    num_drafts: int = 4
    """Chains drafted per request (K)."""
    draft_length: int = 5
    """Tokens in a chain (L)."""
    draft_method: str = ""
    """How the children of a node are drawn; empty is the rule's own method."""
    tree: tuple[int, ...] = ()
    """Children of every node by depth, instead of `num_drafts` and `draft_length`; empty is chains."""
    adaptive: bool = False
    """Choose the shape by load and acceptance, up to `num_drafts` and `draft_length`, for requests that name none."""
    seed_shape: tuple[int, int] | None = None
    """Chains and their length for requests with a seed, whose shape must not depend on the load; None is by device."""
    draft_window: int = 0
    """Tokens the draft model sees, and computes of a long prompt; 0 is all."""
    drafters: tuple[str, ...] = (MODEL,)
    """Where drafts come from: `model`, `prompt_lookup`, or both."""
    max_over_acceptance: float = 0.0
    """Most lossy over-acceptance a request may ask for; 0 allows exact verification only."""
    observed_share: float = 0.01
    """Share of steps on which acceptance is compared with the optimum."""
    max_num_drafts: int = 16
    """Highest num_drafts a request may ask for."""
    max_draft_length: int = 16
    """Highest draft_length a request may ask for."""


class GrammarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that follows a request's grammar may use; a grammar that needs more ends its request."""

    start_timeout_s: float = 5.0
    """CPU time to read the grammar and compute its first mask."""
    mask_timeout_s: float = 0.05
    """CPU time to compute the masks of a step. Other requests wait for it."""
    memory_bytes: int = 1 << 30
    """Memory beside the vocabulary, which all share."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is told."""

    model: ModelConfig
    grammars: GrammarConfig = GrammarConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    calibrate: bool = True
    """Measure plain decoding at start, so that answers can report their speedup."""
    profile_cache: str = "off"
    """Folder where what was measured is kept for the next start; `off` keeps nothing."""
    self_check: bool = False
    """Check at start, on the loaded pair, that the configured rule keeps the target's law."""
    log_format: Literal["text", "json"] = "text"


class RuleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must respect to use a rule."""

    max_drafts: int | None = None
    """Most children of a node the rule can use; None is no limit."""
    draft_methods: tuple[str, ...] = ("iid",)
    """Draft methods for which it is exact; the first is its own."""
    trees: bool = False
    """Whether nodes below the root may have several children; else chains must be independent."""
    changes_targets: bool = False
    """Whether its steps change the targets of later positions (`speculation/target_shift.py`): the draft law below a
    text must then stay what it was, and no copied chains may come before the rule's own."""
    max_vocabulary: int | None = None
    """Largest vocabulary it can be computed for; None is no limit."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine found out while loading."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    architecture: str
    has_draft: bool
    max_copied_tokens: int
    rules: dict[str, RuleFacts]
    """What is known of every verification rule, by name."""
    memory_plan: dict[str, int]
    """Bytes by purpose: weights, draft_weights, kv_cache, draft_kv_cache, workspace, graphs."""
