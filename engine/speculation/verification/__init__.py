"""The verification rules by name. Each is exact: the output law is the target's own.

A rule takes the drafted chains, the target laws at their nodes and the noise, and returns for every
request which chain it follows, how far, and one token more. Node rules (`node.py`) are composed top-down.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.speculation.verification.block import verify_block
from engine.speculation.verification.greedy import greedy, spechub
from engine.speculation.verification.greedy_block import verify_greedy_block, verify_spectr_gbv
from engine.speculation.verification.kseq import kseq
from engine.speculation.verification.node import TopDown
from engine.speculation.verification.nss import nss
from engine.speculation.verification.ot_lp import MAX_VOCABULARY, ot_lp
from engine.speculation.verification.over_acceptance import OverAcceptance
from engine.speculation.verification.race import verify_bv_race
from engine.speculation.verification.rrs import rrs, rrs_without_replacement
from engine.speculation.verification.rule import ChainVerdict, Rule, Verify
from engine.speculation.verification.token import verify_token
from engine.speculation.verification.traversal import verify_traversal
from engine.speculation.verification.weighted_race import weighted_race

_EVERY_METHOD = ("iid", "without_replacement", "greedy", "spechub")

_ALL = (
    Rule("token", verify_token, max_drafts=1),
    Rule("nss", TopDown(nss), draft_methods=_EVERY_METHOD, trees=True),
    Rule("rrs", TopDown(rrs), trees=True),
    Rule(
        "rrs_without_replacement",
        TopDown(rrs_without_replacement),
        draft_methods=("without_replacement", "iid"),
        trees=True,
    ),
    Rule("kseq", TopDown(kseq), trees=True),
    Rule("spechub", TopDown(spechub), max_drafts=2, draft_methods=("spechub",), trees=True),
    Rule("greedy", TopDown(greedy), draft_methods=("greedy",), trees=True),
    Rule("weighted_race", TopDown(weighted_race), trees=True),
    Rule("ot_lp", TopDown(ot_lp), trees=True, max_vocabulary=MAX_VOCABULARY),
    Rule("block", verify_block, max_drafts=1),
    Rule("greedy_block", verify_greedy_block, max_drafts=1, changes_targets=True),
    Rule("bv_race", verify_bv_race),
    Rule("spectr_gbv", verify_spectr_gbv, changes_targets=True),
    Rule("traversal", verify_traversal, draft_methods=("without_replacement", "iid"), trees=True),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _ALL})


__all__ = ["RULES", "ChainVerdict", "OverAcceptance", "Rule", "Verify"]
