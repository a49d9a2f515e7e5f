"""A prompt as its answers show it, decoded once for all of them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

from engine.api import Outcome, Request, StepStats, TokenLogprob, read_logprobs
from server.text.logprobs import SpelledToken, prompt_logprobs, spell
from server.text.tokenizer import Tokenizer

Arrival = tuple[int, Outcome, StepStats]
"""Number of the answer, its outcome, the step's statistics."""


class ShownPrompt:
    """Prompt of a call. Its logprobs arrive with the first outcome of its first request."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, echo: bool, skips_special: bool, num_top: int | None
    ) -> None:
        """request: the first one with this prompt. num_top: likeliest tokens per position."""
        self.text = ""
        """Text, if it is echoed."""
        self.tokens: list[SpelledToken] = []
        self.num_characters = 0
        """Number of shown characters of these tokens."""
        self.by_place: msgspec.Raw | None = None
        """`prompt_logprobs` as JSON, if they were requested."""
        self._request = request
        self._tokenizer = tokenizer
        self._echo = echo
        self._skips_special = skips_special
        self._num_top = num_top

    def read(self, logprobs: Sequence[msgspec.Raw]) -> None:
        """Read the logprobs that the engine has sent (`Outcome.prompt_logprobs`)."""
        prompt = self._request.prompt_token_ids
        if self._num_top is not None:
            self.by_place = prompt_logprobs(self._tokenizer, prompt, read_logprobs(logprobs), self._num_top)
        if not self._echo:
            return
        self.text = self._tokenizer.decode(prompt, self._skips_special)
        most = self._request.num_logprobs
        if most is None:
            return
        first: tuple[TokenLogprob | None, ...] = (None,)
        every = itertools.chain(first, read_logprobs(logprobs))
        for token, logprob, offset in zip(prompt, every, self._offsets(), strict=True):
            shown = logprob and msgspec.structs.replace(logprob, top=logprob.top[:most])
            self.tokens.append(spell(self._tokenizer, token, shown, offset))
        self.num_characters = len(self.text)

    def _offsets(self) -> list[int]:
        """Return the number of characters of the text before each token."""
        detokenizer = self._tokenizer.detokenizer(self._skips_special)
        ends = list(itertools.accumulate(len(detokenizer.step(token)) for token in self._request.prompt_token_ids))
        # The space before the first word is not in the text.
        num_hidden = max(0, ends[-1] - len(self.text))
        return [0, *(max(0, end - num_hidden) for end in ends[:-1])]


async def with_prompts(
    parts: AsyncIterator[Arrival], prompts: Sequence[ShownPrompt], num_answers: int, tokenizer: Tokenizer
) -> AsyncGenerator[Arrival, None]:
    """Yield each part after its prompt has been read."""
    unread: dict[int, list[Arrival]] = {number: [] for number in range(len(prompts))}
    async for part in parts:
        number, answer = divmod(part[0], num_answers)
        if number not in unread:
            yield part
        elif answer:
            unread[number].append(part)
        else:
            prompt = prompts[number]
            await tokenizer.run_answer(prompt.read, part[1].prompt_logprobs)
            yield part
            for waiting in unread.pop(number):
                yield waiting
