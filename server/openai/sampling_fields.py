"""Translates sampling fields of a body to the engine's parameters.

Not for: unsupported fields (`unsupported_fields.py`), prompts (`preparing.py`), or limits that
depend on the prompt's length (the engine's `request_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar

import msgspec

from engine.api import (
    EARLIER_ANSWERS,
    MODEL,
    PREDICTION,
    EngineFacts,
    Request,
    RequestError,
    Sampling,
    Speculation,
    SpeculationConfig,
    Thinking,
    default_speculation,
    unknown_rule,
    with_fixed_shape,
)
from server.text.tokenizer import GenerationDefaults
from server.wire.current_call import this_call
from server.wire.fields import ChatRequest, CompletionRequest, GenerationFields, SpeculationFields
from server.wire.ids import new_seed, seed_of
from server.wire.limits import MOST_PROMPT_LOGPROBS, MOST_STOPS

Value = TypeVar("Value")
_MOST_DIGITS = 20


def given_or(value: Value | None, default: Value) -> Value:
    """Return the value of a field; its default if the body does not have it."""
    return default if value is None else value


def stop_strings(body: GenerationFields) -> list[str]:
    """Return the stop strings; raise RequestError for an empty one or too many."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if len(stops) > MOST_STOPS:
        raise RequestError(f"at most {MOST_STOPS} stop strings, not {len(stops)}", "stop")
    if not all(stops):
        raise RequestError("a stop string must not be empty", "stop")
    return stops


def logit_bias_of(body: GenerationFields) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs; raise RequestError for other keys or values."""
    pairs = []
    for key, added in (body.logit_bias or {}).items():
        if not _is_token_id(key):
            raise RequestError(f"logit_bias: {key!r} is not a token id", "logit_bias")
        if not -100 <= added <= 100:
            raise RequestError(f"logit_bias: {added} for token {key} is outside -100 to 100", "logit_bias")
        pairs.append((int(key), added))
    return tuple(pairs)


def _is_token_id(key: str) -> bool:
    """Whether a key is a number as `str` writes it; a longer one is no id of 64 bits."""
    return key.isascii() and key.isdigit() and len(key) < _MOST_DIGITS and str(int(key)) == key


def repetition_penalty_of(body: GenerationFields) -> float | None:
    """Return the repetition penalty by either name; raise RequestError if both differ."""
    if body.repetition_penalty is None or body.repeat_penalty is None:
        return given_or(body.repetition_penalty, body.repeat_penalty)
    if body.repetition_penalty != body.repeat_penalty:
        raise RequestError(
            f"repeat_penalty {body.repeat_penalty} is not repetition_penalty {body.repetition_penalty}; "
            "send one of them",
            "repeat_penalty",
        )
    return body.repetition_penalty


def named_seed(body: GenerationFields) -> int | None:
    """Return the seed by either name; raise RequestError if both differ."""
    if body.random_seed is None or body.seed is None or body.seed == body.random_seed:
        return given_or(body.seed, body.random_seed)
    message = f"random_seed {body.random_seed} is not seed {body.seed}; send one of them"
    raise RequestError(message, "random_seed")


def fixed_seed(body: GenerationFields) -> int | None:
    """Return the seed with which the answer must repeat; None if it need not."""
    if body.seed is None and (name := this_call().attempt_of):
        return seed_of(name)
    return body.seed


def sampling_of(
    body: GenerationFields,
    defaults: GenerationDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
    seed_stable: bool = False,
    thinking: Thinking | None = None,
) -> Sampling:
    """Return the sampling parameters, with defaults of the model and the call's seed.

    bad_words: token ids of the body's words. grammar: grammar of its structured output.
    seed_stable: the server's setting. thinking: thoughts that the engine tracks.
    """
    seed = fixed_seed(body)
    if seed is None:
        seed = new_seed()
    return Sampling(
        temperature=given_or(body.temperature, defaults.temperature),
        top_k=max(0, given_or(body.top_k, defaults.top_k)),
        top_p=given_or(body.top_p, defaults.top_p),
        min_p=given_or(body.min_p, defaults.min_p),
        repetition_penalty=given_or(repetition_penalty_of(body), defaults.repetition_penalty),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=logit_bias_of(body),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words=bad_words,
        grammar=grammar,
        thinking=thinking,
        seed_stable=given_or(body.seed_stable, seed_stable),
        seed=seed,
    )


def max_tokens_of(body: GenerationFields) -> int | None:
    """Return the requested maximum length; None if there is none."""
    return given_or(body.max_completion_tokens, body.max_tokens)


def answer_bound(
    num_prompt: int, body: GenerationFields, max_tokens: int | None, max_model_len: int, is_strict: bool
) -> int:
    """Return the most answer tokens: as requested, cut to the room in the context.

    num_prompt: number of prompt tokens. max_tokens: requested number; None asks for all the room.
    is_strict: refuse a number that would be cut. Raises RequestError if the room is less than that,
    than `min_tokens`, or than a token.
    """
    room = max_model_len - num_prompt
    min_tokens = body.min_tokens or 0
    bounding_field = _bounding_field(body)
    if max_tokens is None:
        max_tokens = max(1, room, min_tokens)
    elif min_tokens > max_tokens:
        message = f"min_tokens must be at most {bounding_field} = {max_tokens}, not {min_tokens}"
        raise RequestError(message, "min_tokens")
    needed = max_tokens
    if not is_strict:
        needed = min(max_tokens, max(1, min_tokens))
    if room >= needed:
        return min(max_tokens, room)
    length = f"This model's maximum context length is {max_model_len} tokens, but the prompt has {num_prompt}"
    if room <= 0:
        field = "prompt" if isinstance(body, CompletionRequest) else "messages"
        message = f"{length} and leaves no room for an answer; shorten it"
        raise RequestError(message, field, "context_length_exceeded")
    field = bounding_field if is_strict else "min_tokens"
    message = f"{length} and {field} asks for {needed} more; lower {field} or shorten the prompt"
    raise RequestError(message, field, "context_length_exceeded")


def _bounding_field(body: GenerationFields) -> str:
    """Return the name under which a body bounds its answer."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def truncated(
    prompt: Sequence[int], body: GenerationFields, max_tokens: int | None, max_model_len: int
) -> Sequence[int]:
    """Return a prompt truncated as requested. Raises RequestError for an impossible length."""
    num_kept = body.truncate_prompt_tokens
    if num_kept is None:
        if body.truncation_side is not None:
            raise RequestError("truncation_side goes with truncate_prompt_tokens", "truncation_side")
        return prompt
    if num_kept == 0 or num_kept > max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be from 1 to the model's context of {max_model_len} tokens, or -1, not "
            f"{num_kept}",
            "truncate_prompt_tokens",
        )
    if num_kept < 0:
        num_kept = max_model_len - _room_of_answer(body, max_tokens, max_model_len)
    if body.truncation_side == "right":
        return prompt[:num_kept]
    return prompt[-num_kept:]


def _room_of_answer(body: GenerationFields, max_tokens: int | None, max_model_len: int) -> int:
    """Return the tokens that a truncated prompt leaves; raise RequestError if none."""
    room = given_or(max_tokens, 1)
    if room >= max_model_len:
        # A cut of the answer would leave one token of the prompt.
        field = _bounding_field(body)
        raise RequestError(
            f"truncate_prompt_tokens: -1 leaves room for {field} = {room}, which is all of the model's context of "
            f"{max_model_len} tokens; lower {field}",
            field,
        )
    return room


def num_logprobs_of(body: GenerationFields) -> int | None:
    """Return the likeliest tokens to report with each emitted one; None without logprobs."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, ChatRequest)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs: true", "top_logprobs")
    if not body.logprobs:
        return None
    return body.top_logprobs or 0


def num_prompt_logprobs_of(body: GenerationFields, num_logprobs: int | None) -> int | None:
    """Return the likeliest tokens to report with each prompt token, or None."""
    num_echoed = None
    if isinstance(body, CompletionRequest) and body.echo:
        num_echoed = num_logprobs
    if body.prompt_logprobs is None:
        return num_echoed
    if body.stream:
        raise RequestError("prompt_logprobs are not streamed; ask for a whole answer", "prompt_logprobs")
    return max(body.prompt_logprobs, num_echoed or 0)


def check_num_entries(prompts: Sequence[Sequence[int]], num_top: int | None, body: GenerationFields) -> None:
    """Raise RequestError if prompt logprobs make an answer too large.

    num_top: alternatives per token.
    """
    if num_top is None:
        return
    num_tokens = sum(map(len, prompts))
    count = num_tokens * (num_top + 1) * body.n
    if count > MOST_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise RequestError(
            f"{field}: {count} logprobs of prompt tokens (tokens times alternatives and one more, times n), more than "
            f"{MOST_PROMPT_LOGPROBS}; ask for fewer alternatives, a smaller n or a shorter prompt",
            field,
        )


def speculation_of(body: GenerationFields, defaults: SpeculationConfig, facts: EngineFacts) -> Speculation:
    """Return the request's speculation, with the server's defaults; limits are not checked."""
    asked = body.speculation or SpeculationFields()
    if not asked.enabled or asked.rule == "off":
        return Speculation()
    if asked.over_acceptance_residual is not None and not asked.over_acceptance:
        raise RequestError(
            "over_acceptance_residual goes with over_acceptance above 0", "speculation.over_acceptance_residual"
        )
    drafters = _drafters_of(body, defaults, facts)
    if not drafters:
        return Speculation()
    rule = asked.rule or defaults.rule
    if rule == "off":
        rule = "bv_race"
    if rule not in facts.rules:
        raise unknown_rule(rule, facts)
    if MODEL not in drafters:
        _refuse_model_fields(asked)
        # Only requests that the engine adapts draft from earlier answers.
        adaptive = defaults.adaptive and EARLIER_ANSWERS in drafters
        return Speculation(rule=rule, drafters=drafters, adaptive=adaptive)
    if not facts.has_draft:
        raise RequestError(
            "speculation: this server has no draft model; leave it out, or send drafters without 'model'", "speculation"
        )
    return _model_speculation(asked, msgspec.structs.replace(defaults, drafters=drafters), rule, facts)


def _names_drafts(asked: SpeculationFields) -> bool:
    """Whether a request asks for more than to be drafted if anything drafts."""
    return bool(asked.model_dump(exclude={"enabled", "return_drafts"}, exclude_none=True))


def _refuse_model_fields(asked: SpeculationFields) -> None:
    """Raise RequestError for fields about a draft model that does not draft."""
    for name in ("num_drafts", "draft_length", "tree", "draft_method", "over_acceptance"):
        if getattr(asked, name):
            raise RequestError(
                f"speculation.{name}: no draft model drafts, because 'model' is not among the drafters; leave it out",
                f"speculation.{name}",
            )


def _model_speculation(
    asked: SpeculationFields, defaults: SpeculationConfig, rule: str, facts: EngineFacts
) -> Speculation:
    """Return speculation by the draft model, with the drafters of `defaults`."""
    usual = default_speculation(msgspec.structs.replace(defaults, rule=rule), facts)
    # The server's tree and draft method apply only to the server's rule and draft shape.
    has_shape = asked.num_drafts is not None or asked.draft_length is not None
    if rule != defaults.rule or (usual.tree and has_shape and not asked.tree):
        plain = msgspec.structs.replace(defaults, rule=rule, tree=(), draft_method="")
        usual = default_speculation(plain, facts)
    num_drafts = usual.num_drafts
    draft_length = usual.draft_length
    tree = tuple(asked.tree or usual.tree)
    if tree:
        num_drafts = prod(tree)
        draft_length = len(tree)
    return Speculation(
        rule=rule,
        num_drafts=asked.num_drafts or num_drafts,
        draft_length=asked.draft_length or draft_length,
        draft_method=asked.draft_method or usual.draft_method,
        tree=tree,
        drafters=defaults.drafters,
        adaptive=usual.adaptive and not (has_shape or asked.tree or asked.over_acceptance),
        over_acceptance=asked.over_acceptance or 0.0,
        over_acceptance_residual=asked.over_acceptance_residual or "optimal",
    )


def _drafters_of(body: GenerationFields, defaults: SpeculationConfig, facts: EngineFacts) -> tuple[str, ...]:
    """Return the named drafters, else the defaults and the prediction; empty for plain."""
    asked = body.speculation
    if asked is not None and asked.drafters is not None:
        return tuple(dict.fromkeys(asked.drafters))
    drafters = [name for name in defaults.drafters if facts.has_draft or name != MODEL]
    if asked is None and defaults.rule == "off":
        drafters = []
    elif asked is not None and not drafters and (facts.has_draft or _names_drafts(asked)):
        drafters = [MODEL]
    if body.prediction is not None:
        drafters.append(PREDICTION)
    return tuple(drafters)


def with_seed(
    speculation: Speculation, sampling: Sampling, limits: SpeculationConfig, facts: EngineFacts
) -> Speculation:
    """Return a fixed shape for a request with a seed, unless shapes cannot change it."""
    if not speculation.adaptive or sampling.is_certain:
        return speculation
    return with_fixed_shape(speculation, limits, facts.device)


def check_earlier_answers(body: GenerationFields, speculation: Speculation) -> None:
    """Raise RequestError if a request names earlier answers and cannot draft from them."""
    asked = body.speculation
    if asked is None or not asked.drafters or speculation.adaptive:
        return
    if EARLIER_ANSWERS in speculation.drafters:
        raise RequestError(
            f"{EARLIER_ANSWERS} drafts only if the engine chooses what is drafted: leave out seed, num_drafts, "
            "draft_length, tree and over_acceptance, or leave out this drafter; rules that need one shape and servers "
            "with --spec-shape fixed have no such drafts",
            "speculation.drafters",
        )


def without_equal_chains(request: Request, facts: EngineFacts) -> Request:
    """Reduce i.i.d. chains to one at temperature 0, where all chains of a draft model are equal."""
    speculation = request.speculation
    if not request.sampling.is_greedy or not speculation.num_drafts:
        return request
    draft_method = speculation.draft_method or facts.rules[speculation.rule].draft_methods[0]
    if draft_method != "iid":
        return request
    speculation = msgspec.structs.replace(speculation, num_drafts=1, tree=())
    return msgspec.structs.replace(request, speculation=speculation)
