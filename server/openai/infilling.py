"""Prompts of completions with a suffix: the model fills the gap between prompt and suffix.

Not for: marks and their order (`text/infill.py`), or llama.cpp's `/infill` (`llama_cpp/`).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import RequestError
from server.state import Server
from server.text.infill import Gap, Infill
from server.wire.fields import CompletionRequest

_NOT_WITH_SUFFIX = {
    "echo": "the model's prompt has the text after the gap, too",
    "truncate_prompt_tokens": "a cut could remove the marks of the gap",
}
"""Fields that a completion with a suffix cannot have, and why."""


def infill_for(server: Server, param: str) -> Infill:
    """Return the model's infilling; raise RequestError about `param` if it has none."""
    if server.infill is None:
        raise RequestError(
            f"{param}: this model has no tokens for filling gaps that the server knows; serve a model that has them, "
            "name them with --fim-tokens, or leave it out",
            param,
            "unsupported_value",
        )
    return server.infill


async def infill_prompts(
    server: Server, body: CompletionRequest, prompts: Sequence[str | Sequence[int]]
) -> list[list[int]]:
    """Return the prompts of gaps between each prompt, a text or token ids, and the suffix.

    Raises RequestError if the model fills no gaps, for fields that do not go with a suffix, and for
    texts that are longer than the context.
    """
    infill = infill_for(server, "suffix")
    for name, why in _NOT_WITH_SUFFIX.items():
        if getattr(body, name) not in (None, False):
            raise RequestError(f"{name} does not go with suffix: {why}; leave one of them out", name)
    tokenizer = server.tokenizer
    most = server.client.ready_facts().max_model_len
    tokenizer.check_length(body.suffix, most, "suffix")
    suffix = await tokenizer.run(infill.inner_ids, body.suffix, size=len(body.suffix))
    filled = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer.check_length(prompt, most, "prompt")
            prefix: Sequence[int] = await tokenizer.run(infill.prefix_ids, prompt, size=len(prompt))
            begins = body.add_special_tokens
        else:
            prefix = prompt
            begins = False
        filled.append(infill.prompt(Gap(prefix, suffix), begins))
    return filled
