"""Facts of rules and names of draft methods, for request checks and the command line.

`engine.speculation.verification.RULES` combines these facts with the rules themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.config import RuleFacts
from engine.speculation.conditions import FIXED_DISTRIBUTION, FIXED_SHAPE, INDEPENDENT_CHAINS, WHOLE_BLOCKS

MOST_LIKELY = "most_likely"
"""Draft method without random numbers.

At temperature 0 it replaces methods below nodes with several children, but `iid`, whose draws are
one token. In seed-stable requests it replaces every method.
"""

DRAFT_METHODS = {
    "iid": "independent draws, with duplicates",
    "without_replacement": "one after another, each token at most once",
    "greedy": "the most likely tokens, and one drawn from the rest",
    "spechub": "one draw, and the most likely token (or, when that was drawn, another draw)",
    MOST_LIKELY: "the most likely tokens by their logits, with no random number",
}

_WITHOUT_REPLACEMENT = ("without_replacement", "iid")
_CHAINS = (INDEPENDENT_CHAINS,)
_TARGET_SHIFTS = (INDEPENDENT_CHAINS, WHOLE_BLOCKS, FIXED_DISTRIBUTION, FIXED_SHAPE)
"""Conditions of rules that change the targets of later positions (`target_shift.py`)."""

RULE_FACTS: Mapping[str, RuleFacts] = MappingProxyType(
    {
        "token": RuleFacts(max_drafts=1, needs=_CHAINS),
        "nss": RuleFacts(draft_methods=tuple(DRAFT_METHODS)),
        "rrs": RuleFacts(),
        "rrs_without_replacement": RuleFacts(draft_methods=_WITHOUT_REPLACEMENT),
        "kseq": RuleFacts(),
        "spechub": RuleFacts(max_drafts=2, draft_methods=("spechub",)),
        "greedy": RuleFacts(draft_methods=("greedy",)),
        "weighted_race": RuleFacts(),
        "ot_lp": RuleFacts(max_vocabulary=12),
        "block": RuleFacts(max_drafts=1, needs=_CHAINS),
        "greedy_block": RuleFacts(max_drafts=1, needs=_TARGET_SHIFTS),
        "bv_race": RuleFacts(needs=_CHAINS),
        "spectr_gbv": RuleFacts(needs=_TARGET_SHIFTS),
        "traversal": RuleFacts(draft_methods=_WITHOUT_REPLACEMENT),
    }
)
"""Facts of each rule, in the order of listings."""
