"""Drafters that find chains in texts, instead of drawing them from a law.

A chain is a function of the text alone, token by token: it survives preemption, and does not depend on the steps by
which the text came about. To add a drafter: a file with a class that has `chain`, and a line in `TEXT_DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from engine.config import PREDICTION, PROMPT_LOOKUP
from engine.plan import TextDraft
from engine.request import Request
from engine.scheduling.text_drafters import lookup
from engine.scheduling.text_drafters.lookup import LookupDrafter
from engine.scheduling.text_drafters.prediction import PredictionDrafter


class TextDrafter(Protocol):
    """Proposes how one request's text goes on."""

    def chain(self, text: Sequence[int]) -> tuple[int, ...]:
        """What probably follows the text (prompt and answer so far); empty where nothing was found."""


class TextDrafterKind(NamedTuple):
    """A kind of text drafter."""

    make: Callable[[Request], TextDrafter]
    most_tokens: int | None = None
    """Longest chain; None is as long as may be copied at all."""
    for_every_request: bool = True
    """Whether the server may use it by default; else a request brings what it needs."""


TEXT_DRAFTERS: Mapping[str, TextDrafterKind] = MappingProxyType(
    {
        PREDICTION: TextDrafterKind(
            lambda request: PredictionDrafter(request.prediction, len(request.prompt_token_ids)),
            for_every_request=False,
        ),
        PROMPT_LOOKUP: TextDrafterKind(lambda _: LookupDrafter(), lookup.MOST_TOKENS),
    }
)
"""By the name that requests call it; the chains of the first come first."""


def most_copied(longest_chain: int) -> int:
    """Most tokens that are copied for one request at once."""
    return sum(min(source.most_tokens or longest_chain, longest_chain) for source in TEXT_DRAFTERS.values())


class TextDraftFinder:
    """The copied chains of one request."""

    def __init__(self, request: Request) -> None:
        wanted = request.speculation.drafters
        self._drafters = {name: source.make(request) for name, source in TEXT_DRAFTERS.items() if name in wanted}

    def __bool__(self) -> bool:
        return bool(self._drafters)

    def copies(self, text: Sequence[int], most: int) -> tuple[TextDraft, ...]:
        """Chains of at most `most` tokens behind the text; none with which an earlier one begins."""
        found: list[TextDraft] = []
        for name, drafter in self._drafters.items():
            chain = drafter.chain(text)[:most]
            if chain and not any(copy.tokens[: len(chain)] == chain for copy in found):
                found.append(TextDraft(name, chain))
        return tuple(found)

    def num_predicted(self, text: Sequence[int], emitted: Sequence[int]) -> int:
        """How many of the tokens emitted behind the text the request's prediction has foreseen."""
        drafter = self._drafters.get(PREDICTION)
        return drafter.num_predicted(text, emitted) if isinstance(drafter, PredictionDrafter) else 0
