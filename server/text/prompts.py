"""A prompt as its answers show it: echoed, and with its logprobs. Read once for all answers to it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import msgspec

from engine.api import Outcome, Request, StepStats, TokenLogprob, read_logprobs
from server.text.logprobs import SpelledToken, prompt_logprobs, spell
from server.text.tokenizer import Tokenizer

Arrival = tuple[int, Outcome, StepStats]
"""(number of the answer, its outcome, the step's stats)."""


class Prompt:
    """One prompt of a call. Its logprobs come with the first outcome of the first request that answers it."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, echo: bool, skips_special: bool, num_top: int | None
    ) -> None:
        """request: the first that answers it. num_top: the likeliest tokens that are reported by place, None: nothing
        is."""
        self.text = ""
        """Its text, if it is echoed."""
        self.tokens: list[SpelledToken] = []
        """Its tokens, if it is echoed with logprobs."""
        self.num_characters = 0
        """Characters of those tokens that are shown."""
        self.by_place: msgspec.Raw | None = None
        """`prompt_logprobs` as JSON, if they were asked for."""
        self._request = request
        self._tokenizer = tokenizer
        self._echo = echo
        self._skips_special = skips_special
        self._num_top = num_top

    def read(self, found: Sequence[msgspec.Raw]) -> None:
        """Take the logprobs that the engine has sent (`Outcome.prompt_logprobs`)."""
        prompt = self._request.prompt_token_ids
        if self._num_top is not None:
            self.by_place = prompt_logprobs(self._tokenizer, prompt, read_logprobs(found), self._num_top)
        if not self._echo:
            return
        self.text = self._tokenizer.decode(prompt, self._skips_special)
        most = self._request.num_logprobs
        if most is None:
            return
        first: tuple[TokenLogprob | None, ...] = (None,)
        for token, one in zip(prompt, itertools.chain(first, read_logprobs(found)), strict=True):
            shown = one and msgspec.structs.replace(one, top=one.top[:most])
            self.tokens.append(spell(self._tokenizer, token, shown, self.num_characters))
            if not (self._skips_special and self._tokenizer.is_special(token)):
                self.num_characters += len(self.tokens[-1].text)


async def with_prompts(
    parts: AsyncIterator[Arrival], prompts: Sequence[Prompt], num_answers: int, tokenizer: Tokenizer
) -> AsyncGenerator[Arrival, None]:
    """The parts, each after its prompt has been read; answers may have to wait for the first one to their prompt."""
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
