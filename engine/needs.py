"""Needs of a row in a step; every fast path states which needs it meets.

A row without needs has a distribution that follows from its logits, temperature and filters, and drafts independent
chains that race, or nothing. Needs are bits of an integer.
"""

from __future__ import annotations

from engine.fanout import Fanout
from engine.request import Sampling, Speculation

TEXT, SHIFTS, ALONE, RULE, LOSSY, TREE, TEXT_DRAFTS = (1 << number for number in range(7))
"""Its distribution depends on its text, or on earlier drafts; it must not depend on other rows; its drafts are verified
by a rule without a race, or by a lossy one; they are a tree, or depend on each other; it has text drafts.
"""
DISTRIBUTION_NEEDS = TEXT | SHIFTS | ALONE
"""Needs whatever is drafted; no recorded step meets them."""
RACES = frozenset({"block", "bv_race"})
"""Rules that are races of independent chains."""


def needs_of_distribution(has_context: bool, has_shifts: bool, sampling: Sampling) -> int:
    """Return the needs of a row's distribution. has_context, has_shifts: whether it has `Row.text`, `Row.shifts`."""
    return TEXT * has_context | SHIFTS * has_shifts | ALONE * sampling.seed_stable


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
