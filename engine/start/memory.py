"""Division of a device's memory: weights, working memory of steps, and K/V blocks in the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.attention.states import StateSizes
from engine.config import MODEL, CacheConfig, EngineConfig, EngineFacts
from engine.config_check import lookahead
from engine.errors import ConfigError
from engine.fanout import num_nodes

log = logging.getLogger("polydraft")

_DEFAULT_CPU_BYTES = 1 << 30
# Share of the free memory after reservations; the rest is for the activations of a pass.
_DEFAULT_CUDA_SHARE = 0.9
_LEAST_CONTEXT = 1024
"""Least context to which the pool shortens it; below it a start is refused."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that the loaded models leave, and its use; sizes in bytes."""

    num_blocks: int
    """Blocks of the target's pool, which the draft model may share."""
    num_draft_blocks: int
    """Blocks of the draft model's storage."""
    max_model_len: int
    """Most tokens of prompt and answer; the pool holds one such request or more."""
    most_blocks: int
    """Blocks of the longest text with its drafts."""
    pool_bytes: Sequence[int]
    """K/V of each model, with spare blocks."""
    kept_back: Mapping[str, int]
    """Working memory of steps, and states of recurrent layers."""
    num_states: int
    """Places for states, of all models."""


class StoredModel(NamedTuple):
    """K/V that a model stores."""

    token_bytes: int
    spare_blocks: int = 0
    """Blocks besides the pool."""
    state_bytes: int = 0
    """State of a text in recurrent layers."""
    input_bytes: int = 0
    """Inputs of a node of recurrent layers."""


def plan_memory(
    config: EngineConfig,
    facts: EngineFacts,
    models: Sequence[StoredModel],
    recorded_bytes: int,
    device: torch.device,
    has_draft_pool: bool = False,
) -> MemoryPlan:
    """Divide the memory that is left; raise ConfigError if the longest request has no room.

    A context that is the model's limit, because the operator has chosen none, is shortened to
    what the pool holds. models: the target, then the draft model; recorded_bytes: memory of
    recorded passes and steps; has_draft_pool: whether the draft model's blocks hold its window
    only, in a separate pool.
    """
    kept_back = {
        "workspace": _workspace_bytes(config, facts.vocab_size),
        "graphs": recorded_bytes,
    }
    num_seats, num_cached, num_nodes = state_sizes(config)
    recurrent = [model for model in models if model.state_bytes]
    if recurrent:
        kept_back["states"] = sum(
            (num_seats + num_cached) * model.state_bytes + num_seats * num_nodes * model.input_bytes
            for model in recurrent
        )
    longest = facts.max_model_len
    block_size = config.cache.block_size
    block_bytes = [block_size * model.token_bytes for model in models]
    spare_bytes = [model.spare_blocks * size for model, size in zip(models, block_bytes, strict=True)]
    most_blocks = blocks_of(longest, config)
    window_blocks = max(most_blocks, _window_blocks(config))
    num_blocks = config.cache.num_blocks
    if not num_blocks:
        free = max(0, _free_bytes(config.cache, device, sum(kept_back.values())) - sum(spare_bytes))
        # Blocks of a model without attention take no memory.
        num_blocks = free // sum(block_bytes) if any(block_bytes) else most_blocks * config.scheduler.max_num_seqs
        if has_draft_pool and num_blocks > window_blocks:
            num_blocks = (free - window_blocks * block_bytes[1]) // block_bytes[0]
        has_size = config.cache.memory_bytes or config.cache.device_share
        if not (has_size and config.cache.prefix_caching):
            # Further blocks could only hold prefixes of ended requests: only if the operator has
            # set a size.
            num_blocks = min(num_blocks, most_blocks * config.scheduler.max_num_seqs)
    if num_blocks < most_blocks:
        longest = num_blocks * block_size - lookahead(config)
        if config.scheduler.max_model_len or longest < _LEAST_CONTEXT:
            raise ConfigError(
                f"the K/V cache has room for {num_blocks} blocks, but one request of {facts.max_model_len} tokens "
                f"needs {most_blocks}; give it more memory (--kv-cache-memory-bytes) or lower --max-model-len"
            )
        most_blocks = num_blocks
    num_draft_blocks = min(num_blocks, window_blocks) if has_draft_pool else num_blocks
    counts = (num_blocks, num_draft_blocks)
    pool_bytes = [count * size + spare for count, size, spare in zip(counts, block_bytes, spare_bytes, strict=False)]
    num_states = (num_seats + num_cached) * len(recurrent)
    return MemoryPlan(num_blocks, num_draft_blocks, longest, most_blocks, pool_bytes, kept_back, num_states)


def blocks_of(length: int, config: EngineConfig) -> int:
    """Return the blocks of a text of this length with its drafts."""
    return -(-(length + lookahead(config)) // config.cache.block_size)


def state_sizes(config: EngineConfig) -> StateSizes:
    """Return a seat for each running request, and the same number of places for cached prefixes."""
    num_seats = config.scheduler.max_num_seqs
    num_cached = num_seats if config.cache.prefix_caching else 0
    return StateSizes(num_seats, num_cached, lookahead(config))


def _window_blocks(config: EngineConfig) -> int:
    """Return the blocks of the draft model's windows if all requests draft the configured shape."""
    num_tokens = config.speculation.draft_window + _num_drawn(config)
    # The first token of a window may be the last of a block.
    blocks_per_request = -(-(num_tokens - 1) // config.cache.block_size) + 1
    return config.scheduler.max_num_seqs * blocks_per_request


def _num_drawn(config: EngineConfig) -> int:
    """Return the drafted nodes of a request that names no shape."""
    wanted = config.speculation
    if wanted.tree:
        return num_nodes(wanted.tree)
    return wanted.num_drafts * wanted.draft_length


def _free_bytes(cache: CacheConfig, device: torch.device, kept_back: int) -> int:
    """Return the memory for K/V; kept_back: other memory that steps need."""
    if cache.device_share and device.type != "cuda":
        log.warning("--gpu-memory-utilization has no effect on a CPU; --kv-cache-memory-bytes sizes its K/V cache")
    if cache.memory_bytes:
        return cache.memory_bytes
    if device.type == "cuda":
        # An ended engine may still hold memory, and torch holds the memory that probing has used.
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        if cache.device_share:
            return max(0, int(cache.device_share * total) - (total - free) - kept_back)
        return max(0, int((free - kept_back) * _DEFAULT_CUDA_SHARE))
    return _DEFAULT_CPU_BYTES


def _workspace_bytes(config: EngineConfig, vocab_size: int) -> int:
    """Return the memory for the probabilities of a full step.

    Target and draft rows in float32, and the cumulative sums in float64.
    """
    nodes = 1 + (_num_drawn(config) if config.model.draft else 0)
    if config.speculation.drafters != (MODEL,):
        nodes += config.scheduler.max_copied_tokens
    rows = min(config.scheduler.max_num_seqs * nodes, config.scheduler.max_num_batched_tokens)
    return rows * vocab_size * (4 + 4 + 8)
