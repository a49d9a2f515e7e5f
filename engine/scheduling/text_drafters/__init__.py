"""Text drafters: they find probable continuations in texts, and draw none from a distribution.

The drafts of most text drafters are a function of the request's text alone, token by token: they
survive preemption, and do not depend on the steps that produced the text. Requests that are not
adaptive use these drafters alone; the API refuses other drafters that such a request names. To add
a drafter, add a file with a class that has `candidates`, and an entry in `TEXT_DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from engine.config import EARLIER_ANSWERS, PREDICTION, PROMPT_LOOKUP
from engine.control.text_acceptance import usual_acceptance
from engine.request import Request, TextDraft
from engine.scheduling.text_drafters.answers import AnswersDrafter, AnswerStore
from engine.scheduling.text_drafters.candidate import Candidate
from engine.scheduling.text_drafters.lookup import LookupDrafter
from engine.scheduling.text_drafters.prediction import PredictionDrafter
from engine.scheduling.text_drafters.tree import Estimate, TextTree, grow

_LEAST_PROBABLE = 0.02
"""Least probability of a node, because a node takes at least a fiftieth of a step."""
_LEAST_UNWEIGHED = 0.4
"""Probability of a node that pays at almost any load."""


class TextDrafter(Protocol):
    """Proposes continuations of one request's text."""

    def candidates(self, text: Sequence[int]) -> list[Candidate]:
        """Return the places whose continuations may follow the text (prompt and answer so far)."""


class TextDrafterKind(NamedTuple):
    """Registered text drafter: its constructor, and the requests that may use it."""

    make: Callable[[Request, AnswerStore], TextDrafter]
    for_every_request: bool = True
    """Whether the server may use it by default; else a request brings its input."""
    by_text_alone: bool = True
    """Whether its drafts depend on the request alone; else only adaptive requests use it."""


TEXT_DRAFTERS: Mapping[str, TextDrafterKind] = MappingProxyType(
    {
        PREDICTION: TextDrafterKind(
            lambda request, _: PredictionDrafter(request.prediction, len(request.prompt_token_ids)),
            for_every_request=False,
        ),
        PROMPT_LOOKUP: TextDrafterKind(lambda *_: LookupDrafter()),
        EARLIER_ANSWERS: TextDrafterKind(
            lambda request, answers: AnswersDrafter(request, answers.of(request)), by_text_alone=False
        ),
    }
)


class TextDraftFinder:
    """Text drafts of one request."""

    def __init__(self, request: Request, answers: AnswerStore) -> None:
        speculation = request.speculation
        self._drafters = {
            name: kind.make(request, answers)
            for name, kind in TEXT_DRAFTERS.items()
            if name in speculation.drafters and (speculation.adaptive or kind.by_text_alone)
        }

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def tree(self, text: Sequence[int], estimate: Estimate, most_nodes: int, deepest: int) -> TextTree:
        """Return the continuations worth drafting, at most `most_nodes` of depth `deepest`."""
        return grow(self._candidates(text), estimate, _LEAST_PROBABLE, most_nodes, deepest)

    def find(self, text: Sequence[int], most_nodes: int, deepest: int) -> tuple[TextDraft, ...]:
        """Return drafts that are a function of the text, not of the load and other requests."""
        candidates = self._candidates(text)
        tree = grow(candidates, usual_acceptance, _LEAST_UNWEIGHED, most_nodes, deepest)
        return tree.chains(range(len(tree)))

    def _candidates(self, text: Sequence[int]) -> list[Candidate]:
        candidates = []
        for drafter in self._drafters.values():
            candidates += drafter.candidates(text)
        return candidates

    def num_predicted(self, text: Sequence[int], emitted: Sequence[int]) -> int:
        """Return how many of the tokens emitted after the text the request's prediction had."""
        drafter = self._drafters.get(PREDICTION)
        if isinstance(drafter, PredictionDrafter):
            return drafter.num_predicted(text, emitted)
        return 0
