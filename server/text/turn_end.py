"""Compares the token that ends turns in the chat template with the model's end tokens, at start.

Not for: ending answers. A template may end a message with a token that also precedes an answer.
"""

from __future__ import annotations

from collections.abc import Collection

from jinja2 import TemplateSyntaxError

from engine.api import ConfigError, RequestError
from server.text.tokenizer import Tokenizer

_ANSWER = "polydraft-answer"


def check_template(tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a chat template that cannot render any messages."""
    _rendered(tokenizer)


def turn_remark(tokenizer: Tokenizer, ends: Collection[int]) -> str | None:
    """Return a warning if turns end with a special token that does not end answers."""
    _, answer, rest = (_rendered(tokenizer) or "").rpartition(_ANSWER)
    tokens = tokenizer.encode(rest.lstrip(), False) if answer else []
    if not tokens or tokens[0] in ends or not tokenizer.is_special(tokens[0]):
        return None
    return (
        f"the chat template ends the assistant's turns with {tokenizer.token_text(tokens[0])!r} ({tokens[0]}), which "
        "does not end answers; if answers run on, add it to eos_token_id in generation_config.json"
    )


def _rendered(tokenizer: Tokenizer) -> str | None:
    """Return a rendered short conversation; None if the template refuses it."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=False)
    except RequestError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            fault = f"line {error.__cause__.lineno}: {error.__cause__}"
            raise ConfigError(f"the chat template cannot be read ({fault}); see --chat-template") from error
        return None
