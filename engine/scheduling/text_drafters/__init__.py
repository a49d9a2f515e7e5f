"""Text drafters: they find chains in texts instead of drawing them from a distribution.

A chain is a function of the text alone, token by token. It survives preemption, and does not depend on the steps that
produced the text. To add a drafter, add a file with a class that has `chain`, and an entry in `TEXT_DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from engine.config import PREDICTION, PROMPT_LOOKUP
from engine.request import Request, TextDraft
from engine.scheduling.text_drafters import lookup
from engine.scheduling.text_drafters.lookup import LookupDrafter
from engine.scheduling.text_drafters.prediction import PredictionDrafter


class TextDrafter(Protocol):
    """Proposes a continuation of one request's text."""

    def chain(self, text: Sequence[int]) -> tuple[int, ...]:
        """Return the probable continuation of the text (prompt and answer so far); empty if none was found."""


class TextDrafterKind(NamedTuple):
    """Registered text drafter: its constructor and limits."""

    make: Callable[[Request], TextDrafter]
    most_tokens: int | None = None
    """Longest chain; None is the server's limit."""
    for_every_request: bool = True
    """Whether the server may use it by default; otherwise a request must bring its input."""


TEXT_DRAFTERS: Mapping[str, TextDrafterKind] = MappingProxyType(
    {
        PREDICTION: TextDrafterKind(
            lambda request: PredictionDrafter(request.prediction, len(request.prompt_token_ids)),
            for_every_request=False,
        ),
        PROMPT_LOOKUP: TextDrafterKind(lambda _: LookupDrafter(), lookup.MOST_TOKENS),
    }
)
"""Text drafters by the name that requests use; the chains of the first one come first."""


def most_text_draft_tokens(longest_chain: int) -> int:
    """Return the most tokens of text drafts for one request in a step."""
    return sum(min(source.most_tokens or longest_chain, longest_chain) for source in TEXT_DRAFTERS.values())


class TextDraftFinder:
    """Text drafts of one request."""

    def __init__(self, request: Request) -> None:
        wanted = request.speculation.drafters
        self._drafters = {name: source.make(request) for name, source in TEXT_DRAFTERS.items() if name in wanted}

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def find(self, text: Sequence[int], most: int) -> tuple[TextDraft, ...]:
        """Return chains of at most `most` tokens after the text, without those that an earlier chain begins with."""
        found: list[TextDraft] = []
        for name, drafter in self._drafters.items():
            chain = drafter.chain(text)[:most]
            if chain and not any(one.tokens[: len(chain)] == chain for one in found):
                found.append(TextDraft(name, chain))
        return tuple(found)

    def num_predicted(self, text: Sequence[int], emitted: Sequence[int]) -> int:
        """Return how many of the tokens emitted after the text the request's prediction contained."""
        drafter = self._drafters.get(PREDICTION)
        return drafter.num_predicted(text, emitted) if isinstance(drafter, PredictionDrafter) else 0
