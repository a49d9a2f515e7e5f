"""Prompt tokens of a step: each prompt's share, and a time limit while other requests decode.

Each token of a prompt attends to all tokens before it, so the time of a chunk of fixed size grows
with the prompt: on one core, 512 tokens after 16,384 earlier tokens took six seconds, during which
all other streams stood still.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from engine.control.step_time import StepTimes
from engine.control.step_work import StepWork
from engine.scheduling.sequence import Sequence

MOST_SHARING = 8
"""Most waiting requests among which a step's prompt tokens are divided."""
_LEAST_S = 0.1
"""Seconds that prompts may always add to a step."""
_LEAST_TOKENS = 8
"""Tokens of each prompt that the time limit always allows."""


class PromptLimit:
    """Limit of the time that prompts add to a step: that of decoding, or 0.1 s if it is more."""

    def __init__(self, times: StepTimes, rows: int, text: int) -> None:
        """rows: requests that decode in this step; text: tokens of their texts together."""
        self._times = times
        self._work = StepWork(rows=rows, text=text)
        decoding_s = times.rest_s(self._work)
        self._most_s = decoding_s + max(_LEAST_S, decoding_s)

    def _with(self, first: int, count: int) -> StepWork:
        work = self._work
        prompt_text = work.prompt_text + count * (first + count // 2)
        return replace(work, prompt=work.prompt + count, prompt_text=prompt_text)

    def most(self, first: int, count: int) -> int:
        """Return how many of `count` prompt tokens from index `first` on fit; a few always do."""

        def seconds(num_tokens: int) -> float:
            return self._times.rest_s(self._with(first, num_tokens))

        fitting = bisect_right(range(1, count + 1), self._most_s, key=seconds)
        return max(_LEAST_TOKENS, fitting)

    def take(self, first: int, count: int) -> None:
        """Reserve the time of `count` prompt tokens from index `first` on."""
        self._work = self._with(first, count)


def shares_of(prompts: Iterable[Sequence], budget: int, prompt_lag: Callable[[Sequence], int]) -> dict[int, int]:
    """Return the most tokens of a step for each prompt, by the sequence's id.

    Within a priority all prompts get an equal share, plus the tokens that shorter prompts leave.
    Waiting requests with a free seat are included, so that a short prompt is computed together with
    a long prompt and not after it. prompt_lag: extra tokens that the draft model must read
    for the row's chunk.
    """
    sharing = sorted(prompts, key=lambda s: (s.request.priority, s.num_missing))
    shares = {}
    for number, sequence in enumerate(sharing):
        priority = sequence.request.priority
        rivals = sum(other.request.priority == priority for other in sharing[number:])
        share = max(1 + prompt_lag(sequence), budget // rivals)
        shares[sequence.sequence_id] = share
        budget -= min(sequence.num_missing, share)
    return shares
