"""Lengths of texts and chains that the models of a configuration allow, and the facts that follow.

Not for: memory, which may shorten the context (`memory.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from engine.config import MODEL, DraftFacts, EngineConfig, EngineFacts
from engine.config_check import early_facts
from engine.errors import ConfigError
from engine.scheduling.request_checks import check_defaults
from engine.speculation.conditions import DRAFTER_FACTS
from engine.start.architectures import RECURRENT_MODEL_TYPES
from engine.start.outlines import Outline

log = logging.getLogger("polydraft")


def check_outlines(config: EngineConfig, outlines: Sequence[Outline]) -> None:
    """Raise ConfigError for lengths and speculation that the models' configurations rule out."""
    drafts = [DRAFTER_FACTS[outline.drafter] for outline in outlines[1:]]
    facts = facts_before_loading(config, outlines, drafts[0] if drafts else None)
    check_defaults(facts, config.speculation)
    length = len(config.speculation.tree) or config.speculation.draft_length
    for outline in outlines[1:]:
        longest = outline.max_draft_length
        if longest and length > longest:
            raise ConfigError(f"--draft-length {length}: {outline.name} drafts at most {longest} tokens; lower it")
        window = config.speculation.draft_window
        if window and outline.drafter == MODEL and outline.model_type in RECURRENT_MODEL_TYPES:
            raise ConfigError(
                f"--draft-window {window}: {outline.name} has recurrent layers or short convolutions, which read the "
                "whole text; leave the flag out"
            )


def limit_drafts(config: EngineConfig, draft: Outline | None) -> EngineConfig:
    """Return a configuration whose requests ask for no longer chains than a head drafts."""
    wanted = config.speculation
    longest = None if draft is None else draft.max_draft_length
    if longest is None or wanted.max_draft_length <= longest:
        return config
    limited = msgspec.structs.replace(wanted, max_draft_length=longest)
    return msgspec.structs.replace(config, speculation=limited)


def facts_before_loading(config: EngineConfig, models: Sequence[Outline], draft: DraftFacts | None) -> EngineFacts:
    """Return the facts about an engine that are known before its weights are read.

    models: the target, then the draft model; draft: facts of the draft model.
    """
    target = models[0]
    context = max_model_len(config, models)
    return early_facts(config, draft, target.vocab_size, context, target.model_type)


def max_model_len(config: EngineConfig, models: Sequence[Outline]) -> int:
    """Return the configured context, or the models'; raise ConfigError if a model is shorter."""
    shortest = _shortest(models)
    longest = shortest.max_positions
    wanted = config.scheduler.max_model_len
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len {wanted}: {shortest.name} reaches {longest} positions"
            f"{shortest.limit_reason}; lower it to {longest}"
        )
    return wanted or longest


def _shortest(models: Sequence[Outline]) -> Outline:
    return min(models, key=lambda model: model.max_positions)


def report_context(config: EngineConfig, models: Sequence[Outline], context: int) -> None:
    """Log a context that is shorter than the target's, if the operator has not chosen it."""
    reach = models[0].max_positions
    shortest = _shortest(models)
    if config.scheduler.max_model_len or context == reach:
        return
    reason = f"the draft model {shortest.name} reaches {context} positions; choose another"
    if context < shortest.max_positions:
        reason = "the K/V cache has no room for more; give it memory (--kv-cache-memory-bytes)"
    log.warning("context %d of the model's %d: %s, or set --max-model-len", context, reach, reason)
    for model in models:
        if context <= (model.short_context or 0) < shortest.max_positions:
            log.warning(
                "%s: the long factors of its rotary embedding were chosen before the context was shortened to %d; its "
                "short factors suit this context: set --max-model-len %d",
                model.name,
                context,
                context,
            )
