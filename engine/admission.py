"""What the engine accepts: one check, made by the server before it answers and again at the engine's door.

No torch: the server imports it through `engine.api`.
"""

from __future__ import annotations

from engine.config import EngineFacts, SpeculationConfig
from engine.errors import RequestError
from engine.request import Request

# Draft methods that are made for so many chains only.
_MAX_CHAINS_OF_METHOD = {"spechub": 2}


def check_request(request: Request, facts: EngineFacts, limits: SpeculationConfig) -> None:
    """Raise RequestError where the engine cannot serve the request as asked."""
    prompt, answer = len(request.prompt_token_ids), request.limits.max_tokens
    if prompt == 0:
        raise RequestError("the prompt is empty; send at least one token", "prompt")
    if answer < 1:
        raise RequestError(f"max_tokens must be at least 1, not {answer}", "max_tokens")
    if prompt + answer > facts.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {facts.max_model_len} tokens, but the prompt has {prompt} "
            f"and the answer may have {answer}; shorten the prompt or lower max_tokens",
            "max_tokens" if prompt < facts.max_model_len else "prompt",
            "context_length_exceeded",
        )
    if bad := [token for token in request.prompt_token_ids if not 0 <= token < facts.vocab_size]:
        raise RequestError(f"token id {bad[0]} is outside the vocabulary of {facts.vocab_size}", "prompt")
    speculation = request.speculation
    if not speculation.num_drafts:
        return
    if not facts.has_draft:
        raise RequestError("the server runs without a draft model; speculation cannot be enabled", "speculation")
    rules = facts.rules
    if speculation.rule not in rules:
        raise RequestError(f"unknown rule {speculation.rule!r}; choose one of {', '.join(rules)}", "speculation.rule")
    for name, value, most in (
        ("num_drafts", speculation.num_drafts, limits.max_num_drafts),
        ("draft_length", speculation.draft_length, limits.max_draft_length),
    ):
        if not 1 <= value <= most:
            raise RequestError(f"{name} must be between 1 and {most}, not {value}", f"speculation.{name}")
    known = rules[speculation.rule]
    method = speculation.draft_method or known.draft_methods[0]
    if method not in known.draft_methods:
        raise RequestError(
            f"rule {speculation.rule!r} would be biased with drafts drawn by {method!r}; it is exact for "
            f"{', '.join(known.draft_methods)}",
            "speculation.draft_method",
        )
    most_drafts = _MAX_CHAINS_OF_METHOD.get(method, known.max_drafts)
    if most_drafts is not None and speculation.num_drafts > most_drafts:
        raise RequestError(
            f"rule {speculation.rule!r} with drafts drawn by {method!r} takes at most {most_drafts} chains, "
            f"not {speculation.num_drafts}; "
            "lower num_drafts or choose bv_race",
            "speculation.num_drafts",
        )
