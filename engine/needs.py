"""Needs of a row in a step; every fast path states which needs it meets.

A row without needs has a distribution that follows from its logits, temperature and filters, and
drafts independent chains that race, or nothing. Needs are bits of an integer.
"""

from __future__ import annotations

from engine.fanout import Fanout
from engine.request import Sampling, Speculation

TEXT = 1
"""Penalties, masks or bias depend on the row's text."""
SHIFTS = 2
SEED_STABLE = 4
"""Drafts must not change the answer (`sampling/stable.py`)."""
RULE = 8
"""The rule is no race."""
LOSSY = 16
TREE = 32
"""The drafts are a tree, or depend on each other."""
TEXT_DRAFTS = 64
DISTRIBUTION_NEEDS = TEXT | SHIFTS | SEED_STABLE
"""Needs with and without drafts; no recorded step meets them."""
RACES = frozenset({"block", "bv_race"})
"""Rules that are races of independent chains."""


def needs_of_distribution(has_context: bool, has_shifts: bool, sampling: Sampling) -> int:
    """Return the needs of a row's distribution.

    has_context, has_shifts: whether it has `Row.text`, `Row.shifts`.
    """
    return TEXT * has_context | SHIFTS * has_shifts | SEED_STABLE * sampling.seed_stable


def needs_of_drafts(speculation: Speculation, fanout: Fanout, has_text_drafts: bool = False) -> int:
    """Return the needs of a request's drafts."""
    needs = TEXT_DRAFTS * has_text_drafts
    if speculation.over_acceptance and (fanout or has_text_drafts):
        needs |= LOSSY
    if not fanout:
        return needs
    if speculation.rule not in RACES:
        needs |= RULE
    if speculation.draft_method not in ("", "iid") or not set(fanout[1:]) <= {1}:
        needs |= TREE
    return needs
