"""Decides whether an answer may begin with thoughts, and whether the engine tracks them.

The engine tracks thoughts that have a budget, or after which a grammar applies. Not for: separating thoughts from the
answer's text (`text/reasoning.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from engine.api import RequestError, Thinking
from server.openai.fields import ChatRequest, GenerationFields
from server.openai.sampling_fields import max_tokens_of
from server.state import Server
from server.text.reasoning import CLOSE, OPEN, is_closed, is_open

Thoughts = Literal["none", "possible", "begun"]
_PROMPT_END = 16
"""Number of last prompt tokens in which a chat template may open or close the thoughts."""


def thoughts_of(
    server: Server, body: GenerationFields, prompt: Sequence[int], is_bound: bool
) -> tuple[Thoughts, Thinking | None]:
    """Return whether an answer may contain thoughts or the prompt has opened them, and the thoughts that the engine
    tracks.

    is_bound: the answer must follow a grammar. The grammar applies after the thoughts, or, if the tags are not tokens
    of the model, from the first token on. Raises RequestError for a budget that cannot be enforced.
    """
    if not server.thinks or not isinstance(body, ChatRequest):
        return "none", None
    end = server.tokenizer.decode(prompt[-_PROMPT_END:])
    is_begun = server.settings.reasoning_parser == "deepseek_r1" or is_open(end)
    budget, most = body.thinking_token_budget, max_tokens_of(body)
    if budget is not None and most is not None and budget >= most:
        budget = None  # the length ends the answer first
    opens, closes = server.tokenizer.token_of(OPEN), server.tokenizer.token_of(CLOSE)
    if budget is not None and (opens is None or closes is None):
        raise RequestError(
            f"thinking_token_budget: {OPEN} and {CLOSE} are not tokens of this model, so that its thoughts cannot be "
            "ended; leave it out, and bound thoughts and answer together by max_tokens",
            "thinking_token_budget",
            "unsupported_value",
        )
    can_begin = not (is_closed(end) or body.continue_final_message)
    is_followed = budget is not None or (is_bound and (is_begun or can_begin))
    followed = None
    if is_followed and opens is not None and closes is not None:
        followed = Thinking(opens=opens, closes=closes, is_begun=is_begun, budget=budget, may_end=not is_bound)
    return "begun" if is_begun and (followed or not is_bound) else "possible", followed
