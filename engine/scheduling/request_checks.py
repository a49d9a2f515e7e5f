"""Checks whether a request can be served as asked, and the default speculation of requests.

The server checks requests before it answers, and the engine checks them again. No torch: the server
imports this module through `engine.api`. Not for: when a queued request starts (`Scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from engine.config import MODEL, PREDICTION, EngineFacts, SpeculationConfig
from engine.errors import NO_END_TOKEN, NOTHING_LEFT, ConfigError, RequestError
from engine.request import Request, Speculation
from engine.scheduling.text_drafters import TEXT_DRAFTERS
from engine.speculation.conditions import check_conditions, may_adapt, served_rules

MAX_LOGPROBS = 20
"""Most alternatives reported for a token."""

_SHAPE_FOR_ANY_LOAD = (1, 4)
_IN_TEXT = ("prompt", "prediction", "logit_bias", "allowed_token_ids")
"""Lists of tokens that a model reads, or may write."""


def check_requests(requests: Sequence[Request], facts: EngineFacts, config: SpeculationConfig) -> None:
    """Raise RequestError if the engine cannot serve the requests of one call.

    Lists that several requests share as one object are read once.
    """
    lists: dict[int, tuple[str, Sequence[int]]] = {}
    for request in requests:
        _check_lengths(request, facts)
        _check_edits(request, facts)
        _check_text_drafts(request, facts)
        check_speculation(request.speculation, facts, config)
        lists[id(request.prompt_token_ids)] = ("prompt", request.prompt_token_ids)
        lists[id(request.prediction)] = ("prediction", request.prediction)
    for name, tokens in lists.values():
        _check_tokens(name, tokens, facts)
    for request in {_mask_key(request): request for request in requests}.values():
        _check_masks(request, facts)


def _check_lengths(request: Request, facts: EngineFacts) -> None:
    prompt = len(request.prompt_token_ids)
    answer = request.limits.max_tokens
    if prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if answer < 0:
        raise RequestError(f"max_tokens must be at least 0, not {answer}", "max_tokens")
    if prompt + answer > facts.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {facts.max_model_len} tokens, but the prompt "
            f"has {prompt} and the answer may have {answer}; "
            "shorten the prompt or lower max_tokens",
            "max_tokens" if prompt < facts.max_model_len else "prompt",
            "context_length_exceeded",
        )


def _check_tokens(name: str, tokens: Sequence[int], facts: EngineFacts) -> None:
    size = facts.vocab_size
    if tokens and (min(tokens) < 0 or max(tokens) >= size):
        bad = next(token for token in tokens if not 0 <= token < size)
        raise RequestError(f"{name}: token id {bad} is outside the vocabulary of {size}", name)
    placeholders = frozenset(facts.placeholder_ids).intersection(tokens) if name in _IN_TEXT else ()
    if placeholders:
        raise RequestError(
            f"{name}: token id {min(placeholders)} stands for an image, a video or audio; this server reads and "
            "writes text only, so leave it out",
            name,
        )


def _check_text_drafts(request: Request, facts: EngineFacts) -> None:
    """Check that the drafters exist, and that text drafts are allowed."""
    speculation = request.speculation
    known = (MODEL, *TEXT_DRAFTERS)
    unknown = [name for name in speculation.drafters if name not in known]
    if unknown:
        raise RequestError(
            f"unknown drafter {unknown[0]!r}; choose from {', '.join(sorted(known))}", "speculation.drafters"
        )
    if request.prediction and PREDICTION not in speculation.drafters:
        raise RequestError(
            "prediction: speculation is off for this request, or its drafters leave the prediction out", "prediction"
        )
    if len(request.prediction) > facts.max_model_len:
        raise RequestError(
            f"the prediction has {len(request.prediction)} tokens, more than the context of {facts.max_model_len}",
            "prediction",
        )
    if speculation.uses_text_drafts and not facts.max_copied_tokens:
        raise RequestError(
            "the operator has switched prompt lookup and predictions off (--max-copied-tokens 0)",
            "prediction" if request.prediction else "speculation.drafters",
        )


def _check_edits(request: Request, facts: EngineFacts) -> None:
    """Check the fields that change logits: bounds, and combinations."""
    sampling = request.sampling
    limits = request.limits
    if limits.min_tokens > limits.max_tokens:
        raise RequestError(
            f"min_tokens must be at most max_tokens = {limits.max_tokens}, not {limits.min_tokens}", "min_tokens"
        )
    if sampling.seed_stable and request.speculation.over_acceptance:
        message = "seed_stable is exact and does not go with over_acceptance"
        raise RequestError(message, "speculation.over_acceptance")
    if sampling.grammar and limits.ignore_eos:
        raise RequestError(
            "ignore_eos cannot be combined with structured output, whose grammar ends the answer", "ignore_eos"
        )
    if sampling.grammar and not facts.eos_token_ids:
        message = "structured output cannot end: this model's files name no end token"
        raise RequestError(message, code=NO_END_TOKEN)
    _check_alternatives("logprobs", request.num_logprobs)
    _check_alternatives("prompt_logprobs", request.num_prompt_logprobs)
    penalty = sampling.repetition_penalty
    if not 0.01 <= penalty <= 10:
        message = f"repetition_penalty must be from 0.01 to 10, not {penalty}"
        raise RequestError(message, "repetition_penalty")


def _check_alternatives(name: str, count: int | None) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"{name}: between 0 and {MAX_LOGPROBS} alternatives, not {count}", name)


def _mask_key(request: Request) -> tuple[int, ...]:
    """Return a key that is equal for requests that share their lists: they are checked once."""
    sampling = request.sampling
    lists = (sampling.logit_bias, sampling.allowed_token_ids, sampling.bad_words)
    stops = request.limits.stop_token_ids
    return (*map(id, lists), id(stops), request.limits.min_tokens)


def _check_masks(request: Request, facts: EngineFacts) -> None:
    """Check masks and biases: all tokens are in the vocabulary, and the masks leave a token."""
    sampling = request.sampling
    limits = request.limits
    _check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], facts)
    _check_tokens("allowed_token_ids", sampling.allowed_token_ids, facts)
    _check_tokens("stop_token_ids", limits.stop_token_ids, facts)
    _check_tokens("bad_words", [token for word in sampling.bad_words for token in word], facts)
    thinking = sampling.thinking
    if thinking:
        marks = [*thinking.opens, thinking.closes, *thinking.between, *thinking.lead]
        _check_tokens("thinking", marks, facts)
    masked = {word[0] for word in sampling.bad_words if len(word) == 1}
    if limits.min_tokens and not sampling.grammar:
        masked.update(limits.stop_token_ids)
        if not limits.ignore_eos:
            masked.update(facts.eos_token_ids)
    allowed = sampling.allowed_token_ids or range(facts.vocab_size)
    if masked and masked.issuperset(allowed):
        raise RequestError(
            "allowed_token_ids, bad_words and the ends that min_tokens holds back leave no token; allow more",
            "allowed_token_ids" if sampling.allowed_token_ids else "bad_words",
            NOTHING_LEFT,
        )


def unknown_rule(rule: str, facts: EngineFacts) -> RequestError:
    """Return the error for a rule that does not exist."""
    offered = ", ".join(served_rules(facts))
    return RequestError(f"unknown rule {rule!r}; choose off or one of {offered}", "speculation.rule")


def default_speculation(config: SpeculationConfig, facts: EngineFacts) -> Speculation:
    """Return the speculation of a request that sets none; plain without a rule or drafter."""
    drafters = tuple(name for name in config.drafters if facts.has_draft or name != MODEL)
    if config.rule == "off" or not drafters:
        return Speculation()
    if MODEL not in drafters:
        return Speculation(rule=config.rule, drafters=drafters, adaptive=config.adaptive)
    rule = facts.rules[config.rule]
    num_drafts = config.num_drafts
    if config.tree:
        num_drafts = prod(config.tree)
    elif rule.max_drafts:
        num_drafts = min(num_drafts, rule.max_drafts)
    return Speculation(
        rule=config.rule,
        num_drafts=num_drafts,
        draft_length=len(config.tree) or config.draft_length,
        draft_method=config.draft_method,
        tree=config.tree,
        drafters=drafters,
        adaptive=config.adaptive and may_adapt(rule, config.tree),
    )


def with_fixed_shape(speculation: Speculation, config: SpeculationConfig, device: str) -> Speculation:
    """Return speculation with a fixed shape, so that a seed gives one answer under any load.

    On a CPU it is a short chain, which pays at any load; else the maximum.
    """
    shape = (speculation.num_drafts, speculation.draft_length)
    if device.startswith("cpu"):
        shape = _SHAPE_FOR_ANY_LOAD
    num_drafts, draft_length = config.seed_shape or shape
    if not num_drafts:
        return msgspec.structs.replace(speculation.without_drawn, adaptive=False)
    return msgspec.structs.replace(
        speculation,
        num_drafts=min(num_drafts, speculation.num_drafts),
        draft_length=min(draft_length, speculation.draft_length),
        adaptive=False,
    )


def check_defaults(facts: EngineFacts, config: SpeculationConfig) -> None:
    """Raise ConfigError if the default speculation would be refused or biased."""
    try:
        speculation = default_speculation(config, facts)
        request = Request(request_id="", prompt_token_ids=(), speculation=speculation)
        _check_text_drafts(request, facts)
        check_speculation(speculation, facts, config)
    except RequestError as error:
        flags = f"--spec-rule {config.rule}"
        if config.drafters != (MODEL,):
            flags += f" --spec-drafters {','.join(config.drafters)}"
        if config.draft_method:
            flags += f" --draft-method {config.draft_method}"
        if config.tree:
            flags += f" --draft-tree {','.join(map(str, config.tree))}"
        raise ConfigError(f"{flags}: {error}") from error


def check_speculation(speculation: Speculation, facts: EngineFacts, config: SpeculationConfig) -> None:
    """Raise RequestError for speculation that cannot be served or would change the distribution."""
    if not speculation.num_drafts:
        return
    if not facts.has_draft:
        raise RequestError(
            "the server runs without a draft model; only prompt_lookup and predictions can draft", "speculation"
        )
    if speculation.rule not in facts.rules:
        raise unknown_rule(speculation.rule, facts)
    _check_bound("num_drafts", speculation.num_drafts, config.max_num_drafts)
    _check_bound("draft_length", speculation.draft_length, config.max_draft_length)
    _check_tree(speculation)
    check_conditions(speculation, facts)
    _check_over_acceptance(speculation, config)


def _check_bound(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        message = f"{name} must be between 1 and {most}, not {value}"
        raise RequestError(message, f"speculation.{name}")


def _check_tree(speculation: Speculation) -> None:
    tree = speculation.tree
    if not tree:
        return
    length = speculation.draft_length
    num_drafts = speculation.num_drafts
    if min(tree) < 1 or len(tree) != length or prod(tree) != num_drafts:
        raise RequestError(
            f"tree {list(tree)} must have draft_length = {length} entries of at least 1, with "
            f"product num_drafts = {num_drafts}; leave the two out, they follow from the tree",
            "speculation.tree",
        )


def _check_over_acceptance(speculation: Speculation, config: SpeculationConfig) -> None:
    epsilon = speculation.over_acceptance
    if epsilon == 0:
        return
    if config.max_over_acceptance == 0:
        raise RequestError(
            "over_acceptance changes what the model says; the operator has not allowed it (--max-over-acceptance)",
            "speculation.over_acceptance",
        )
    if not 0 < epsilon <= config.max_over_acceptance:
        raise RequestError(
            f"over_acceptance must be between 0 and {config.max_over_acceptance}, not {epsilon}",
            "speculation.over_acceptance",
        )
    if speculation.rule != "token":
        raise RequestError(
            f"over_acceptance is a variant of rule 'token', not of {speculation.rule!r}", "speculation.over_acceptance"
        )
