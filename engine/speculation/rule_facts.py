"""Facts of the verification rules and names of the draft methods, for request checks and the command line. No torch.

`engine.speculation.verification.RULES` combines these facts with the rules themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.config import RuleFacts

MOST_LIKELY = "most_likely"
"""Draft method that draws nothing. At temperature 0 every method with several children uses it."""

DRAFT_METHODS = {
    "iid": "independent draws, with duplicates",
    "without_replacement": "one after another, each token at most once",
    "greedy": "the most likely tokens, and one drawn from the rest",
    "spechub": "one draw, and the most likely token (or, when that was drawn, another draw)",
    MOST_LIKELY: "the most likely tokens by their logits, with no random number",
}
"""Methods of drawing the children of one node."""

_WITHOUT_REPLACEMENT = ("without_replacement", "iid")

RULE_FACTS: Mapping[str, RuleFacts] = MappingProxyType(
    {
        "token": RuleFacts(max_drafts=1),
        "nss": RuleFacts(draft_methods=tuple(DRAFT_METHODS), trees=True),
        "rrs": RuleFacts(trees=True),
        "rrs_without_replacement": RuleFacts(draft_methods=_WITHOUT_REPLACEMENT, trees=True),
        "kseq": RuleFacts(trees=True),
        "spechub": RuleFacts(max_drafts=2, draft_methods=("spechub",), trees=True),
        "greedy": RuleFacts(draft_methods=("greedy",), trees=True),
        "weighted_race": RuleFacts(trees=True),
        "ot_lp": RuleFacts(trees=True, max_vocabulary=12),
        "block": RuleFacts(max_drafts=1),
        "greedy_block": RuleFacts(max_drafts=1, changes_targets=True),
        "bv_race": RuleFacts(),
        "spectr_gbv": RuleFacts(changes_targets=True),
        "traversal": RuleFacts(draft_methods=_WITHOUT_REPLACEMENT, trees=True),
    }
)
"""Facts of each rule by its name, in the order of listings."""
