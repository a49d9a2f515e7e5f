"""Checks of a configuration that need neither a model nor torch, before anything is loaded."""

from __future__ import annotations

import msgspec

from engine.config import MODEL, MTP, DraftFacts, EngineConfig, EngineFacts
from engine.errors import ConfigError
from engine.scheduling.request_checks import check_defaults
from engine.scheduling.text_drafters import TEXT_DRAFTERS
from engine.speculation.conditions import DRAFTER_FACTS, drafters_of
from engine.speculation.rule_facts import DRAFT_METHODS, RULE_FACTS

_ANY_VOCABULARY = 1 << 31


def check_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings that cannot work together with any model."""
    wanted = config.speculation
    if wanted.rule != "off" and wanted.rule not in RULE_FACTS:
        raise ConfigError(f"--spec-rule {wanted.rule}: unknown; choose off or one of {', '.join(RULE_FACTS)}")
    if wanted.draft_method and wanted.draft_method not in DRAFT_METHODS:
        raise ConfigError(f"--draft-method {wanted.draft_method}: unknown; choose one of {', '.join(DRAFT_METHODS)}")
    usable = [MODEL, *(name for name, source in TEXT_DRAFTERS.items() if source.for_every_request)]
    if not wanted.drafters or not set(wanted.drafters) <= set(usable):
        raise ConfigError(f"--spec-drafters {','.join(wanted.drafters)}: choose from {', '.join(usable)}")
    if config.model.draft == MTP and config.model.draft_revision is not None:
        raise ConfigError("--draft-model mtp: the module has the target's revision; leave out --draft-revision")
    if not 1 <= wanted.num_drafts <= wanted.max_num_drafts:
        raise ConfigError(
            f"--num-drafts {wanted.num_drafts}: must be between 1 and {wanted.max_num_drafts}, or raise "
            "--max-num-drafts"
        )
    if not 0 <= wanted.draft_window <= config.scheduler.max_num_batched_tokens // 2:
        raise ConfigError(
            f"--draft-window {wanted.draft_window}: must be 0 (all of the text), or at most half of "
            f"--max-num-batched-tokens ({config.scheduler.max_num_batched_tokens})"
        )
    if not 1 <= wanted.draft_length <= wanted.max_draft_length:
        raise ConfigError(
            f"--draft-length {wanted.draft_length}: must be between 1 and {wanted.max_draft_length}, or raise "
            "--max-draft-length"
        )
    largest = 1 + lookahead(config)
    if config.scheduler.max_num_batched_tokens < largest:
        raise ConfigError(
            f"--max-num-batched-tokens {config.scheduler.max_num_batched_tokens}: one request may verify {largest} "
            f"tokens in a step (caps {wanted.max_num_drafts} x {wanted.max_draft_length}, and --max-copied-tokens); "
            "raise it or lower the caps"
        )
    draft = DRAFTER_FACTS[MTP if config.model.draft == MTP else MODEL]
    facts = early_facts(config, None if config.model.draft is None else draft, _ANY_VOCABULARY)
    rules = {name: msgspec.structs.replace(known, max_vocabulary=None) for name, known in facts.rules.items()}
    check_defaults(msgspec.structs.replace(facts, rules=rules), wanted)


def lookahead(config: EngineConfig) -> int:
    """Return the most tokens that one request drafts in a step."""
    from_text = config.scheduler.max_copied_tokens
    if config.model.draft is None:
        return from_text
    return from_text + config.speculation.max_num_drafts * config.speculation.max_draft_length


def early_facts(
    config: EngineConfig,
    draft: DraftFacts | None,
    vocab_size: int,
    max_model_len: int = 0,
    architecture: str = "",
) -> EngineFacts:
    """Return the facts that are known before weights are read.

    draft: facts of a draft model or head.
    """
    return EngineFacts(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        num_blocks=0,
        block_size=config.cache.block_size,
        eos_token_ids=[],
        device="",
        dtype="",
        architecture=architecture,
        drafters=drafters_of(draft),
        max_copied_tokens=config.scheduler.max_copied_tokens,
        rules=dict(RULE_FACTS),
        memory_plan={},
    )
