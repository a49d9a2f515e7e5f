"""Prompt tokens of a step: each prompt's share, and as many as there is time for while others decode.

Each token of a prompt attends to all before it, so a chunk of a fixed number of tokens takes longer and longer: 512
tokens behind 16,384 others took a core six seconds. Others' streams stand still for that time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from engine.control.step_time import StepTimes, StepWork
from engine.scheduling.sequence import Sequence

MOST_SHARING = 8
"""Waiting requests that are taken into account when a step's prompt tokens are shared out."""
_LEAST_S = 0.1
"""Seconds that prompts may add to a step, if decoding itself takes less than that."""
_LEAST_TOKENS = 8
"""Tokens of a prompt that a step reads in any case, so that every prompt is read to its end."""


class PromptLimit:
    """Time that the prompts of one step may add: as much as decoding takes, and at least 0.1 seconds."""

    def __init__(self, times: StepTimes, rows: int, text: int) -> None:
        """rows, text: the requests that decode in this step, and the tokens of their texts together."""
        self._times = times
        self._work = StepWork(rows=rows, text=text)
        decoding_s = times.rest_s(self._work)
        self._most_s = decoding_s + max(_LEAST_S, decoding_s)

    def _with(self, first: int, count: int) -> StepWork:
        work = self._work
        return replace(work, prompt=work.prompt + count, prompt_text=work.prompt_text + count * (first + count // 2))

    def most(self, first: int, count: int) -> int:
        """Return the number of `count` prompt tokens after `first` others that there is time for; always a few."""
        fitting = bisect_right(
            range(1, count + 1), self._most_s, key=lambda tokens: self._times.rest_s(self._with(first, tokens))
        )
        return max(_LEAST_TOKENS, fitting)

    def take(self, first: int, count: int) -> None:
        """This many prompt tokens are planned."""
        self._work = self._with(first, count)


def shares_of(prompts: Iterable[Sequence], budget: int, lag: Callable[[Sequence], int]) -> dict[int, int]:
    """Most tokens of a step for each prompt, by the sequence's id.

    Within a priority all get an equal share, plus what shorter prompts leave over. Waiting requests for which a seat is
    free take part, so that a short prompt is computed together with a long one and not after it.
    lag: tokens that the draft model computes of a text beyond the target's.
    """
    sharing = sorted(prompts, key=lambda s: (s.request.priority, s.num_missing))
    shares = {}
    for number, sequence in enumerate(sharing):
        priority = sequence.request.priority
        rivals = sum(other.request.priority == priority for other in sharing[number:])
        share = max(1 + lag(sequence), budget // rivals)
        shares[sequence.sequence_id] = share
        budget -= min(sequence.num_missing, share)
    return shares
