"""Translates sampling fields of a body to the engine's parameters.

Not for: unsupported fields (`unsupported_fields.py`), prompts (`preparing.py`), or limits that depend on the prompt's
length (the engine's `request_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from engine.api import (
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
from server.wire.fields import ChatRequest, CompletionRequest, GenerationFields, SpeculationFields
from server.wire.ids import new_seed

MAX_STOPS = 16
MOST_PROMPT_LOGPROBS = 1 << 20
"""Maximum number of reported logprobs over all choices of a call; each takes about 60 bytes."""


def stop_strings(body: GenerationFields) -> list[str]:
    """Return the stop strings as a list. Raises RequestError for an empty string or too many strings."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if len(stops) > MAX_STOPS:
        raise RequestError(f"at most {MAX_STOPS} stop strings, not {len(stops)}", "stop")
    if not all(stops):
        raise RequestError("a stop string must not be empty", "stop")
    return stops


def logit_bias_of(body: GenerationFields) -> tuple[tuple[int, float], ...]:
    """Return (token, bias) pairs. Raises RequestError for keys that are not token ids, and for values out of range."""
    pairs = []
    for key, added in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key):
            raise RequestError(f"logit_bias: {key!r} is not a token id", "logit_bias")
        if not -100 <= added <= 100:
            raise RequestError(f"logit_bias: {added} for token {key} is outside -100 to 100", "logit_bias")
        pairs.append((int(key), added))
    return tuple(pairs)


def repetition_penalty_of(body: GenerationFields) -> float | None:
    """Return the repetition penalty under either of its names. Raises RequestError if both are given and differ."""
    one, other = body.repetition_penalty, body.repeat_penalty
    if one is not None and other is not None and one != other:
        raise RequestError(
            f"repeat_penalty {other} is not repetition_penalty {one}; send one of them", "repeat_penalty"
        )
    return other if one is None else one


def sampling_of(
    body: GenerationFields,
    defaults: GenerationDefaults,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: str = "",
    seed_stable: bool = False,
    thinking: Thinking | None = None,
) -> Sampling:
    """Return the sampling parameters. Omitted ones come from the model's generation_config, an omitted seed from the
    system.

    bad_words: token ids of the body's words. grammar: of its structured output. seed_stable: the server's setting.
    thinking: thoughts that the engine tracks.
    """
    repetition = repetition_penalty_of(body)
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return Sampling(
        temperature=temperature,
        top_k=max(0, top_k),
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=defaults.repetition_penalty if repetition is None else repetition,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=logit_bias_of(body),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words=bad_words,
        grammar=grammar,
        thinking=thinking,
        seed_stable=seed_stable if body.seed_stable is None else body.seed_stable,
        seed=new_seed() if body.seed is None else body.seed,
    )


def max_tokens_of(body: GenerationFields) -> int | None:
    """Return the requested maximum length; None if there is none."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def answer_bound(
    num_prompt: int, body: GenerationFields, max_tokens: int | None, max_model_len: int, is_strict: bool
) -> int:
    """Return the maximum number of answer tokens: the requested one, cut to the room that the context leaves.

    num_prompt: number of prompt tokens. max_tokens: requested number; None asks for all the room. is_strict: refuse
    a number that would be cut. Raises RequestError if the room is less than that, than `min_tokens`, or than a token.
    """
    room = max_model_len - num_prompt
    least = body.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        field = _bounding_field(body)
        raise RequestError(f"min_tokens must be at most {field} = {max_tokens}, not {least}", "min_tokens")
    wanted = max(1, room, least) if max_tokens is None else max_tokens
    needed = wanted if is_strict else min(wanted, max(1, least))
    if room >= needed:
        return min(wanted, room)
    length = f"This model's maximum context length is {max_model_len} tokens, but the prompt has {num_prompt}"
    if room <= 0:
        field = "prompt" if isinstance(body, CompletionRequest) else "messages"
        message = f"{length} and leaves no room for an answer; shorten it"
        raise RequestError(message, field, "context_length_exceeded")
    field = _bounding_field(body) if is_strict else "min_tokens"
    message = f"{length} and {field} asks for {needed} more; lower {field} or shorten the prompt"
    raise RequestError(message, field, "context_length_exceeded")


def _bounding_field(body: GenerationFields) -> str:
    """Return the name under which a body bounds its answer."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def truncated(
    prompt: Sequence[int], body: GenerationFields, max_tokens: int | None, max_model_len: int
) -> Sequence[int]:
    """Return a prompt truncated as requested. Raises RequestError for an impossible length."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        if body.truncation_side is not None:
            raise RequestError("truncation_side goes with truncate_prompt_tokens", "truncation_side")
        return prompt
    if wanted == 0 or wanted > max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be from 1 to the model's context of {max_model_len} tokens, or -1, not "
            f"{wanted}",
            "truncate_prompt_tokens",
        )
    answer = 1 if max_tokens is None else max_tokens
    if wanted < 0 and answer >= max_model_len:
        # A cut of the answer would leave one token of the prompt.
        field = _bounding_field(body)
        raise RequestError(
            f"truncate_prompt_tokens: -1 leaves room for {field} = {answer}, which is all of the model's context of "
            f"{max_model_len} tokens; lower {field}",
            field,
        )
    kept = wanted if wanted > 0 else max_model_len - answer
    return prompt[:kept] if body.truncation_side == "right" else prompt[-kept:]


def num_logprobs_of(body: GenerationFields) -> int | None:
    """Number of likeliest tokens reported with each emitted one; None if no logprobs are requested."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, ChatRequest)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs: true", "top_logprobs")
    return body.top_logprobs or 0 if body.logprobs else None


def num_prompt_logprobs_of(body: GenerationFields, num_logprobs: int | None) -> int | None:
    """Number of likeliest tokens reported with each prompt token; None unless requested, also by `echo`."""
    asked = body.prompt_logprobs
    if asked is not None and body.stream:
        raise RequestError("prompt_logprobs are not streamed; ask for a whole answer", "prompt_logprobs")
    echoed = num_logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return echoed if asked is None else max(asked, echoed or 0)


def check_num_entries(prompts: Sequence[Sequence[int]], num_top: int | None, body: GenerationFields) -> None:
    """Raise RequestError if the prompts' logprobs would make an answer too large. num_top: alternatives per token."""
    if num_top is None:
        return
    count = sum(map(len, prompts)) * (num_top + 1) * body.n
    if count > MOST_PROMPT_LOGPROBS:
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise RequestError(
            f"{field}: {count} logprobs of prompt tokens (tokens times alternatives and one more, times n), more than "
            f"{MOST_PROMPT_LOGPROBS}; ask for fewer alternatives, a smaller n or a shorter prompt",
            field,
        )


def speculation_of(body: GenerationFields, defaults: SpeculationConfig, facts: EngineFacts) -> Speculation:
    """Return the request's speculation: its own values over the server's defaults. Limits are not checked here."""
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
    rule = asked.rule or ("bv_race" if defaults.rule == "off" else defaults.rule)
    if rule not in facts.rules:
        raise unknown_rule(rule, facts)
    if MODEL not in drafters:
        for name in ("num_drafts", "draft_length", "tree", "draft_method", "over_acceptance"):
            if getattr(asked, name):
                raise RequestError(
                    f"{name} is about the draft model's chains, and 'model' is not among the drafters",
                    f"speculation.{name}",
                )
        return Speculation(rule=rule, drafters=drafters)
    if not facts.has_draft:
        raise RequestError("the server runs without a draft model, so that none can draft", "speculation")
    defaults = msgspec.structs.replace(defaults, drafters=drafters)
    own = default_speculation(msgspec.structs.replace(defaults, rule=rule), facts)
    # The server's tree and draft method apply only to the server's rule and draft shape.
    shaped = asked.num_drafts is not None or asked.draft_length is not None
    if rule != defaults.rule or (own.tree and shaped and not asked.tree):
        plain = msgspec.structs.replace(defaults, rule=rule, tree=(), draft_method="")
        own = default_speculation(plain, facts)
    tree = tuple(asked.tree) if asked.tree else own.tree
    return Speculation(
        rule=rule,
        num_drafts=asked.num_drafts or (prod(tree) if tree else own.num_drafts),
        draft_length=asked.draft_length or (len(tree) if tree else own.draft_length),
        draft_method=asked.draft_method or own.draft_method,
        tree=tree,
        drafters=drafters,
        adaptive=own.adaptive and not (shaped or asked.tree or asked.over_acceptance),
        over_acceptance=asked.over_acceptance or 0.0,
        over_acceptance_residual=asked.over_acceptance_residual or "optimal",
    )


def _drafters_of(body: GenerationFields, defaults: SpeculationConfig, facts: EngineFacts) -> tuple[str, ...]:
    """Return the request's drafters: its own or the defaults, and its prediction; empty for plain decoding."""
    asked = body.speculation
    if asked is not None and asked.drafters is not None:
        return tuple(dict.fromkeys(asked.drafters))
    usual = tuple(name for name in defaults.drafters if facts.has_draft or name != MODEL)
    if asked is not None:
        usual = usual or (MODEL,)
    elif defaults.rule == "off":
        usual = ()
    return (*usual, PREDICTION) if body.prediction is not None else usual


def with_seed(
    speculation: Speculation, sampling: Sampling, limits: SpeculationConfig, facts: EngineFacts
) -> Speculation:
    """Return speculation with a fixed shape for a request with a seed, unless the shape cannot change the answer."""
    if not speculation.adaptive or sampling.is_certain:
        return speculation
    return with_fixed_shape(speculation, limits, facts.device)


def without_equal_chains(request: Request, facts: EngineFacts) -> Request:
    """Reduce i.i.d. chains to one at temperature 0, where all chains of a draft model are equal."""
    speculation = request.speculation
    if not request.sampling.is_greedy or not speculation.num_drafts:
        return request
    if (speculation.draft_method or facts.rules[speculation.rule].draft_methods[0]) != "iid":
        return request
    return msgspec.structs.replace(request, speculation=msgspec.structs.replace(speculation, num_drafts=1, tree=()))
